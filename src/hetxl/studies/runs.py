"""What the studies do alike with data and runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetxl.training.files import read_json

METRICS = ("nll", "precision@1", "precision@5", "calibration_error", "brier")

Result = Mapping[str, Any]
"""What result.json of a run holds."""


def results_in(directory: Path) -> dict[str, dict[str, Any]]:
    """The results of the finished runs below a directory, by the names of theirs."""
    return {
        path.parent.name: read_json(path)
        for path in sorted(directory.glob("*/result.json"), key=lambda path: str(path))
    }


def over_seeds(results: Iterable[Result], split: str = "test") -> dict[str, Any]:
    """What some runs that differ in their seeds found, as lists in the order of the seeds.

    Args:
        results: of at least one run.
        split: that the metrics are of.
    """
    runs = sorted(results, key=lambda run: run["seed"])
    values: dict[str, Any] = {name: [run["metrics"][split][name] for run in runs] for name in METRICS}
    values["validation_nll"] = [run["metrics"]["validation"]["nll"] for run in runs]
    values["train_seconds"] = [run["train_seconds"] for run in runs]
    values["steps"] = runs[0]["steps"]
    values["temperature"] = [run["temperature"] for run in runs]
    values["noise_scale"] = [run.get("noise_scale", 1.0) for run in runs]  # runs of before had no other
    values["parameters"] = runs[0]["parameters"]["total"]
    values["seeds"] = [run["seed"] for run in runs]
    return values


def by_label(results: Mapping[str, Result], labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`over_seeds` for every label that has runs, in the order of the labels."""
    found = {label: [run for run in results.values() if run["label"] == label] for label in dict.fromkeys(labels)}
    return {label: over_seeds(runs) for label, runs in found.items() if runs}
