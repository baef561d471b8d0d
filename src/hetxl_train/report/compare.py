"""Compare heads: means over seeds, differences to the baseline with a paired test, and the verdict in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetxl._tensors import read_tensors
from hetxl.registry import HEAD_LABELS, METRIC_ENTRIES
from hetxl_train import formatting as form
from hetxl_train.report.read import Run
from hetxl_train.report.statistics import Mean, PairedTest, mean, paired_test, t_test
from hetxl_train.report.tables import Cell, Column, Row, Table

TRUE_MODEL = "true model"
CHANCE = 0.05  # a p-value above this could well be chance
MISCALIBRATED = 0.05  # a calibration error above this is worth mending
COSTLY = 1.15  # a ratio of times below this could well be chance
CHEAPER = 0.5  # of rows that gain, one that predicts in this share of the best one's time is named beside it


@dataclass(frozen=True)
class Group:
    """The runs of one label, by seed."""

    label: str
    runs: tuple[Run, ...]  # at least one

    def metrics(self, key: str, split: str) -> dict[int | None, float]:
        """Return a metric by seed, for the runs that have it."""
        values = {run.seed: run.metrics(split).get(key) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def values(self, key: str) -> list[float]:
        """Return a number of the result, for the runs that have it."""
        return [value for run in self.runs if (value := run.value(key)) is not None]

    def parameters(self) -> list[float]:
        """Return the number of parameters, for the runs that have it."""
        return [value for run in self.runs if (value := run.parameters()) is not None]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by label: in the order of their comparison, else the baseline and the heads of the paper first.

    Two runs of the same label and seed are not two seeds of one head: each such run is a group under its own name.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, found none")
    datasets = sorted({run.dataset for run in runs if run.dataset is not None})
    if len(datasets) > 1:
        raise ValueError(f"runs must be of the same data to be compared, found {', '.join(datasets)}; report on each")
    labels, groups = list(dict.fromkeys(run.label for run in runs)), []
    ranked = sorted(runs, key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
    for label in sorted(labels, key=lambda label: _order(label, runs, labels)):
        members = [run for run in ranked if run.label == label]
        if len({run.seed for run in members}) == len(members):
            groups.append(Group(label, tuple(members)))
        else:
            groups += [Group(f"{label} ({name})", (run,)) for name, run in zip(_names(members), members, strict=True)]
    return groups


def _names(runs: Sequence[Run]) -> list[str]:
    """Return different names for runs: of their directories, with the parent or the whole path where names repeat."""
    choices = ([run.name for run in runs], [f"{run.path.parent.name}/{run.name}" for run in runs])
    return next((names for names in choices if len(set(names)) == len(names)), [str(run.path) for run in runs])


def _order(label: str, runs: Sequence[Run], labels: list[str]) -> tuple[int, int]:
    """Return a key to sort by: the order of the comparison, then that of the paper, then of appearance."""
    for run in runs:
        if run.comparison is not None and label in run.comparison.heads:
            return 0, run.comparison.heads.index(label)
    known = list(HEAD_LABELS.values())
    return (1, known.index(label)) if label in known else (2, labels.index(label))


def baseline_label(groups: Sequence[Group]) -> str | None:
    """Return the label that the others are compared with: the comparison's, else DET; None without it."""
    labels = [group.label for group in groups]
    for run in (run for group in groups for run in group.runs):
        if run.comparison is not None and run.comparison.baseline in labels:
            return run.comparison.baseline
    plain = [group.label for group in groups if any(run.head == "det" for run in group.runs)]
    return "DET" if "DET" in labels else plain[0] if plain else None


def read_losses(run: Run, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the row numbers [n], in order, and losses [n] in nats from `records/`; None if the run has none.

    The error of a damaged file names it.
    """
    path = Path(run.path) / "records" / f"{split}.safetensors"
    try:
        tensors = read_tensors(path).tensors
    except FileNotFoundError:
        return None
    if "rows" not in tensors or "log_prob" not in tensors:
        return None
    rows, losses = tensors["rows"].numpy(), -tensors["log_prob"].numpy()
    if rows.ndim != 1 or rows.shape != losses.shape or not np.isfinite(losses).all():
        return None
    order = np.argsort(rows, kind="stable")
    return rows[order], losses[order].astype(np.float64)


def example_test(run: Run, other: Run, split: str) -> PairedTest | None:
    """Test two runs over the examples that both were evaluated on, by the paired t test.

    It tells whether these two trained models differ on such data, not whether another seed would say the same. None
    unless both have the losses of the same examples, at least two.
    """
    ours, theirs = read_losses(run, split), read_losses(other, split)
    if ours is None or theirs is None or len(ours[0]) < 2 or not np.array_equal(ours[0], theirs[0]):
        return None
    differences = ours[1] - theirs[1]
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    return t_test(Mean(float(differences.mean()), error, len(differences)))


@dataclass(frozen=True)
class HeadRow(Row):
    """One head, or the true model."""

    seeds: int = 0  # how many runs its metrics are the mean of
    tested: Literal["seeds", "examples"] | None = None  # what the difference was tested over; None without a test
    common: int = 0  # how many seeds it has in common with the baseline
    averaged: bool = False  # whether it averages over members, a posterior or dropout masks


@dataclass(frozen=True)
class HeadTable(Table):
    """Heads by rows."""

    rows: Sequence[HeadRow] = ()  # in order; the true model, if known, is a reference
    head: str = "head"
    split: str = "test"  # where the metrics are from, "test" or "validation"
    baseline: str | None = None  # the label that differences are to, None without one

    @property
    def heads(self) -> list[HeadRow]:
        """The rows without the true model."""
        return [row for row in self.rows if not row.reference]

    def row(self, label: str) -> HeadRow | None:
        """Return the row of a head by its label."""
        return next((row for row in self.heads if row.label == label), None)

    def nll(self, row: HeadRow) -> float:
        """Return the NLL to sort by: infinite when it is not known."""
        value = self.cell(row, "nll").value
        return math.inf if value is None else value


def compare_table(runs: Sequence[Run]) -> HeadTable:
    """Compare heads on the test data, over seeds.

    Each metric is the mean over the seeds ± its standard error. The difference to the baseline is that of the NLL, seed
    by seed, with a paired t test from two seeds on; for one seed, over its examples where their losses are known.
    Without any test metrics, those of the validation data are used.
    """
    groups = group_runs(runs)
    tested = any(run.metrics("test") for run in runs) or not any(run.metrics("validation") for run in runs)
    split = "test" if tested else "validation"
    baseline = baseline_label(groups)
    reference = next((group for group in groups if group.label == baseline), None)
    losses = [value for group in groups for value in group.metrics("nll", split).values()]
    digits = 4 if losses and max(losses) < 1 else 3  # small NLLs need more digits to differ
    rows = [_row(group, reference, split, digits) for group in groups]
    best_nll = next((value for run in runs if (value := run.value("best_nll")) is not None), None)
    if best_nll is not None:
        own = reference and list(reference.metrics("nll", split).values())
        difference = best_nll - mean(own).value if own else None
        shown = Cell(difference, text=form.decimal(difference, digits, sign=True))
        cells = [Cell(best_nll, text=form.decimal(best_nll, digits)), shown, *[Cell()] * (len(_columns(None)) - 2)]
        rows.insert(0, HeadRow(TRUE_MODEL, cells, reference=True))
    dataset = next((run.dataset for run in runs if run.dataset), None)
    notes = _notes(groups, reference, split, best_nll, any(row.tested == "examples" for row in rows))
    title = f"{dataset or 'Heads'}, {split} data"
    return HeadTable(title, _columns(baseline), rows, "\n".join(notes), split=split, baseline=baseline)


def as_dict(table: HeadTable) -> dict[str, Any]:
    """Return the table as plain numbers, for JSON."""
    rows = []
    for row in table.rows:
        entry: dict[str, Any] = {"label": row.label, "seeds": row.seeds, "tested_over": row.tested}
        for column in table.columns:
            cell = table.cell(row, column.key)
            entry[column.key] = {"mean": cell.value, "standard_error": cell.error, "best": cell.best}
        entry["p"] = entry["p"]["mean"]
        rows.append(entry)
    facts = {"title": table.title, "split": table.split, "baseline": table.baseline}
    return facts | {"rows": rows, "notes": table.notes}


def _columns(baseline: str | None) -> tuple[Column, ...]:
    return (
        Column("NLL", better="lower", key="nll"),
        Column(f"difference to {baseline or 'DET'}", key="difference"),
        Column("p", key="p"),
        *(
            Column(f"{m.title}, %" if m.percent else m.title, better=m.better, key=m.name, part=1)
            for m in METRIC_ENTRIES
        ),
        Column("parameters", better="lower", key="parameters", part=2),
        Column("training", better="lower", key="train_seconds", part=2),
        Column("prediction per 1,000", better="lower", key="predict_seconds_per_1000", part=2),
        Column(f"× {baseline or 'DET'}", key="predict_ratio", part=2),
    )


def _row(group: Group, reference: Group | None, split: str, digits: int) -> HeadRow:
    difference, p, tested = _difference(group, reference, split, digits)
    cells = [_metric(group, "nll", split, digits), difference, p]
    cells += [_metric(group, m.name, split, m.digits, 100 if m.percent else 1) for m in METRIC_ENTRIES]
    for values, show in (
        (group.parameters(), form.short_count),
        (group.values("train_seconds"), form.duration),
        (group.values("predict_seconds_per_1000"), form.duration),
    ):
        average = mean(values) if values else None
        cells.append(Cell(average.value, average.error, show(average.value)) if average else Cell())
    theirs = reference.values("predict_seconds_per_1000") if reference else []
    seconds, base = cells[-1].value, mean(theirs).value if theirs else 0.0
    cells.append(Cell(seconds / base, text=_times(seconds / base)) if seconds is not None and base else Cell())
    own, other = (side.metrics("nll", split) if side else {} for side in (group, reference))
    common = len(own.keys() & other.keys())
    averaged = any(run.averaged for run in group.runs)
    return HeadRow(group.label, cells, seeds=len(own), tested=tested, common=common, averaged=averaged)


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
    """Return the difference of the NLL to the baseline over common seeds, its p-value, and what that is over."""
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
        notes.append("No run has test metrics: these are of the validation data, which training used to select.")
    if reference is None:
        notes.append("No run of DET, so there are no differences to it.")
    if best_nll is not None:
        notes.append("The true model is the one that generated the data: no head can expect a lower NLL.")
    for group in groups:
        notes += [
            f"{group.label}, {'seed unknown' if run.seed is None else f'seed {run.seed}'}: no {split} metrics yet."
            for run in group.runs
            if not run.metrics(split)
        ]
        origins = [run.result.get("derived_from") for run in group.runs]
        derived = {labels.get(origin, origin) for origin in origins if isinstance(origin, str)}
        if members := group.values("members"):
            cost = f"{members[0]:g} times the training, and at least as many times the prediction"
            notes.append(f"{group.label} averages {members[0]:g} runs of {form.listed(sorted(derived))}: {cost}.")
        elif derived:
            notes.append(f"{group.label} is not trained by itself but derived from {form.listed(sorted(derived))}.")
    planned = next((run.comparison.heads for group in groups for run in group.runs if run.comparison), ())
    existing = {run.label for group in groups for run in group.runs}
    notes += [f"{label}: no run yet." for label in planned if label not in existing]
    return [" ".join(note.split()) for note in notes]  # a label may hold line breaks


def verdict(table: HeadTable) -> str:
    """Return the result in words: the head with the lowest NLL and the certainty of that, then its other advantages."""
    known = [row for row in table.heads if table.cell(row, "nll").value is not None]
    if not known:
        return f"No run has {table.split} metrics yet. The plots below show the training so far."
    best = min(known, key=table.nll)
    base = next((row for row in known if row.label == table.baseline), None)
    rival = min((row for row in known if row is not best), key=table.nll, default=None)
    rival = base if base is not None and base is not best else rival
    bound = next((f"; the true model has {table.cell(row, 'nll').text}" for row in table.rows if row.reference), "")
    if rival is None:
        shown = table.cell(best, "nll").text
        sentence = f"{best.label} has an NLL of {shown} on the {table.split} data{bound}."
        return f"{sentence} There is no other head to compare it with."
    sentence = f"{_nll_sentence(table, known, best, base, rival)}{bound}."
    return f"{sentence} {_rest_sentence(table, known, best, base, rival)}".strip()


def advice(table: HeadTable) -> str:
    """Return what to do in two sentences: which row to take and what it costs, and what to try next."""
    known = [row for row in table.heads if table.cell(row, "nll").value is not None]
    base = next((row for row in known if row.label == table.baseline), None)
    if base is None or len(known) < 2:
        return ""
    better = sorted((row for row in known if row is not base and _gains(table, row)), key=table.nll)
    # Of rows that are as good as the best, the one that predicts fastest.
    near = [row for row in better if table.nll(row) - table.nll(better[0]) <= 2 * _error(table, row, better[0])]
    chosen = min(near, key=lambda row: _seconds(table, row), default=base)
    once = all(row.tested != "seeds" for row in known)
    if chosen is base:
        sentence = f"Take {base.label}: nothing else has a lower NLL by more than chance."
    else:
        sentence = f"Take {chosen.label}: its NLL is lower than {base.label}'s by {_gain(table, chosen, base)}"
        cheaper = [row for row in better if _seconds(table, row) <= CHEAPER * _seconds(table, chosen)]
        if cheaper:  # the best of them
            sentence += f"; {cheaper[0].label}'s by {_gain(table, cheaper[0], base)}"
        sentence += "."
    error = table.cell(chosen, "calibration_error").value or 0.0
    if once:
        follow = "Next, repeat it with --seeds 3: another seed may differ."
    elif error > MISCALIBRATED and not chosen.averaged:
        follow = (
            f"Its probabilities are off by {form.percent(error)}: fit them to labels that you trust, "
            "hetxl rescale RUN --validation FILE."
        )
    else:
        follow = "Next, train longer (--epochs): that helps more than another head in most cases."
    return f"{sentence} {follow}"


def _gain(table: HeadTable, row: HeadRow, base: HeadRow) -> str:
    """Say by how much the NLL of a row is lower than the baseline's, and what that costs."""
    costs = [
        f"{ratio:.2g} times the time to {verb}"
        for key, verb in (("train_seconds", "train"), ("predict_seconds_per_1000", "predict"))
        if (ours := table.cell(row, key).value) is not None and (theirs := table.cell(base, key).value)
        if (ratio := ours / theirs) >= COSTLY
    ]
    return f"{form.decimal(-(table.cell(row, 'difference').value or 0.0), 3)}, " + (
        f"for {form.listed(costs)}" if costs else "at no more cost"
    )


def _seconds(table: HeadTable, row: HeadRow) -> float:
    """Return the time of predictions to sort by: infinite when it is not known."""
    value = table.cell(row, "predict_seconds_per_1000").value
    return math.inf if value is None else value


def _times(ratio: float) -> str:
    return f"{form.decimal(ratio, 1 if ratio < 10 else 0)}×"


def _error(table: HeadTable, *rows: HeadRow) -> float:
    """Return the largest standard error of the differences of some heads to the baseline."""
    return max(table.cell(row, "difference").error or 0.0 for row in rows)


def _gains(table: HeadTable, row: HeadRow) -> bool:
    """Whether a head has a lower NLL than the baseline by more than chance."""
    difference, p = table.cell(row, "difference").value, table.cell(row, "p").value
    return difference is not None and difference < 0 and p is not None and p <= CHANCE


def _nll_sentence(table: HeadTable, known: list[HeadRow], best: HeadRow, base: HeadRow | None, rival: HeadRow) -> str:
    shown = table.cell(rival, "nll").text
    start = f"{best.label} has the lowest NLL, {table.cell(best, 'nll').text}"
    if best is base:
        gap = form.decimal(table.nll(rival) - table.nll(best), 4 if table.nll(best) < 1 else 3)
        certainty = _certainty(table, rival, best)
        return f"{start}: no other head beats it, the closest is {rival.label} with {shown}, {gap} more ({certainty})"
    start += f" against {shown} for {rival.label}"
    if base is None:
        return start
    others = [row for row in known if row is not best and row is not base]
    close = [row.label for row in others if table.nll(row) - table.nll(best) <= (table.cell(row, "nll").error or 0)]
    ties = f"; {form.listed(close)} {'is' if len(close) == 1 else 'are'} within one standard error of it"
    return f"{start} ({_certainty(table, best, base)}){ties if close else ''}"


def _certainty(table: HeadTable, row: HeadRow, base: HeadRow) -> str:
    """Say whether a difference could be chance."""
    test, difference = table.cell(row, "p"), table.cell(row, "difference")
    if difference.value is None:
        return "no common seed to test the difference on"
    if test.value is None:
        return "1 seed: it could be chance"
    over = form.plural(row.common, "seed")
    if row.tested == "examples":
        over = "the examples of 1 seed, another may differ"
    p = f"p {form.probability(test.value)}" if test.value < 0.001 else f"p = {form.probability(test.value)}"
    text = f"{p} over {over}" + ("; it could be chance" if test.value > CHANCE else "")
    # The means are over more seeds than the two have in common.
    if (difference.value > 0) != (table.nll(row) > table.nll(base)):
        text += f"; on the seeds that both have, the difference is {difference.text}"
    return text


def _rest_sentence(table: HeadTable, known: list[HeadRow], best: HeadRow, base: HeadRow | None, other: HeadRow) -> str:
    """Say precision, calibration and cost of the best head against the baseline, and which heads lose to it."""
    parts = []
    for key, name, higher in (("precision@1", "accuracy", True), ("calibration_error", "calibration error", False)):
        ours, theirs = table.cell(best, key), table.cell(other, key)
        if ours.value is None or theirs.value is None:
            continue
        word = "better" if (ours.value > theirs.value) == higher else "worse"
        word = "the same" if ours.short == theirs.short else word
        parts.append(f"its {name} is {word}, {form.percent(ours.value, 2)} against {form.percent(theirs.value, 2)}")
    costs = []
    for key, name in (("parameters", "the parameters"), ("train_seconds", "the training time")):
        ours, theirs = table.cell(best, key).value, table.cell(other, key).value
        if ours is not None and theirs:
            costs.append(f"{ours / theirs:.2f} times {name}")
    if costs:
        parts.append(f"it takes {form.listed(costs)}")
    losers = [row.label for row in known if base is not None and table.cell(row, "difference").worse]
    if losers and best is not base and base is not None:
        parts.append(f"{form.listed(losers)} {'is' if len(losers) == 1 else 'are'} worse than {base.label}")
    return f"Against {other.label}, {'; '.join(parts)}." if parts else ""
