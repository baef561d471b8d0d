"""All studies by name, with the options of their commands. A new study is one entry; studies are imported on use."""

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetxl._checks import one_of

if TYPE_CHECKING:
    from hetxl_lab.studies.study import Study


@dataclass(frozen=True)
class Option:
    """An option of a study's command, in addition to those of all studies."""

    name: str  # in Python; with dashes on the command line
    type: type  # str, int or bool
    default: Any
    help: str
    positional: bool = False  # an argument without dashes
    minimum: int | None = None  # of a number; None for any


@dataclass(frozen=True)
class Entry:
    """A study in lists and commands. Minutes are measured or estimated on two cores."""

    name: str
    title: str
    paper: str  # the part of the paper that it reproduces; a dash if none
    quick: float | None  # minutes; None without a quick profile
    full: float | None  # minutes with an empty cache
    module: str  # below `hetxl_lab.studies`, whose `STUDIES` has it
    options: tuple[Option, ...] = ()
    seeds: str = "3; quick 2"  # the default, as shown by `--help`
    cache: str = "runs/studies/cache"  # directory of its runs, as shown by `--help`

    def with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all options, with defaults for those that are absent or None."""
        names = [option.name for option in self.options]
        for name in options:
            one_of(f"option of study {self.name}", name, names)
        chosen = {name: value for name, value in options.items() if value is not None}
        return {option.name: option.default for option in self.options} | chosen


_DATA = Option("data", str, None, "Your data, as for hetxl train [data of the published page].", positional=True)
_SHARED = (
    Option("backbone", str, None, "Backbone as for hetxl train, or several, separated by commas [the page's]."),
    Option("link", str, None, "Link function: softmax or sigmoid [sigmoid if rows have several labels]."),
    Option("steps", int, None, "Steps per run [as in hetxl train; at most 100 with --quick].", minimum=1),
    Option("config", str, None, "TOML file with other options of hetxl train."),
)
_OWN = (_DATA, *_SHARED)
"""Options of all studies that train: data, backbone and link of the user, see `hetxl_lab.studies.own_data`."""


def _pairs(name: str, title: str, paper: str, quick: float, full: float) -> Entry:
    data = Option("data", str, None, "Pairs, as for hetxl contrastive train [icons].", positional=True)
    return Entry(name, title, paper, quick, full, "pairs", (data,), "1,2,3,4,5; quick 2", "runs/study-contrastive/runs")


_TAU_OPTIONS = (
    Option("head", str, "het-xl", "Head whose τ is chosen: det, het, het-h or het-xl."),
    Option("longer", bool, False, "Also run the methods with one run for ten times as many steps: 15 more minutes."),
)
_DEFAULTS_OPTIONS = (
    Option("settings", str, None, "Settings, separated by commas, such as pycode,pycode-noisy [all]."),
    Option("heads", str, None, "Heads to compare, as for hetxl compare [all]."),
    Option("equal_time", bool, True, "Also train DET for the time that HET-XL takes."),
)
_STRANGERS_OPTIONS = (
    Option("settings", str, None, "Settings, separated by commas, such as digits,wine [all]."),
    Option("ablations", bool, True, "Also search the grid, and remove parts of the defaults."),
)
_RECOVERY_OPTIONS = (
    Option("data", str, "synthetic", "Data: synthetic, with options as in synthetic:noise=2.", positional=True),
    Option("data_seed", int, 0, "Seed for the true model and the data.", minimum=0),
)
_LEARN_OPTIONS = (
    *_OWN,
    Option("grid", bool, False, "Compare with a grid search of τ, as in the paper, instead of τ = 1."),
)
_EPOCHS_OPTIONS = (
    *_OWN,
    Option("epochs", str, None, "Numbers of epochs, such as 1,7,90 [those of the published page]."),
)
_FEW_SHOT_OPTIONS = (
    Option("run", str, None, "Run or comparison whose features are used [train on DATA].", True),
    Option("data", str, None, "Labelled data with any classes.", positional=True),
    *_SHARED,
)
_COST_OPTIONS = (Option("device", str, "cpu", "Device: cpu, cuda, …"),)
_LEVERS_OPTIONS = (
    Option("data", str, "pycode", "Data, as for hetxl train.", positional=True),
    Option("levers", str, None, "Levers, separated by commas, such as rank,samples [all]."),
)
_LOCKED_OPTIONS = (
    Option("data", str, None, "Your pairs, as for hetxl contrastive train [three sets].", positional=True),
    Option("sets", str, None, "Sets, separated by commas, such as icons,glosses [all]."),
)
_FLIPPED = Option("rate", int, 10, "Percentage of the labels to flip.", minimum=1)
_MORE_FLIPPED = replace(_FLIPPED, default=30)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("main", "Five methods compared", "Table “Method comparison on 3 datasets”", 2, 45, "methods", _OWN),
        Entry(
            "main-sigmoid",
            "Five methods compared, any number of labels",
            "Table “Method comparison on 3 datasets”, for the sigmoid link",
            2,
            2,
            "methods",
            _OWN,
        ),
        Entry("data-scale", "More training", "Tables “Effect of data scaling”", 1, 18, "methods", _OWN),
        Entry("model-scale", "Wider models", "Table “Effect of model scaling”", 0.5, 7, "methods", _OWN),
        Entry(
            "learn-tau",
            "Learning τ",
            "Tables “Ablation on the effect of learning τ”",
            1,
            30,
            "temperature",
            _LEARN_OPTIONS,
        ),
        Entry(
            "tau-epochs",
            "Learning τ on data seen once and many times",
            "Table “Learning τ for 7 and 90 epochs”",
            1,
            2,
            "temperature",
            _EPOCHS_OPTIONS,
        ),
        Entry("tau-dynamics", "The path of τ", "Figure and table “τ dynamics”", 0.5, 4, "temperature", _OWN),
        Entry("tau-range", "Start and range of τ", "Tables “Sensitivity to τ”", 0.5, 19, "temperature", _OWN),
        Entry("samples", "How many samples", "Tables “MC samples” and “Training time”", 1, 14, "costs", _OWN),
        Entry("sharing", "Sharing W", "Tables “Effect of sharing W” and “Sensitivity to M”", 1, 9, "covariance", _OWN),
        Entry("alignment", "Do W and the noise align?", "Table “Smallest principal angle”", 0.5, 3, "covariance", _OWN),
        Entry(
            "residual", "Rank-1 or diagonal", "Table “Diagonal component parameterization”", 0.5, 10, "covariance", _OWN
        ),
        Entry("latency", "Time of a step", "Figures of latency", 1, 12, "costs", _COST_OPTIONS),
        Entry("memory", "Memory of a step", "Figures of memory", 1, 12, "costs", _COST_OPTIONS),
        Entry("flops", "Operations of a step", "Table “Time complexity”, figures of FLOPs", 0.1, 0.1, "flops"),
        Entry("few-shot", "Few-shot linear evaluation", "Table “Few-shot”", 0.5, 6, "few_shot", _FEW_SHOT_OPTIONS),
        Entry("equal-params", "DET with as many parameters", "Section “Equalize DET params”", 0.5, 5, "methods", _OWN),
        Entry("tau", "Ways to choose τ", "Tables “Methods to tune τ”", 1, 35, "tau", _TAU_OPTIONS, "3"),
        _pairs("contrastive", "Contrastive learning", "Table “HET-XL LiT”", 1, 25),
        _pairs("normalisation", "When to normalise embeddings", "Table “Placements of the normalization”", 1, 15),
        _pairs("test-noise", "Noise at test time", "Section “Deterministic versus stochastic … at test time”", 1, 12),
        Entry(
            "locked-towers",
            "Locked pre-trained towers",
            "–",
            1,
            15,
            "locked_towers",
            _LOCKED_OPTIONS,
            "5; quick 5",
            "runs/study-locked-towers/runs",
        ),
        Entry("defaults", "HET-XL's defaults against a tuned DET", "–", 2, 180, "defaults", _DEFAULTS_OPTIONS, "5"),
        Entry("strangers", "The defaults on a stranger's data", "–", 3, 150, "strangers", _STRANGERS_OPTIONS),
        Entry("recovery", "How near to the true model", "–", 1, 10, "recovery", _RECOVERY_OPTIONS, "3"),
        Entry("levers", "What each default is worth", "–", None, 80, "ablations", _LEVERS_OPTIONS, "3"),
        Entry("audit", "Finding wrong labels", "–", 1, 12, "label_audit", (_FLIPPED,), "3"),
        Entry("noise-only", "Noise for a trained classifier", "–", 1, 6, "noise_only", (_MORE_FLIPPED,), "3"),
        Entry("coverage", "Prediction sets", "–", 0.5, 4, "coverage", (), "3"),
    )
}
"""In the order of lists: the paper's, then our own."""


def load_study(name: str) -> "Study":
    """Import and return the study of a name."""
    one_of("study", name, ENTRIES)
    studies = importlib.import_module(f"hetxl_lab.studies.{ENTRIES[name].module}").STUDIES
    return next(study for study in studies if study.name == name)


def minutes_text(minutes: float | None) -> str:
    """Return a cost as readable text; a dash for None."""
    if minutes is None:
        return "–"
    if minutes < 1:
        return f"{max(1, round(60 * minutes))} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def listing() -> str:
    """Return all studies, one line each, for a terminal."""
    rows = [("study", "the paper", "quick", "full")]
    rows += [
        (entry.name, entry.title if entry.paper == "–" else entry.paper, *map(minutes_text, (entry.quick, entry.full)))
        for entry in ENTRIES.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {paper:<{widths[1]}}  {quick:>{widths[2]}}  {full:>{widths[3]}}"
        for name, paper, quick, full in rows
    ]
    return "\n".join([*lines, "", "Costs are for two cores and an empty cache; studies share runs."])
