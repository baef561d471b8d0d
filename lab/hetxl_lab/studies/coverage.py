"""`hetxl study coverage`: do prediction sets contain the label as often as requested, and how large are they?

A DET and a HET-XL are trained on half of the rows. The other half is divided at random, many times, into rows that
calibrate the sets and rows that measure them. With wrong labels in training and calibration rows, coverage is measured
for such labels, to which the guarantee applies, and for the right ones.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl.metrics import ScoreOptions, calibrate, class_bands
from hetxl.metrics.conformal import class_scores
from hetxl.metrics.summary import BANDS
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.label_audit import classifier, study_data
from hetxl_lab.studies.small_data import SMALL_DATA, Arrays, stored
from hetxl_lab.studies.study import Lab, Study
from hetxl_lab.studies.verdicts import Summary, markdown
from hetxl_train.data.pycode import load_pycode
from hetxl_train.report.statistics import PairedTest, mean, paired_test

COVERAGE = 0.9
TRAIN = 0.5  # share of the rows
RATES = (0.0, 0.1)  # shares of wrong labels
PEER = "DET, aps"
METHODS: dict[str, tuple[str, str, str]] = {
    PEER: ("det", "aps", "marginal"),
    "HET-XL, aps": ("het-xl", "aps", "marginal"),
    "HET-XL, raps": ("het-xl", "raps", "marginal"),
    "HET-XL, lac": ("het-xl", "lac", "marginal"),
    "HET-XL, raps, class": ("het-xl", "raps", "class"),
    "HET-XL, raps, clustered": ("het-xl", "raps", "clustered"),
}
"""Head, score and grouping, by name."""
ONE_THRESHOLD = [name for name, (_, _, grouping) in METHODS.items() if grouping == "marginal"]
BY_GROUP = [name for name in METHODS if name not in ONE_THRESHOLD]
OURS = "HET-XL, raps"
"""That of `hetxl calibrate` by default."""
SIZES = {
    "full": {"rows": 10_000, "steps": 400, "halves": 20},
    "quick": {"rows": 2000, "steps": 100, "halves": 5},
    "miniature": {"rows": 400, "steps": 40, "halves": 2},
}
CLASSES, CONTEXT, WIDTH = 200, 3, 24  # of `pycode_rows`: classes, tokens of the input, and numbers that stand for each


def pycode_rows(rows: int) -> Arrays:
    """Return the next of the commonest tokens of Python's source, by random numbers for each of those before it."""
    splits = load_pycode(classes=CLASSES, context=CONTEXT, limit=rows).splits
    train = splits["train"]
    tokens = train.fetch(np.arange(len(train))).inputs.numpy()
    numbers = np.random.default_rng(0).normal(size=(int(tokens.max()) + 1, WIDTH))
    return Arrays(numbers[tokens].reshape(len(tokens), -1).astype(np.float32), np.asarray(train.labels.ids))


def rows_of(name: str, limit: int) -> Arrays:
    """Return at most `limit` rows of a dataset at random, with the classes that have ten of them or more."""
    data = pycode_rows(limit) if name == "pycode" else SMALL_DATA[name]()
    data = data.take(np.random.default_rng(0).permutation(len(data.labels))[:limit])
    frequent = np.bincount(data.labels) >= 10
    chosen = frequent[data.labels]
    return Arrays(data.features[chosen], np.unique(data.labels[chosen], return_inverse=True)[1])


def measure_setting(data: Arrays, rate: float, seed: int, steps: int, halves: int) -> dict[str, Any]:
    """Return coverage and size of the sets of each method, means over the halvings of the held-out rows."""
    order = np.random.default_rng(seed).permutation(len(data.labels))
    data = data.take(order)
    observed = data.flipped("symmetric", rate, seed) if rate else data.labels
    first = int(TRAIN * len(order))
    probs = {}
    for head in ("det", "het-xl"):
        model = classifier(head, first, steps, seed).fit(data.features[:first], observed[:first])
        probs[head] = np.zeros((len(order) - first, data.num_classes))
        probs[head][:, model.classes_] = model.predict_proba(data.features[first:])
    bands = class_bands(np.bincount(observed[:first], minlength=data.num_classes))
    held_out = (observed[first:], data.labels[first:], bands)
    return {
        name: measure_sets(torch.from_numpy(probs[head]), *held_out, score, grouping, seed, halves)
        for name, (head, score, grouping) in METHODS.items()
    }


def measure_sets(
    probs: torch.Tensor, observed: np.ndarray, right: np.ndarray, bands: np.ndarray, score: str, grouping: str,
    seed: int, halves: int,
) -> dict[str, Any]:  # fmt: skip
    """Return coverage of observed and right labels, overall and by band of the observed ones, and the mean size.

    Args:
        probs: [n, K]
        observed: [n], labels that calibrate.
        right: [n]
        bands: [K] of the classes.
        score: one of `hetxl.metrics.conformal.SCORES`.
        grouping: of the thresholds.
        seed: of ties and of the halvings.
        halves: number of random divisions of the rows into two halves.
    """
    options, generator = ScoreOptions(score), np.random.default_rng(seed)
    count, num_classes = probs.shape
    ordered, ids = class_scores(probs, torch.from_numpy(generator.random(count)), options)
    scores = torch.empty_like(ordered).scatter_(1, ids, ordered).numpy()  # [n, K] by class
    rows = np.arange(count)
    hits, sizes, in_band = [], [], []
    for _ in range(halves):
        own = np.isin(rows, generator.permutation(count)[: count // 2])
        fitted = calibrate(scores[rows, observed][own], observed[own], num_classes, COVERAGE, options, grouping, seed)
        inside = scores[~own] <= fitted.thresholds
        sizes.append(inside.sum(1).mean())
        hit = inside[np.arange(len(inside)), observed[~own]]
        hits.append((hit.mean(), inside[np.arange(len(inside)), right[~own]].mean()))
        in_band.append([hit[bands[observed[~own]] == band].mean() for band in range(len(BANDS))])
    coverage, coverage_right = np.mean(hits, axis=0).tolist()
    return {
        "coverage": coverage,
        "coverage_right": coverage_right,
        "bands": np.mean(in_band, axis=0).tolist(),
        "size": float(np.mean(sizes)),
    }


class Coverage(Study):
    """Coverage and size of prediction sets, overall, by class frequency, and with wrong labels."""

    name = "coverage"
    question = "Do prediction sets hold the label as often as was asked for, and are they small?"
    seed_count = 3

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the results of every setting by seed, and store each as soon as it is known."""
        names = [*study_data(lab.profile), *(() if lab.profile.name == "miniature" else ("pycode",))]
        settings = [part for name in names for part in self._measure(lab, name)]
        return {"settings": settings, "halves": SIZES[lab.profile.name]["halves"], "measuring_seconds": 0.0}

    def _measure(self, lab: Lab, name: str) -> list[dict[str, Any]]:
        """Return the results of a dataset with right and with wrong labels."""
        size, settings = SIZES[lab.profile.name], []
        data = rows_of(name, size["rows"])
        for rate in RATES:
            about = {"data": name, "rate": rate, "rows": len(data.labels), "num_classes": data.num_classes}
            seeds = []
            for seed in lab.seeds:
                compute = functools.partial(measure_setting, data, rate, seed, size["steps"], size["halves"])
                seeds.append(stored(lab.directory / "parts" / f"{name}-{rate:g}-seed{seed}.json", compute))
                lab.console.say(f"{title(about)}, seed {seed}")
            settings.append({**about, "seeds": seeds})
        return settings

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the size of our sets over that of APS of DET."""
        groups = [(title(setting), [("HET-XL", size_ratio(setting))]) for setting in summary["settings"]]
        return plot_groups(groups, path, f"log of the size of sets, {OURS} over {PEER}: left is smaller")

    def text(self, summary: Summary) -> str:
        """Return the tables of coverage, size and bands."""
        settings = summary["settings"]
        smaller = sum(size_ratio(setting).difference <= 0 for setting in settings)
        sentences = [
            f"{self.question} {COVERAGE:.0%} was asked for. Means over {summary['halves']} random divisions of the "
            f"held-out rows into two halves; seeds: {len(settings[0]['seeds'])}. With one threshold for all "
            f"classes the coverage is within {100 * furthest(settings, ONE_THRESHOLD, 'coverage'):.1f} % of that in "
            f"each of {len(settings)} settings; with thresholds by class or by cluster within "
            f"{100 * furthest(settings, BY_GROUP, 'coverage'):.1f} %: few examples of a class make its threshold high.",
            f"Those of HET-XL that `hetxl calibrate` makes by default, by the score raps, are not larger than those of "
            f"DET by the score aps in {smaller} of {len(settings)} settings.",
        ]
        return "\n\n".join(
            (
                f"# {self.entry.title}",
                " ".join(sentences),
                self.image_link,
                "## Coverage and size",
                sets_table(settings),
                "Coverage of observed labels, which are wrong as often as those of the calibration rows: the guarantee "
                "is about them. Right: the share of right labels in the same sets of HET-XL (raps).",
                "## Coverage by class frequency",
                bands_table(settings),
                f"Classes by frequency in the training rows, each band with a third of them: {', '.join(BANDS)}. "
                "Furthest from what was asked for: "
                + ", ".join(f"{100 * furthest(settings, [name], 'bands'):.1f} % ({name})" for name in METHODS)
                + ".",
            )
        )


def title(setting: Mapping[str, Any]) -> str:
    """Return the name of a setting."""
    return f"{setting['data']}, {setting['rate']:.0%} wrong" if setting["rate"] else str(setting["data"])


def value(setting: Mapping[str, Any], method: str, key: str) -> float:
    """Return the mean of a number over the seeds."""
    return mean([seed[method][key] for seed in setting["seeds"]]).value


def furthest(settings: Sequence[Mapping[str, Any]], methods: Sequence[str], key: str) -> float:
    """Return the largest deviation of a mean coverage, overall or of a band, from the requested coverage."""
    means = [
        np.mean([seed[name][key] for seed in setting["seeds"]], axis=0) for setting in settings for name in methods
    ]
    return float(np.abs(np.array(means) - COVERAGE).max())


def size_ratio(setting: Mapping[str, Any]) -> PairedTest:
    """Return the logarithm of the size of our sets less that of the sets of DET."""
    ours, theirs = (np.log([seed[name]["size"] for seed in setting["seeds"]]).tolist() for name in (OURS, PEER))
    return paired_test(ours, theirs)


def sets_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of coverage and mean size."""
    rows = []
    for setting in settings:
        cells = [
            f"{100 * value(setting, name, 'coverage'):.1f} %, {value(setting, name, 'size'):.2f}" for name in METHODS
        ]
        right = f"{100 * value(setting, OURS, 'coverage_right'):.1f} %"
        rows.append([title(setting), str(setting["num_classes"]), *cells, right])
    return markdown(["setting", "classes", *METHODS, "right"], rows).rstrip()


def bands_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of coverage by band."""
    rows = []
    for setting in settings:
        cells = []
        for name in METHODS:
            bands = np.mean([seed[name]["bands"] for seed in setting["seeds"]], axis=0)
            cells.append(" / ".join(f"{100 * band:.1f}" for band in bands))
        rows.append([title(setting), *cells])
    return markdown(["setting, coverage in %", *METHODS], rows).rstrip()


STUDIES = (Coverage(),)
