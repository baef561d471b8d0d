"""`hetxl train --noise-only`: add noise to the head of a finished run, learned on held-out rows."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from hetxl._seeds import derive_seed
from hetxl.functional import LabelLists
from hetxl.metrics.noise_fit import NOISE_RANK, fit_noise
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.defaults import with_defaults
from hetxl_train.distributed import find_device
from hetxl_train.evaluate_runs import data_for
from hetxl_train.model import Model, build_model
from hetxl_train.rescale import held_out_features, open_finished, rows_to_fit, write_derived
from hetxl_train.runs import Run, check_single, load_run, open_run

LABEL, FLIPS_LABEL = "HET-XL, noise-only", "DET, noise-only"
MAX_ENTRIES = 2**28
"""Maximum number of label entries, n × K, in memory."""


def add_noise_to_run(
    start: str | Path, *, data: str | None = None, out: str | None = None, seed: int = 0, device: str = "auto",
    console: Console | None = None,
) -> Run[TrainConfig]:  # fmt: skip
    """Learn noise, τ and ε for a finished DET without changing its weights, and write a new run.

    Args:
        start: directory of the run.
        data: other labelled data, its validation split or all of it; None for the run's validation split.
        out: directory of the new run [default: that of the old run with the suffix "-noise"].

    Returns:
        The new run, or the old run if noise does not lower the NLL of held-out rows.
    """
    console = console or Console()
    run, directory = open_finished(start, out, "noise")
    trained = load_run(run.path, find_device(device))
    check_single(trained, "given noise")
    head = trained.model.head
    if head.covariance is not None:
        raise ValueError(f"{run.path} already has a head with noise; use hetxl rescale {run.path} to fit its scale")
    dataset = data_for(trained)
    features, targets = held_out_features(trained, rows_to_fit(trained, dataset, data))
    fit = fit_noise(head, torch.cat(features), _dense(targets, head.num_classes), seed=derive_seed(seed, 25))
    console.say(f"Noise for {run.path.name}: {fit.describe()}")
    if not fit.helps:
        hint = f"; hetxl rescale {run.path} fits τ alone" if fit.choice == "temperature" else ""
        console.say(f"Noise does not help: {run.path} is not changed{hint}")
        return run
    config = dataclasses.replace(
        run.config, out=str(directory), temperature=str(fit.temperature), temperature_method="train",
        temperature_held_out=0.0, flip_rate=fit.flip_rate,
    )  # fmt: skip
    label = LABEL if fit.has_noise else FLIPS_LABEL
    if fit.has_noise:
        config = dataclasses.replace(config, head="het-xl", rank=NOISE_RANK, covariance="efficient", residual="rank1")
    built = with_defaults(dataclasses.replace(config, pretrained=False), dataset.input)
    noisy = build_model(built, dataset.input, head.num_classes, trained.link).head.to(trained.model.device)
    noisy.load_state_dict(head.state_dict(), strict=False)  # the classifier and the standardisation of its features
    fit.apply(noisy)
    scored = write_derived(run, config, Model(trained.model.backbone, noisy.eval()), dataset, label, fitted_to=data)
    console.say(f"{label}: {scored}, in {directory}")
    return open_run(directory)


def _dense(targets: Tensor | LabelLists, num_classes: int) -> Tensor:
    """Return class ids [n], or lists of labels as [n, K]."""
    if isinstance(targets, Tensor):
        return targets
    if targets.batch * num_classes > MAX_ENTRIES:
        raise ValueError(
            f"noise for {num_classes:,} labels takes at most {MAX_ENTRIES // num_classes:,} rows; pass fewer"
        )
    return targets.dense(num_classes)
