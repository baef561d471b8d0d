"""Runs that differ in their seed alone, side by side with the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetxl.report.read import HEAD_LABELS, Run


@dataclass(frozen=True)
class Group:
    """The runs of one label, by seed.

    Attributes:
        label: what they are called.
        runs: at least one.
    """

    label: str
    runs: tuple[Run, ...]

    def metrics(self, key: str, split: str) -> dict[int | None, float]:
        """A metric by seed, for the runs that have it."""
        found = {run.seed: run.metrics(split).get(key) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def values(self, key: str) -> list[float]:
        """A number of the result, for the runs that have it."""
        return [value for run in self.runs if (value := run.value(key)) is not None]

    def parameters(self) -> list[float]:
        """All parameters, for the runs that say."""
        return [value for run in self.runs if (value := run.parameters()) is not None]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by label: in the order of their comparison, else the baseline and the heads of the paper first.

    Two runs of the same label and seed are not two seeds of one head: each such run is a group under its own name.

    Args:
        runs: at least one, all of the same data.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, found none")
    datasets = sorted({run.dataset for run in runs if run.dataset is not None})
    if len(datasets) > 1:
        raise ValueError(f"runs must be of the same data to be compared, found {', '.join(datasets)}; report on each")
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    groups = []
    for label in sorted(by_label, key=lambda label: _order(label, runs, list(by_label))):
        members = sorted(by_label[label], key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
        if len({run.seed for run in members}) == len(members):
            groups.append(Group(label, tuple(members)))
        else:
            names = [run.name for run in members]
            # Names can be the same in two folders; then the folder tells them apart.
            shown = (
                names if len(set(names)) == len(names) else [f"{run.path.parent.name}/{run.name}" for run in members]
            )
            shown = shown if len(set(shown)) == len(shown) else [str(run.path) for run in members]
            groups += [Group(f"{label} ({name})", (run,)) for name, run in zip(shown, members, strict=True)]
    return groups


def baseline_label(groups: Sequence[Group]) -> str | None:
    """The label that the others are compared with: the one the comparison names, else DET; None without it."""
    labels = [group.label for group in groups]
    for group in groups:
        for run in group.runs:
            if run.comparison is not None and run.comparison.baseline in labels:
                return run.comparison.baseline
    plain = [group.label for group in groups if any(run.head == "det" for run in group.runs)]
    return "DET" if "DET" in labels else plain[0] if plain else None


def _order(label: str, runs: Sequence[Run], labels: list[str]) -> tuple[int, int]:
    """A key to sort by: the order of the comparison, then that of the paper, then of appearance."""
    for run in runs:
        if run.comparison is not None and label in run.comparison.heads:
            return 0, run.comparison.heads.index(label)
    known = list(HEAD_LABELS.values())
    return (1, known.index(label)) if label in known else (2, labels.index(label))
