"""What a person sees while a run goes on."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Narrator:
    """A progress bar on a terminal, and lines of text anywhere; both on the standard error.

    Args:
        quiet: say nothing.
    """

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def bar(self, title: str, total: int, done: int = 0) -> "Bar":
        """A bar for a task of known length; use it as a context."""
        return Bar(self.console, title, total, done)


class Bar:
    """One progress bar; it shows nothing where the standard error is no terminal."""

    def __init__(self, console: Console, title: str, total: int, done: int):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, status="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def to(self, done: int, status: str = "") -> None:
        """How far it is, and what to say beside it."""
        self._progress.update(self._task, completed=done, status=status)


def duration(seconds: float) -> str:
    """Seconds as a person would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def amount(count: float) -> str:
    """Bytes as a person would say it."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
