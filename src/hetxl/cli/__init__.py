"""The `hetxl` command: it parses, then calls the library."""

from typing import Annotated

import typer

from hetxl import __version__
from hetxl.cli.contrastive import contrastive
from hetxl.cli.data import data
from hetxl.cli.evaluate import evaluate
from hetxl.cli.export import export
from hetxl.cli.params import params
from hetxl.cli.predict import predict
from hetxl.cli.report import report
from hetxl.cli.rescale import rescale
from hetxl.cli.study import study
from hetxl.cli.train import compare, train
from hetxl.cli.tune import tune

# Plain errors and help: one line is one line, wherever it is read. Tracebacks never show the values of variables.
app = typer.Typer(
    name="hetxl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)
for command in (compare, train, tune, rescale, evaluate, predict, export, report, params):
    app.command()(command)
app.add_typer(contrastive, name="contrastive")
app.add_typer(data, name="data")
app.add_typer(study, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetxl {__version__}")
        raise typer.Exit


@app.callback()
def hetxl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Classifier heads for many classes and noisy labels."""


def main() -> None:
    """What the `hetxl` script calls."""
    app(prog_name="hetxl")
