"""`hetxl study contrastive`: DET and HET-XL on pairs, clean and with swapped texts (Table "HET-XL LiT")."""

import math
from collections.abc import Sequence
from pathlib import Path

from hetxl.report.statistics import mean, paired_test, two_sided_p
from hetxl.studies.charts import plot_lines
from hetxl.studies.pair_study import PairStudy, percent, percents, setting_note, share_text
from hetxl.studies.pair_trainings import SWAPS, swap_setting
from hetxl.studies.study import Summary
from hetxl.studies.summary import difference_text, p_text
from hetxl.studies.tables import Cell, Column, Row, Table
from hetxl.studies.verdicts import against, agree, change, holds, sign

HEADS = {"DET": "det", "HET-XL": "het-xl"}

ZERO_SHOT = {
    "zero_shot_top1": "top-1",
    "zero_shot_top5": "top-5",
    "unseen_top1": "top-1, names never seen",
}
"""Metrics of the table that is the paper's."""

COMPARED = {
    **{f"zero_shot_{kind}": f"zero-shot {kind[:3]}-{kind[3:]}" for kind in ("top1", "top5")},
    "unseen_top1": "zero-shot top-1, names never seen",
    **{
        f"validation_{way}@{k}": f"validation, {way.replace('_', ' ')}, recall@{k}"
        for way in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    },
    "test_image_to_text@1": "test, image to text, recall@1",
    "test_text_to_image@1": "test, text to image, recall@1",
}
"""Metrics whose differences are tested."""


class Contrastive(PairStudy):
    """Both heads with none, a fifth and two fifths of the texts swapped."""

    name = "contrastive"
    question = (
        "Does HET-XL help two towers that are trained on pairs of a picture and its name, from clean pairs and from "
        "pairs whose texts are partly swapped?"
    )
    paper = ("tab:contrastive_zero_shot",)
    claim = "HET-XL gives a small but significant gain in zero-shot accuracy over DET"
    settings = tuple(swap_setting(head, swap) for swap in SWAPS for head in HEADS.values())

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's for every share of swapped texts; all differences; and how swapped pairs are found."""
        columns = [Column(name, 2, "higher") for name in ZERO_SHOT.values()]
        rows = [
            Row(label, [percent(_run(summary, label, swap), key) for key in ZERO_SHOT], f"{share_text(swap)} swapped")
            for swap in SWAPS
            for label in HEADS
        ]
        zero_shot = Table("Zero-shot accuracy of HET-XL and DET", columns, rows, setting_note(summary))
        return [zero_shot, _differences(summary), _audit(summary)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Zero-shot accuracy over the share of swapped texts."""
        panels = {
            f"zero-shot {ZERO_SHOT[key]}, %": {
                label: [(100 * swap, percents(_run(summary, label, swap), key)) for swap in SWAPS] for label in HEADS
            }
            for key in ("zero_shot_top1", "zero_shot_top5")
        }
        return plot_lines(panels, path, "texts swapped, %")

    def conclusion(self, summary: Summary) -> str:
        """The difference in zero-shot top-1 at every share."""
        tests = {
            swap: against(_run(summary, "HET-XL", swap), _run(summary, "DET", swap), "zero_shot_top1") for swap in SWAPS
        }
        signs = [sign(test) for test in tests.values()]
        told = "; ".join(f"{change(test, 2, 100, ' points')} with {share_text(swap)}" for swap, test in tests.items())
        return (
            f"HET-XL's zero-shot top-1 accuracy compared with DET's is, by the share of swapped texts, {told}. "
            f"It is significantly higher in {signs.count(1)} and significantly lower in {signs.count(-1)} of "
            f"{len(signs)} comparisons. {holds(agree(signs, 1), self.claim)}"
        )


def welch_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of Welch's t test; None with fewer than two values on a side.

    Args:
        first: [n]
        second: [m]
    """
    ours, theirs = mean(first), mean(second)
    if ours.error is None or theirs.error is None:
        return None
    total = ours.error**2 + theirs.error**2
    if total == 0:  # no spread at all
        return 1.0 if ours.value == theirs.value else 0.0
    freedom = total**2 / (ours.error**4 / (ours.number - 1) + theirs.error**4 / (theirs.number - 1))
    return two_sided_p((ours.value - theirs.value) / math.sqrt(total), freedom)


def _run(summary: Summary, label: str, swap: float) -> dict[str, list[float]] | None:
    return summary["runs"][swap_setting(HEADS[label], swap)]


def _differences(summary: Summary) -> Table:
    rows = []
    for swap in SWAPS:
        det, xl = (_run(summary, label, swap) for label in HEADS)
        for key, title in COMPARED.items():
            cells: list[Cell] = [percent(run, key) for run in (det, xl)]
            if det is not None and xl is not None and key in det and key in xl:
                test = paired_test(xl[key], det[key])
                cells += [difference_text(test, 2, 100), p_text(test), _p(welch_p(xl[key], det[key]))]
                rows.append(Row(title, cells, f"{share_text(swap)} swapped"))
    columns = [Column(label, 2) for label in HEADS]
    columns += [Column("difference", 2), Column("p, paired"), Column("p, Welch")]
    note = "the p-values are of the t test paired over the seeds, and of Welch's, which is the paper's; all in percent"
    return Table("HET-XL less DET", columns, rows, note)


def _audit(summary: Summary) -> Table:
    rows = []
    for swap in SWAPS:
        det, xl = (_run(summary, label, swap) for label in HEADS)
        if swap:
            asked = ((xl, "noise_auroc"), (xl, "distance_auroc"), (det, "distance_auroc"))
            rows.append(Row(share_text(swap), [percent(run, key) for run, key in asked]))
    names = ("HET-XL, noise", "HET-XL, distance", "DET, distance")
    note = (
        "AUROC in percent for telling the training pairs with swapped texts from the others: by the scale of the "
        "noise, and by the distance of the two embeddings"
    )
    return Table("Finding swapped pairs", [Column(name, 2) for name in names], rows, note, "texts swapped")


def _p(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


STUDY = Contrastive()
