"""`hetxl data`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors

data = typer.Typer(help="What is in a dataset.", no_args_is_help=True, rich_markup_mode=None)


@data.callback()
def _group() -> None:
    """Look at data before training on it."""


@data.command()
def describe(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="As for hetxl train: pycode, synthetic, arrays, pictures or a manifest.",
            show_default=False,
        ),
    ],
    *,
    labels: Annotated[str | None, typer.Option(help="File with the labels.", show_default=False)] = None,
    data_seed: Annotated[int, typer.Option(help="Of the split, where the data has none.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rows, classes and their frequencies, duplicates, and what is missing."""
    with one_line_errors():
        from hetxl.data import describe as describe_dataset
        from hetxl.training.config import TrainConfig
        from hetxl.training.train import open_data

        found = describe_dataset(open_data(TrainConfig(data=dataset, labels=labels, data_seed=data_seed)))
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=2))
        else:
            Console().print(found)
