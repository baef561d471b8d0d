"""`hetxl study`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors
from hetxl.cli.train import seeds_from

study = typer.Typer(help="Comparisons that answer one question each.", no_args_is_help=True, rich_markup_mode=None)


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
    equal_time: Annotated[bool, typer.Option(help="Also train DET for as much time as HET-XL takes.")] = True,
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
            equal_time=equal_time,
        )
        summaries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        parts = [f"## {summary['setting']}\n\n{heads_table(summary)}" for summary in summaries]
        if all({"DET", "HET-XL"} <= set(summary["heads"]) for summary in summaries):
            parts = [verdict_table(summaries), count_verdicts(summaries) + "\n", *parts]
        page = "\n".join(parts)
        (directory / "study.md").write_text(page, encoding="utf-8")
        typer.echo(page)
        typer.echo(f"Tables: {directory / 'study.md'}; the results themselves: summary.json of each setting beside it")


@study.command()
def recovery(
    data: Annotated[str, typer.Argument(help="synthetic, with options as in synthetic:noise=2.")] = "synthetic",
    *,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which as in 3,4,5.")] = "3",
    data_seed: Annotated[int, typer.Option(help="Of the true model and the data.", min=0)] = 0,
    quick: Annotated[bool, typer.Option(help="Smaller data instead, in less than a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study [runs/study-recovery].", show_default=False)
    ] = None,
) -> None:
    """How near do the heads come to the model that their data was drawn from?"""
    with one_line_errors():
        from hetxl.studies.recovery import study as run_study

        options = {"data_seed": data_seed} if data_seed else None
        directory = out or Path("runs") / ("study-recovery-quick" if quick else "study-recovery")
        summary = run_study(data, seeds=seeds_from(seeds), out=directory, quick=quick, options=options)
        typer.echo(summary.with_name("study.md").read_text(encoding="utf-8"))
        typer.echo(f"Picture: {summary.with_name('recovery.png')}; the results themselves: {summary}")


@study.command()
def levers(
    data: Annotated[str, typer.Argument(help="As for hetxl train.")] = "pycode",
    *,
    levers: Annotated[
        str | None, typer.Option(help="Which, with commas between, as in rank,samples [all].", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which as in 3,4,5.")] = "3",
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study [runs/study-levers-DATA].", show_default=False)
    ] = None,
) -> None:
    """What is each choice that HET-XL's defaults make worth, when one at a time is changed?"""
    with one_line_errors():
        from hetxl.studies.levers import study as run_study
        from hetxl.studies.variants import LEVERS

        summary = run_study(data, levers=_names(levers, tuple(LEVERS)), seeds=seeds_from(seeds), out=out)
        typer.echo(summary.with_name("study.md").read_text(encoding="utf-8"))
        typer.echo(f"Picture: {summary.with_name('levers.png')}; the results themselves: {summary}")


def _names(text: str | None, everything: tuple[str, ...]) -> tuple[str, ...]:
    return everything if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
