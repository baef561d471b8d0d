"""The list of commands, with one-line errors, help in sections, and modules that are imported when they run."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from hetxl import __version__
from hetxl_train import plugins
from hetxl_train.formatting import message_lines


def optional(help: str, **more: Any) -> Any:
    """Return an option whose help states its default in brackets."""
    return typer.Option(help=help, show_default=False, **more)


def argument(help: str, **more: Any) -> Any:
    """Return an argument whose help states its default in brackets."""
    return typer.Argument(help=help, show_default=False, **more)


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "numel: integer")
"""Messages of torch's errors when memory runs out; numpy raises a MemoryError."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """On bad input, print one line (or a list) on stderr without a traceback, and exit with code 2."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        lines = [" ".join(line.split()) for line in message_lines(str(error))]
        typer.echo("Error: " + "\n  ".join(filter(None, lines)), err=True)
        raise typer.Exit(2) from None
    except FloatingPointError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        reason = " ".join(str(error).split("\n")[0].split())[:200]
        typer.echo(f"Error: not enough memory ({reason}); lower --batch-size, --width, --rank or the samples", err=True)
        raise typer.Exit(2) from None


OTHER_NAMES = {
    "--lr": "--learning-rate", "--wd": "--weight-decay", "--bs": "--batch-size", "--batch": "--batch-size",
    "--model": "--backbone", "--arch": "--backbone", "--num-workers": "--workers", "--num-epochs": "--epochs",
    "--max-steps": "--steps", "--optim": "--optimizer", "--scheduler": "--schedule", "--tau": "--temperature",
    "--output": "--out", "--output-dir": "--out", "--save-dir": "--out", "--amp": "--precision", "--gpu": "--device",
    "--img-size": "--image-size", "--ckpt": "--start-from", "--checkpoint": "--start-from", "--k": "--top-k",
}  # fmt: skip
"""Names of options in other programs, and ours, which the error suggests."""
_UsageError: Any = typer.BadParameter.__base__  # click's class, or that of typer's copy of click


class SectionedCommand(TyperCommand):
    """A command with one-line errors, whose help groups its options by their `rich_help_panel`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; the error for an unknown option suggests our name for it."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            meant = OTHER_NAMES.get(getattr(error, "option_name", ""))
            if any(meant in parameter.opts for parameter in self.params):
                error.possibilities = [meant]  # pyright: ignore[reportAttributeAccessIssue]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with one_line_errors():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the command's own options, then one list per section."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class LazyCommand(TyperCommand):
    """The name and the help line of a command, which is loaded when it runs or when its help is requested.

    `source` imports and returns the command's function, or the typer app of a group.
    """

    def __init__(self, name: str, help: str, source: Callable[[], Any]):
        super().__init__(name, short_help=help, rich_markup_mode=None)
        self._source = source

    def load(self) -> Any:
        """Return the command itself."""
        loaded = self._source()
        if isinstance(loaded, typer.Typer):
            command = get_group(loaded)
            command.name = self.name or ""
            return command
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name, cls=SectionedCommand)(loaded)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the loaded command, which parses the remaining arguments."""
        with one_line_errors():
            command = self.load()
        return command.make_context(info_name, args, parent=parent, **extra)


def lazy_group(parent: str = "", commands: Mapping[str, tuple[str, str]] | None = None) -> type[TyperGroup]:
    """Return the class of a group whose commands, and those of plug-ins, are loaded when they run.

    Args:
        parent: name of the group in entry points, as in `data.build`; empty for `hetxl` itself.
        commands: the "module:function" and the help line of each name.
    """

    class Group(TyperGroup):
        def __init__(self, **attributes: Any):
            super().__init__(**attributes)
            for name, (target, help) in (commands or {}).items():
                self.add_command(LazyCommand(name, help, partial(pkgutil.resolve_name, target)))
            installed = plugins.entries("commands")
            for name in dict.fromkeys([*installed, *plugins.LAB_COMMANDS]):
                group, _, leaf = name.rpartition(".")
                if group == parent:
                    help = plugins.LAB_COMMANDS.get(name) or f"Added by {_package(installed[name])}."
                    self.add_command(LazyCommand(leaf, help, partial(_plugged_in, name)))

    return Group


def _plugged_in(name: str) -> Any:
    if name not in plugins.entries("commands"):
        raise ImportError(f"hetxl {name.replace('.', ' ')} {plugins.LAB}")
    return plugins.load("commands", name)


def _package(entry: Any) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


_HERE = "hetxl_train.cli"
COMMANDS = {
    "compare": (f"{_HERE}.train:compare", "Train every head on the same data and report which performs best."),
    "train": (f"{_HERE}.train:train", "Train one head on your data, evaluate it, and save the run to a directory."),
    "tune": (f"{_HERE}.train:tune", "Choose the temperature τ by one of the methods that the paper compares."),
    "rescale": (
        f"{_HERE}.run:rescale",
        "Fit τ and the noise scale of a trained run to labels that you trust, and save the result as a new run.",
    ),
    "evaluate": (f"{_HERE}.run:evaluate", "Evaluate a run on its test split, or on other data of the same classes."),
    "predict": (f"{_HERE}.run:predict", "Write the most probable classes of new inputs, with their uncertainty."),
    "calibrate": (f"{_HERE}.run:calibrate", "Calibrate prediction sets and answers with a guarantee."),
    "audit": (f"{_HERE}.audit:audit", "Find labels that are probably wrong, and correct them."),
    "export": (f"{_HERE}.run:export", "Write a trained model to one file: ONNX, torch.export, or the head alone."),
    "embed": (f"{_HERE}.embed:embed", "Compute the embeddings of a dataset with a trained network, to train heads on."),
    "push": (f"{_HERE}.run:push", "Save a run with a model card to the Hugging Face hub, or to a directory."),
    "serve": (f"{_HERE}.serve:serve", "Serve predictions of a run over HTTP."),
    "demo": (f"{_HERE}.serve:demo", "Try a run on a local page in the browser."),
    "report": (f"{_HERE}.run:report", "Write report.html: one file with all plots and tables of the runs."),
    "recipes": (f"{_HERE}.recipes:recipes", "List the recipes of hetxl train, or print one."),
    "params": (f"{_HERE}.params:params", "Show the parameters and the training memory of the four heads."),
    "contrastive": (
        f"{_HERE}.contrastive:contrastive",
        "Train an image tower and a text tower on pairs, with or without noise on their embeddings.",
    ),
    "data": (f"{_HERE}.data:data", "Describe a dataset, or build a benchmark dataset."),
}
"""The location of each command and the first line of its help."""

# Errors and help are plain text, so that a line stays one line in logs. Tracebacks never show values of variables.
app = typer.Typer(
    name="hetxl",
    cls=lazy_group(commands=COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"hetxl {__version__}")
        raise typer.Exit


@app.callback()
def hetxl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Classifier heads for many classes and noisy labels."""
