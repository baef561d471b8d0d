"""Lines of text and progress bars during a run, on standard error."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hetxl_train.formatting import message_lines

Item = TypeVar("Item")
STEP = 4096


class Console:
    """Print lines of text, and progress bars on terminals; nothing if quiet."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.rich = RichConsole(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        """Print one line without markup; control characters, for instance in file names, are escaped."""
        self.rich.print("\n".join(message_lines(text)), markup=False, soft_wrap=True)

    def bar(self, title: str, total: int, done: int = 0) -> "Bar":
        """Return a progress bar for a task of known length, a context manager."""
        return Bar(self.rich, title, total, done)


class Bar(Progress):
    """One progress bar, hidden unless standard error is a terminal."""

    def __init__(self, console: RichConsole, title: str, total: int | None, done: int = 0):
        super().__init__(
            TextColumn("{task.description}", markup=False),  # file names may contain brackets
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self.add_task(title, total=total, completed=done, status="")

    def to(self, done: int, status: str = "") -> None:
        """Show the progress and a status."""
        self.update(self.task_ids[0], completed=done, status=status)


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, if standard error is a terminal; yield a function that advances it.

    A total of None means an unknown length.
    """
    with Bar(RichConsole(stderr=True), description, total) as bar:
        yield lambda amount: bar.advance(bar.task_ids[0], amount)


def counted(items: Iterable[Item], description: str) -> Generator[Item, None, None]:
    """Yield the items and advance a bar, for an iterable of unknown length.

    Use it with contextlib.closing, so that the bar is removed before an error is shown.
    """
    with progress_bar(description, None) as advance:
        for number, item in enumerate(items, 1):
            if number % STEP == 0:
                advance(STEP)
            yield item
