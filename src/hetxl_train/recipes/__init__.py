"""Recipes by name: options of a run in TOML files, those of the paper's settings and our own."""

from importlib import resources
from typing import Any

from hetxl._checks import one_of
from hetxl_train.config import Options

AS = "# As "
"""How the second line of a recipe begins that changes lines of another one."""


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(entry.name.removesuffix(".toml") for entry in _files() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the TOML file of a recipe, with its comments and all lines of the recipe that it changes."""
    one_of("recipe", name, recipe_names())
    title, second, *lines = _read(name).splitlines()
    if not second.startswith(AS):
        return _read(name)
    changed = {line.partition(" = ")[0]: line for line in lines if " = " in line}
    others = _read(second.removeprefix(AS).partition(",")[0]).splitlines()[1:]
    return "\n".join([title, *(changed.get(line.partition(" = ")[0], line) for line in others), ""])


def recipe_title(name: str) -> str:
    """Return the first line of a recipe's file."""
    return recipe_text(name).splitlines()[0].removeprefix("# ")


def recipe_options(name: str, kind: type[Options]) -> dict[str, Any]:
    """Return the options of a recipe for a kind of configuration, and its name."""
    return kind.parse_toml(recipe_text(name), f"recipe {name}") | {"recipe": name}


def _read(name: str) -> str:
    return (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def _files() -> Any:
    return resources.files(__name__).iterdir()
