"""`hetxl contrastive`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors
from hetxl.cli.options import Given, config_flags
from hetxl.contrastive.config import ContrastiveConfig

contrastive = typer.Typer(
    help="Contrastive learning of pairs of pictures and texts.", no_args_is_help=True, rich_markup_mode=None
)

DATA = "icons (options as in icons:held_out=phosphor), a folder of pictures with .txt files, a manifest, or arrays."


@contrastive.callback()
def _group() -> None:
    """Train two towers with noise on their embeddings or without, and evaluate them."""


@contrastive.command()
@config_flags(without=("data",), kind=ContrastiveConfig)
def train(
    data: Annotated[str | None, typer.Argument(help=f"{DATA} [icons]", show_default=False)] = None,
    *,
    given: Given = (None, {}),
) -> None:
    """Train two towers on pairs, evaluate them, and keep the run in a directory.

    A run that was stopped goes on from its last checkpoint when the same command is given again.
    """
    with one_line_errors():
        from hetxl.contrastive.train import train as run_training

        run = run_training(resolve(given, data))
        typer.echo(f"hetxl contrastive report {run.path}   shows it")


@contrastive.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    data: Annotated[str | None, typer.Argument(help=f"{DATA} Without it, the run's own.", show_default=False)] = None,
    *,
    samples: Annotated[
        int, typer.Option(help="Also classify with so many draws of the noise; 22 in the paper.", min=0)
    ] = 0,
    templates: Annotated[
        str | None, typer.Option(help="Prompts with | between [those of the run].", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Zero-shot accuracy, recall both ways, and how well swapped pairs are found."""
    with one_line_errors():
        from hetxl.contrastive.evaluate_run import as_table, evaluate_run
        from hetxl.training.files import write_json

        result = evaluate_run(run, data, samples=samples, templates=templates)
        if out is not None:
            write_json(out, result)
        if as_json:
            typer.echo(json.dumps(result, indent=2))
        else:
            Console().print(as_table(result))


@contrastive.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.", show_default=False)],
    *,
    out: Annotated[
        Path | None, typer.Option(help="File to write [report.html in the first directory].", show_default=False)
    ] = None,
) -> None:
    """Write report.html: one file, with curves, tables, and pictures never seen with the names the model gives them."""
    with one_line_errors():
        from hetxl.report.contrastive import write_contrastive_report

        typer.echo(f"Report: {write_contrastive_report(runs, out or runs[0] / 'report.html')}")


def resolve(given: Given, data: str | None) -> ContrastiveConfig:
    """The configuration: defaults, then the file, then arguments and flags.

    Args:
        given: the file of options, and the flags.
        data: the argument.
    """
    file, flags = given
    values = {} if file is None else ContrastiveConfig.read_toml(file)
    values |= flags if data is None else {**flags, "data": data}
    if "steps" in flags and "epochs" in flags:
        raise ValueError("--steps and --epochs exclude each other; give one")
    if "epochs" in flags:
        values.pop("steps", None)
    return ContrastiveConfig(**values)
