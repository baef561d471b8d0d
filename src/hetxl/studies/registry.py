"""All studies by name: a new one is one entry. Nothing is imported until a study is run."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetxl.functional._checks import one_of

if TYPE_CHECKING:
    from hetxl.studies.study import Study


@dataclass(frozen=True)
class Entry:
    """A study as lists show it.

    Attributes:
        name: as on the command line.
        title: of its page.
        paper: what of the paper it is about; a dash for one of our own.
        quick: minutes of its quick form on two cores, by measurement or estimate; None where it has none.
        full: likewise of its full form, when none of its trainings is there yet.
        module: that holds it as `STUDY`; None for one with a command of its own.
        pairs: whether it is on pairs, which can be one's own.
    """

    name: str
    title: str
    paper: str
    quick: float | None
    full: float | None
    module: str | None = None
    pairs: bool = False


def _entry(
    name: str,
    title: str,
    paper: str,
    quick: float | None,
    full: float | None,
    module: str = "",
    *,
    pairs: bool = False,
) -> Entry:
    return Entry(name, title, paper, quick, full, f"hetxl.studies.{module}" if module else None, pairs)


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _entry("main", "Five methods compared", "Table “Method comparison on 3 datasets”", 2, 45, "main_table"),
        _entry("data-scale", "More training", "Tables “Effect of data scaling”", 1, 18, "data_scale"),
        _entry("model-scale", "Wider models", "Table “Effect of model scaling”", 0.5, 7, "model_scale"),
        _entry("learn-tau", "Learning τ", "Tables “Ablation on the effect of learning τ”", 1, 30, "learn_tau"),
        _entry("tau-dynamics", "The path of τ", "Figure and table “τ dynamics”", 0.5, 4, "temperature_path"),
        _entry("tau-range", "Start and range of τ", "Tables “Sensitivity to τ”", 0.5, 19, "temperature_range"),
        _entry("samples", "How many samples", "Tables “MC samples” and “Training time”", 1, 14, "samples"),
        _entry("sharing", "Sharing W", "Tables “Effect of sharing W” and “Sensitivity to M”", 1, 9, "sharing"),
        _entry("alignment", "Do W and the noise align?", "Table “Smallest principal angle”", 0.5, 3, "alignment"),
        _entry("residual", "Rank-1 or diagonal", "Table “Diagonal component parameterization”", 0.5, 10, "residual"),
        _entry("latency", "Time of a step", "Figures of latency", 0.5, 9, "latency"),
        _entry("memory", "Memory of a step", "Figures of memory", 0.5, 3, "memory"),
        _entry("flops", "Operations of a step", "Table “Time complexity”, figures of FLOPs", 0.1, 0.1, "flops"),
        _entry("few-shot", "Few-shot linear evaluation", "Table “Few-shot”", 0.5, 6, "few_shot"),
        _entry("equal-params", "DET with as many parameters", "Section “Equalize DET params”", 0.5, 5, "equal_params"),
        _entry("tau", "Ways to choose τ", "Tables “Methods to tune τ”", 1, 35),
        _entry("contrastive", "Contrastive learning", "Table “HET-XL LiT”", 1, 25, "contrastive", pairs=True),
        _entry(
            "normalisation",
            "When to normalise embeddings",
            "Table “Placements of the normalization”",
            1,
            15,
            "normalisation",
            pairs=True,
        ),
        _entry(
            "test-noise",
            "Noise at test time",
            "Section “Deterministic versus stochastic … at test time”",
            1,
            12,
            "noise_at_test_time",
            pairs=True,
        ),
        _entry("defaults", "HET-XL's defaults against a tuned DET", "–", 2, 180),
        _entry("recovery", "How near to the true model", "–", 1, 10),
        _entry("levers", "What each default is worth", "–", None, 80),
    )
}
"""In the order of lists: the paper's, then our own."""


def load_study(name: str) -> "Study":
    """The study of a name, of those that have a module."""
    one_of("study", name, [entry.name for entry in ENTRIES.values() if entry.module])
    module = ENTRIES[name].module
    assert module is not None
    return importlib.import_module(module).STUDY


def minutes_text(minutes: float | None) -> str:
    """A cost as a person would say it; a dash for none."""
    if minutes is None:
        return "–"
    if minutes < 1:
        return f"{max(1, round(60 * minutes))} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def listing() -> str:
    """All studies, a line each, for a terminal."""
    rows = [("study", "the paper", "quick", "full")]
    rows += [
        (entry.name, entry.paper if entry.module else entry.title, minutes_text(entry.quick), minutes_text(entry.full))
        for entry in ENTRIES.values()
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {paper:<{widths[1]}}  {quick:>{widths[2]}}  {full:>{widths[3]}}"
        for name, paper, quick, full in rows
    ]
    return "\n".join([*lines, "", "Costs are for two cores with no training done before; trainings are shared."])
