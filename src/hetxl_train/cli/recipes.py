"""`hetxl recipes`."""

from typing import Annotated

import typer

from hetxl_train.cli.commands import argument


def recipes(name: Annotated[str | None, argument("Recipe to print [list all recipes].")] = None) -> None:
    """List the recipes of hetxl train, or print one.

    A recipe is a set of options with the source of each value. Use it with hetxl train --recipe NAME; flags override
    its values.
    """
    from hetxl_train.recipes import recipe_names, recipe_text, recipe_title

    if name is not None:
        typer.echo(recipe_text(name), nl=False)
        return
    names = recipe_names()
    for each in names:
        typer.echo(f"{each:<{max(map(len, names))}}  {recipe_title(each)}")
