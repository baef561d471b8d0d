"""`hetxl tune`."""

from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors
from hetxl.cli.options import Given, config_flags, resolve_preset
from hetxl.cli.train import DATA

CHOSEN = {"temperature": "--method", "temperature_method": "--method", "temperature_held_out": "--held-out"}
"""Options of a training that the search sets, and by which flag."""


@config_flags(without=("data", *CHOSEN))
def tune(
    data: Annotated[str | None, typer.Argument(help=f"{DATA} [pycode]", show_default=False)] = None,
    *,
    method: Annotated[
        str,
        typer.Option(
            help="grid, bayes, bilevel, gradient, train, posthoc, fixed; auto: that of other options, or by the data "
            "and --trainings."
        ),
    ] = "auto",
    trainings: Annotated[
        int | None, typer.Option(help="auto: how many trainings there is time for [1].", min=1, show_default=False)
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="grid: values of τ, with commas between [the paper's 8].", show_default=False)
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="bayes: trainings in all, over all machines [30].", min=1, show_default=False),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="bayes: trainings of a step [5].", min=1, show_default=False)
    ] = None,
    search_sampler: Annotated[
        str | None, typer.Option(help="bayes: gp, tpe; auto: gp where scipy is [auto].", show_default=False)
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="bayes: a journal file or any storage of optuna [OUT/study.journal].", show_default=False),
    ] = None,
    folds: Annotated[int, typer.Option(help="2: choose on the test split, for the paper's check only.")] = 3,
    retrain: Annotated[bool, typer.Option(help="grid, bayes: at last, train on validation rows as well.")] = False,
    held_out: Annotated[
        float, typer.Option(help="bilevel, gradient: validate on this share of each batch, such as 0.125.")
    ] = 0.0,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trainings at a time [as many as there are cores and memory].", min=1, show_default=False),
    ] = None,
    given: Given = (None, {}),
) -> None:
    """Choose the temperature τ in one of the ways that the paper compares.

    A search that was stopped goes on when the same command is given again; a training that fails does not stop it.
    """
    with one_line_errors():
        from hetxl.training.progress import Narrator
        from hetxl.tuning.methods import Search
        from hetxl.tuning.tune import recommended
        from hetxl.tuning.tune import tune as run_search

        config = resolve_preset(given, data, instead=CHOSEN)
        of_bayes = {"trials": trials, "parallel": parallel, "sampler": search_sampler, "storage": storage}
        of_methods = {name: value for name, value in of_bayes.items() if value is not None}
        if method != "auto" and trainings is not None:
            raise ValueError(f"--trainings is for --method auto, found --method {method}")
        if method == "auto" and grid is not None:
            method = "grid"
        elif method == "auto" and of_methods:
            method = "bayes"
        elif method == "auto":
            method = recommended(config, trainings or 1, Narrator())
        if grid is not None:
            of_methods["grid"] = _numbers(grid)
        search = Search(
            method=method,
            folds=folds,
            retrain=retrain,
            held_out=held_out,
            jobs=jobs,
            **of_methods,  # pyright: ignore[reportArgumentType]
        )
        path = run_search(config, search)
        typer.echo(f"{path}   has the numbers, {path.with_name('tune.html')} the picture")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--grid must be numbers with commas between, found {text!r}") from None
