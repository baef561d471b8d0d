"""`hetxl calibrate`: prediction sets and answers with a guarantee, calibrated on examples that a run has not seen."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl._files import read_checked, reading, write_checked
from hetxl._seeds import derive_seed
from hetxl.functional import LabelLists
from hetxl.metrics.conformal import Conformal, ScoreOptions, calibrate, label_scores, label_thresholds, risk_threshold
from hetxl.metrics.summary import BANDS, class_bands
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset, Split
from hetxl_train.distributed import find_device
from hetxl_train.evaluate_runs import data_for
from hetxl_train.runs import Trained, load_run

FILE = "calibration.json"
MAX_ENTRIES = 2**28
"""Maximum number of probabilities, n × K, in memory to choose label thresholds."""


@dataclass(frozen=True)
class Calibration:
    """The calibration of a run, which `predict` uses."""

    conformal: Conformal | None = None
    risk: float | None = None  # error rate of the answers at or above the confidence
    confidence: float | None = None
    thresholds: np.ndarray | None = None  # [K], minimum probability of each label (several labels)

    @property
    def needs_all(self) -> bool:
        """Return whether it needs the probabilities of all classes."""
        return self.conformal is not None or self.thresholds is not None

    @staticmethod
    def load(run: Path) -> "Calibration":
        """Read the calibration of a run."""
        path = run / FILE
        if not path.exists():
            raise FileNotFoundError(f"{run} is not calibrated; run hetxl calibrate {run} first")
        again = f"run hetxl calibrate {run} again"
        about, conformal = read_checked(path, again), None
        with reading(path, again):
            if "coverage" in about:
                limits = np.array([np.inf if value is None else float(value) for value in about["class_thresholds"]])
                options = ScoreOptions(**about["score"])
                conformal = Conformal(about["coverage"], options, limits, about["grouping"], about["examples"])
            labels = about.get("label_thresholds")
            thresholds = None if labels is None else np.array([np.inf if v is None else float(v) for v in labels])
            return Calibration(conformal, about.get("risk"), about.get("confidence"), thresholds)


def calibrate_run(
    run: str | Path, data: str | None = None, *, coverage: float | None = None, score: str = "raps",
    grouping: str = "marginal", risk: float | None = None, precision: float | None = None, labels: str | None = None,
    device: str = "auto", seed: int = 0, console: Console | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate a run, write calibration.json into its directory, and return its content.

    Args:
        data: labelled data that the run has not seen; None for its validation split, and then the test split, if any,
            measures the coverage.
        coverage: coverage of prediction sets, such as 0.9.
        score: one of `hetxl.metrics.conformal.SCORES`.
        grouping: one of `hetxl.metrics.conformal.GROUPINGS`.
        risk: maximum error rate of answers, such as 0.05.
        precision: several labels: precision of every label; None for the best F1 of each.
        labels: file with the labels of `data`.
    """
    console = console or Console()
    trained = load_run(run, find_device(device), console)
    dataset = data_for(trained, data, labels)
    name = "test" if data is not None else "validation"
    if name not in dataset.splits:
        raise ValueError(f"{trained.run.path} has no validation split; pass labelled data that the run has not seen")
    about: dict[str, Any] = {"data": data or "validation split", "examples": len(dataset.splits[name])}
    if trained.link == "sigmoid":
        if coverage is not None or risk is not None:
            raise ValueError("coverage and risk need one label per row; with several labels, pass only --precision")
        about |= _several_labels(trained, dataset.splits[name], precision, seed, console)
    else:
        if coverage is None and risk is None:
            raise ValueError(
                "pass --coverage for prediction sets, --risk for answers with a maximum error rate, or both"
            )
        about |= _one_label(trained, dataset, name, coverage, ScoreOptions(score), grouping, risk, seed, console)
    write_checked(trained.run.path / FILE, about)
    return about


def _several_labels(
    trained: Trained, split: Split, precision: float | None, seed: int, console: Console
) -> dict[str, Any]:
    classes = len(trained.class_names)
    if len(split) * classes > MAX_ENTRIES:
        rows = MAX_ENTRIES // classes
        raise ValueError(f"calibrating {classes:,} labels takes at most {rows:,} rows, got {len(split):,}; pass fewer")
    probs, labels = [], []
    for part, targets, _ in predicted(trained, split, seed, console):
        lists = targets
        if isinstance(lists, Tensor):  # the sigmoid link with one label per row
            lists = LabelLists.from_lists([[label] for label in lists.tolist()])
        probs.append(part.float().cpu().numpy())
        labels.append(lists.dense(classes).cpu().numpy())
    thresholds = label_thresholds(np.concatenate(probs), np.concatenate(labels), precision)
    return {"precision": precision, "label_thresholds": _finite(thresholds)}


def _one_label(
    trained: Trained, dataset: Dataset, name: str, coverage: float | None, options: ScoreOptions, grouping: str,
    risk: float | None, seed: int, console: Console,
) -> dict[str, Any]:  # fmt: skip
    about: dict[str, Any] = {}
    scores, labels, confidence, correct = [], [], [], []
    for probs, targets, u in predicted(trained, dataset.splits[name], seed, console):
        assert isinstance(targets, Tensor)
        scores.append(label_scores(probs, targets, u, options).cpu().numpy())
        labels.append(targets.numpy())
        top = probs.max(-1)
        confidence.append(top.values.double().cpu().numpy())
        correct.append((top.indices.cpu() == targets).numpy())
    every = np.concatenate(labels)
    if coverage is not None:
        classes = len(trained.class_names)
        conformal = calibrate(np.concatenate(scores), every, classes, coverage, options, grouping, seed)
        about |= {"coverage": coverage, "score": asdict(options), "grouping": grouping}
        about["class_thresholds"] = _finite(conformal.thresholds)
        if name == "validation" and "test" in dataset.splits:
            about["test"] = measure_sets(trained, dataset.splits["test"], conformal, seed, console)
    if risk is not None:
        limit, share = risk_threshold(np.concatenate(confidence), np.concatenate(correct), risk)
        about |= {"risk": risk, "confidence": None if np.isinf(limit) else limit, "answered": share}
    return about


def measure_sets(trained: Trained, split: Split, conformal: Conformal, seed: int, console: Console) -> dict[str, Any]:
    """Return coverage and mean size of a split's sets, over all examples and by the frequency of their classes."""
    hits, sizes, labels = [], [], []
    for probs, targets, u in predicted(trained, split, seed + 1, console):
        assert isinstance(targets, Tensor)
        for label, chosen in zip(targets.tolist(), conformal.sets(probs, u), strict=True):
            hits.append(label in chosen)
            sizes.append(len(chosen))
            labels.append(label)
    hit, size = np.array(hits), np.array(sizes)
    about: dict[str, Any] = {"examples": len(hit), "coverage": float(hit.mean()), "set_size": float(size.mean())}
    if trained.class_counts is not None:
        band = class_bands(np.asarray(trained.class_counts))[np.array(labels)]
        for number, name in enumerate(BANDS):
            if (band == number).any():
                about[f"coverage_{name}"] = float(hit[band == number].mean())
                about[f"set_size_{name}"] = float(size[band == number].mean())
    return about


def predicted(
    trained: Trained, split: Split, seed: int, console: Console
) -> Iterator[tuple[Tensor, Tensor | LabelLists, Tensor]]:
    """Yield probabilities [b, K], labels and uniform numbers [b] of the labelled rows of a split."""
    if not len(rows := split.labels.labelled()):
        raise ValueError("the data has no labelled rows to calibrate on")
    uniform = torch.Generator().manual_seed(derive_seed(seed, 24))
    bar = console.bar("calibrating", len(rows))
    for _, prediction, some in trained.predictions(split, rows, derive_seed(seed, 23), bar):
        u = torch.rand(len(some), generator=uniform, dtype=torch.float64).to(prediction.probs.device)
        yield prediction.probs, split.labels.take(some), u


def _finite(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON, with null for infinity."""
    return [float(value) if np.isfinite(value) else None for value in values]
