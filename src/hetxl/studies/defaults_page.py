"""The study of the defaults as a page: verdicts over all settings, the order of the heads, and every head's numbers."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hetxl.report.statistics import mean
from hetxl.studies.plot import plot_differences
from hetxl.studies.settings import RATE
from hetxl.studies.summary import WORSE, Summary, count_verdicts, heads_table, judge, verdict_table
from hetxl.training.files import read_json
from hetxl.training.rescale import SCALED, SCALED_XL

PICTURE = "defaults.svg"
ORDER = ("HET-XL", "HET-H", "HET", "DET")
"""Of the paper's main table, the lowest NLL first."""
TOLD = (
    "In every setting DET's learning rate and weight decay are tuned on the validation split first; every head takes "
    "them over, and trains for as many steps with the same seeds. In the noisy settings {rate:.0%} of the training "
    "labels are flipped to a near class; validation and test labels are as they were. Means ± standard errors over "
    "{seeds} seeds on the test split, paired t-tests. Time is that of a training over DET's, from steps that took "
    "turns.\n"
)
LONGER = "DET, as much time as HET-XL"
PANELS = {
    "as many steps, less DET": [(head, "DET") for head in ("HET-XL", "HET", "HET-H")],
    "rescaled: HET-XL less DET": [(SCALED_XL, SCALED)],
    "as much time: HET-XL less DET": [("HET-XL", LONGER)],
}
"""Of the picture."""


def finished(directory: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The summaries of the settings below a directory that have one, in the order of the names.

    Args:
        directory: of the study.
        names: of the settings.
    """
    paths = (directory / name / "summary.json" for name in names)
    return [read_json(path) for path in paths if path.exists()]


def order_told(summary: Summary) -> str:
    """The heads of one setting by their NLL, with < where a difference counts and ≈ where it does not."""
    nll = {head: mean(summary["heads"][head]["nll"]).value for head in ORDER}
    found = sorted(ORDER, key=nll.__getitem__)
    parts = [found[0]]
    for one, other in itertools.pairwise(found):
        test = judge(summary, other, one).nll
        parts.append("<" if test.p is not None and test.p < WORSE else "≈")
        parts.append(other)
    return " ".join(parts)


def page(summaries: Sequence[Summary]) -> str:
    """The study in markdown.

    Args:
        summaries: of the settings.
    """
    seeds = " or ".join(str(count) for count in sorted({len(summary["seeds"]) for summary in summaries}))
    parts = [TOLD.format(rate=RATE, seeds=seeds).replace("%", " %")]
    if all({"DET", "HET-XL"} <= set(summary["heads"]) for summary in summaries):
        parts += [verdict_table(summaries), count_verdicts(summaries) + "\n"]
        parts += [f"{summary['setting']}: {summary['note']}\n" for summary in summaries if "note" in summary]
    ordered = [summary for summary in summaries if set(ORDER) <= set(summary["heads"])]
    if ordered:
        parts.append(
            "The paper's order in NLL is HET-XL ≤ HET-H ≤ HET ≤ DET. Here, with < where the difference of neighbours "
            f"counts (p < {WORSE:g}) and ≈ where it does not:\n\n| setting | lowest NLL first |\n| --- | --- |\n"
            + "".join(f"| {summary['setting']} | {order_told(summary)} |\n" for summary in ordered)
        )
    rescaled = [summary for summary in summaries if {SCALED, SCALED_XL} <= set(summary["heads"])]
    if rescaled:
        parts.append(
            "## Rescaled on the validation split\n\nBoth heads with τ fitted to validation labels after the training, "
            "and HET-XL with the scale of its noise beside it: above 1 where noise was learned too small, 0 where "
            "it is of no use. Labels of validation and test are right in the noisy settings too.\n"
        )
        parts += [verdict_table(rescaled, SCALED_XL, SCALED), count_verdicts(rescaled, SCALED_XL, SCALED) + "\n"]
    longer = [summary for summary in summaries if {"HET-XL", LONGER} <= set(summary["heads"])]
    if longer:
        parts.append(
            "## For as much time\n\nA step of HET-XL takes longer than one of DET, most of all where the head is most "
            "of the model. Against a DET that trains for as much time, with a schedule of as many more steps:\n"
        )
        parts += [verdict_table(longer, baseline=LONGER), count_verdicts(longer, baseline=LONGER) + "\n"]
    parts += [f"## {summary['setting']}\n\n{heads_table(summary)}" for summary in summaries]
    return "\n".join(parts)


def plot(summaries: Sequence[Summary], path: Path) -> Path:
    """Draw the NLL of heads less that of DET, as far as there are some.

    Args:
        summaries: of the settings.
        path: of the picture; its ending says which kind.
    """
    known = {head for summary in summaries for head in summary["heads"]}
    panels = {title: [pair for pair in pairs if set(pair) <= known] for title, pairs in PANELS.items()}
    return plot_differences(summaries, path, {title: pairs for title, pairs in panels.items() if pairs})
