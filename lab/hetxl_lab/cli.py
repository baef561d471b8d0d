"""`hetxl data build`, and `hetxl study` with one command per study of the registry."""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetxl_lab.studies.registry import ENTRIES, Entry, Option, listing
from hetxl_train.cli.commands import SectionedCommand, argument, one_line_errors
from hetxl_train.cli.train import seeds_from

NAME = "Dataset, with options as in words:classes=20000 [list all datasets]."


class _Studies(TyperGroup):
    """The group of studies; its error for an unknown study suggests names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a name."""
        if args and not args[0].startswith("-") and args[0] not in ENTRIES:
            near = difflib.get_close_matches(args[0], list(ENTRIES), 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
            with one_line_errors():
                raise ValueError(f"unknown study {args[0]!r}{hint} hetxl study --list shows all")
        return super().resolve_command(ctx, args)


study = typer.Typer(cls=_Studies, no_args_is_help=True, rich_markup_mode=None)


def _list(show: bool) -> None:
    if show:
        typer.echo(listing())
        raise typer.Exit


@study.callback()
def _group(
    list_: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List all studies with their running times.")
    ] = False,
) -> None:
    """Run a study: experiments that answer one question.

    Rerun the same command to resume.
    """


def _parameter(option: Option) -> inspect.Parameter:
    """Return the command's parameter for an option. A default of None is described in the help, in brackets."""
    kind: Any = typer.Argument if option.positional else typer.Option
    info = kind(help=option.help, show_default=option.default is not None, min=option.minimum)
    annotation = Annotated[option.type if option.default is not None else option.type | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def _options_of(entry: Entry) -> list[Option]:
    """Return the options of a study's command: its own, and those that all studies share."""
    quick = Option("quick", bool, False, "Run a small version, which takes minutes.")
    return [
        *entry.options,
        *([] if entry.quick is None else [quick]),
        Option("seeds", str, None, f"Number of seeds, or a list of seeds such as 3,4,5 [{entry.seeds}]."),
        Option("out", Path, None, f"Directory for the results [runs/studies/{entry.name}]."),
        Option(
            "write",
            Path,
            None,
            "Also copy the page, its chart and its numbers to this directory, such as lab/docs/studies.",
        ),
        Option("cache", Path, None, f"Directory of the training runs, which studies share [{entry.cache}]."),
        Option("jobs", int, None, "Runs at the same time, each on one thread [one per core, if memory suffices]."),
    ]


def _command_of(entry: Entry) -> Callable[..., None]:
    """Return the command of a study."""

    def command(*, seeds: str | None, quick: bool = False, **values: Any) -> None:
        from hetxl_lab.studies.run import run_study

        page = run_study(
            entry.name,
            profile="quick" if quick else "full",
            seeds=None if seeds is None else seeds_from(seeds),
            options={option.name: values.pop(option.name) for option in entry.options},
            **values,
        )
        typer.echo(page.read_text(encoding="utf-8"))
        typer.echo(f"Page: {page}; its chart and numbers are in the same directory")

    parameters = [_parameter(option) for option in _options_of(entry)]
    # Typer reads the options of the study from both attributes.
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = f"{entry.title}." if entry.paper == "–" else f"{entry.title}. The paper: {entry.paper}."
    return command


for _entry in ENTRIES.values():
    study.command(_entry.name, cls=SectionedCommand)(_command_of(_entry))


def build(
    dataset: Annotated[str | None, argument(NAME, metavar="NAME")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Build the dataset again even if it exists.")] = False,
) -> None:
    """Download and build a benchmark dataset.

    Commands then accept its name as DATA.
    """
    from hetxl_lab.build.packages import Unavailable
    from hetxl_lab.build.store import build_dataset, dataset_listing

    try:
        lines = dataset_listing() if dataset is None else build_dataset(dataset, force=force).lines()
    except Unavailable as error:
        raise OSError(str(error)) from None
    typer.echo("\n".join(lines))
