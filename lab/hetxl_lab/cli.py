"""`hetxl data build`, and `hetxl study`: a command for every study of the registry."""

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

NAME = "Options go behind it, as in words:classes=20000. Without a name, all names are listed."


class _Studies(TyperGroup):
    """The group of commands, whose error for an unknown study suggests names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a name."""
        if args and not args[0].startswith("-") and args[0] not in ENTRIES:
            near = difflib.get_close_matches(args[0], list(ENTRIES), 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
            with one_line_errors():
                raise ValueError(f"there is no study {args[0]!r}{hint} hetxl study --list shows all")
        return super().resolve_command(ctx, args)


study = typer.Typer(cls=_Studies, no_args_is_help=True, rich_markup_mode=None)


def _list(show: bool) -> None:
    if show:
        typer.echo(listing())
        raise typer.Exit


@study.callback()
def _group(
    list_: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List all studies, with their costs.")
    ] = False,
) -> None:
    """Run a study: a comparison that answers one question.

    Rerun the same command to resume.
    """


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter of a command for an option; brackets in its help already name an absent default."""
    kind: Any = typer.Argument if option.positional else typer.Option
    info = kind(help=option.help, show_default=option.default is not None, min=option.minimum)
    annotation = Annotated[option.type if option.default is not None else option.type | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def _options_of(entry: Entry) -> list[Option]:
    """Return the options of a study's command: its own, and those of all."""
    quick = Option("quick", bool, False, "Run a small profile instead, in minutes.")
    return [
        *entry.options,
        *([] if entry.quick is None else [quick]),
        Option("seeds", str, None, f"How many seeds, or which as in 3,4,5 [{entry.seeds}]."),
        Option("out", Path, None, f"Directory of the results [runs/studies/{entry.name}]."),
        Option("write", Path, None, "Directory of pages to copy the results to, such as lab/docs/studies."),
        Option("cache", Path, None, f"Directory of the runs, which studies share [{entry.cache}]."),
        Option("jobs", int, None, "Runs at a time, one thread each [one a core, as far as memory has room]."),
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
        typer.echo(f"Page: {page}; its image and numbers are beside it")

    parameters = [_parameter(option) for option in _options_of(entry)]
    # Typer reads both: a command has the options that its study declares.
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = f"{entry.title}." if entry.paper == "–" else f"{entry.title}. The paper: {entry.paper}."
    return command


for _entry in ENTRIES.values():
    study.command(_entry.name, cls=SectionedCommand)(_command_of(_entry))


def build(
    dataset: Annotated[str | None, argument(NAME, metavar="NAME")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Build it again if it is there.")] = False,
) -> None:
    """Download and build a benchmark dataset.

    Its name is then a value of DATA like any other.
    """
    from hetxl_lab.build.packages import Unavailable
    from hetxl_lab.build.store import build_dataset, dataset_listing

    try:
        lines = dataset_listing() if dataset is None else build_dataset(dataset, force=force).lines()
    except Unavailable as error:
        raise OSError(str(error)) from None
    typer.echo("\n".join(lines))
