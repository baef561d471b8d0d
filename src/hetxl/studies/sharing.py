"""`hetxl study sharing`: noise through W, or through a W′ of its own with M rows (Tables "Effect of sharing W",
"Sensitivity to M")."""

from collections.abc import Sequence
from pathlib import Path

from hetxl.studies.charts import plot_lines
from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import NLL, PARAMETERS, PRECISION, Line, LineStudy, cells_of, values_of
from hetxl.studies.model_scale import FEATURES
from hetxl.studies.study import Summary
from hetxl.studies.tables import Row, Table
from hetxl.studies.verdicts import against, agree, change, holds, insensitive, sign, within

SHARED = "HET-XL, W shared"
FACTORS = (32, 16, 8, 4, 2, 1)
"""D over M."""


def sizes_of(form: Form) -> list[int]:
    """M = D / 32 … D, each once."""
    features = form.base.config("het-xl").features or FEATURES
    return list(dict.fromkeys(max(1, features // factor) for factor in FACTORS))


class Sharing(LineStudy):
    """Shared W against W′ of several sizes."""

    name = "sharing"
    question = "Noise reaches the logits through W itself. What if it had a projection W′ of its own, and how large?"
    paper = ("tab:w_sharing", "tab:sensitivity_to_M")
    claim = "sharing W has little effect on performance, and without it a larger M is better"
    title = "Sharing W"
    columns = (NLL, PRECISION, PARAMETERS)

    def lines(self, form: Form) -> Sequence[Line]:
        """Shared, then every M."""
        own = [
            Line(str(size), "het-xl", form.base, {**LEARNED, "noise_features": size}, "own W′")
            for size in sizes_of(form)
        ]
        return [Line(SHARED, "het-xl", form.base, LEARNED, "shared"), *own]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's two."""
        sizes = _sizes(summary)
        shared = values_of(summary, SHARED, "shared")
        largest = values_of(summary, sizes[-1], "own W′")
        both = [
            Row(SHARED, cells_of(shared, self.columns)),
            Row("HET-XL, own W′", cells_of(largest, self.columns)),
        ]
        rows = [Row(size, cells_of(values_of(summary, size, "own W′"), self.columns)) for size in sizes]
        data = summary["lines"][0]["data"]
        return [
            Table("Effect of sharing W", self.columns, both, f"{data}, M = D = {sizes[-1]}"),
            Table("Sensitivity to M when W is not shared", self.columns, rows, data, head="M"),
        ]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and precision@1 over M, and those of shared W."""
        sizes, shared = _sizes(summary), values_of(summary, SHARED, "shared")
        panels, levels = {}, {}
        for axis, metric in (("test NLL", "nll"), ("precision@1", "precision@1")):
            points = [(float(size), (values_of(summary, size, "own W′") or {}).get(metric, [])) for size in sizes]
            panels[axis] = {"own W′": points}
            levels[axis] = {"W shared": sum(shared[metric]) / len(shared[metric])} if shared else {}
        return plot_lines(panels, path, "M", log_x=True, levels=levels)

    def conclusion(self, summary: Summary) -> str:
        """Own W′ of M = D against shared W, and the largest M against the smallest."""
        sizes = _sizes(summary)
        own = {size: values_of(summary, size, "own W′") for size in sizes}
        test = against(own[sizes[-1]], values_of(summary, SHARED, "shared"))
        growth = against(own[sizes[-1]], own[sizes[0]])
        shared = insensitive([test], values_of(summary, SHARED, "shared"))
        larger = agree([sign(growth)], -1)
        found = None if None in (shared, larger) else bool(shared and larger)
        return (
            f"With a W′ of its own and M = D the NLL, compared with that of W shared, is {change(test)}; with M = D "
            "compared "
            f"with M = {sizes[0]} it is {change(growth)}. "
            f"{holds(found, self.claim, within())}"
        )


def _sizes(summary: Summary) -> list[str]:
    return [line["label"] for line in summary["lines"] if line["group"] == "own W′"]


STUDY = Sharing()
