"""The commands that train: `hetxl train`, `compare` and `tune`."""

from typing import Annotated, Any

import typer

from hetxl_train.cli.commands import argument, optional
from hetxl_train.cli.options import Settings, config_flags, resolve, resolve_preset
from hetxl_train.config import CompareConfig, TrainConfig
from hetxl_train.temperature_methods import METHODS

DATA = (
    "A dataset by name (pycode, synthetic, words, glyphs, wordnet; with options as in synthetic:noise=2), hf:NAME, or "
    "a path to arrays, images, a table or tar shards."
)

CHOSEN = {"head": "--heads", "label_smoothing": "--heads", "mc_dropout": "--baselines", "seed": "--seeds"}
"""Options of a run that a comparison sets, and the flag that sets each."""
CHOSEN_BY_SEARCH = {"temperature": "--method", "temperature_method": "--method", "temperature_held_out": "--held-out"}
"""Options of a run that the search sets, and the flag that sets each."""


@config_flags(without=("data",))
def train(
    data: Annotated[str | None, argument(DATA)] = None,
    *,
    noise_only: Annotated[
        bool, typer.Option("--noise-only", help="With --start-from RUN: learn only noise and τ, on validation rows.")
    ] = False,
    settings: Settings = (None, {}),
) -> None:
    """Train one head on your data, evaluate it, and save the run to a directory.

    Rerun the same command to resume from the last checkpoint. --noise-only adds noise to a trained DET without changing
    its weights. It takes seconds, and keeps the noise only if it lowers the NLL of held-out rows.
    """
    if noise_only:
        run = _add_noise(data, settings)
    else:
        from hetxl_train.training import train as run_training

        run = run_training(resolve(TrainConfig, settings, data=data))
    typer.echo(f"Report: hetxl report {run.path}; predictions: hetxl predict {run.path} INPUT --out FILE")


def _add_noise(data: str | None, settings: Settings) -> Any:
    """Return the run of `hetxl train --noise-only`, which accepts few of the options."""
    from hetxl_train.noise_only import add_noise_to_run

    file, flags = settings
    options = dict(flags)
    start = options.pop("start_from", None)
    if start is None:
        raise ValueError("--noise-only needs --start-from RUN, the run to add noise to")
    extra = sorted(options.keys() - {"out", "seed", "device"})
    if extra or file is not None:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in extra) or "--config"
        raise ValueError(f"--noise-only accepts only --start-from, --out, --seed and --device, found {names}")
    return add_noise_to_run(start, data=data, **options)


@config_flags(without=("data", *CHOSEN), kind=CompareConfig)
def compare(
    data: Annotated[str | None, argument(f"{DATA} [pycode]")] = None,
    *,
    heads: Annotated[
        str, optional("Heads to compare, separated by commas [all: det, det-smoothed, het, het-h, het-xl].")
    ] = "det,det-smoothed,het,het-h,het-xl",
    seeds: Annotated[str, typer.Option(help="Number of seeds, or a list of seeds such as 3,4,5.")] = "1",
    jobs: Annotated[int | None, optional("Runs at the same time, each on one thread [1 run, on all cores].")] = None,
    settings: Settings = (None, {}),
) -> None:
    """Train every head on the same data and report which performs best.

    Every head starts from the same backbone weights, sees the same examples in the same order and trains for the same
    number of steps. The comparison also has DET with temperature scaling, and HET-XL with τ and its noise scale fitted
    on the validation split; they need no extra training. --baselines adds other methods. Rerun the same command to
    resume.
    """
    from rich.console import Console

    from hetxl_train.comparison import compare as run_comparison
    from hetxl_train.report import advice, as_rich, compare_table, find_runs, write_report

    config = resolve_preset(settings, data, CompareConfig, instead=CHOSEN)
    names = tuple(name.strip() for name in heads.split(",") if name.strip())
    members = config.members if config.baselines else 0
    options = {"heads": names, "seeds": seeds_from(seeds), "members": members, "jobs": jobs}
    directory = run_comparison(config.run_options(), **options)
    runs = find_runs([directory])
    table = compare_table(runs)
    Console().print(as_rich(table))
    typer.echo(advice(table))
    typer.echo(f"Report: {write_report(runs, directory / 'report.html')}")


def seeds_from(text: str) -> tuple[int, ...]:
    """Return the seeds of a text with their number, or with the seeds themselves."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--seeds must be a number, or several separated by commas, found {text!r}") from None
    if not numbers or min(numbers) < 0 or numbers == (0,):
        raise ValueError(f"--seeds must be at least 1, or seeds such as 0,1,2, found {text!r}")
    return tuple(range(numbers[0])) if len(numbers) == 1 and "," not in text else numbers


@config_flags(without=("data", *CHOSEN_BY_SEARCH))
def tune(
    data: Annotated[str | None, argument(f"{DATA} [pycode]")] = None,
    *,
    method: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(METHODS)}; auto: the method whose options are set, else by the data and --max-runs."
        ),
    ] = "auto",
    max_runs: Annotated[
        int | None,
        typer.Option(
            "--max-runs",
            "--trainings",
            help="auto: maximum number of runs [1].",
            show_default=False,
            min=1,
        ),
    ] = None,
    grid: Annotated[str | None, optional("grid: values of τ, separated by commas [the paper's 8].")] = None,
    trials: Annotated[int | None, optional("bayes: total number of runs, over all machines [30].", min=1)] = None,
    parallel: Annotated[int | None, optional("bayes: runs per search step [5].", min=1)] = None,
    search_sampler: Annotated[str | None, optional("bayes: gp or tpe [gp if scipy is installed, else tpe].")] = None,
    storage: Annotated[str | None, optional("bayes: journal file, or any optuna storage [OUT/study.journal].")] = None,
    folds: Annotated[
        int,
        typer.Option(help="3: choose on the validation split; 2: on the test split, only to repeat the paper's check."),
    ] = 3,
    retrain: Annotated[
        bool, typer.Option(help="grid, bayes: finally train once more, with the validation rows included.")
    ] = False,
    held_out: Annotated[
        float,
        typer.Option(help="bilevel, gradient: share of each batch used for validation; 0: use the validation split."),
    ] = 0.0,
    jobs: Annotated[int | None, optional("Runs at the same time [as many as cores and memory allow].", min=1)] = None,
    settings: Settings = (None, {}),
) -> None:
    """Choose the temperature τ by one of the methods that the paper compares.

    Rerun the same command to resume. A run that fails does not stop the search.
    """
    from hetxl_train.console import Console
    from hetxl_train.search.methods import Search
    from hetxl_train.search.tune import recommended
    from hetxl_train.search.tune import tune as run_search

    config = resolve_preset(settings, data, TrainConfig, instead=CHOSEN_BY_SEARCH)
    values = {"trials": trials, "parallel": parallel, "sampler": search_sampler, "storage": storage}
    values["grid"] = None if grid is None else _numbers(grid)
    own = {name: value for name, value in values.items() if value is not None}
    if method != "auto" and max_runs is not None:
        raise ValueError(f"--max-runs is for --method auto, found --method {method}")
    if method == "auto":  # choose the method whose options are set
        owners = (name for name in METHODS if own.keys() & set(METHODS[name].options))
        method = next(owners, None) or recommended(config, max_runs or 1, Console())
    own |= {"folds": folds, "retrain": retrain, "held_out": held_out, "jobs": jobs}
    search = Search(method, **own)  # pyright: ignore[reportArgumentType]
    path = run_search(config, search)
    typer.echo(f"Numbers: {path}; plots: {path.with_name('tune.html')}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--grid must be numbers separated by commas, found {text!r}") from None
