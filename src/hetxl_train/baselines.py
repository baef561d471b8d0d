"""Baselines derived from finished runs of DET: an ensemble, and last-layer Laplace."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl._files import read_json
from hetxl.metrics import fit_laplace
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset
from hetxl_train.defaults import spread_rows
from hetxl_train.distributed import find_device
from hetxl_train.model import ensemble_of
from hetxl_train.rescale import held_out_features, write_derived
from hetxl_train.runs import load_run, open_run

ENSEMBLE, LAPLACE = "DET ensemble", "DET + Laplace"
LAPLACE_ROWS = 20_000
"""Number of evenly spread training rows that measure the curvature, which is scaled to all rows."""


def add_laplace(source: Path, directory: Path, dataset: Dataset, console: Console) -> None:
    """Fit a posterior over the last layer of a DET run and save it as a new run, which predicts in closed form.

    A finished run is not changed.
    """
    if (directory / "result.json").exists():
        return
    begin = time.perf_counter()
    config = open_run(source).config
    trained = load_run(source, device := find_device(config.device))
    model, split = trained.model, dataset.splits["train"]
    rows = spread_rows(len(split), LAPLACE_ROWS)
    held_out, targets = held_out_features(trained, dataset.splits.get("validation", split))
    features = (batch.to(device) for batch, _ in trained.features(split, rows))
    laplace = fit_laplace(model.head, features, [batch.to(device) for batch in held_out], targets, rows=len(split))
    model.head = laplace
    spent = read_json(source / "result.json")["train_seconds"] + time.perf_counter() - begin
    facts = {"train_seconds": spent, "laplace_prior": laplace.prior, "fitted_to": "validation"}
    own = dataclasses.replace(config, out=str(directory))
    scored = write_derived(trained.run, own, model, dataset, LAPLACE, method="probit", about={"laplace": True}, **facts)
    console.say(f"{LAPLACE}: prior variance of the logits {laplace.prior:g}, {scored}")


def add_ensemble(sources: Sequence[Path], directory: Path, dataset: Dataset, console: Console) -> None:
    """Save a new run that averages the probabilities of several DET runs; a finished run is not changed."""
    if (directory / "result.json").exists():
        return
    run = open_run(sources[0])
    members = [load_run(source, find_device(run.config.device)) for source in sources]
    seconds = sum(read_json(source / "result.json")["train_seconds"] for source in sources)
    facts: dict[str, Any] = {"members": len(sources), "train_seconds": seconds}
    model = ensemble_of([member.model for member in members]).eval()
    own = dataclasses.replace(run.config, out=str(directory))
    scored = write_derived(run, own, model, dataset, ENSEMBLE, about={"members": len(sources)}, **facts)
    console.say(f"{ENSEMBLE}: {len(sources)} members, {scored}")
