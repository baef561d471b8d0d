"""The tables of the contrastive study in markdown, in the forms of the paper."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hetxl.report.statistics import mean, paired_test, two_sided_p
from hetxl.studies.summary import difference_text, mean_text, p_text

Summary = Mapping[str, Any]

COMPARED = (
    ("zero_shot_top1", "zero-shot top-1"),
    ("zero_shot_top5", "zero-shot top-5"),
    ("unseen_top1", "zero-shot top-1, names never seen"),
    ("validation_image_to_text@1", "validation, image to text, recall@1"),
    ("validation_image_to_text@5", "validation, image to text, recall@5"),
    ("validation_image_to_text@10", "validation, image to text, recall@10"),
    ("validation_text_to_image@1", "validation, text to image, recall@1"),
    ("validation_text_to_image@5", "validation, text to image, recall@5"),
    ("validation_text_to_image@10", "validation, text to image, recall@10"),
    ("test_image_to_text@1", "test, image to text, recall@1"),
    ("test_text_to_image@1", "test, text to image, recall@1"),
)
"""Metrics of the first tables."""


def page(summary: Summary) -> str:
    """The whole page.

    Args:
        summary: of `hetxl.studies.contrastive.summarise`.
    """
    seeds, rows = len(summary["seeds"]), summary["rows"]
    lines = [
        f"# Contrastive learning on {summary['data']}",
        "",
        f"{rows['train']:,} training pairs, {summary['steps']:,} steps, {seeds} seed{'' if seeds == 1 else 's'}; "
        f"{summary['classes']:,} test classes (chance {100 / summary['classes']:.3f} %). Of a seed, towers, order and "
        "swaps are the same for both heads. ± is the standard error over the seeds; p is of the paired t test, and of "
        "Welch's, which is the paper's. All in percent.",
    ]
    for swap in summary["swaps"]:
        lines += ["", f"## {_share(swap)} of the texts swapped", "", *_heads(summary, f"swap{round(100 * swap)}")]
    lines += ["", "## When embeddings are normalised", "", *_placements(summary)]
    lines += ["", "## With noise at test time and without", "", *_sampled(summary)]
    lines += ["", "## Finding swapped pairs", "", *_audit(summary)]
    return "\n".join([*lines, ""])


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


def _heads(summary: Summary, name: str) -> list[str]:
    det, het = summary["runs"][f"det-{name}"], summary["runs"][f"het-xl-{name}"]
    lines = ["| | DET | HET-XL | difference | p, paired | p, Welch |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for key, title in COMPARED:
        if key in det and key in het:
            test = paired_test(het[key], det[key])
            lines.append(
                f"| {title} | {_percent(det[key])} | {_percent(het[key])} | {difference_text(test, 2, 100)} "
                f"| {p_text(test)} | {_p(welch_p(het[key], det[key]))} |"
            )
    seconds = [f"{mean(run['train_seconds']).value:.0f} s" for run in (det, het)]
    return [*lines, f"| training time | {seconds[0]} | {seconds[1]} | – | – | – |"]


def _placements(summary: Summary) -> list[str]:
    runs = summary["runs"]

    def cell(placement: str) -> str:
        run = runs["het-xl-swap0" if placement == "before" else f"het-xl-normalize-{placement}"]
        values = [_percent(run[key]) for key in ("zero_shot_top1", "zero_shot_top5", "validation_image_to_text@1")]
        return " / ".join(values)

    return [
        "HET-XL, clean pairs: zero-shot top-1 / zero-shot top-5 / validation recall@1 from image to text.",
        "",
        "| | post-noise normalisation = false | post-noise normalisation = true |",
        "| --- | ---: | ---: |",
        f"| **pre-noise normalisation = false** | {cell('none')} | {cell('after')} |",
        f"| **pre-noise normalisation = true** | {cell('before')} | {cell('both')} |",
    ]


def _sampled(summary: Summary) -> list[str]:
    lines = [
        f"HET-XL, zero-shot: the representations without noise, and the mean over {summary['samples']} draws.",
        "",
        "| texts swapped | top-1, without | top-1, draws | difference | top-5, without | top-5, draws |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for swap in summary["swaps"]:
        run = summary["runs"][f"het-xl-swap{round(100 * swap)}"]
        if "sampled_top1" in run:
            test = paired_test(run["sampled_top1"], run["zero_shot_top1"])
            lines.append(
                f"| {_share(swap)} | {_percent(run['zero_shot_top1'])} | {_percent(run['sampled_top1'])} "
                f"| {difference_text(test, 2, 100)} | {_percent(run['zero_shot_top5'])} "
                f"| {_percent(run['sampled_top5'])} |"
            )
    return lines


def _audit(summary: Summary) -> list[str]:
    lines = [
        "AUROC for telling the training pairs with swapped texts from the others, in percent: by the scale of the "
        "noise, and by the distance of the two embeddings.",
        "",
        "| texts swapped | HET-XL, noise | HET-XL, distance | DET, distance |",
        "| --- | ---: | ---: | ---: |",
    ]
    for swap in summary["swaps"]:
        name = f"swap{round(100 * swap)}"
        det, het = summary["runs"][f"det-{name}"], summary["runs"][f"het-xl-{name}"]
        if "distance_auroc" in det:
            cells = [
                _percent(run[key]) if key in run else "–"
                for run, key in ((het, "noise_auroc"), (het, "distance_auroc"), (det, "distance_auroc"))
            ]
            lines.append(f"| {_share(swap)} | {' | '.join(cells)} |")
    return lines


def _percent(values: Sequence[float]) -> str:
    return mean_text(values, 2, 100)


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _share(swap: float) -> str:
    return f"{100 * swap:.0f} %"
