"""What the comparison says, in two sentences computed from its numbers."""

from hetxl.report import format as form
from hetxl.report.tables import Cell, Row, Table

CHANCE = 0.05
"""A p-value above this could well be chance."""


def verdict(table: Table) -> str:
    """The result in plain words: who has the lowest NLL and how sure that is, then what else speaks for or against it.

    Args:
        table: as `compare_table` gives it.
    """
    known = [row for row in table.heads if row.cells["nll"].value is not None]
    if not known:
        return f"No run has {table.split} metrics yet. The plots below show how far training got."
    best = min(known, key=lambda row: row.nll)
    base = next((row for row in known if row.label == table.baseline), None)
    sentences = [_nll_sentence(table, known, best, base)]
    if len(known) > 1:
        sentences.append(_rest_sentence(known, best, base))
    else:
        sentences.append("There is no other head to compare it with.")
    return " ".join(sentence for sentence in sentences if sentence)


def _nll_sentence(table: Table, known: list[Row], best: Row, base: Row | None) -> str:
    bound = ""
    truth = next((row for row in table.rows if row.truth), None)
    if truth is not None:
        bound = f"; the true model has {truth.cells['nll'].text}"
    said = f"{best.label} has the lowest NLL, {best.cells['nll'].text}"
    if len(known) == 1:
        return f"{best.label} has an NLL of {best.cells['nll'].text} on the {table.split} data{bound}."
    if base is None:
        second = min((row for row in known if row is not best), key=lambda row: row.nll)
        return f"{said} against {second.cells['nll'].text} for {second.label}{bound}."
    if best is base:
        closest = min((row for row in known if row is not base), key=lambda row: row.nll)
        gap = form.decimal(closest.nll - base.nll, 4 if base.nll < 1 else 3)
        return f"{said}: no other head beats it, the closest is {closest.label} with {closest.cells['nll'].text}, " + (
            f"{gap} more ({_certainty(closest, base)}){bound}."
        )
    certainty = _certainty(best, base)
    return f"{said} against {base.cells['nll'].text} for {base.label} ({certainty}){_ties(known, best, base)}{bound}."


def _ties(known: list[Row], best: Row, base: Row) -> str:
    """The heads that the best one cannot be told from by their spread over seeds."""
    others = [row for row in known if row is not best and row is not base]
    close = [row.label for row in others if row.nll - best.nll <= (row.cells["nll"].error or 0)]
    if not close:
        return ""
    return f"; {form.listed(close)} {'is' if len(close) == 1 else 'are'} within one standard error of it"


def _certainty(row: Row, base: Row) -> str:
    """Whether a difference could be chance."""
    test, difference = row.cells["p"], row.cells["difference"]
    if difference.value is None:
        return "no common seed to test the difference on"
    if test.value is None:
        return "1 seed: it could be chance"
    over = form.plural(row.common, "seed")
    if row.tested == "examples":
        over = "the examples of 1 seed, another may differ"
    p = f"p {form.probability(test.value)}" if test.value < 0.001 else f"p = {form.probability(test.value)}"
    said = f"{p} over {over}" + ("; it could be chance" if test.value > CHANCE else "")
    if (difference.value > 0) != (row.nll > base.nll):  # the means are over more seeds than the two have in common
        said += f"; on the seeds that both have, the difference is {difference.text}"
    return said


def _rest_sentence(known: list[Row], best: Row, base: Row | None) -> str:
    """Precision, calibration and cost of the best head against the baseline, and heads that lose to it."""
    other = (
        base
        if base is not None and base is not best
        else min((r for r in known if r is not best), key=lambda row: row.nll)
    )
    parts = []
    for key, name, higher in (("precision@1", "precision@1", True), ("calibration_error", "calibration error", False)):
        ours, theirs = best.cells[key], other.cells[key]
        if ours.value is None or theirs.value is None:
            continue
        word = _compared(ours, theirs, higher)
        parts.append(f"its {name} is {word}, {form.percent(ours.value, 2)} against {form.percent(theirs.value, 2)}")
    costs = _costs(best, other)
    if costs:
        parts.append(f"it takes {form.listed(costs)}")
    losers = [row.label for row in known if base is not None and row.cells["difference"].worse]
    if losers and best is not base and base is not None:
        parts.append(f"{form.listed(losers)} {'is' if len(losers) == 1 else 'are'} worse than {base.label}")
    if not parts:
        return ""
    start = f"Against {other.label}, "
    return f"{start}{'; '.join(parts)}."


def _compared(ours: Cell, theirs: Cell, higher: bool) -> str:
    if ours.text.split(" ±")[0] == theirs.text.split(" ±")[0] or ours.value is None or theirs.value is None:
        return "the same"
    return "better" if (ours.value > theirs.value) == higher else "worse"


def _costs(best: Row, other: Row) -> list[str]:
    costs = []
    for key, name in (("parameters", "the parameters"), ("train_seconds", "the training time")):
        ours, theirs = best.cells[key].value, other.cells[key].value
        if ours is not None and theirs:
            costs.append(f"{ours / theirs:.2f} times {name}")
    return costs
