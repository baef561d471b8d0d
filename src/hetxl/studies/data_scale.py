"""`hetxl study data-scale`: do the gains stay when training goes on longer (Tables "Effect of data scaling")?"""

from collections.abc import Sequence
from pathlib import Path

from hetxl.studies.charts import plot_lines
from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import NLL, PRECISION, Line, LineStudy, cells_of, values_of
from hetxl.studies.study import Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, change, holds, sign

SCALES = (1, 2, 4)
HEADS = {"DET": ("det", {}), "HET": ("het", {}), "HET-XL": ("het-xl", LEARNED)}


class DataScale(LineStudy):
    """One, two and four times the steps."""

    name = "data-scale"
    question = "Do the gains of HET-XL stay when all methods train for twice and four times as many steps?"
    paper = ("tab:data_scale_ablation_jft300m", "tab:data_scale_ablation_jft4b")
    claim = "all methods benefit from more training, and HET-XL stays ahead of DET by about as much"
    title = "Effect of more steps"

    def lines(self, form: Form) -> Sequence[Line]:
        """Every head at every scale."""
        return [
            Line(label, head, form.base, {**options, "scale": float(scale)}, f"{scale}×")
            for scale in SCALES
            for label, (head, options) in HEADS.items()
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's: methods down, amounts of training side by side."""
        columns = [
            Column(f"{scale}× {kind.name}", kind.digits, kind.better) for scale in SCALES for kind in (NLL, PRECISION)
        ]
        rows = []
        for label in HEADS:
            cells = []
            for scale in SCALES:
                cells += cells_of(values_of(summary, label, f"{scale}×"), (NLL, PRECISION))
            rows.append(Row(label, cells))
        steps = (values_of(summary, "DET", "1×") or {}).get("steps")
        return [Table(self.title, columns, rows, f"{summary['lines'][0]['data']}, 1× is {steps} steps")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and precision@1 over the steps."""
        panels = {
            axis: {
                label: [
                    (float(scale), (values_of(summary, label, f"{scale}×") or {}).get(metric, [])) for scale in SCALES
                ]
                for label in HEADS
            }
            for axis, metric in (("test NLL", "nll"), ("precision@1", "precision@1"))
        }
        return plot_lines(panels, path, "steps, as a multiple", log_x=True)

    def conclusion(self, summary: Summary) -> str:
        """Whether all gain, and the difference of HET-XL to DET at every scale."""
        tests = [
            against(values_of(summary, "HET-XL", f"{scale}×"), values_of(summary, "DET", f"{scale}×"))
            for scale in SCALES
        ]
        parts = [f"{change(test)} at {scale}×" for test, scale in zip(tests, SCALES, strict=True)]
        gains = [
            against(values_of(summary, label, f"{SCALES[-1]}×"), values_of(summary, label, "1×")) for label in HEADS
        ]
        gained = sum(test is not None and test.difference < 0 for test in gains)
        signs = [sign(test) for test in tests]
        found = False if 1 in signs or gained < len(HEADS) else True if signs[-1] == -1 else None
        return (
            f"HET-XL's NLL compared with DET's is {', '.join(parts)}. {gained} of {len(HEADS)} methods have a lower "
            "NLL "
            f"after four times the steps. {holds(found, self.claim)}"
        )


STUDY = DataScale()
