"""`hetxl study normalisation`: when to normalise embeddings in contrastive learning with HET-XL?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hetxl.report.statistics import PairedTest
from hetxl.studies.charts import plot_dots
from hetxl.studies.pair_study import PairStudy, percent, percents, setting_note
from hetxl.studies.pair_trainings import placement_setting
from hetxl.studies.study import Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, change, holds, sign

ROWS = {
    "neither before nor after the noise": "none",
    "after the noise": "after",
    "before the noise": "before",
    "before and after the noise": "both",
}
"""Placements by the names that the paper's table has for them here, in its order."""

METRICS = {
    "zero_shot_top1": "zero-shot top-1",
    "zero_shot_top5": "zero-shot top-5",
    "validation_image_to_text@1": "validation recall@1, image to text",
}


class Normalisation(PairStudy):
    """HET-XL on clean pairs, with embeddings normalised before and after the noise, or not."""

    name = "normalisation"
    question = (
        "Embeddings can be brought to length 1 before the noise is added, after it, both times or never: does it "
        "matter when?"
    )
    paper = ("tab:contrastive_normalization",)
    claim = (
        "the noise has to be added after the normalisation, while normalising once more behind it has no consistent "
        "effect"
    )
    settings = tuple(placement_setting(placement) for placement in ROWS.values())

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's."""
        columns = [Column(name, 2, "higher") for name in METRICS.values()]
        rows = [Row(label, [percent(_run(summary, one), key) for key in METRICS]) for label, one in ROWS.items()]
        return [Table("Where to normalise", columns, rows, f"HET-XL on {setting_note(summary)}")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Zero-shot accuracy and recall of the four."""
        panels = {
            f"{METRICS[key]}, %": [("", [(label, percents(_run(summary, one), key)) for label, one in ROWS.items()])]
            for key in ("zero_shot_top1", "validation_image_to_text@1")
        }
        return plot_dots(panels, path)

    def conclusion(self, summary: Summary) -> str:
        """Both parts of the claim, each from its own differences."""
        first = {
            "without normalisation after it": _less(summary, "before", "none"),
            "with it": _less(summary, "both", "after"),
        }
        told = " and ".join(f"{change(test, 2, 100, ' points')} {name}" for name, test in first.items())
        signs = [sign(test) for test in first.values()]
        # Needed means in both cases; a single one that counts against it is enough to deny that.
        needed = False if -1 in signs else True if set(signs) == {1} else None
        why = "" if needed is not None else f"{signs.count(1)} of the two differences counts"
        again = {name: _less(summary, "both", "before", key) for key, name in METRICS.items()}
        effects = [sign(test) for test in again.values()]
        consistent = None if None in effects else len(set(effects)) > 1 or set(effects) == {0}
        changes = "; ".join(f"{name} is {change(test, 2, 100, ' points')}" for name, test in again.items())
        return (
            f"Normalising before the noise, zero-shot top-1 is {told}. "
            f"{holds(needed, 'the noise has to be added after the normalisation', why)} "
            f"With normalisation before the noise, one more behind it changes this: {changes}. "
            f"{holds(consistent, 'normalising once more has no consistent effect')}"
        )


def _run(summary: Summary, placement: str) -> Mapping[str, Sequence[float]] | None:
    return summary["runs"][placement_setting(placement)]


def _less(summary: Summary, first: str, second: str, metric: str = "zero_shot_top1") -> PairedTest | None:
    return against(_run(summary, first), _run(summary, second), metric)


STUDY = Normalisation()
