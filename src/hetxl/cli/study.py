"""`hetxl study`: a command for every entry of the registry, and those of the studies that have options of their own."""

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetxl.cli.errors import one_line_errors
from hetxl.cli.train import seeds_from
from hetxl.studies.registry import ENTRIES, Entry, listing


class _Studies(TyperGroup):
    """The group, with errors for names that are no studies like those of the rest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a name."""
        if args and not args[0].startswith("-") and args[0] not in ENTRIES:
            near = difflib.get_close_matches(args[0], list(ENTRIES), 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
            with one_line_errors():
                raise ValueError(f"there is no study {args[0]!r}{hint} hetxl study --list shows all")
        return super().resolve_command(ctx, args)


study = typer.Typer(
    cls=_Studies, help="Comparisons that answer one question each.", no_args_is_help=True, rich_markup_mode=None
)

Quick = Annotated[bool, typer.Option(help="A small form instead, in minutes.")]
Jobs = Annotated[
    int | None, typer.Option(help="Trainings at a time, one thread each [one a core].", show_default=False)
]

Write = Annotated[
    Path | None, typer.Option(help="Folder of pages to put the results in, such as docs/studies.", show_default=False)
]


def _list(wanted: bool) -> None:
    if wanted:
        typer.echo(listing())
        raise typer.Exit


@study.callback()
def _group(
    list_: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="All studies, with what they cost.")
    ] = False,
) -> None:
    """Run a study; one that was stopped goes on when the same command is given again."""


def _run(
    name: str,
    quick: bool,
    seeds: str | None,
    out: Path | None,
    write: Path | None,
    cache: Path | None,
    jobs: int | None,
    data: str | None = None,
) -> None:
    with one_line_errors():
        from hetxl.studies.run import run_study

        page = run_study(
            name,
            form="quick" if quick else "full",
            seeds=None if seeds is None else seeds_from(seeds),
            out=out,
            write=write,
            cache=cache,
            jobs=jobs,
            data=data,
        )
        typer.echo(page.read_text(encoding="utf-8"))
        typer.echo(f"Page: {page}; its picture and numbers are beside it")


def _command_of(entry: Entry) -> Callable[..., None]:
    """The command of a study that has a module."""
    results = f"Directory of the results [runs/studies/{entry.name}]."

    def command(
        *,
        quick: Quick = False,
        seeds: Annotated[
            str | None, typer.Option(help="How many seeds, or which as in 3,4,5 [3; quick 2].", show_default=False)
        ] = None,
        out: Annotated[Path | None, typer.Option(help=results, show_default=False)] = None,
        write: Write = None,
        cache: Annotated[
            Path | None,
            typer.Option(
                help="Directory of the trainings, which studies share [runs/studies/cache].", show_default=False
            ),
        ] = None,
        jobs: Jobs = None,
    ) -> None:
        _run(entry.name, quick, seeds, out, write, cache, jobs)

    def on_pairs(
        data: Annotated[
            str | None, typer.Argument(help="As for hetxl contrastive train [icons].", show_default=False)
        ] = None,
        *,
        quick: Quick = False,
        seeds: Annotated[
            str | None,
            typer.Option(help="How many seeds, or which as in 3,4,5 [1,2,3,4,5; quick 2].", show_default=False),
        ] = None,
        out: Annotated[Path | None, typer.Option(help=results, show_default=False)] = None,
        write: Write = None,
        cache: Annotated[
            Path | None,
            typer.Option(
                help="Directory of the trainings, which studies on pairs share [runs/study-contrastive/runs].",
                show_default=False,
            ),
        ] = None,
        jobs: Jobs = None,
    ) -> None:
        _run(entry.name, quick, seeds, out, write, cache, jobs, data)

    chosen = on_pairs if entry.pairs else command
    chosen.__doc__ = f"{entry.title}. The paper: {entry.paper}."
    return chosen


for _entry in ENTRIES.values():
    if _entry.module:
        study.command(_entry.name)(_command_of(_entry))


def _publish(
    name: str,
    text: str,
    write: Path | None,
    pictures: Mapping[str, Path],
    numbers: Mapping[str, Path],
    options: str = "",
) -> None:
    """Put the page of a study with a command of its own where it was asked for; `options` that its command had."""
    if write is not None:
        from hetxl.studies.page import publish_own

        publish_own(ENTRIES[name], text, f"hetxl study {name}{options}", write, pictures, numbers)


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
    write: Write = None,
    jobs: Jobs = None,
) -> None:
    """Is HET-XL with its defaults ever worse than DET, and where is it better?"""
    with one_line_errors():
        from hetxl.studies.defaults import study as run_study
        from hetxl.studies.defaults_page import PICTURE, finished, page, plot
        from hetxl.studies.plot import new_figure
        from hetxl.studies.settings import SETTINGS
        from hetxl.training.compare import VARIANTS

        if write is not None:
            new_figure(1, 1)  # whether there is matplotlib is better known now
        directory = out or Path("runs") / ("study-defaults-quick" if quick else "study-defaults")
        paths = run_study(
            _names(settings, tuple(SETTINGS)),
            seeds=seeds_from(seeds),
            heads=_names(heads, tuple(VARIANTS)),
            out=directory,
            quick=quick,
            equal_time=equal_time,
            jobs=jobs,
        )
        text = page([json.loads(path.read_text(encoding="utf-8")) for path in paths])
        (directory / "study.md").write_text(text, encoding="utf-8")
        if write is not None:
            # The page has all settings that are done, also those of other calls.
            everything = finished(directory, [path.parent.name for path in paths] if quick else SETTINGS)
            picture = plot(everything, directory / PICTURE)
            names = [summary["setting"] for summary in everything]
            numbers = {f"defaults/{name}.json": directory / name / "summary.json" for name in names}
            _publish("defaults", page(everything), write, {PICTURE: picture}, numbers, _told({"--quick": quick}))
        typer.echo(text)
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
    write: Write = None,
    jobs: Jobs = None,
) -> None:
    """How near do the heads come to the model that their data was drawn from?"""
    with one_line_errors():
        from hetxl.studies.recovery import study as run_study

        options = {"data_seed": data_seed} if data_seed else None
        directory = out or Path("runs") / ("study-recovery-quick" if quick else "study-recovery")
        summary = run_study(data, seeds=seeds_from(seeds), out=directory, quick=quick, options=options, jobs=jobs)
        page = summary.with_name("study.md").read_text(encoding="utf-8")
        picture = {"recovery.png": summary.with_name("recovery.png")}
        told = {data: data != "synthetic", f"--seeds {seeds}": seeds != "3", f"--data-seed {data_seed}": data_seed}
        _publish("recovery", page, write, picture, {"recovery.json": summary}, _told({**told, "--quick": quick}))
        typer.echo(page)
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
    write: Write = None,
    jobs: Jobs = None,
) -> None:
    """What is each choice that HET-XL's defaults make worth, when one at a time is changed?"""
    with one_line_errors():
        from hetxl.studies.levers import study as run_study
        from hetxl.studies.variants import LEVERS

        chosen = _names(levers, tuple(LEVERS))
        summary = run_study(data, levers=chosen, seeds=seeds_from(seeds), out=out, jobs=jobs)
        page = summary.with_name("study.md").read_text(encoding="utf-8")
        picture = {"levers.png": summary.with_name("levers.png")}
        _publish("levers", page, write, picture, {"levers.json": summary}, f" {data} --seeds {seeds}")
        typer.echo(page)
        typer.echo(f"Picture: {summary.with_name('levers.png')}; the results themselves: {summary}")


@study.command()
def tau(
    *,
    head: Annotated[str, typer.Option(help="Whose τ: det, het, het-h or het-xl.")] = "het-xl",
    seeds: Annotated[str, typer.Option(help="How many replications, or which seeds as in 3,4,5.")] = "3",
    quick: Annotated[bool, typer.Option(help="Small synthetic data and searches instead, in minutes.")] = False,
    longer: Annotated[
        bool, typer.Option(help="Also ways with one training, ten times as long: a quarter of an hour more.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trainings at a time [as many as there are cores and memory].", min=1, show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study [runs/study-tau].", show_default=False)
    ] = None,
    write: Write = None,
) -> None:
    """Which way to choose the temperature is right, on much data and on little?"""
    with one_line_errors():
        from hetxl.studies.tau import study as run_study

        directory = out or Path("runs") / ("study-tau-quick" if quick else "study-tau")
        summary = run_study(seeds=seeds_from(seeds), out=directory, head=head, quick=quick, longer=longer, jobs=jobs)
        page = summary.with_name("study.md").read_text(encoding="utf-8")
        picture = {"tau.svg": summary.with_name("tau.svg")}
        told = {f"--head {head}": head != "het-xl", f"--seeds {seeds}": seeds != "3"}
        options = _told({**told, "--quick": quick, "--longer": longer})
        _publish("tau", page, write, picture, {"tau.json": summary}, options)
        typer.echo(page)
        typer.echo(f"Pictures: {summary.with_name('study.html')}; the results themselves: {summary}")


def _told(options: Mapping[str, object]) -> str:
    """The options that were given, as behind a command."""
    return "".join(f" {option}" for option, given in options.items() if given)


def _names(text: str | None, everything: tuple[str, ...]) -> tuple[str, ...]:
    return everything if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
