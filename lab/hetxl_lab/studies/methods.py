"""`hetxl study main` (Table "Method comparison"), `equal-params` (Section "Equalize DET params with HET-XL"),
`data-scale` (Tables "Effect of data scaling") and `model-scale` (Table "Effect of model scaling")."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetxl._files import read_json
from hetxl.profiling import count_parameters
from hetxl_lab.studies import study
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.own_data import opened
from hetxl_lab.studies.profiles import LEARNED, Bench, Profile
from hetxl_lab.studies.runs import StudyRun
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Searched, Summary, TableStudy
from hetxl_lab.studies.verdicts import against, agree, change, holds, lower_in, sign
from hetxl_train.backbones import backbone_name
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import InputSpec
from hetxl_train.model import build_model
from hetxl_train.report.tables import Column, Row, Table

DET, HET, BEST, HASH, XL = METHODS = ("DET", "HET τ = 1", "HET τ*", "HET-H", "HET-XL")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    DET: ("det", {}),
    HET: ("het", {}),
    HASH: ("het-h", LEARNED),
    XL: ("het-xl", LEARNED),
}
"""Heads and options of all methods but HET with its best τ. HET-H and HET-XL learn τ, as in the paper."""


def settings(profile: Profile) -> list[tuple[Bench, str]]:
    """Return every dataset with each of its backbones."""
    return [(bench, backbone) for bench in profile.benches for backbone in bench.backbones]


def method_line(method: str, bench: Bench, backbone: str) -> Line:
    """Return the line of a method in a setting."""
    head, options = OPTIONS[method]
    return Line(method, head, bench, {**options, "backbone": backbone}, _group(bench, backbone))


def tuned(bench: Bench, backbone: str, profile: Profile) -> Searched:
    """Return the line of HET with its best τ."""
    return Searched(BEST, "het", bench, {"backbone": backbone}, _group(bench, backbone), (1.0, *profile.temperatures))


def _group(bench: Bench, backbone: str) -> str:
    return f"{bench.name}, {backbone}"


class MainTable(PaperStudy):
    """The comparison of methods."""

    name = "main"
    question = (
        "Which of the five methods predicts best, and what does it cost in parameters? Every method trains for as many "
        "steps from the same backbone; τ* is the best for HET on validation data."
    )
    paper = ("tab:results",)
    claim = "HET-XL outperforms or is on par with all other methods, with far fewer extra parameters than HET"

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return all methods with all seeds, and HET with the other τ for the first seed."""
        lines = [method_line(method, *setting) for setting in settings(profile) for method in OPTIONS]
        tuning = [run for setting in settings(profile) for run in tuned(*setting, profile).runs(seeds[0])]
        return [*tuning, *study.runs_of(lines, seeds)]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train HET with its best τ; return lines by setting, and τ* of each."""
        chosen = settings(lab.profile)
        searches = [tuned(*setting, lab.profile) for setting in chosen]
        best = [search.best(lab) for search in searches]
        tuned_lines = [search.line(value) for search, value in zip(searches, best, strict=True)]
        lab.run(study.runs_of(tuned_lines, lab.seeds))
        lines = [
            line if method == BEST else method_line(method, *setting)
            for setting, line in zip(chosen, tuned_lines, strict=True)
            for method in METHODS
        ]
        return {
            "lines": study.measured(lines, lab),
            "temperatures": {_group(*setting): value for setting, value in zip(chosen, best, strict=True)},
            "settings": [
                {"data": name, "backbones": list(backbones), "groups": [f"{name}, {b}" for b in backbones]}
                for name, backbones in ((bench.name, bench.backbones) for bench in lab.profile.benches)
            ],
        }

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout: rows by dataset and method, columns by backbone."""
        kinds = (study.NLL, study.PRECISION, study.PARAMETERS)
        sides = max(len(setting["groups"]) for setting in summary["settings"])
        sided = [(f"backbone {side + 1}", kind) for side in range(sides) for kind in kinds]
        columns = [Column(f"{side} {kind.title}", kind.digits, kind.better) for side, kind in sided]
        rows = []
        for setting in summary["settings"]:
            for method in METHODS:
                values = [study.values_of(summary, method, group) for group in setting["groups"]]
                cells = [cell for side in values for cell in study.cells_of(side, kinds)]
                rows.append(Row(method, [*cells, *[None] * (len(columns) - len(cells))], setting["data"]))
        backbones = "; ".join(
            f"{setting['data']}: {' and '.join(setting['backbones'])}" for setting in summary["settings"]
        )
        stars = ", ".join(f"{value:g} ({group})" for group, value in summary["temperatures"].items())
        return [Table("Method comparison", columns, rows, f"the backbones are, {backbones}. τ* is {stars}")]

    def conclusion(self, summary: Summary) -> str:
        """Compare HET-XL with DET and with all methods, and their parameters."""
        groups = list(summary["temperatures"])
        tests = {
            other: [
                against(study.values_of(summary, XL, group), study.values_of(summary, other, group)) for group in groups
            ]
            for other in METHODS[:-1]
        }
        lower, better, worse = lower_in(tests[DET])
        signs = [sign(test) for per_method in tests.values() for test in per_method]
        verdict = False if 1 in signs else True if better else None
        behind = [other for other, per_method in tests.items() if 1 in map(sign, per_method)]
        why = f"its NLL is significantly higher than that of {', '.join(behind)} somewhere" if behind else ""
        extra = ""
        first = [study.values_of(summary, method, groups[0]) for method in (DET, HET, XL)]
        if None not in first:
            det, het, xl = (values["parameters"] for values in first if values is not None)
            added = [f"{(values - det) / 1e6:.2f}M" for values in (xl, het)]
            extra = f" It adds {added[0]} parameters to DET in the first setting, and HET {added[1]}."
        return (
            f"HET-XL's test NLL is lower than DET's in {lower} of {len(groups)} settings, significantly so in "
            f"{better}, and significantly higher in {worse}. {holds(verdict, self.claim, why)}{extra} "
            "As in the paper HET-H and HET-XL learn τ, and DET does not: `hetxl study learn-tau` says how much of the "
            "difference that is."
        )


WIDE = "DET, widened"
LAST_LAYER = Column("width of the last layer", 0)


def parameters_of(config: TrainConfig, spec: InputSpec, num_classes: int) -> int:
    """Count the parameters of a model without allocating them."""
    with torch.device("meta"):
        return count_parameters(build_model(config, spec, num_classes, "softmax"))


def matching_width(config: TrainConfig, target: int, spec: InputSpec, num_classes: int) -> int:
    """Return the number of features for which a model's parameters are closest to a target."""

    def size(features: int) -> int:
        return parameters_of(dataclasses.replace(config, features=features), spec, num_classes)

    low, high = 1, 2
    while size(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < target else (low, middle)
    return min((low, high), key=lambda features: abs(size(features) - target))


class SigmoidTable(MainTable):
    """The comparison of methods with the sigmoid link, where an example may have any number of labels."""

    name = "main-sigmoid"
    question = (
        "With the sigmoid link an example may have any number of labels. Which of the five methods predicts best "
        "there? The paper has both links, and does not say which of its models have which."
    )

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with data of several labels per example."""
        chosen = super().adapt(profile, {**options, "link": options.get("link") or "sigmoid"})
        return dataclasses.replace(chosen, benches=chosen.sigmoid)


class EqualParams(PaperStudy):
    """DET, DET with a wider last layer, and HET-XL."""

    name = "equal-params"
    question = "HET-XL has more parameters than DET. Does DET gain as much from as many?"
    paper = ("section Equalize DET params with HET-XL",)
    claim = "HET-XL's gains cannot be attributed to its larger capacity"

    def check(self, lab: Lab) -> None:
        """Raise if the backbone's last layer has a fixed width."""
        check_width(lab.profile.base)

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the runs of DET and HET-XL, whose parameters determine the width of the wide DET."""
        return study.runs_of(_two_lines(profile), seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train DET with as many parameters as HET-XL; return all three."""
        wide = widened_line(lab)
        lab.run(study.runs_of([wide], lab.seeds))
        det, xl = _two_lines(lab.profile)
        widths = [features_of(line, lab) for line in (det, wide, xl)]
        return {"lines": study.measured([det, wide, xl], lab), "widths": widths}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return a table of the figures in the paper's sentence."""
        columns = (study.NLL, study.PRECISION, study.PARAMETERS)
        rows = [
            Row(line["label"], [*study.cells_of(line["values"], columns), width])
            for line, width in zip(summary["lines"], summary["widths"], strict=True)
        ]
        plain = Column(study.PARAMETERS.title, study.PARAMETERS.digits)
        return [
            Table(
                "As many parameters", (study.NLL, study.PRECISION, plain, LAST_LAYER), rows, summary["lines"][0]["data"]
            )
        ]

    def conclusion(self, summary: Summary) -> str:
        """Compare the wide DET with the usual one, and HET-XL with the wide DET."""
        gain = against(study.values_of(summary, WIDE), study.values_of(summary, DET))
        test = against(study.values_of(summary, XL), study.values_of(summary, WIDE))
        return (
            f"With {summary['widths'][1]} features instead of {summary['widths'][0]} DET has about as many "
            f"parameters as HET-XL, and its NLL is {change(gain)}. HET-XL's NLL compared with that of the wider DET is "
            f"{change(test)}. {holds(agree([sign(test)], -1), self.claim)}"
        )


def check_width(bench: Bench) -> None:
    """Raise unless the width of a bench's backbone is an option."""
    config = bench.config("det")
    name = backbone_name(config, opened(config)[0].input)
    if name not in ("mlp", "cnn"):
        raise ValueError(
            f"this study widens the backbone, and {name} has a fixed width; use --backbone mlp, or cnn for images"
        )


def _two_lines(profile: Profile) -> tuple[Line, Line]:
    return Line(DET, "det", profile.base), Line(XL, "het-xl", profile.base, LEARNED)


def _described(line: Line, lab: Lab) -> tuple[InputSpec, int]:
    """Return the inputs and the number of classes of a finished run's model."""
    about = read_json(lab.cache.directory(line.run(lab.seeds[0])) / "model.json")
    inputs = about["input"]
    return InputSpec(inputs["kind"], tuple(inputs["shape"]), inputs["vocabulary"]), len(about["class_names"])


def widened_line(lab: Lab) -> Line:
    """Return the line of DET with as many parameters as HET-XL."""
    det, xl = _two_lines(lab.profile)
    spec, classes = _described(xl, lab)
    target = parameters_of(xl.run(lab.seeds[0]).config, spec, classes)
    width = matching_width(det.run(lab.seeds[0]).config, target, spec, classes)
    return Line(WIDE, "det", lab.profile.base, {"features": width})


def features_of(line: Line, lab: Lab) -> int:
    """Return the width of the last layer of a line's models."""
    spec, classes = _described(line, lab)
    with torch.device("meta"):
        return build_model(line.run(lab.seeds[0]).config, spec, classes, "softmax").backbone.out_features


SCALES = {scale: f"{scale}×" for scale in (1, 2, 4)}  # multiples of the steps, and their names in tables
HEADS = {"DET": ("det", {}), "HET": ("het", {}), "HET-XL": ("het-xl", LEARNED)}


class DataScale(TableStudy):
    """One, two and four times the steps."""

    name = "data-scale"
    question = "Do the gains of HET-XL stay when all methods train for twice and four times as many steps?"
    paper = ("tab:data_scale_ablation_jft300m", "tab:data_scale_ablation_jft4b")
    claim = "all methods benefit from more training, and HET-XL stays ahead of DET by about as much"
    title = "Effect of more steps"

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return every head at every scale."""
        return [
            Line(label, head, profile.base, {**options, "scale": float(scale)}, group)
            for scale, group in SCALES.items()
            for label, (head, options) in HEADS.items()
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout: rows by method, columns by number of steps."""
        columns, rows = study.side_by_side(
            summary, HEADS, {group: group for group in SCALES.values()}, (study.NLL, study.PRECISION)
        )
        steps = (study.values_of(summary, "DET", "1×") or {}).get("steps")
        return [Table(self.title, columns, rows, f"{summary['lines'][0]['data']}, 1× is {steps} steps")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw NLL and precision@1 over the steps."""
        panels = {
            axis: {
                label: study.points_of(summary, {scale: (label, group) for scale, group in SCALES.items()}, metric)
                for label in HEADS
            }
            for axis, metric in study.PANELS.items()
        }
        return plot_lines(panels, path, "steps, as a multiple", log_x=True)

    def conclusion(self, summary: Summary) -> str:
        """State whether all heads gain, and the difference between HET-XL and DET at every scale."""
        tests = [study.less(summary, ("HET-XL", group), ("DET", group)) for group in SCALES.values()]
        parts = [f"{change(test)} at {group}" for test, group in zip(tests, SCALES.values(), strict=True)]
        gains = [study.less(summary, (label, "4×"), (label, "1×")) for label in HEADS]
        gained = sum(test is not None and test.difference < 0 for test in gains)
        signs = [sign(test) for test in tests]
        verdict = False if 1 in signs or gained < len(HEADS) else True if signs[-1] == -1 else None
        return (
            f"HET-XL's NLL compared with DET's is {', '.join(parts)}. {gained} of {len(HEADS)} methods have a lower "
            f"NLL after four times the steps. {holds(verdict, self.claim)}"
        )


TWO_HEADS = {"DET": ("det", {}), "HET-XL": ("het-xl", LEARNED)}
WIDTH, FEATURES = 512, 128  # of the network for tokens by default


def widened(config: TrainConfig, factor: int) -> dict[str, int]:
    """Return the options of a network with wider hidden layers and more features."""
    return {"width": factor * (config.width or WIDTH), "features": factor * (config.features or FEATURES)}


class ModelScale(TableStudy):
    """Both heads with the default width and twice that."""

    name = "model-scale"
    question = "Do the gains of HET-XL stay when the backbone is twice as wide, features included?"
    paper = ("tab:model_scale_ablation",)
    claim = "both methods benefit from a wider model, and HET-XL stays ahead of DET by about as much"
    title = "Effect of twice the width"
    columns = (study.NLL, study.PRECISION, study.PARAMETERS)

    def check(self, lab: Lab) -> None:
        """Raise if the backbone has a fixed width."""
        check_width(lab.profile.base)

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return both heads at both widths."""
        return [
            Line(label, head, profile.base, {**options, **wider}, f"{factor}× width")
            for factor in (1, 2)
            for label, (head, options) in TWO_HEADS.items()
            for wider in [widened(profile.base.config(head), factor) if factor > 1 else {}]
        ]

    def conclusion(self, summary: Summary) -> str:
        """Compare HET-XL with DET at both widths, and state the gain of each."""
        usual, twice = "1× width", "2× width"
        tests = [study.less(summary, ("HET-XL", group), ("DET", group)) for group in (usual, twice)]
        gains = [study.less(summary, (label, twice), (label, usual)) for label in TWO_HEADS]
        texts = [
            f"{label}'s NLL is {change(gain)} at twice the width" for label, gain in zip(TWO_HEADS, gains, strict=True)
        ]
        verdict = agree([sign(test) for test in tests], -1)
        return (
            f"HET-XL's NLL compared with DET's is {change(tests[0])} at the usual width and {change(tests[1])} at "
            f"twice that. {'; '.join(texts)}. {holds(verdict, 'HET-XL stays ahead of DET in a wider model')}"
        )


STUDIES = (MainTable(), SigmoidTable(), EqualParams(), DataScale(), ModelScale())
