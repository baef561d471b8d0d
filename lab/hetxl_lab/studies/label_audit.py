"""`hetxl study audit`: does `hetxl audit` find more wrong labels than cleanlab, and what does correcting them bring?

Both have the same rows, folds and probabilities. A setting is a dataset with labels flipped to any class (symmetric) or
to a similar one (confusable).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.metrics import Neighbours
from hetxl.metrics.audit import Audit, audit
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.profiles import Profile
from hetxl_lab.studies.small_data import SMALL_DATA, Arrays, small_data, stored
from hetxl_lab.studies.study import Lab, Study
from hetxl_lab.studies.verdicts import Summary, markdown
from hetxl_train.audit import average_precision, fold_of
from hetxl_train.data.labels import Labels
from hetxl_train.formatting import decimal
from hetxl_train.report.statistics import PairedTest, mean, paired_test

KINDS = ("symmetric", "confusable")
FOLDS = 4
TOP = 0.05  # share of the labels that are corrected without a person
TEST = 0.25  # share of the rows whose labels stay right, to measure the benefit of a correction
PEER = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
OURS, MODEL = "hetxl audit", "hetxl audit, model alone"
SIZES: dict[str, dict[str, int]] = {
    "full": {"rows": 3000, "steps": 400},
    "quick": {"rows": 1500, "steps": 100},
    "miniature": {"rows": 400, "steps": 40},
}
LEVEL = 0.01


def classifier(head: str, rows: int, steps: int, seed: int) -> Any:
    """Return an untrained `HetXLClassifier` that takes about `steps` steps on `rows` rows."""
    from hetxl.integrations.sklearn import HetXLClassifier

    epochs = -(-steps // -(-rows // 256))
    return HetXLClassifier(
        head=head,
        rank=10,
        train_samples=8,
        eval_samples=64,
        max_iter=epochs,
        tol=0.0,
        random_state=seed,
    )


def cross_fitted(
    head: str,
    features: np.ndarray,
    labels: np.ndarray,
    folds: np.ndarray,
    num_classes: int,
    steps: int,
    seed: int,
) -> np.ndarray:
    """Return out-of-sample probabilities [n, K]."""
    probs = np.full((len(labels), num_classes), 1e-12)
    for fold in range(FOLDS):
        own = folds == fold
        model = classifier(head, int((~own).sum()), steps, seed).fit(features[~own], labels[~own])
        probs[np.ix_(own, model.classes_)] = model.predict_proba(features[own])
    return probs / probs.sum(1, keepdims=True)


def peer_scores(labels: np.ndarray, probs: np.ndarray) -> dict[str, np.ndarray]:
    """Return cleanlab's scores of labels [n], the larger the more suspicious."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        raise ImportError("hetxl study audit compares with cleanlab: pip install hetxl[dev]") from None
    return {name: 1 - get_label_quality_scores(labels, probs, method=name) for name in PEER}


def measure_setting(data: Arrays, kind: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return average precision of every score, of all rows and of each fold, and losses before and after correction."""
    rows = np.random.default_rng(seed).permutation(len(data.labels))
    test, train = (
        data.take(rows[: int(TEST * len(rows))]),
        data.take(rows[int(TEST * len(rows)) :]),
    )
    labels, K = train.flipped(kind, rate, seed), data.num_classes
    wrong, folds = labels != train.labels, fold_of(Labels(labels), FOLDS, seed)
    probs = {
        label: cross_fitted(head, train.features, labels, folds, K, steps, seed)
        for label, head in (("DET", "det"), ("HET-XL", "het-xl"))
    }
    scores = {
        f"cleanlab {name}, {label}": values
        for label, own in probs.items()
        for name, values in peer_scores(labels, own).items()
    }
    frequencies = neighbour_frequencies(train.features, labels, K)
    mixed = (probs["HET-XL"] + frequencies) / 2
    with_neighbours = {f"cleanlab {name}, HET-XL and neighbours": v for name, v in peer_scores(labels, mixed).items()}
    ours = audit(labels, probs["HET-XL"], train.features)
    scores |= with_neighbours | {
        MODEL: audit(labels, probs["HET-XL"]).score,
        f"{OURS}, DET": audit(labels, probs["DET"], train.features).score,
        OURS: ours.score,
    }
    precisions = {
        name: {
            "all": _precision(values, wrong),
            "folds": [_precision(values, wrong, folds == k) for k in range(FOLDS)],
        }
        for name, values in scores.items()
    }
    return {
        "average_precision": precisions,
        "flipped": float(wrong.mean()),
    } | _corrected(train, test, labels, ours, steps, seed)


def neighbour_frequencies(features: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the label frequencies of the nearest rows [n, K], as used by an audit."""
    import torch

    vectors, rows = torch.from_numpy(features), np.arange(len(labels))
    return Neighbours(vectors, torch.from_numpy(labels), num_classes).label_frequencies(vectors, rows).numpy()


def _precision(scores: np.ndarray, wrong: np.ndarray, which: np.ndarray | None = None) -> float:
    if which is not None:
        scores, wrong = scores[which], wrong[which]
    value = average_precision(wrong[np.argsort(-scores, kind="stable")])
    assert value is not None
    return value


def _corrected(
    train: Arrays,
    test: Arrays,
    labels: np.ndarray,
    result: Audit,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Return the NLL of right test labels by how the training labels are: noisy, corrected, or right."""
    top, every = labels.copy(), labels.copy()
    first = result.ranked(round(TOP * len(labels)))
    first = first.take(first.score > 0)
    top[first.rows] = first.suggestion
    suspects = result.take(result.is_suspect)
    every[suspects.rows] = suspects.suggestion
    losses, wrong = {}, {}
    for name, used in (
        ("noisy", labels),
        ("top 5 %", top),
        ("all suspects", every),
        ("right", train.labels),
    ):
        model = classifier("het-xl", len(used), steps, seed).fit(train.features, used)
        chosen = np.searchsorted(model.classes_, test.labels)
        losses[name] = float(-model.predict_log_proba(test.features)[np.arange(len(chosen)), chosen].mean())
        wrong[name] = float((used != train.labels).mean())
    return {"nll": losses, "wrong": wrong}


def measure_settings(
    lab: Lab, measure: Callable[[Arrays, str, float, int, int], dict[str, Any]], steps: int | None = None
) -> dict[str, Any]:
    """Return what every setting gave, by seed: measure(data, kind, rate, seed, steps), each stored once finished.

    Args:
        steps: number of steps of a run; None for those of `SIZES`.
    """
    size, rate = SIZES[lab.profile.name], lab.options["rate"] / 100
    steps = size["steps"] if steps is None else steps
    settings = []
    for name in study_data(lab.profile):
        data = small_data(name, size["rows"])
        for kind in KINDS:
            seeds = []
            for seed in lab.seeds:
                file = lab.directory / "parts" / f"{name}-{kind}-{lab.options['rate']}-seed{seed}.json"
                seeds.append(stored(file, lambda d=data, k=kind, s=seed: measure(d, k, rate, s, steps)))
                lab.console.say(f"{name}, {kind}, seed {seed}")
            settings.append({"data": name, "kind": kind, "rows": len(data.labels), "seeds": seeds})
    # Parts may come from earlier commands, so the time of this one is meaningless.
    return {"rate": rate, "settings": settings, "measuring_seconds": 0.0}


class LabelAudit(Study):
    """Average precision for flipped labels, compared with cleanlab's, and the loss regained by correction."""

    name = "audit"
    question = "Does hetxl audit rank wrong labels higher than cleanlab does, and what does correcting them bring?"
    seed_count = 3

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the results of every setting by seed."""
        return measure_settings(lab, measure_setting)

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw our average precision less that of cleanlab's best score."""
        groups = [(title(setting), [("HET-XL", comparison(setting)[1])]) for setting in summary["settings"]]
        return plot_groups(
            groups,
            path,
            "average precision, hetxl audit − cleanlab's best: right is better",
        )

    def text(self, summary: Summary) -> str:
        """Return the tables of scores and of corrections."""
        settings = summary["settings"]
        tests = [comparison(setting)[1] for setting in settings]
        above = sum(test.difference > 0 and (test.p or 1) < LEVEL for test in tests)
        below = sum(test.difference < 0 for test in tests)
        return "\n\n".join(
            (
                f"# {self.entry.title}",
                f"{self.question} {summary['rate']:.0%} of the labels are flipped.",
                f"In {above} of {len(settings)} settings the average precision is above that of cleanlab's best score "
                f"(p < {LEVEL}), in {below} below it. Cleanlab's best is the best, by the mean over the seeds and "
                "with the flips known, of three scores with the probabilities of DET and of HET-XL: no user could "
                "choose it without knowing them.",
                self.image_link,
                "## Average precision",
                scores_table(settings),
                f"Tests are paired over {FOLDS} folds and all seeds. The last two columns take the score apart: the "
                "model's probabilities without the labels of the nearest rows, and cleanlab's best score on the "
                "probabilities with them.",
                "## Correct, and train again",
                corrections_table(settings),
                f"NLL of right test labels by HET-XL, trained on noisy labels, on those with the most suspicious "
                f"{TOP:.0%} replaced by their suggestions, with all suspects replaced, and on right ones. Share: of "
                "the distance from noisy to right that comes back.",
            )
        )


def study_data(profile: Profile) -> Sequence[str]:
    """Return the names of the data that a profile takes."""
    return ("digits", "twins") if profile.name == "miniature" else tuple(SMALL_DATA)


def title(setting: Mapping[str, Any]) -> str:
    """Return the name of a setting."""
    return f"{setting['data']}, {setting['kind']}"


def over(setting: Mapping[str, Any], name: str) -> list[float]:
    """Return the average precision of a score, by seed."""
    return [seed["average_precision"][name]["all"] for seed in setting["seeds"]]


def best_of(setting: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the score with the highest mean over the seeds."""
    return max(names, key=lambda name: mean(over(setting, name)).value)


def peers(setting: Mapping[str, Any], neighbours: bool = False) -> list[str]:
    """Return the names of cleanlab's scores, by the model's probabilities alone or with the neighbours."""
    names = [name for name in setting["seeds"][0]["average_precision"] if name.startswith("cleanlab")]
    return [name for name in names if name.endswith("neighbours") == neighbours]


def comparison(setting: Mapping[str, Any]) -> tuple[str, PairedTest]:
    """Return cleanlab's best score, and ours less that one, paired over folds and seeds."""
    best = best_of(setting, peers(setting))
    ours, theirs = (
        [value for seed in setting["seeds"] for value in seed["average_precision"][name]["folds"]]
        for name in (OURS, best)
    )
    return best, paired_test(ours, theirs)


def scores_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of average precisions."""
    rows = []
    for setting in settings:
        best, test = comparison(setting)
        p = "–" if test.p is None else f"{test.p:.1g}"
        cell = [decimal(mean(over(setting, name)).value, 3) for name in (best, OURS, MODEL)]
        mixed = decimal(
            mean(over(setting, best_of(setting, peers(setting, neighbours=True)))).value,
            3,
        )
        name = best.removeprefix("cleanlab ").replace("_", " ")
        rows.append(
            [
                title(setting),
                f"{cell[0]} ({name})",
                cell[1],
                f"{test.difference:+.3f}",
                p,
                cell[2],
                mixed,
            ]
        )
    header = [
        "setting",
        "cleanlab's best",
        OURS,
        "difference",
        "p",
        "model alone",
        "cleanlab with neighbours",
    ]
    return markdown(header, rows).rstrip()


def corrections_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of losses before and after correction."""
    rows = []
    for setting in settings:
        losses = {name: [seed["nll"][name] for seed in setting["seeds"]] for name in setting["seeds"][0]["nll"]}
        cells = [decimal(mean(values).value, 3) for values in losses.values()]
        gap = mean(losses["noisy"]).value - mean(losses["right"]).value
        back = [(mean(losses["noisy"]).value - mean(losses[name]).value) / gap for name in ("top 5 %", "all suspects")]
        left = mean([seed["wrong"]["all suspects"] for seed in setting["seeds"]]).value
        rows.append([title(setting), *cells, *(f"{share:.0%}" for share in back), f"{left:.1%}"])
    header = [
        "setting",
        "noisy",
        "top 5 %",
        "all suspects",
        "right",
        "share, top 5 %",
        "share, all",
        "wrong then",
    ]
    return markdown(header, rows).rstrip()


STUDIES = (LabelAudit(),)
