"""`hetxl study`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors
from hetxl.cli.train import seeds_from

study = typer.Typer(help="Comparisons over several datasets.", no_args_is_help=True, rich_markup_mode=None)


@study.callback()
def _group() -> None:
    """Run a study; one that was stopped goes on when the same command is given again."""


@study.command()
def defaults(
    *,
    settings: Annotated[
        str | None,
        typer.Option(help="Which, with commas between, as in pycode,pycode-noisy [all].", show_default=False),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Which take part, as for hetxl compare.", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which as in 3,4,5.")] = "5",
    quick: Annotated[bool, typer.Option(help="Two small settings on synthetic data instead, in minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study [runs/study-defaults].", show_default=False)
    ] = None,
) -> None:
    """Is HET-XL with its defaults ever worse than DET, and where is it better?"""
    with one_line_errors():
        from hetxl.studies.defaults import study as run_study
        from hetxl.studies.settings import SETTINGS
        from hetxl.studies.summary import count_verdicts, heads_table, verdict_table
        from hetxl.training.compare import VARIANTS

        directory = out or Path("runs") / ("study-defaults-quick" if quick else "study-defaults")
        paths = run_study(
            _names(settings, tuple(SETTINGS)),
            seeds=seeds_from(seeds),
            heads=_names(heads, tuple(VARIANTS)),
            out=directory,
            quick=quick,
        )
        summaries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        parts = [f"## {summary['setting']}\n\n{heads_table(summary)}" for summary in summaries]
        if all({"DET", "HET-XL"} <= set(summary["heads"]) for summary in summaries):
            parts = [verdict_table(summaries), count_verdicts(summaries) + "\n", *parts]
        page = "\n".join(parts)
        (directory / "study.md").write_text(page, encoding="utf-8")
        typer.echo(page)
        typer.echo(f"Tables: {directory / 'study.md'}; the results themselves: summary.json of each setting beside it")


def _names(text: str | None, everything: tuple[str, ...]) -> tuple[str, ...]:
    return everything if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
