"""Compare time and memory of the fused engine with DET and the paper's samples-first evaluation, and check the bars.

python benchmarks/engine.py                             # about a quarter of an hour on two cores; needs 12 GB
python benchmarks/engine.py --write docs/benchmarks.md  # also into that page, with the figures beside it
python benchmarks/engine.py --quick                     # small sizes: a smoke test without meaningful numbers
python benchmarks/engine.py --only softmax memory       # some of the measures
python benchmarks/engine.py --against CHECKOUT          # the speed of this version over that of another checkout

The exit code is 1 if a bar is missed.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _against import compare
from _cases import THREADS
from _curves import Curve, curves_table, measure_curve, plot_curves
from _measures import MEASURES
from _meter import FULL, QUICK, Meter, Sizes, machine
from _report import HEADER, Row, markdown_table, missed, replace_between
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

FIGURES = "figures"
COLOURS = {"fail": "red", "pass": "green", "stretch": "bold green"}


def run(sizes: Sizes, chosen: Sequence[str], console: Console) -> tuple[list[Row], dict[int, Curve]]:
    """Run the chosen measures and print each row once finished."""
    rows: list[Row] = []
    curves: dict[int, Curve] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        batches = (sizes.small_batch, sizes.batch) if FIGURES in chosen else ()
        names = [name for name in MEASURES if name in chosen]
        task = progress.add_task("", total=len(names) + len(batches))
        meter = Meter(sizes, lambda text: progress.update(task, description=text))
        for name in names:
            meter.say(name)
            for row in MEASURES[name](meter):
                rows.append(row)
                print_row(row, console)
            progress.advance(task)
            gc.collect()
        for batch in batches:
            curves[batch] = measure_curve(meter, batch)
            progress.advance(task)
    return rows, curves


def print_row(row: Row, console: Console) -> None:
    """Print one measure to the terminal."""
    name, detail, measured, bar, stretch, verdict = row.cells()
    goal = f"bar {bar}" + (f", stretch {stretch}" if stretch else "")
    console.print(
        f"[{COLOURS[verdict]}]{verdict:>7}[/]  {name}: [bold]{measured}[/] ({goal}; {detail})", highlight=False
    )


def report(rows: Sequence[Row], curves: dict[int, Curve], sizes: Sizes) -> str:
    """Return the measured part of the page."""
    failed = missed(rows)
    reached = f"{len(rows) - len(failed)} of {len(rows)} bars reached"
    parts = [
        f"Measured on {machine(THREADS)}. Medians of steps that take turns in one run; {reached}.",
        markdown_table(HEADER, [row.cells() for row in rows], left=2),
    ]
    if sizes is QUICK:
        parts.insert(0, "**A smoke run with small sizes: these numbers mean nothing.**")
    if curves:
        parts += [
            "### Time and memory against the number of samples",
            f"Loss and backward, HET-XL softmax, D = {sizes.D:,}, K = {sizes.K:,}.",
            "![Time of loss and backward against samples for DET, samples first and hetxl](img/engine-time.svg)",
            "![Peak memory of loss and backward against samples for the same three](img/engine-memory.svg)",
            curves_table(curves, sizes.curve_samples),
        ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, and with --write put it all into the page."""
    everything = (*MEASURES, FIGURES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small sizes; no bar can be missed")
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="some of the measures")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="print times as ratios to those of that checkout, step by step"
    )
    parser.add_argument("--rounds", type=int, default=21, help="of --against, at most, for each row")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    console = Console()
    if arguments.against is not None:
        if arguments.write is not None:
            parser.error("--against writes nothing: leave --write out")
        for name, ratio, rounds in compare(arguments.against, sizes, arguments.only, arguments.rounds):
            console.print(f"{ratio:6.3f}  {name} ({rounds} rounds)", highlight=False)
        return
    page: Path | None = arguments.write
    if page is not None and set(arguments.only) != set(everything):
        parser.error("--write needs all measures: leave --only out")
    text = "" if page is None else page.read_text()
    if page is not None:
        replace_between(text, "", "engine.py")  # fail now rather than after a quarter of an hour
    torch.set_num_threads(THREADS)
    rows, curves = run(sizes, arguments.only, console)
    if page is not None:
        page.write_text(replace_between(text, report(rows, curves, sizes), "engine.py"))
        plot_curves(curves, sizes.curve_samples, page.parent / "img")
    elif curves:
        console.print(curves_table(curves, sizes.curve_samples), markup=False)
    if missed(rows) and not arguments.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
