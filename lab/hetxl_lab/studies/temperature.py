"""`hetxl study learn-tau` (Tables "Ablation on the effect of learning τ"), `tau-dynamics` (Figure and Table "τ
dynamics") and `tau-range` (Tables "Sensitivity to τ")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetxl_lab.studies import study
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.profiles import FIXED, LEARNED, Profile
from hetxl_lab.studies.runs import StudyRun
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Summary, TableStudy
from hetxl_lab.studies.verdicts import against, agree, change, holds, insensitive, sign, within
from hetxl_train.report.statistics import PairedTest
from hetxl_train.report.tables import Row, Table
from hetxl_train.runs import read_log

HEADS = {"DET": "det", "HET": "het", "HET-XL": "het-xl"}
SHORT = 0.25  # of the steps, in the short training


def _label(head: str, learned: bool) -> str:
    return f"{head}, learned τ" if learned else f"{head}, τ = 1"


class LearnTau(TableStudy):
    """Three heads with τ = 1 and learned, and HET-XL in a shorter training."""

    name = "learn-tau"
    question = "What is it worth to learn τ with the weights, for each head, and does it depend on how long one trains?"
    paper = ("tab:temp_ablation", "tab:7_90_epoch_learn_tau")
    claim = (
        "learning τ helps all methods in large-scale settings, explains only part of HET-XL's gains, and helps more "
        "the shorter the training is"
    )
    title = "Learning τ"

    def lines(self, profile: Profile) -> Sequence[Line]:
        """All heads on all data, then the short training."""
        settings = [(bench, head, bench.name, 1.0) for bench in profile.benches for head in HEADS]
        settings.append((profile.base, "HET-XL", _short_of(profile.base.name), SHORT))
        return [
            Line(_label(head, learned), HEADS[head], bench, {**options, "scale": scale}, group)
            for bench, head, group, scale in settings
            for learned, options in ((False, FIXED), (True, LEARNED))
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's two: heads by data, and short against long."""
        names = _data(summary)
        labels = [_label(head, learned) for head in HEADS for learned in (False, True)]
        kinds = (study.NLL, study.PRECISION, study.LEARNED_TAU)
        columns, rows = study.side_by_side(summary, labels, {name: name for name in names}, kinds)
        short = [
            Row(label, study.cells_of(study.values_of(summary, label, group), (study.NLL, study.PRECISION)), title)
            for group, title in ((names[0], "all steps"), (_short_of(names[0]), "a quarter of them"))
            for label in (_label("HET-XL", False), _label("HET-XL", True))
        ]
        return [
            Table(self.title, columns, rows),
            Table("Short against long training", (study.NLL, study.PRECISION), short, f"HET-XL on {names[0]}"),
        ]

    def conclusion(self, summary: Summary) -> str:
        """What learning is worth to each head, and in a short training."""
        names = _data(summary)

        def worth(head: str, group: str):
            return study.less(summary, (_label(head, True), group), (_label(head, False), group))

        counts = []
        signs: list[int | None] = []
        for head in HEADS:
            tests = [worth(head, name) for name in names]
            signs += [sign(test) for test in tests]
            gained = sum(test is not None and test.difference < 0 for test in tests)
            counts.append(f"{head} on {gained} of {len(names)}")
        long, short = worth("HET-XL", names[0]), worth("HET-XL", _short_of(names[0]))
        verdict = False if 1 in signs else True if -1 in signs else None
        heads = [study.less(summary, (_label("HET-XL", True), name), (_label("DET", True), name)) for name in names]
        changes = ", ".join(f"{change(test)} on {name}" for test, name in zip(heads, names, strict=True))
        return (
            f"Learning τ lowers the NLL of {', '.join(counts)} datasets. "
            f"{holds(verdict, 'learning τ helps all methods')} "
            f"With τ learned for both, HET-XL's NLL compared with DET's is {changes}. "
            f"{holds(agree([sign(test) for test in heads], -1), 'learning τ explains only part of its gains')} "
            f"On {names[0]} HET-XL's NLL with a learned τ is {change(long)}, and after a quarter of the steps "
            f"{change(short)}: {_compared(long, short)}."
        )


def _compared(long: PairedTest | None, short: PairedTest | None) -> str:
    """What learning τ gains in a short training, beside what it gains in a long one."""
    if long is None or short is None:
        return "whether the gain is larger in the shorter training is not known"
    if min(long.difference, short.difference) >= 0:
        return "no gain in either"
    return f"the gain is {'larger' if short.difference < long.difference else 'not larger'} in the shorter training"


def _short_of(name: str) -> str:
    return f"{name}, short"


def _data(summary: Summary) -> list[str]:
    groups = dict.fromkeys(line["group"] for line in summary["lines"])
    return [group for group in groups if not group.endswith(", short")]


MOVING, FIXED_LABEL = LABELS = ("HET-XL", "HET-XL, τ fixed at its final value")


def learned_line(profile: Profile) -> Line:
    """HET-XL with a learned τ."""
    return Line(MOVING, "het-xl", profile.base, LEARNED)


def fixed_run(lab: Lab, seed: int) -> StudyRun:
    """HET-XL with τ fixed where the run of the same seed left it; at 1 if that was not finite."""
    result = lab.cache.result(learned_line(lab.profile).run(seed))
    final = 1.0 if result is None else result["temperature"]
    return lab.profile.base.run("het-xl", seed, temperature=str(round(final, 5)))


def path_of(lab: Lab, seed: int) -> list[tuple[int, float]]:
    """Steps and τ, as they were logged."""
    log = read_log(lab.cache.directory(learned_line(lab.profile).run(seed)) / "log.jsonl")
    return [(line["step"], line["temperature"]) for line in log if line.get("kind") == "step"]


class TemperaturePath(PaperStudy):
    """τ over the steps, then τ fixed."""

    name = "tau-dynamics"
    question = "How does τ move in training, and does it matter that it moves, or only where it ends?"
    paper = ("tab:temp_dynamics",)
    claim = "training with τ fixed at its final value does as well, so that its value matters and not its path"

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Those whose τ is learned."""
        return study.runs_of([learned_line(profile)], seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train with τ fixed where that of each seed ended; return both lines, and the paths."""
        runs = [fixed_run(lab, seed) for seed in lab.seeds]
        lab.run(runs)
        lines = study.measured([learned_line(lab.profile)], lab)
        fixed = lab.results(runs)
        lines.append({"label": FIXED_LABEL, "group": None, "data": lab.profile.base.name, "values": fixed})
        return {"lines": lines, "paths": {str(seed): path_of(lab, seed) for seed in lab.seeds}}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's, with τ."""
        columns = (study.NLL, study.PRECISION, study.LEARNED_TAU)
        rows = [Row(line["label"], study.cells_of(line["values"], columns)) for line in summary["lines"]]
        return [Table("τ learned and fixed", columns, rows, f"{summary['lines'][0]['data']}")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """τ over the steps, a line for each seed."""
        series = {
            f"seed {seed}": [(float(step), [value]) for step, value in points]
            for seed, points in summary["paths"].items()
        }
        return plot_lines({"τ": series}, path, "step", marked=False)

    def conclusion(self, summary: Summary) -> str:
        """Where τ went, and whether fixing it changes anything."""
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
    """How a learned τ begins: its value, and the bounds that it has."""

    init: float
    low: float = 0.05
    high: float = 5.0

    @property
    def label(self) -> str:
        """As the paper's tables name it here."""
        return f"{self.init:g} in {self.low:g} … {self.high:g}"


PAPER = Start(2.525)
STARTS = (Start(1.25), PAPER, Start(3.75), Start(4.9))
RANGES = (PAPER, Start(2.525, 0.001), Start(2.525, 0.01), Start(2.525, high=4.0), Start(2.525, high=3.0))
"""The paper's settings: eight, as one is in both tables."""

SETTINGS = tuple(dict.fromkeys((*STARTS, *RANGES)))  # each once


class TemperatureRange(TableStudy):
    """Eight starts and ranges of τ."""

    name = "tau-range"
    question = "Does it matter where a learned τ starts, and between which bounds it is kept?"
    paper = ("tab:tau_start_point", "tab:tau_range")
    claim = "performance is not sensitive to the start and the range of τ"
    title = "Start and range of τ"
    columns = (study.NLL, study.PRECISION, study.LEARNED_TAU)

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Every setting once."""
        names = ("temperature_init", "temperature_low", "temperature_high")
        return [
            Line(start.label, "het-xl", profile.base, {**LEARNED, **dict(zip(names, start, strict=True))})
            for start in SETTINGS
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's two: starts, and ranges."""
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
        """The spread over all settings, and which differ from the paper's own."""
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


STUDIES = (LearnTau(), TemperaturePath(), TemperatureRange())
