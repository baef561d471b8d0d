"""Recipes by name: options of a run in TOML files, those of the paper's settings and our own."""

from importlib import resources
from typing import Any

from hetxl._checks import one_of
from hetxl_train.config import Options


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(entry.name.removesuffix(".toml") for entry in _files() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the TOML file of a recipe, with its comments."""
    one_of("recipe", name, recipe_names())
    return (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def recipe_title(name: str) -> str:
    """Return the first line of a recipe's file."""
    return recipe_text(name).splitlines()[0].removeprefix("# ")


def recipe_options(name: str, kind: type[Options]) -> dict[str, Any]:
    """Return the options of a recipe for a kind of configuration, and its name."""
    return kind.parse_toml(recipe_text(name), f"recipe {name}") | {"recipe": name}


def _files() -> Any:
    return resources.files(__name__).iterdir()
