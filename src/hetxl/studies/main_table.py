"""`hetxl study main`: the five methods on several datasets with two backbones each (Table "Method comparison")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.cache import Training
from hetxl.studies.charts import plot_dots
from hetxl.studies.forms import LEARNED, Bench, Form
from hetxl.studies.lines import NLL, PARAMETERS, PRECISION, Line, cells_of, dots_of, measured, trainings_of
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, holds, lower_in, sign

DET, HET, BEST, HASH, XL = METHODS = ("DET", "HET τ = 1", "HET τ*", "HET-H", "HET-XL")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    DET: ("det", {}),
    HET: ("het", {}),
    HASH: ("het-h", LEARNED),
    XL: ("het-xl", LEARNED),
}
"""Heads and options of all methods but HET with its best τ. HET-H and HET-XL learn τ, as in the paper."""


def settings(form: Form) -> list[tuple[Bench, str]]:
    """Every dataset with each of its backbones."""
    return [(bench, backbone) for bench in form.benches for backbone in bench.backbones]


def method_line(method: str, bench: Bench, backbone: str) -> Line:
    """A method in a setting."""
    head, options = OPTIONS[method]
    return Line(method, head, bench, {**options, "backbone": backbone}, _group(bench, backbone))


def tuned_line(bench: Bench, backbone: str, temperature: float) -> Line:
    """HET with a fixed τ."""
    options = {"backbone": backbone, "temperature": str(float(temperature))}
    return Line(BEST, "het", bench, options, _group(bench, backbone))


def _group(bench: Bench, backbone: str) -> str:
    return f"{bench.name}, {backbone}"


def best_temperature(lab: Lab, bench: Bench, backbone: str) -> float:
    """τ*, the one of the lowest validation NLL with the first seed."""
    found: dict[float, float] = {}
    for temperature in (1.0, *lab.form.temperatures):
        result = lab.cache.result(tuned_line(bench, backbone, temperature).training(lab.seeds[0]))
        if result is not None:
            found[temperature] = result["metrics"]["validation"]["nll"]
    return min(found, key=found.__getitem__, default=1.0)


class MainTable(Study):
    """The comparison of methods."""

    name = "main"
    question = (
        "Which of the five methods predicts best, and what does it cost in parameters? Every method trains for as many "
        "steps from the same backbone; τ* is the best for HET on validation data."
    )
    paper = ("tab:results",)
    claim = "HET-XL outperforms or is on par with all other methods, with far fewer extra parameters than HET"

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[Training]:
        """All methods with all seeds, and HET with the other τ with the first."""
        lines = [method_line(method, *setting) for setting in settings(form) for method in OPTIONS]
        tuning = [tuned_line(*setting, value) for setting in settings(form) for value in form.temperatures]
        return [*trainings_of(tuning, seeds[:1]), *trainings_of(lines, seeds)]

    def follow_ups(self, lab: Lab) -> Sequence[Training]:
        """HET with its best τ, with the other seeds."""
        lines = [tuned_line(*setting, best_temperature(lab, *setting)) for setting in settings(lab.form)]
        return trainings_of(lines, lab.seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Lines by setting, and τ* of each."""
        lines, best = [], {}
        for bench, backbone in settings(lab.form):
            best[_group(bench, backbone)] = best_temperature(lab, bench, backbone)
            tuned = tuned_line(bench, backbone, best[_group(bench, backbone)])
            lines += [tuned if method == BEST else method_line(method, bench, backbone) for method in METHODS]
        return {
            "lines": measured(lines, lab),
            "temperatures": best,
            "settings": [
                {
                    "data": bench.name,
                    "backbones": list(bench.backbones),
                    "groups": [_group(bench, b) for b in bench.backbones],
                }
                for bench in lab.form.benches
            ],
        }

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's: datasets and methods down, the backbones side by side."""
        kinds = (NLL, PRECISION, PARAMETERS)
        sides = max(len(setting["groups"]) for setting in summary["settings"])
        columns = [
            Column(f"{_side(side)} {kind.name}", kind.digits, kind.better) for side in range(sides) for kind in kinds
        ]
        rows = []
        for setting in summary["settings"]:
            for method in METHODS:
                cells: list[Any] = []
                for group in setting["groups"]:
                    cells += cells_of(line_of(summary, method, group), kinds)
                cells += [None] * (len(columns) - len(cells))
                rows.append(Row(method, cells, setting["data"]))
        backbones = "; ".join(f"{one['data']}: {' and '.join(one['backbones'])}" for one in summary["settings"])
        stars = ", ".join(f"{value:g} ({group})" for group, value in summary["temperatures"].items())
        return [Table("Method comparison", columns, rows, f"the backbones are, {backbones}. τ* is {stars}")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """All methods in all settings."""
        return plot_dots(dots_of(summary["lines"]), path)

    def conclusion(self, summary: Summary) -> str:
        """HET-XL against DET and against all, and the parameters."""
        groups = list(summary["temperatures"])
        tests = {
            other: [against(line_of(summary, XL, group), line_of(summary, other, group)) for group in groups]
            for other in METHODS[:-1]
        }
        lower, better, worse = lower_in(tests[DET])
        signs = [sign(test) for per_method in tests.values() for test in per_method]
        found = False if 1 in signs else True if better else None
        behind = [other for other, per_method in tests.items() if 1 in map(sign, per_method)]
        why = f"its NLL is significantly higher than that of {', '.join(behind)} somewhere" if behind else ""
        extra = ""
        first = [line_of(summary, method, groups[0]) for method in (DET, HET, XL)]
        if None not in first:
            det, het, xl = (values["parameters"] for values in first if values is not None)
            added = [f"{(values - det) / 1e6:.2f}M" for values in (xl, het)]
            extra = f" It adds {added[0]} parameters to DET in the first setting, and HET {added[1]}."
        return (
            f"HET-XL's test NLL is lower than DET's in {lower} of {len(groups)} settings, significantly so in "
            f"{better}, and significantly higher in {worse}. {holds(found, self.claim, why)}{extra} "
            "As in the paper HET-H and HET-XL learn τ, and DET does not: `hetxl study learn-tau` says how much of the "
            "difference that is."
        )


def _side(side: int) -> str:
    return f"backbone {side + 1}"


def line_of(summary: Summary, label: str, group: str) -> dict[str, Any] | None:
    """The values of a method in a setting; None where a loss was not finite."""
    for line in summary["lines"]:
        if line["label"] == label and line["group"] == group:
            return line["values"]
    raise ValueError(f"study main has no line {label!r} of {group!r}")


STUDY = MainTable()
