"""`hetxl train` and `hetxl compare`."""

from typing import Annotated

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors
from hetxl.cli.options import Given, config_flags, resolve, resolve_preset

DATA = (
    "pycode, synthetic, words, glyphs or wordnet (options as in synthetic:noise=2), an array file or folder, pictures, "
    "or a manifest."
)

CHOSEN = {"head": "--heads", "label_smoothing": "--heads", "seed": "--seeds"}
"""Options of a training that a comparison sets, and by which flag."""


@config_flags(without=("data",))
def train(
    data: Annotated[str | None, typer.Argument(help=DATA, show_default=False)] = None, *, given: Given = (None, {})
) -> None:
    """Train one head on your data, evaluate it, and keep the run in a directory.

    A run that was stopped goes on from its last checkpoint when the same command is given again.
    """
    with one_line_errors():
        from hetxl.training.train import train as run_training

        run = run_training(resolve(given, data=data))
        typer.echo(f"hetxl report {run.path}   shows it; hetxl predict {run.path} INPUT --out FILE   uses it")


@config_flags(without=("data", *CHOSEN))
def compare(
    data: Annotated[str | None, typer.Argument(help=f"{DATA} [pycode]", show_default=False)] = None,
    *,
    heads: Annotated[
        str, typer.Option(help="Which take part, of det, det-smoothed, het, het-h and het-xl.", show_default=False)
    ] = "det,det-smoothed,het,het-h,het-xl",
    seeds: Annotated[str, typer.Option(help="How many seeds, or which as in 3,4,5.")] = "1",
    jobs: Annotated[
        int | None,
        typer.Option(help="Trainings at a time, one thread each [one, on all cores].", show_default=False),
    ] = None,
    given: Given = (None, {}),
) -> None:
    """Train all heads on the same data and tell which serves you.

    Every head starts from the same backbone, sees the same examples in the same order and takes as many steps. DET with
    temperature scaling, and HET-XL with τ and the scale of its noise fitted likewise on the validation split, come for
    free. A comparison that was stopped goes on when the same command is given again.
    """
    with one_line_errors():
        from hetxl.report import as_rich, compare_table, find_runs, write_report
        from hetxl.training.compare import compare as run_comparison

        config = resolve_preset(given, data, instead=CHOSEN)
        names = tuple(name.strip() for name in heads.split(",") if name.strip())
        directory = run_comparison(config, heads=names, seeds=seeds_from(seeds), jobs=jobs)
        runs = find_runs([directory])
        Console().print(as_rich(compare_table(runs)))
        report = write_report(runs, directory / "report.html")
        typer.echo(f"Report: {report}")


def seeds_from(text: str) -> tuple[int, ...]:
    """A number of seeds, or the seeds themselves."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--seeds must be a number, or several with commas between, found {text!r}") from None
    if not numbers or min(numbers) < 0 or numbers == (0,):
        raise ValueError(f"--seeds must be at least 1, or seeds such as 0,1,2, found {text!r}")
    return tuple(range(numbers[0])) if len(numbers) == 1 and "," not in text else numbers
