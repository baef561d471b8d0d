"""A study: the runs that it needs, what it measures on them, and what its page says."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetxl_lab.studies.charts import plot_dots
from hetxl_lab.studies.own_data import adapted
from hetxl_lab.studies.paper import paper_table
from hetxl_lab.studies.profiles import Bench, Profile
from hetxl_lab.studies.registry import ENTRIES, Entry
from hetxl_lab.studies.runs import CACHE, RESCALED, AnyRun, RunCache, StudyRun, over_seeds, run_missing
from hetxl_lab.studies.verdicts import Summary, against, mean_cell
from hetxl_train.comparison import VARIANTS
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.report.statistics import PairedTest
from hetxl_train.report.tables import Column, Row, Table, as_markdown
from hetxl_train.rescale import SCALABLE


@dataclass
class Lab:
    """The profile, options and caches of one call of a study."""

    profile: Profile
    seeds: tuple[int, ...]
    cache: RunCache
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the study, see its entry in the registry
    directory: Path = Path()  # directory of its results
    jobs: int | None = None  # number of simultaneous runs; None for one per core
    console: Console = field(default_factory=Console)
    trained: dict[str, AnyRun] = field(default_factory=dict)  # the runs so far, by their keys
    training_time: float = 0.0  # seconds spent waiting for them

    def run(self, runs: Sequence[AnyRun]) -> None:
        """Train the runs that the cache does not have."""
        self.training_time += run_missing(runs, self.cache, jobs=self.jobs, console=self.console)
        self.trained |= {run.key: run for run in runs}

    def results(self, runs: Sequence[StudyRun]) -> dict[str, Any] | None:
        """Return the metrics of runs that differ only in their seeds (`over_seeds`); None if a loss was not finite."""
        results = [self.cache.result(run) for run in runs]
        finite = [result for result in results if result is not None]
        return over_seeds(finite) if len(finite) == len(results) else None

    def compare(self, config: TrainConfig, heads: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Train heads of `VARIANTS` as `hetxl compare` does and return their metrics over the seeds, by label.

        Those of `SCALABLE` also count rescaled to the validation split.
        """
        runs = {(name, seed): head_run(config, name, seed) for seed in self.seeds for name in heads}
        self.run(list(runs.values()))
        metrics = {}
        for name in heads:
            own = [runs[name, seed] for seed in self.seeds]
            metrics[VARIANTS[name].label] = over_seeds(self.cache.finite_result(run) for run in own)
            if name in SCALABLE:
                metrics[SCALABLE[name]] = over_seeds(self.cache.finite_result(run, RESCALED) for run in own)
        return metrics


def head_run(config: TrainConfig, name: str, seed: int) -> StudyRun:
    """Return the run of a head of `VARIANTS` in a comparison."""
    options: dict[str, Any] = {**VARIANTS[name].options, "seed": seed}
    return StudyRun(replace(config, **options), rescaled=name in SCALABLE)


def names_in(text: str | None, everything: Sequence[str]) -> tuple[str, ...]:
    """Return the names that an option lists, separated by commas [default: all]."""
    return tuple(everything) if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def directory_suffix(profile: str, data: str | None) -> str:
    """Return the suffix of a directory's name: the profile unless it is the full one, and the user's own data."""
    suffix = "" if profile == "full" else f"-{profile}"
    return suffix if data is None else f"{suffix}-{Path(data.partition(':')[0]).stem or 'data'}"


class Study(ABC):
    """A question, the runs that answer it, and a page of results."""

    name: str  # as on the command line, and in the registry
    question: str
    split = "test"  # split that its numbers are measured on
    seed_count: int | None = None  # default of all profiles except miniature; None for that of the profile

    @property
    def entry(self) -> Entry:
        """The study's entry in the registry."""
        return ENTRIES[self.name]

    def seeds(self, profile: Profile) -> tuple[int, ...]:
        """Return the seeds of the runs by default."""
        return tuple(range(profile.seeds if profile.name == "miniature" else self.seed_count or profile.seeds))

    def home(self, profile: Profile) -> Path:
        """Return the directory of its runs by default."""
        return CACHE

    def normalised(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options in the form that the study uses."""
        return dict(options)

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with the user's data, backbone and link, if the options name them."""
        return adapted(profile, options) if "backbone" in options else profile

    def check(self, lab: Lab) -> None:  # noqa: B027 - most studies have no options
        """Raise if options are wrong, before anything is trained or written."""

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[AnyRun]:
        """Return the runs that can start at once; `measure` starts those that depend on their results."""
        return ()

    @abstractmethod
    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the results of the runs or measurements, as values that JSON can store."""

    @abstractmethod
    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the chart of the results."""

    @abstractmethod
    def text(self, summary: Summary) -> str:
        """Return the page in markdown from the title to the image, without the section on how it was run."""

    @property
    def image_link(self) -> str:
        """Return the link to the image, in markdown."""
        return f"![{self.entry.title}]({self.name}.svg)"


class PaperStudy(Study):
    """One table or figure of the paper."""

    paper: tuple[str, ...] = ()  # labels of the paper's tables to compare ours with
    claim: str  # what the paper concludes

    @abstractmethod
    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return our tables, laid out like the paper's."""

    @abstractmethod
    def conclusion(self, summary: Summary) -> str:
        """Return two or three sentences on whether the paper's conclusion holds here, from the numbers."""

    def paper_tables(self) -> Sequence[Table]:
        """Return the paper's tables, in its own numbers."""
        return [paper_table(label) for label in self.paper]

    def text(self, summary: Summary) -> str:
        """Return question, conclusion, image, our tables and the paper's."""
        parts = [f"# {self.entry.title}", self.question, self.conclusion(summary), self.image_link, "## Here"]
        parts += [_table_text(table) for table in self.tables(summary)]
        parts += ["## In the paper", f"{self.entry.paper}. The paper concludes that {self.claim}."]
        parts += [_table_text(table) for table in self.paper_tables()]
        return "\n\n".join(part.strip() for part in parts)

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw NLL and precision@1 of all lines."""
        return plot_dots(dots_of(summary["lines"]), path)


def _table_text(table: Table) -> str:
    note = f"\n\n{table.note[0].upper()}{table.note[1:].rstrip('.')}." if table.note else ""
    return f"**{table.title}**{note}\n\n{as_markdown(table, escape=False)}"


NLL = Column("NLL", 3, "lower")
PRECISION = Column("Prec@1", 3, "higher")
LEARNED_TAU = Column("τ at the end", 2)
SECONDS = Column("training, s", 0)
PARAMETERS = Column("parameters, M", 2, "lower")
PANELS = {"test NLL": "nll", "precision@1": "precision@1"}  # metrics that images show, by the titles of their axes


@dataclass(frozen=True)
class Line:
    """A row of a table, and the runs trained for it."""

    label: str
    head: str
    bench: Bench
    options: Mapping[str, Any] = field(default_factory=dict)  # see `Bench.config`
    group: str | None = None  # name shared by several lines

    def run(self, seed: int) -> StudyRun:
        """Return the run of the line with a seed."""
        return self.bench.run(self.head, seed, **self.options)


@dataclass(frozen=True)
class Searched:
    """A line whose τ is the best of a grid: that of the lowest validation NLL with the first seed."""

    label: str
    head: str
    bench: Bench
    options: Mapping[str, Any]
    group: str | None
    grid: tuple[float, ...]

    def line(self, temperature: float) -> Line:
        """Return the line with a fixed τ."""
        options = {**self.options, "temperature": str(float(temperature))}
        return Line(self.label, self.head, self.bench, options, self.group)

    def runs(self, seed: int) -> list[StudyRun]:
        """Return the runs of the search."""
        return [self.line(temperature).run(seed) for temperature in self.grid]

    def best(self, lab: Lab) -> float:
        """Return the best τ; 1 if no run of the search kept a finite loss."""
        results = {value: lab.cache.result(self.line(value).run(lab.seeds[0])) for value in self.grid}
        losses = {
            value: result["metrics"]["validation"]["nll"] for value, result in results.items() if result is not None
        }
        return min(losses, key=losses.__getitem__, default=1.0)


def runs_of(lines: Sequence[Line], seeds: Sequence[int]) -> list[StudyRun]:
    """Return all lines with the first seed, then with the next, so that a stopped study has results for every line."""
    return [line.run(seed) for seed in seeds for line in lines]


def measured(lines: Sequence[Line], lab: Lab) -> list[dict[str, Any]]:
    """Return label, group and values over seeds (None where a loss was not finite) of lines."""
    return [
        {
            "label": line.label,
            "group": line.group,
            "data": line.bench.name,
            "values": lab.results([line.run(seed) for seed in lab.seeds]),
        }
        for line in lines
    ]


def values_of(summary: Summary, label: str, group: str | None = None) -> dict[str, Any] | None:
    """Return the values of a line."""
    for line in summary["lines"]:
        if line["label"] == label and line["group"] == group:
            return line["values"]
    raise ValueError(f"study {summary.get('study')} has no line {label!r} (group {group!r})")


def less(summary: Summary, first: tuple[str, str | None], second: tuple[str, str | None]) -> PairedTest | None:
    """Return the NLL of a line less that of another, each by its label and group; see `against`."""
    return against(values_of(summary, *first), values_of(summary, *second))


def points_of(
    summary: Summary, lines: Mapping[float, tuple[str, str | None]], metric: str
) -> list[tuple[float, list[float]]]:
    """Return a metric of lines, each by its label and group, over a number, for `plot_lines`."""
    return [(x, (values_of(summary, *line) or {}).get(metric, [])) for x, line in lines.items()]


def cells_of(values: Mapping[str, Any] | None, columns: Sequence[Column]) -> list[Any]:
    """Return the cells of a line in some of the columns above."""
    if values is None:
        return ["not finite", *[None] * (len(columns) - 1)]
    known = {
        NLL: mean_cell(values["nll"]),
        PRECISION: mean_cell(values["precision@1"]),
        LEARNED_TAU: mean_cell(values["temperature"]),
        SECONDS: sum(values["train_seconds"]) / len(values["train_seconds"]),
        PARAMETERS: values["parameters"] / 1e6,
    }
    return [known[column] for column in columns]


def side_by_side(
    summary: Summary, labels: Iterable[str], groups: Mapping[str, str], kinds: Sequence[Column]
) -> tuple[list[Column], list[Row]]:
    """Return columns and rows of a table with lines down, and their groups, by name and heading, side by side."""
    columns = [replace(kind, title=f"{heading} {kind.title}") for heading in groups.values() for kind in kinds]
    return columns, [
        Row(label, [cell for group in groups for cell in cells_of(values_of(summary, label, group), kinds)])
        for label in labels
    ]


def dots_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, list[tuple[str, list[float]]]]]]:
    """Return panels of NLL and precision@1 for `plot_dots`, grouped as the lines are."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["group"] or "", []).append(line)
    return {
        axis: [
            (group, [(line["label"], line["values"][metric] if line["values"] else []) for line in members])
            for group, members in groups.items()
        ]
        for axis, metric in PANELS.items()
    }


class TableStudy(PaperStudy):
    """A study whose results are the metrics of its lines."""

    title: str  # of its table
    columns: Sequence[Column] = (NLL, PRECISION)

    @abstractmethod
    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return the rows of its table."""

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the runs of its lines."""
        return runs_of(self.lines(profile), seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the results of its lines."""
        return {"lines": measured(self.lines(lab.profile), lab)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return one table of all lines."""
        rows = [Row(line["label"], cells_of(line["values"], self.columns), line["group"]) for line in summary["lines"]]
        return [Table(self.title, self.columns, rows)]
