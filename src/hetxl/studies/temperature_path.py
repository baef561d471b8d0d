"""`hetxl study tau-dynamics`: the path of τ, and a training with τ fixed where it ended (Figure and Table "τ
dynamics")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.cache import Training
from hetxl.studies.charts import plot_lines
from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import LEARNED_TAU, NLL, PRECISION, Line, cells_of, measured, trainings_of, values_of
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Row, Table
from hetxl.studies.verdicts import against, change, holds, insensitive, within
from hetxl.training.log import read_log

MOVING, FIXED = LABELS = ("HET-XL", "HET-XL, τ fixed at its final value")


def learned_line(form: Form) -> Line:
    """HET-XL with a learned τ."""
    return Line(MOVING, "het-xl", form.base, LEARNED)


def fixed_training(lab: Lab, seed: int) -> Training:
    """HET-XL with τ fixed where the training of the same seed left it; of one that was not finite, at 1."""
    result = lab.cache.result(learned_line(lab.form).training(seed))
    final = 1.0 if result is None else result["temperature"]
    return lab.form.base.training("het-xl", seed, temperature=str(round(final, 5)))


def path_of(lab: Lab, seed: int) -> list[tuple[int, float]]:
    """Steps and τ, as they were logged."""
    log = read_log(lab.cache.place(learned_line(lab.form).training(seed)) / "log.jsonl")
    return [(line["step"], line["temperature"]) for line in log if line.get("kind") == "step"]


class TemperaturePath(Study):
    """τ over the steps, then τ fixed."""

    name = "tau-dynamics"
    question = "How does τ move in training, and does it matter that it moves, or only where it ends?"
    paper = ("tab:temp_dynamics",)
    claim = "training with τ fixed at its final value does as well, so that its value matters and not its path"

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[Training]:
        """Those whose τ is learned."""
        return trainings_of([learned_line(form)], seeds)

    def follow_ups(self, lab: Lab) -> Sequence[Training]:
        """Those whose τ is fixed, each where that of its seed ended."""
        return [fixed_training(lab, seed) for seed in lab.seeds]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Both lines, and the paths."""
        lines = measured([learned_line(lab.form)], lab)
        fixed = lab.results([fixed_training(lab, seed) for seed in lab.seeds])
        lines.append({"label": FIXED, "group": None, "data": lab.form.base.name, "values": fixed})
        return {"lines": lines, "paths": {str(seed): path_of(lab, seed) for seed in lab.seeds}}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's, with τ."""
        columns = (NLL, PRECISION, LEARNED_TAU)
        rows = [Row(line["label"], cells_of(line["values"], columns)) for line in summary["lines"]]
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
        test = against(values_of(summary, FIXED), values_of(summary, MOVING))
        found = insensitive([test], values_of(summary, MOVING))
        turned = sum(
            low < min(end, 1.0) - 0.005 or high > max(end, 1.0) + 0.005
            for (low, high), end in zip(ranges, ends, strict=True)
        )
        return (
            f"τ starts at 1 and ends at {min(ends):.3f} to {max(ends):.3f}; in {turned} of {len(ends)} trainings it "
            "goes "
            f"beyond both on its way. With τ fixed where it ended, the NLL is {change(test)}. "
            f"{holds(found, self.claim, within())}"
        )


STUDY = TemperaturePath()
