"""The comparison of heads: means over seeds, and how each differs from the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetxl.report import format as form
from hetxl.report.groups import Group, baseline_label, group_runs
from hetxl.report.losses import example_test
from hetxl.report.read import Run
from hetxl.report.statistics import mean, paired_test

TRUE_MODEL = "true model"


@dataclass(frozen=True)
class Column:
    """What a column shows.

    Attributes:
        key: its name in cells and JSON.
        title: its heading, unit included.
        better: which values are better; None where none is.
    """

    key: str
    title: str
    better: Literal["lower", "higher"] | None = None


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
        value: the mean over seeds, None when there is none.
        error: its standard error, None for one seed.
        text: how it is shown.
        best: whether no other head has a better one.
        worse: for differences, whether it is on the wrong side of the baseline.
    """

    value: float | None = None
    error: float | None = None
    text: str = form.MISSING
    best: bool = False
    worse: bool = False


@dataclass(frozen=True)
class Row:
    """One head, or the true model.

    Attributes:
        label: what it is called.
        seeds: how many runs its metrics are the mean of.
        cells: by the key of the column.
        truth: whether it is the true model.
        tested: what the difference was tested over, "seeds" or "examples"; None without a test.
        common: how many seeds it has in common with the baseline.
    """

    label: str
    seeds: int
    cells: dict[str, Cell]
    truth: bool = False
    tested: Literal["seeds", "examples"] | None = None
    common: int = 0

    @property
    def nll(self) -> float:
        """The NLL to sort by: infinite when it is not known."""
        value = self.cells["nll"].value
        return math.inf if value is None else value


@dataclass(frozen=True)
class Table:
    """Heads by rows.

    Attributes:
        title: what is compared.
        split: where the metrics are from, "test" or "validation".
        baseline: the label that differences are to, None without one.
        columns: in order, after the labels.
        rows: in order.
        notes: what a reader should know, one line each.
    """

    title: str
    split: str
    baseline: str | None
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def heads(self) -> tuple[Row, ...]:
        """The rows without the true model."""
        return tuple(row for row in self.rows if not row.truth)

    def row(self, label: str) -> Row | None:
        """The row of a head by its label."""
        return next((row for row in self.heads if row.label == label), None)


def compare_table(runs: Sequence[Run]) -> Table:
    """Compare heads on the test data, over seeds.

    Each metric is the mean over the seeds ± its standard error. The difference to the baseline is that of the NLL, seed
    by seed, with a paired t test from two seeds on; for one seed, over its examples where their losses are known.
    Without any test metrics, those of the validation data are used.

    Args:
        runs: at least one, all of the same data.
    """
    groups = group_runs(runs)
    split = "test" if any(run.metrics("test") for run in runs) or not _any_validation(runs) else "validation"
    baseline = baseline_label(groups)
    reference = next((group for group in groups if group.label == baseline), None)
    digits = _nll_digits(groups, split)
    columns = _columns(baseline)
    rows = [_row(group, reference, split, digits) for group in groups]
    rows = _with_best(rows, columns)
    best_nll = next((value for run in runs if (value := run.value("best_nll")) is not None), None)
    if best_nll is not None:
        rows.insert(0, _true_row(best_nll, rows, baseline, digits))
    dataset = next((run.dataset for run in runs if run.dataset), None)
    title = f"{dataset or 'Heads'}, {split} data"
    by_example = any(row.tested == "examples" for row in rows)
    notes = _notes(groups, reference, split, best_nll, by_example)
    return Table(title, split, baseline, columns, tuple(rows), tuple(notes))


def as_dict(table: Table) -> dict[str, Any]:
    """The table as plain numbers, for JSON."""
    rows = []
    for row in table.rows:
        entry: dict[str, Any] = {"label": row.label, "seeds": row.seeds, "tested_over": row.tested}
        for column in table.columns:
            cell = row.cells[column.key]
            if column.key == "p":
                entry["p"] = cell.value
            else:
                entry[column.key] = {"mean": cell.value, "standard_error": cell.error, "best": cell.best}
        rows.append(entry)
    return {
        "title": table.title,
        "split": table.split,
        "baseline": table.baseline,
        "rows": rows,
        "notes": list(table.notes),
    }


def _any_validation(runs: Sequence[Run]) -> bool:
    return any(run.metrics("validation") for run in runs)


def _columns(baseline: str | None) -> tuple[Column, ...]:
    return (
        Column("nll", "NLL", "lower"),
        Column("difference", f"difference to {baseline or 'DET'}", "lower"),
        Column("p", "p"),
        Column("precision@1", "precision@1, %", "higher"),
        Column("precision@5", "precision@5, %", "higher"),
        Column("calibration_error", "calibration error, %", "lower"),
        Column("brier", "Brier", "lower"),
        Column("parameters", "parameters", "lower"),
        Column("train_seconds", "training", "lower"),
        Column("predict_seconds_per_1000", "prediction per 1,000", "lower"),
    )


def _nll_digits(groups: Sequence[Group], split: str) -> int:
    """Decimals of the NLL: small ones need more to be told apart."""
    values = [value for group in groups for value in group.metrics("nll", split).values()]
    return 4 if values and max(values) < 1 else 3


def _row(group: Group, reference: Group | None, split: str, digits: int) -> Row:
    cells = {"nll": _metric(group, "nll", split, digits)}
    cells["difference"], cells["p"], tested = _difference(group, reference, split, digits)
    for key in ("precision@1", "precision@5", "calibration_error"):
        cells[key] = _metric(group, key, split, 2, scale=100)
    cells["brier"] = _metric(group, "brier", split, 4)
    for key, values, show in (
        ("parameters", group.parameters(), form.short_count),
        ("train_seconds", group.values("train_seconds"), form.duration),
        ("predict_seconds_per_1000", group.values("predict_seconds_per_1000"), form.duration),
    ):
        average = mean(values) if values else None
        cells[key] = Cell(average.value, average.error, show(average.value)) if average else Cell()
    own, other = (side.metrics("nll", split) if side else {} for side in (group, reference))
    return Row(group.label, len(own), cells, tested=tested, common=len(own.keys() & other.keys()))


def _metric(group: Group, key: str, split: str, digits: int, scale: float = 1) -> Cell:
    values = list(group.metrics(key, split).values())
    if not values:
        return Cell()
    average = mean(values)
    error = None if average.error is None else scale * average.error
    return Cell(average.value, average.error, form.with_error(scale * average.value, error, digits))


def _difference(
    group: Group, reference: Group | None, split: str, digits: int
) -> tuple[Cell, Cell, Literal["seeds", "examples"] | None]:
    """The difference of the NLL to the baseline over the seeds that both have, its p-value, and what that is over."""
    if reference is None or group is reference:
        return Cell(), Cell(), None
    own, other = group.metrics("nll", split), reference.metrics("nll", split)
    seeds = [seed for seed in own if seed in other]
    if not seeds:
        return Cell(), Cell(text="no common seed" if own and other else form.MISSING), None
    test = paired_test([own[seed] for seed in seeds], [other[seed] for seed in seeds])
    tested = "seeds"
    if len(seeds) == 1:
        ours, theirs = (next(run for run in side.runs if run.seed == seeds[0]) for side in (group, reference))
        by_example = example_test(ours, theirs, split)
        tested = None if by_example is None else "examples"
        if by_example is not None:
            test = test._replace(error=by_example.error, p=by_example.p)
    worse = round(test.difference, digits) > 0  # as it is shown
    text = form.with_error(test.difference, test.error, digits, sign=True) + (" worse" if worse else "")
    p = "1 seed" if test.p is None else form.probability(test.p)
    return Cell(test.difference, test.error, text, worse=worse), Cell(test.p, text=p), tested


def _with_best(rows: list[Row], columns: Sequence[Column]) -> list[Row]:
    """The rows with the best cells marked: all that show the same as the best one. A row alone has no best."""
    marked = rows
    for column in columns:
        found = [
            (value, row.cells[column.key].text) for row in rows if (value := row.cells[column.key].value) is not None
        ]
        if column.better is None or column.key == "difference" or len(found) < 2:
            continue
        pick = min if column.better == "lower" else max
        best, _ = pick(found, key=lambda pair: pair[0])
        shown = {text.split(" ±")[0] for value, text in found if value == best}
        if all(text.split(" ±")[0] in shown for _, text in found):
            continue  # all the same: none is best

        def mark(cell: Cell, shown: set[str] = shown) -> Cell:
            return replace(cell, best=cell.value is not None and cell.text.split(" ±")[0] in shown)

        marked = [replace(row, cells=row.cells | {column.key: mark(row.cells[column.key])}) for row in marked]
    return marked


def _true_row(best_nll: float, rows: Sequence[Row], baseline: str | None, digits: int) -> Row:
    cells = {key: Cell() for key in rows[0].cells}
    cells["nll"] = Cell(best_nll, text=form.decimal(best_nll, digits))
    reference = next((row.cells["nll"].value for row in rows if row.label == baseline), None)
    if reference is not None:
        difference = best_nll - reference
        cells["difference"] = Cell(difference, text=form.decimal(difference, digits, sign=True))
    return Row(TRUE_MODEL, 0, cells, truth=True)


def _notes(
    groups: Sequence[Group], reference: Group | None, split: str, best_nll: float | None, by_example: bool
) -> list[str]:
    numbers = {len(group.metrics("nll", split)) for group in groups} - {0}
    labels = {run.name: group.label for group in groups for run in group.runs}
    notes = []
    if by_example:
        notes.append(
            "1 seed: differences ± standard error and p of the paired t test are over examples; other seeds may differ."
        )
    elif numbers == {1}:
        notes.append("1 seed: no spread over seeds and no test of the differences.")
    if max(numbers, default=0) > 1:
        seeds = " to ".join(str(number) for number in sorted({min(numbers), max(numbers)}))
        notes.append(f"Means over {seeds} seeds ± standard error; p of the paired t test over seeds, two-sided.")
    if split != "test":
        notes.append("No run has test metrics: these are those of the validation data, which training looked at.")
    if reference is None:
        notes.append("No run of DET: there is nothing to take differences to.")
    if best_nll is not None:
        notes.append("The true model is the one that made the data: no head can expect a lower NLL.")
    for group in groups:
        notes += [
            f"{group.label}, {'seed unknown' if run.seed is None else f'seed {run.seed}'}: no {split} metrics yet."
            for run in group.runs
            if not run.metrics(split)
        ]
        origins = [run.result.get("derived_from") for run in group.runs]
        derived = {labels.get(origin, origin) for origin in origins if isinstance(origin, str)}
        if derived:
            notes.append(f"{group.label} is not trained by itself but derived from {form.listed(sorted(derived))}.")
    planned = next((run.comparison.heads for group in groups for run in group.runs if run.comparison), ())
    there = {run.label for group in groups for run in group.runs}
    notes += [f"{label}: no run yet." for label in planned if label not in there]
    return notes
