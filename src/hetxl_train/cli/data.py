"""`hetxl data`."""

import json
from typing import Annotated

import typer

from hetxl_train.cli.commands import SectionedCommand, argument, lazy_group, optional

DATA = "Data as for hetxl train: a dataset by name, hf:NAME, or a path to arrays, images, a table or tar shards."
data = typer.Typer(cls=lazy_group("data"), no_args_is_help=True, rich_markup_mode=None)


@data.callback()
def _group() -> None:
    """Describe a dataset, or build a benchmark dataset."""


@data.command(cls=SectionedCommand)
def describe(
    dataset: Annotated[str, argument(DATA, metavar="DATA")],
    *,
    labels: Annotated[str | None, optional("File with the labels [stored with the features].")] = None,
    features_column: Annotated[
        str | None, optional("Column with embeddings, images or image paths [detected].")
    ] = None,
    text_column: Annotated[str | None, optional("Column with texts [detected].")] = None,
    label_column: Annotated[str | None, optional("Column with labels [detected].")] = None,
    split_column: Annotated[str | None, optional("Column with the name of each row's split [split].")] = None,
    backbone: Annotated[str, typer.Option(help="hf:NAME: read texts with the tokenizer of this model.")] = "auto",
    data_seed: Annotated[int, typer.Option(help="Seed for splitting data that has no splits.")] = 0,
    label_noise: Annotated[
        str,
        typer.Option(help="Replace training labels with wrong ones: none, symmetric, confusable or feature-dependent."),
    ] = "none",
    label_noise_rate: Annotated[
        float, typer.Option("--label-noise-rate", "--rate", help="Share of the training labels to replace.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the number of rows, class frequencies, duplicates and missing values."""
    from rich.console import Console

    from hetxl_train.config import TrainConfig
    from hetxl_train.data import describe as describe_dataset
    from hetxl_train.data.open import open_data

    config = TrainConfig(
        data=dataset,
        labels=labels,
        features_column=features_column,
        text_column=text_column,
        label_column=label_column,
        split_column=split_column,
        backbone=backbone,
        data_seed=data_seed,
        label_noise=label_noise,
        label_noise_rate=label_noise_rate,
    )
    description = describe_dataset(open_data(config))
    if as_json:
        typer.echo(json.dumps(description.as_dict(), indent=2))
    else:
        Console().print(description)
