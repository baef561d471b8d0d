"""Studies that are a table of trainings: every line is a head with some options, trained once for each seed."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl.studies.cache import Training
from hetxl.studies.charts import plot_dots
from hetxl.studies.forms import Bench, Form
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table, over

NLL = Column("NLL", 3, "lower")
PRECISION = Column("Prec@1", 3, "higher")
LEARNED_TAU = Column("τ at the end", 2)
SECONDS = Column("training, s", 0)
PARAMETERS = Column("parameters, M", 2, "lower")


@dataclass(frozen=True)
class Line:
    """A row of a table, and what is trained for it.

    Attributes:
        label: how the table calls it.
        head: a head's name.
        bench: its data.
        options: as of `Bench.config`.
        group: what several lines belong to; None for no group.
    """

    label: str
    head: str
    bench: Bench
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None

    def training(self, seed: int) -> Training:
        """Its run with a seed."""
        return self.bench.training(self.head, seed, **self.options)


def trainings_of(lines: Sequence[Line], seeds: Sequence[int]) -> list[Training]:
    """All lines with the first seed, then with the next: a study that is stopped has something to show."""
    return [line.training(seed) for seed in seeds for line in lines]


def measured(lines: Sequence[Line], lab: Lab) -> list[dict[str, Any]]:
    """What the trainings of lines found: label, group, and values over seeds (None where a loss was not finite)."""
    return [
        {
            "label": line.label,
            "group": line.group,
            "data": line.bench.name,
            "values": lab.results([line.training(seed) for seed in lab.seeds]),
        }
        for line in lines
    ]


def values_of(summary: Summary, label: str, group: str | None = None) -> dict[str, Any] | None:
    """The values of a line."""
    for line in summary["lines"]:
        if line["label"] == label and line["group"] == group:
            return line["values"]
    raise ValueError(f"study {summary.get('study')} has no line {label!r} (group {group!r})")


def cells_of(values: Mapping[str, Any] | None, columns: Sequence[Column]) -> list[Any]:
    """The cells of a line in some of the columns above."""
    if values is None:
        return ["not finite", *[None] * (len(columns) - 1)]
    known = {
        NLL: over(values["nll"]),
        PRECISION: over(values["precision@1"]),
        LEARNED_TAU: over(values["temperature"]),
        SECONDS: sum(values["train_seconds"]) / len(values["train_seconds"]),
        PARAMETERS: values["parameters"] / 1e6,
    }
    return [known[column] for column in columns]


class LineStudy(Study):
    """A study whose results are those of its lines.

    Attributes:
        title: of its table.
        columns: of it.
    """

    title: str
    columns: Sequence[Column] = (NLL, PRECISION)

    @abstractmethod
    def lines(self, form: Form) -> Sequence[Line]:
        """The rows of its table."""

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[Training]:
        """Those of its lines."""
        return trainings_of(self.lines(form), seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """What its lines found."""
        return {"lines": measured(self.lines(lab.form), lab)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """One table of all lines."""
        rows = [Row(line["label"], cells_of(line["values"], self.columns), line["group"]) for line in summary["lines"]]
        return [Table(self.title, self.columns, rows)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and precision@1 of all lines."""
        return plot_dots(dots_of(summary["lines"]), path)


def dots_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, list[tuple[str, list[float]]]]]]:
    """Panels of NLL and precision@1 for `plot_dots`, grouped as the lines are."""
    panels = {}
    for axis, metric in (("test NLL", "nll"), ("precision@1", "precision@1")):
        groups = []
        for group in dict.fromkeys(line["group"] for line in lines):
            members = [line for line in lines if line["group"] == group]
            rows = [(line["label"], line["values"][metric] if line["values"] else []) for line in members]
            groups.append((group or "", rows))
        panels[axis] = groups
    return panels
