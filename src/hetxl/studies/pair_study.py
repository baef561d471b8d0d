"""What the studies on pairs have in common: their trainings, and what is read from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.forms import FORMS, Form
from hetxl.studies.pair_trainings import SAMPLES, PairTraining, pair_values
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Cell, over

SEEDS = (1, 2, 3, 4, 5)
"""Of the full form: the options were chosen with seed 0."""


class PairStudy(Study):
    """A study of runs of `hetxl contrastive train`.

    Attributes:
        settings: names of the trainings that it needs.
    """

    settings: Sequence[str]

    def seeds(self, form: Form) -> tuple[int, ...]:
        """Five in the full form."""
        return SEEDS if form.name == "full" else super().seeds(form)

    def home(self, form: Form) -> Path:
        """The directory of the trainings on pairs, one for each form and each data."""
        return Path("runs") / f"study-contrastive{variant_of(form)}" / "runs"

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[PairTraining]:
        """All settings with the first seed, then with the next: a study that is stopped has something to show."""
        return [form.pairs.training(setting, seed) for seed in seeds for setting in self.settings]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Metrics by setting, over the seeds, and what all trainings have in common."""
        runs: dict[str, dict[str, list[float]] | None] = {}
        first: dict[str, Any] | None = None
        for setting in self.settings:
            found = [lab.cache.result(lab.form.pairs.training(setting, seed)) for seed in lab.seeds]
            known = [one for one in found if one is not None]
            runs[setting] = pair_values(known) if len(known) == len(found) else None
            first = first or next(iter(known), None)
        if first is None:
            raise FloatingPointError("no training of the study kept a finite loss; there is nothing to measure")
        return {
            "data": lab.form.pairs.data,
            "rows": first["data"]["rows"],
            "classes": first["metrics"]["test"]["zero_shot"]["classes"],
            "steps": first["steps"],
            "samples": lab.form.pairs.options.get("eval_samples", SAMPLES),
            "runs": runs,
        }


def variant_of(form: Form) -> str:
    """What directories of a form on pairs have behind their names: nothing for the full one on its own data."""
    end = "" if form.name == "full" else f"-{form.name}"
    if form.pairs.data != FORMS[form.name].pairs.data:
        end += f"-{Path(form.pairs.data.partition(':')[0]).stem}"
    return end


def percent(run: Mapping[str, Sequence[float]] | None, metric: str) -> Cell:
    """The cell of a metric over the seeds, in percent; "not finite" where a loss was not."""
    return "not finite" if run is None else over(run.get(metric), 100)


def percents(run: Mapping[str, Sequence[float]] | None, metric: str) -> list[float]:
    """A metric in percent, one for each seed; none where there is none."""
    return [100 * value for value in (run or {}).get(metric, ())]


def share_text(swap: float) -> str:
    """A share as tables show it."""
    return f"{100 * swap:.0f} %"


def setting_note(summary: Summary) -> str:
    """Data, steps and classes, in a sentence for tables."""
    return (
        f"{summary['data']}: {summary['rows']['train']:,} training pairs, {summary['steps']:,} steps; zero-shot among "
        f"{summary['classes']:,} names (chance {100 / summary['classes']:.3f} %); all in percent"
    )
