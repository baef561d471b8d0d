"""`hetxl study locked-towers`: HET-XL against DET with a locked pre-trained tower, as in LiT.

On every set of pairs the learning rate of DET is tuned first on the validation split. Then both heads are trained with
it, for as many steps and with the same seeds; HET-XL has one set of options everywhere. The test split is used once, at
the end of each run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl._checks import one_of
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.defaults import LEARNING_RATES, SEED, lowest
from hetxl_lab.studies.pairs import HEADS
from hetxl_lab.studies.profiles import Profile
from hetxl_lab.studies.runs import PairRun, pair_values
from hetxl_lab.studies.study import Lab, Study, Summary, directory_suffix, names_in
from hetxl_lab.studies.verdicts import LEVEL, against, difference_text, markdown, mean_text, p_text, sign
from hetxl_train.config import ContrastiveConfig
from hetxl_train.report.statistics import PairedTest

HET_XL: dict[str, Any] = {"noise": "text", "samples": 8, "scale_init": 10.0, "noise_learning_rate": 0.03}
"""Options of HET-XL on every set, chosen on validation pairs: lab/docs/experiments.md has what was tried."""


@dataclass(frozen=True)
class PairSet:
    """Pairs whose image side is vectors of a locked tower, with the options of their runs."""

    name: str  # in tables, and of the directories of its runs
    data: str  # as for `hetxl contrastive train`
    about: str  # what is locked, and what the texts are
    options: Mapping[str, Any] = field(default_factory=dict)
    named: bool = False  # its texts are names of classes: zero-shot accuracy is shown

    def run(self, setting: str, seed: int, blind: bool = False, **options: Any) -> PairRun:
        """Return a run with a seed; `blind` takes the test split away."""
        values = {**self.options, **options, "data": self.data, "seed": seed}
        return PairRun(f"{self.name}-{setting}", ContrastiveConfig(**values), blind)


_OPTIONS: dict[str, Any] = {
    "features": 128,
    "batch_size": 256,
    "learning_rate": 0.016,
    "scale_learning_rate": 1.0,
    "workers": 0,
}
_ICONS = "icons by EfficientNet-Lite0, trained on ImageNet ↔ their names"
_LIMITED = {**_OPTIONS, "steps": 20, "batch_size": 128}
SETS: dict[str, dict[str, PairSet]] = {
    "full": {
        "icons": PairSet("icons", "icon-vectors", _ICONS, {**_OPTIONS, "steps": 200}, named=True),
        "glosses": PairSet(
            "glosses",
            "glosses",
            "words by a sentence encoder ↔ their definitions in WordNet",
            {**_OPTIONS, "steps": 400},
        ),
        "docstrings": PairSet(
            "docstrings",
            "docstrings",
            "docstrings by a sentence encoder ↔ code of the standard library",
            {**_OPTIONS, "steps": 150},
        ),
    },
    "quick": {"icons": PairSet("icons", "icon-vectors:limit=500", _ICONS, _LIMITED, named=True)},
    "miniature": {},
}
"""By profile and name, in the order of the tables."""

JUDGED = {
    "zero_shot_top1": "zero-shot top-1",
    "test_image_to_text@1": "recall@1, locked → text",
    "test_text_to_image@1": "recall@1, text → locked",
}
"""Metrics that the conclusion counts: the first in place of the second where texts are names of classes."""
SHOWN = {
    **JUDGED,
    "zero_shot_top5": "zero-shot top-5",
    **{
        f"test_{way}@{k}": f"recall@{k}, {title}"
        for k in (5, 10)
        for way, title in (("image_to_text", "locked → text"), ("text_to_image", "text → locked"))
    },
    "nll": "NLL of the text",
}


def score(result: Mapping[str, Any]) -> float:
    """Return the mean recall at 1, 5 and 10 both ways on the validation pairs, less noisy than one of them."""
    metrics = result["metrics"]["validation"]
    recalls = [metrics[f"{way}@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    return sum(recalls) / len(recalls)


class LockedTowers(Study):
    """DET and HET-XL on every set, with the learning rate that is best for DET."""

    name = "locked-towers"
    question = "Does HET-XL help a text tower that is trained beside a locked, pre-trained tower (LiT)?"
    seed_count = 5

    def home(self, profile: Profile) -> Path:
        """Return the directory of the runs, one for each profile."""
        return Path("runs") / f"study-{self.name}{directory_suffix(profile.name, None)}" / "runs"

    def check(self, lab: Lab) -> None:
        """Raise if a set is unknown, or none is named."""
        known = SETS[lab.profile.name]
        for name in names_in(lab.options.get("sets"), ()):
            one_of("sets", name, known)
        if not sets_of(lab):
            raise ValueError("data must be set: this profile of the study has no pairs of its own")

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Tune DET and train both heads on each set; return their metrics by set."""
        measured = []
        for number, pairs in enumerate(sets := sets_of(lab), 1):
            lab.console.say(f"[{number}/{len(sets)}] {pairs.name}")
            measured.append(measure_set(lab, pairs))
        return {"options": HET_XL, "sets": measured}

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the differences of the judged metrics, in points."""
        groups = []
        for measured in summary["sets"]:
            tests = {title: comparison(measured, key, 100) for key, title in judged(measured).items()}
            groups.append((measured["set"], [(f"HET-XL, {k}", test) for k, test in tests.items() if test]))
        return plot_groups(groups, path, "points, HET-XL − DET: right is better")

    def text(self, summary: Summary) -> str:
        """Return the conclusion, the image, a table for each set, and the tuned options."""
        options = ", ".join(f"{name} = {value}" for name, value in summary["options"].items())
        parts = [
            f"# {self.entry.title}",
            f"{self.question} The vectors of the locked tower are computed once. On every set the learning rate of DET "
            "is tuned first, by recall on validation pairs; both heads then train with it for as many steps, with the "
            f"same seeds. HET-XL has one set of options on all of them{f' ({options})' if options else ''}. Evaluation "
            "is without noise. Paired t-tests over the seeds.",
            conclusion(summary),
            self.image_link,
        ]
        for measured in summary["sets"]:
            parts += [f"## {measured['set']}", set_text(measured)]
        return "\n\n".join(parts)


def sets_of(lab: Lab) -> list[PairSet]:
    """Return the sets of a call: those of the profile, or the user's pairs."""
    if data := lab.options.get("data"):
        options = {**_OPTIONS, **lab.profile.pairs.options}
        return [PairSet(Path(data.partition(":")[0]).stem, data, data, options)]
    known = SETS[lab.profile.name]
    return [known[name] for name in names_in(lab.options.get("sets"), tuple(known))]


def measure_set(lab: Lab, pairs: PairSet) -> dict[str, Any]:
    """Tune DET on a set, train both heads with its learning rate, and return the metrics over the seeds."""
    trials: dict[float, float] = {}

    def costs(rates: Sequence[float]) -> list[float]:
        runs = {rate: pairs.run(f"det-rate{rate:g}", SEED, True, head="det", learning_rate=rate) for rate in rates}
        lab.run(list(runs.values()))
        trials.update({rate: score(lab.cache.finite_result(run)) for rate, run in runs.items()})
        return [-trials[rate] for rate in rates]

    base = pairs.options["learning_rate"]
    rate = lowest(costs, [factor * base for factor in LEARNING_RATES], beyond_both=True)
    runs = {
        label: [pairs.run(head, seed, head=head, learning_rate=rate, **own) for seed in lab.seeds]
        for (label, head), own in zip(HEADS.items(), ({}, HET_XL), strict=True)
    }
    lab.run([run for both in zip(*runs.values(), strict=True) for run in both])
    results = {label: [lab.cache.finite_result(run) for run in own] for label, own in runs.items()}
    first = results["DET"][0]
    return {
        "set": pairs.name,
        "about": pairs.about,
        "named": pairs.named,
        "rows": first["data"]["rows"],
        "classes": first["metrics"]["test"]["zero_shot"]["classes"],
        "steps": first["steps"],
        "learning_rate": rate,
        "tuning": [[rate, trials[rate]] for rate in sorted(trials)],
        "heads": {label: pair_values(own) for label, own in results.items()},
        "scale": {label: [result["scale"] for result in own] for label, own in results.items()},
    }


def judged(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics of a set that the conclusion counts, with their titles."""
    left_out = "test_image_to_text" if measured["named"] else "zero_shot"  # two names for the same number
    return {key: title for key, title in JUDGED.items() if not key.startswith(left_out)}


def comparison(measured: Mapping[str, Any], metric: str, factor: float = 1.0) -> PairedTest | None:
    """Return HET-XL's metric, times a factor, less that of DET; None if a head does not have it."""
    values = [measured["heads"][label].get(metric) for label in ("HET-XL", "DET")]
    if None in values:
        return None
    return against(*({metric: [factor * value for value in own]} for own in values), metric=metric)


def conclusion(summary: Summary) -> str:
    """Return in how many comparisons HET-XL is better and worse, and where."""
    places: dict[int | None, list[str]] = {-1: [], 0: [], 1: [], None: []}
    for measured in summary["sets"]:
        for key, title in judged(measured).items():
            test = comparison(measured, key, 100)
            difference = "" if test is None else f" ({difference_text(test, 2)} points, p = {p_text(test.p)})"
            places[sign(test)].append(f"{title} on {measured['set']}{difference}")
    total = sum(map(len, places.values()))

    def named(side: int) -> str:
        return f"in {len(places[side])}" + (f" ({'; '.join(places[side])})" if places[side] else "")

    return (
        f"Of {total} comparisons of zero-shot top-1 and recall@1, HET-XL is significantly better (p < {LEVEL:g}) "
        f"{named(1)}, and significantly worse {named(-1)}."
    )


def set_text(measured: Mapping[str, Any]) -> str:
    """Return the description of a set and its table, in markdown."""
    rows = []
    for key, title in SHOWN.items():
        if key.startswith("zero_shot") and not measured["named"]:
            continue
        digits, factor = (3, 1) if key.endswith("nll") else (2, 100)
        cells = [
            mean_text(values[key], digits, factor) if key in (values := measured["heads"][label]) else "–"
            for label in HEADS
        ]
        test = comparison(measured, key, factor)
        tests = ["–", "–"] if test is None else [difference_text(test, digits), p_text(test.p)]
        rows.append([title if key.endswith("nll") else f"{title}, %", *cells, *tests])
    rows.append(["scale of the logits", *(mean_text(measured["scale"][label], 1) for label in HEADS), "–", "–"])
    table = markdown(["test pairs", *HEADS, "difference", "p"], rows).rstrip()
    tried = ", ".join(f"{100 * value:.1f} % at {rate:g}" for rate, value in measured["tuning"])
    count = measured["rows"]
    return (
        f"{measured['about'][0].upper()}{measured['about'][1:]}: {count['train']:,} training, {count['validation']:,} "
        f"validation and {count['test']:,} test pairs with {measured['classes']:,} different texts; "
        f"{measured['steps']:,} steps. DET's mean recall on validation pairs by its learning rate: {tried}.\n\n{table}"
    )


STUDIES = (LockedTowers(),)
