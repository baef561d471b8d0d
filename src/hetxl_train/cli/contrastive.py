"""`hetxl contrastive`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hetxl_train.cli.commands import SectionedCommand, argument, optional
from hetxl_train.cli.options import Settings, config_flags, resolve
from hetxl_train.config import ContrastiveConfig

contrastive = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DATA = "icons (options as in icons:held_out=phosphor), a folder of images with .txt files, a manifest, or arrays."


@contrastive.callback()
def _group() -> None:
    """Train an image tower and a text tower on pairs, with or without noise on their embeddings."""


@contrastive.command(cls=SectionedCommand)
@config_flags(without=("data",), kind=ContrastiveConfig)
def train(data: Annotated[str | None, argument(f"{DATA} [icons]")] = None, *, settings: Settings = (None, {})) -> None:
    """Train two towers on pairs, evaluate them, and save the run to a directory.

    Rerun the same command to resume from the last checkpoint.
    """
    from hetxl_train.training import train as run_training

    run = run_training(resolve(ContrastiveConfig, settings, data=data))
    typer.echo(f"Report: hetxl contrastive report {run.path}")


@contrastive.command(cls=SectionedCommand)
def evaluate(
    run: Annotated[Path, argument("Run directory.")],
    data: Annotated[str | None, argument(f"{DATA} [the run's data]")] = None,
    *,
    num_samples: Annotated[
        int,
        typer.Option(
            "--num-samples", "--samples", help="Also classify with this many noise samples (22 in the paper).", min=0
        ),
    ] = 0,
    templates: Annotated[str | None, optional("Prompt templates separated by | [those of the run].")] = None,
    out: Annotated[Path | None, optional("JSON file to write the results to [none].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show zero-shot accuracy, recall in both directions, and how well swapped pairs are detected."""
    from rich.console import Console

    from hetxl._files import write_json
    from hetxl_train.evaluate_runs import contrastive_table, evaluate_contrastive_run
    from hetxl_train.report import as_rich

    result = evaluate_contrastive_run(run, data, samples=num_samples, templates=templates)
    if out is not None:
        write_json(out, result)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        Console().print(as_rich(contrastive_table(result)))


@contrastive.command("zero-shot", cls=SectionedCommand)
def zero_shot(
    run: Annotated[Path, argument("Run directory.")],
    data: Annotated[str, argument("Labelled data, as for hetxl train.")],
    *,
    split: Annotated[str, typer.Option(help="Split to classify: train, validation or test.")] = "test",
    templates: Annotated[
        str | None, optional("Prompt templates separated by |, or a file of them [those of the run].")
    ] = None,
    names: Annotated[
        Path | None, optional("File with the names of the classes, one per line, in order [the data's].")
    ] = None,
    num_samples: Annotated[
        int, typer.Option(help="Number of noise samples; 0: without noise, as in the paper.", min=0)
    ] = 0,
    limit: Annotated[int, typer.Option(help="Classify this many images, drawn at random; 0: all.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Classify labelled images by the similarity of their class names, put into prompt templates."""
    from rich.console import Console

    from hetxl_train.report import as_rich
    from hetxl_train.zero_shot import zero_shot_run, zero_shot_table

    options = {"templates": templates, "names": names, "num_samples": num_samples, "limit": limit}
    result = zero_shot_run(run, data, split=split, **options)
    if as_json:
        typer.echo(json.dumps({key: value for key, value in result.items() if key != "examples"}, indent=2))
    else:
        Console().print(as_rich(zero_shot_table([result])))


@contrastive.command(cls=SectionedCommand)
def report(
    runs: Annotated[list[Path], argument("Run directories.")],
    *,
    out: Annotated[Path | None, optional("File to write [report.html in the first directory].")] = None,
) -> None:
    """Write report.html: one file with curves, tables, and test images with their predicted names."""
    from hetxl_train.report.contrastive import write_contrastive_report

    typer.echo(f"Report: {write_contrastive_report(runs, out or runs[0] / 'report.html')}")
