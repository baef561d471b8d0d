"""`hetxl study learn-tau` and `tau-epochs` (Tables "Ablation on the effect of learning τ" and "7 and 90 epochs"),
`tau-dynamics` (Figure and Table "τ dynamics") and `tau-range` (Tables "Sensitivity to τ")."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetxl_lab.studies import study
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.profiles import LEARNED, Bench, Profile
from hetxl_lab.studies.runs import StudyRun
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Searched, Summary, TableStudy
from hetxl_lab.studies.verdicts import against, agree, change, holds, insensitive, sign, within
from hetxl_train.log import read_log
from hetxl_train.report.statistics import PairedTest
from hetxl_train.report.tables import Row, Table

HEADS = {"DET": "det", "HET": "het", "HET-XL": "het-xl"}


LEARNED_TAU = "learned τ"


def other(grid: Sequence[float]) -> str:
    """Return the line that a learned τ is compared with."""
    return "τ = 1" if tuple(grid) == (1.0,) else "τ by grid search"


def _setting(head: str, bench: Bench, scale: float, group: str, grid: Sequence[float]) -> Searched:
    """Return the line of a head whose τ is searched for among values."""
    return Searched(f"{head}, {other(grid)}", HEADS[head], bench, {"scale": scale}, group, tuple(grid))


def _learned(setting: Searched) -> Line:
    """Return the same line with a learned τ."""
    label, options = f"{setting.label.partition(', ')[0]}, {LEARNED_TAU}", {**setting.options, **LEARNED}
    return Line(label, setting.head, setting.bench, options, setting.group)


class SearchStudy(TableStudy):
    """A study that compares a learned τ with the best of a grid, as found on validation data with the first seed."""

    @abstractmethod
    def settings(self, profile: Profile) -> Sequence[Searched]:
        """Return the searches to compare."""

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return the lines with a learned τ."""
        return [_learned(setting) for setting in self.settings(profile)]

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the searches, and the runs that learn τ."""
        searches = [run for setting in self.settings(profile) for run in setting.runs(seeds[0])]
        return [*searches, *super().runs(profile, seeds)]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train with the best τ of each search; return all lines, and what the searches found."""
        settings = self.settings(lab.profile)
        best = [(setting, setting.best(lab)) for setting in settings]
        lab.run(study.runs_of([setting.line(value) for setting, value in best], lab.seeds))
        lines = [line for setting, value in best for line in (setting.line(value), _learned(setting))]
        return {
            "lines": study.measured(lines, lab),
            "best": [{"label": s.label, "group": s.group, "temperature": value} for s, value in best],
            "grid": sorted({value for setting in settings for value in setting.grid}),
        }


def _worth(summary: Summary, head: str, group: str) -> PairedTest | None:
    """Return the NLL of a head with a learned τ less that of the grid's best τ."""
    return study.less(summary, (f"{head}, {LEARNED_TAU}", group), (f"{head}, {other(summary['grid'])}", group))


def _grid_note(summary: Summary) -> str:
    values = ", ".join(f"{value:g}" for value in summary["grid"])
    if summary["grid"] == [1.0]:
        return "compared with τ = 1 instead of the paper's grid search, which `--grid` does"
    return f"the grid is {values}; the best is that of the lowest validation NLL with the first seed"


class LearnTau(SearchStudy):
    """Three heads with τ = 1, or by grid search, and learned."""

    name = "learn-tau"
    question = "What is it worth to learn τ with the weights, for each head?"
    paper = ("tab:temp_ablation",)
    claim = "learning τ helps all methods in large-scale settings, and explains only part of HET-XL's gains"
    title = "Learning τ"

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with a grid of τ if requested, else with τ = 1 only."""
        profile = super().adapt(profile, options)
        return profile if options.get("grid") else dataclasses.replace(profile, temperatures=())

    def settings(self, profile: Profile) -> Sequence[Searched]:
        """Return all heads on all data."""
        grid = (1.0, *profile.temperatures)
        return [_setting(head, bench, 1.0, bench.name, grid) for bench in profile.benches for head in HEADS]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout: heads by data."""
        labels = [f"{head}, {how}" for head in HEADS for how in (other(summary["grid"]), LEARNED_TAU)]
        kinds = (study.NLL, study.PRECISION, study.LEARNED_TAU)
        columns, rows = study.side_by_side(summary, labels, {name: name for name in _groups(summary)}, kinds)
        return [Table(self.title, columns, rows, _grid_note(summary))]

    def conclusion(self, summary: Summary) -> str:
        """Say how much learning τ helps each head, and compare HET-XL with DET when both learn τ."""
        names = _groups(summary)
        counts, signs = [], []
        for head in HEADS:
            tests = [_worth(summary, head, name) for name in names]
            signs += [sign(test) for test in tests]
            gained = sum(test is not None and test.difference < 0 for test in tests)
            counts.append(f"{head} on {gained} of {len(names)}")
        verdict = False if 1 in signs else True if -1 in signs else None
        both = (f"HET-XL, {LEARNED_TAU}", f"DET, {LEARNED_TAU}")
        heads = [study.less(summary, (both[0], name), (both[1], name)) for name in names]
        changes = ", ".join(f"{change(test)} on {name}" for test, name in zip(heads, names, strict=True))
        return (
            f"Compared with {other(summary['grid'])}, learning it lowers the NLL of {', '.join(counts)} datasets. "
            f"{holds(verdict, 'learning τ helps all methods')} "
            f"With τ learned for both, HET-XL's NLL compared with DET's is {changes}. "
            f"{holds(agree([sign(test) for test in heads], -1), 'learning τ explains only part of its gains')}"
        )


def _groups(summary: Summary) -> list[str]:
    return list(dict.fromkeys(line["group"] for line in summary["lines"]))


class TauEpochs(SearchStudy):
    """HET-XL with τ by grid search and learned, after one epoch and after many."""

    name = "tau-epochs"
    question = (
        "A learned τ follows the training loss. Does it help where every example is seen once or a few times, and no "
        "longer where the same data is seen many times and can be learned by heart?"
    )
    paper = ("tab:7_90_epoch_learn_tau",)
    claim = "the gain of learning τ over a grid search shrinks with the number of epochs"
    title = "Learning τ, by epochs"
    columns = (study.NLL, study.PRECISION, study.LEARNED_TAU)

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with the requested epochs."""
        profile = super().adapt(profile, options)
        if options.get("epochs") is None:
            return profile
        numbers = options["epochs"].split(",")
        if not all(number.strip().isdigit() and int(number) for number in numbers) or len(set(numbers)) < 2:
            raise ValueError(f"--epochs must be at least two different whole numbers, found {options['epochs']!r}")
        return dataclasses.replace(profile, epochs=tuple(sorted(int(number) for number in numbers)))

    def settings(self, profile: Profile) -> Sequence[Searched]:
        """Return HET-XL with every number of epochs."""
        return [
            _setting("HET-XL", profile.repeated, float(epochs), _epochs(epochs), profile.grid)
            for epochs in profile.epochs
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return a table with the paper's layout."""
        (table,) = super().tables(summary)
        steps = [str((line["values"] or {}).get("steps")) for line in summary["lines"][::2]]
        note = f"HET-XL on {summary['lines'][0]['data']}, {', '.join(steps)} steps; {_grid_note(summary)}"
        return [dataclasses.replace(table, note=note)]

    def conclusion(self, summary: Summary) -> str:
        """State the gain of learning τ for the fewest and the most epochs."""
        groups = _groups(summary)
        tests = [_worth(summary, "HET-XL", group) for group in groups]
        parts = ", ".join(f"{change(test)} after {group}" for test, group in zip(tests, groups, strict=True))
        few, many = tests[0], tests[-1]
        verdict = None
        if few is not None and many is not None and (sign(few) or sign(many)):
            verdict = few.difference < many.difference
        ends = [study.values_of(summary, f"HET-XL, {LEARNED_TAU}", group) for group in groups]
        taus = ", ".join("–" if v is None else f"{sum(v['temperature']) / len(v['temperature']):.2f}" for v in ends)
        return (
            f"With a learned τ, compared with the best of a grid, HET-XL's NLL is {parts}. τ ends at {taus}. "
            f"{holds(verdict, self.claim)}"
        )


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' if number > 1 else ''}"


MOVING, FIXED_LABEL = LABELS = ("HET-XL", "HET-XL, τ fixed at its final value")


def learned_line(profile: Profile) -> Line:
    """Return the line of HET-XL with a learned τ."""
    return Line(MOVING, "het-xl", profile.base, LEARNED)


def fixed_run(lab: Lab, seed: int) -> StudyRun:
    """Return a run of HET-XL with τ fixed at the final value of its seed's learned τ; at 1 if that run failed."""
    result = lab.cache.result(learned_line(lab.profile).run(seed))
    final = 1.0 if result is None else result["temperature"]
    return lab.profile.base.run("het-xl", seed, temperature=str(round(final, 5)))


def path_of(lab: Lab, seed: int) -> list[tuple[int, float]]:
    """Return the logged steps and values of τ."""
    log = read_log(lab.cache.directory(learned_line(lab.profile).run(seed)) / "log.jsonl")
    return [(line["step"], line["temperature"]) for line in log if line.get("kind") == "step"]


class TemperaturePath(PaperStudy):
    """τ over the steps of a run, and a second run with τ fixed at its final value."""

    name = "tau-dynamics"
    question = "How does τ move in training, and does it matter that it moves, or only where it ends?"
    paper = ("tab:temp_dynamics",)
    claim = "training with τ fixed at its final value does as well, so that its value matters and not its path"

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the runs with a learned τ."""
        return study.runs_of([learned_line(profile)], seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train with τ fixed at the final value of each seed; return both lines and the paths of τ."""
        runs = [fixed_run(lab, seed) for seed in lab.seeds]
        lab.run(runs)
        lines = study.measured([learned_line(lab.profile)], lab)
        fixed = lab.results(runs)
        lines.append({"label": FIXED_LABEL, "group": None, "data": lab.profile.base.name, "values": fixed})
        return {"lines": lines, "paths": {str(seed): path_of(lab, seed) for seed in lab.seeds}}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return a table with the paper's layout, with τ."""
        columns = (study.NLL, study.PRECISION, study.LEARNED_TAU)
        rows = [Row(line["label"], study.cells_of(line["values"], columns)) for line in summary["lines"]]
        return [Table("τ learned and fixed", columns, rows, f"{summary['lines'][0]['data']}")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw τ over the steps, a line for each seed."""
        series = {
            f"seed {seed}": [(float(step), [value]) for step, value in points]
            for seed, points in summary["paths"].items()
        }
        return plot_lines({"τ": series}, path, "step", marked=False)

    def conclusion(self, summary: Summary) -> str:
        """Say how τ changed, and whether fixing it changes the results."""
        ends = [points[-1][1] for points in summary["paths"].values() if points]
        ranges = [
            (min(v for _, v in points), max(v for _, v in points)) for points in summary["paths"].values() if points
        ]
        test = study.less(summary, (FIXED_LABEL, None), (MOVING, None))
        verdict = insensitive([test], study.values_of(summary, MOVING))
        turned = sum(
            low < min(end, 1.0) - 0.005 or high > max(end, 1.0) + 0.005
            for (low, high), end in zip(ranges, ends, strict=True)
        )
        return (
            f"τ starts at 1 and ends at {min(ends):.3f} to {max(ends):.3f}; in {turned} of {len(ends)} runs it "
            f"goes beyond both on its way. With τ fixed where it ended, the NLL is {change(test)}. "
            f"{holds(verdict, self.claim, within())}"
        )


class Start(NamedTuple):
    """The initial value and the bounds of a learned τ."""

    init: float
    low: float = 0.05
    high: float = 5.0

    @property
    def label(self) -> str:
        """Return the name in the paper's tables."""
        return f"{self.init:g} in {self.low:g} … {self.high:g}"


PAPER = Start(2.525)
STARTS = (Start(1.25), PAPER, Start(3.75), Start(4.9))
RANGES = (PAPER, Start(2.525, 0.001), Start(2.525, 0.01), Start(2.525, high=4.0), Start(2.525, high=3.0))
"""The paper's settings: eight, as one is in both tables."""

SETTINGS = tuple(dict.fromkeys((*STARTS, *RANGES)))  # each once


class TemperatureRange(TableStudy):
    """Eight initial values and ranges of τ."""

    name = "tau-range"
    question = "Does it matter where a learned τ starts, and between which bounds it is kept?"
    paper = ("tab:tau_start_point", "tab:tau_range")
    claim = "performance is not sensitive to the start and the range of τ"
    title = "Start and range of τ"
    columns = (study.NLL, study.PRECISION, study.LEARNED_TAU)

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return every setting once."""
        names = ("temperature_init", "temperature_low", "temperature_high")
        return [
            Line(start.label, "het-xl", profile.base, {**LEARNED, **dict(zip(names, start, strict=True))})
            for start in SETTINGS
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return two tables with the paper's layout: initial values, and ranges."""
        return [
            Table(
                title,
                self.columns,
                [
                    Row(start.label, study.cells_of(study.values_of(summary, start.label), self.columns))
                    for start in starts
                ],
                head="start and range",
            )
            for title, starts in (("Where τ starts", STARTS), ("The range of τ", RANGES))
        ]

    def conclusion(self, summary: Summary) -> str:
        """Say how far the settings are apart, and which differ from the paper's."""
        reference = study.values_of(summary, PAPER.label)
        tests = {
            line["label"]: against(line["values"], reference)
            for line in summary["lines"]
            if line["label"] != PAPER.label
        }
        known = [line["values"] for line in summary["lines"] if line["values"] is not None]
        means = [sum(values["nll"]) / len(values["nll"]) for values in known]
        ends = [sum(values["temperature"]) / len(values["temperature"]) for values in known]
        differing = [label for label, test in tests.items() if sign(test) not in (0, None)]
        verdict = insensitive(list(tests.values()), reference)
        changes = f" ({'; '.join(differing)})" if differing else ""
        return (
            f"Over {len(known)} settings the mean NLL lies between {min(means):.3f} and {max(means):.3f}, and τ ends "
            f"between {min(ends):.2f} and {max(ends):.2f}. {len(differing)} of {len(tests)} settings differ "
            f"significantly from the paper's own{changes}. {holds(verdict, self.claim, within())}"
        )


STUDIES = (LearnTau(), TauEpochs(), TemperaturePath(), TemperatureRange())
