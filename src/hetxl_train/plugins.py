"""Find what other installed packages add to the app through entry points; nothing is imported before it is used.

| group | value |
| --- | --- |
| `hetxl.datasets` | a function that loads a dataset by name: `hetxl train NAME` |
| `hetxl.pairs` | likewise for pairs: `hetxl contrastive train NAME` |
| `hetxl.presets` | default options for that dataset; the user's override them |
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
"""The end of messages about features that only the lab has."""
LAB_COMMANDS = {
    "study": "Run a study: experiments that answer one question.",
    "data.build": "Download and build a benchmark dataset.",
}
"""The lab's commands with their help lines; they are listed without importing the lab, even if it is not installed."""


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
    """Import and return the object that a package registered under a name."""
    return entries(group)[name].load()
