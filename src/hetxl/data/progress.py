"""A progress bar for what takes longer than two seconds."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
STEP = 4096


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs; nothing where that is not a terminal.

    Args:
        description: what is done.
        total: how much of it there is; None where that is not known.

    Returns:
        A function that is told how much more was done.
    """
    console = Console(stderr=True)
    # File names may hold brackets: no markup.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


def counted(items: Iterable[Item], description: str) -> Generator[Item, None, None]:
    """The items, with a bar that moves while they are taken: how many there will be is not known.

    Use it under contextlib.closing, so that the bar is gone before an error is shown.

    Args:
        items: any number.
        description: what is done.
    """
    with progress_bar(description, None) as advance:
        for number, item in enumerate(items, 1):
            if number % STEP == 0:
                advance(STEP)
            yield item
