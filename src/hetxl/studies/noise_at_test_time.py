"""`hetxl study test-noise`: does zero-shot classification need draws of the noise?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hetxl.report.statistics import PairedTest, paired_test
from hetxl.studies.charts import plot_dots
from hetxl.studies.pair_study import PairStudy, percent, percents, setting_note, share_text
from hetxl.studies.pair_trainings import SWAPS, swap_setting
from hetxl.studies.study import Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import change, holds, same

MARGIN = 0.0025
"""Differences of an accuracy within this are called none: about half the standard error that two thousand test pictures
leave an accuracy of a few percent."""

METRICS = {"top1": "zero-shot top-1", "top5": "zero-shot top-5"}


class NoiseAtTestTime(PairStudy):
    """The same models of HET-XL, evaluated without noise and by the mean over draws of it."""

    name = "test-noise"
    question = (
        "HET-XL is trained with noise on the embeddings. Does zero-shot classification need draws of it too, or do the "
        "representations without noise serve as well?"
    )
    paper = ("app:het_hom_contrastive",)
    claim = "zero-shot accuracy is the same with draws of the noise at test time and without"
    settings = tuple(swap_setting("het-xl", swap) for swap in SWAPS)

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's, for every share of swapped texts."""
        columns = [Column(name, 2, "higher") for name in METRICS.values()]
        rows = [
            Row(
                label, [percent(_run(summary, swap), f"{kind}_{key}") for key in METRICS], f"{share_text(swap)} swapped"
            )
            for swap in SWAPS
            for label, kind in _ways(summary).items()
        ]
        note = f"HET-XL on {setting_note(summary)}"
        return [Table("Deterministic against sampled representations at test time", columns, rows, note)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Both accuracies both ways, by the share of swapped texts."""
        panels = {
            f"{name}, %": [
                (
                    f"{share_text(swap)} swapped",
                    [(label, percents(_run(summary, swap), f"{kind}_{key}")) for label, kind in _ways(summary).items()],
                )
                for swap in SWAPS
            ]
            for key, name in METRICS.items()
        }
        return plot_dots(panels, path)

    def conclusion(self, summary: Summary) -> str:
        """The differences in top-1 at every share of swapped texts."""
        tests = {swap: _less(_run(summary, swap)) for swap in SWAPS}
        told = "; ".join(f"{change(test, 2, 100, ' points')} with {share_text(swap)}" for swap, test in tests.items())
        why = f"a difference counts from {100 * MARGIN:g} points on"
        return (
            f"With {summary['samples']} draws at test time, compared with none, zero-shot top-1 accuracy is, by the "
            f"share of swapped texts, {told}. {holds(same(list(tests.values()), MARGIN), self.claim, why)}"
        )


def _ways(summary: Summary) -> dict[str, str]:
    """How rows are called, and how their metrics begin."""
    return {"deterministic": "zero_shot", f"{summary['samples']} MC samples": "sampled"}


def _run(summary: Summary, swap: float) -> Mapping[str, Sequence[float]] | None:
    return summary["runs"][swap_setting("het-xl", swap)]


def _less(run: Mapping[str, Sequence[float]] | None) -> PairedTest | None:
    return None if run is None else paired_test(run["sampled_top1"], run["zero_shot_top1"])


STUDY = NoiseAtTestTime()
