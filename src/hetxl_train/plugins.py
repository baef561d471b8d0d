"""Find what other installed packages add to the app, by their entry points; nothing is imported until it is used.

| group | value |
| --- | --- |
| `hetxl.datasets` | a function that loads a dataset by name: `hetxl train NAME` |
| `hetxl.pairs` | likewise for pairs: `hetxl contrastive train NAME` |
| `hetxl.presets` | options for that dataset, beneath those of the user |
| `hetxl.text_encoders` | a `TextEncoder`: `hetxl contrastive train --text NAME` |
| `hetxl.commands` | a function, or a typer app, that becomes `hetxl NAME` (`data.NAME`: `hetxl data NAME`) |
| `hetxl.parameter_tables` | a function that prints a table, as JSON if its argument is true: `hetxl params` |

The lab of the repository adds its benchmark datasets and studies this way.
"""

import functools
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

LAB = "is part of the lab, which is not installed; from a checkout of the repository, run: pip install --editable lab"
"""The end of a message about something that only the lab has."""
LAB_COMMANDS = {
    "study": "Run a study: a comparison that answers one question.",
    "data.build": "Download and build a benchmark dataset.",
}
"""The lab's commands with their lines of help: listed without importing it, and also if it is not installed."""


class TextEncoder(Protocol):
    """A locked encoder of texts."""

    size: int  # D′ of its vectors

    def encode(self, texts: Sequence[str], cache: Any = None) -> "np.ndarray":
        """Return vectors of the texts, [n, D′] float32."""
        ...


@functools.cache
def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    return {entry.name: entry for entry in entry_points(group=f"hetxl.{group}")}


def load(group: str, name: str) -> Any:
    """Import and return what a package registered under a name."""
    return entries(group)[name].load()
