"""The datasets that can be built, by name."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hetxl.data.dataset import Dataset


class Builder(NamedTuple):
    """Where a dataset is built and loaded; its module is imported when it is used.

    Attributes:
        module: "hetxl.data.words"
        build: name of the function that builds it and returns its folder.
        load: name of the function that opens it.
        description: one line for a list.
    """

    module: str
    build: str
    load: str
    description: str

    def builder(self) -> Callable[..., Path]:
        """The function that builds it."""
        return getattr(importlib.import_module(self.module), self.build)

    def loader(self) -> Callable[..., Dataset]:
        """The function that opens it."""
        return getattr(importlib.import_module(self.module), self.load)


BUILDERS = {
    name: Builder(f"hetxl.data.{name}", f"build_{name}", f"load_{name}", description)
    for name, description in {
        "words": "next-word prediction on the text of a dictionary of 1913 (Debian's dict-gcide)",
        "wordnet": "from the gloss of a word to its hypernym (Debian's wordnet-base)",
        "glyphs": "pictures of Chinese characters in many typefaces (Debian's font packages)",
        "icons": "pictures of icons with their names, pairs for contrastive learning (the Python package qtawesome)",
    }.items()
}
"""All of them, in the order of a list."""


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a build or load function, with their defaults.

    Args:
        function: whose options are keyword arguments.
    """
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def command(name: str, options: Mapping[str, Any]) -> str:
    """What to type to build a dataset: `hetxl data build words`; options that are the defaults are left out.

    Args:
        name: of the dataset.
        options: that change its files.
    """
    usual = defaults(BUILDERS[name].builder()) if name in BUILDERS else {}
    given = [f"{option}={text(value)}" for option, value in options.items() if usual.get(option, ...) != value]
    return f"hetxl data build {name}" + (":" + ",".join(given) if given else "")


def text(value: Any) -> str:
    """An option's value as it is written behind a name.

    Args:
        value: of any kind that options have.
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
