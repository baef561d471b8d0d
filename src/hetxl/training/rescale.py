"""What labels can still mend in a trained head: its temperature, and the scale of its noise."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data.dataset import Dataset, Split
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.scaling import Scales, fit_scales, fit_temperature
from hetxl.nn import FixedTemperature
from hetxl.training.distributed import find_device
from hetxl.training.evaluation import data_for
from hetxl.training.features import feature_batches
from hetxl.training.files import read_json, write_json
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.results import LABELS, evaluate_split, result_of, write_evaluation
from hetxl.training.run import Run, Trained, load_run, open_run, save_model, start_run

SCALED, SCALED_XL = "DET + temperature scaling", "HET-XL + scaling"
SCALABLE = {"det": SCALED, "het-xl": SCALED_XL}
"""Heads that comparisons also show rescaled, and how tables call them then."""


def rescale(
    run: Run,
    directory: Path,
    dataset: Dataset,
    narrator: Narrator,
    label: str | None = None,
    *,
    noise: bool = True,
    fitted_to: Split | None = None,
    told: str | None = None,
    device: str = "cpu",
) -> None:
    """A head rescaled to labels that its training did not see, as a run of its own: τ (Guo et al.), and its noise.

    Args:
        run: finished.
        directory: of the new run; one that is finished is left as it is.
        dataset: it was trained on.
        narrator: tells the result.
        label: how tables call it; by its head without.
        noise: whether the scale of the noise is fitted too, where there is noise; otherwise τ alone.
        fitted_to: the examples to fit to; the validation split without, or where there is none that of training.
        told: where `fitted_to` is from, for result.json.
        device: where to compute.
    """
    if (directory / "result.json").exists():
        return
    trained = load_run(run.path, find_device(device))
    model, own = trained.model, dataset.splits.get("validation", dataset.splits["train"])
    seed = derive(run.config.seed, 15)
    found = _fit(trained, own if fitted_to is None else fitted_to, seed, noise)
    model.head.temperature, model.head.noise_scale = FixedTemperature(found.temperature), found.noise
    # Whatever a τ that learns was told is past.
    changed: dict[str, Any] = {
        "temperature": str(found.temperature),
        "noise_scale": found.noise,
        "temperature_method": "train",
        "temperature_held_out": 0.0,
    }
    config = dataclasses.replace(run.config, out=str(directory), **changed)
    scaled = start_run(config, directory)
    save_model(scaled, model)
    write_json(directory / "model.json", read_json(run.path / "model.json"))
    counts = np.asarray(trained.class_counts)
    name = "test" if "test" in dataset.splits else "validation"
    options = {"seed": seed, "workers": config.workers, "class_names": dataset.class_names}
    validation = evaluate_split(model, own, limit=config.evaluation_examples, quiet=True, **options)
    evaluation = evaluate_split(model, dataset.splits[name], limit=config.test_examples, confusions=True, **options)
    metrics = {"validation": summarise(validation.records, counts)}
    metrics[name] = write_evaluation(directory, evaluation, dataset, name, counts)
    before = read_json(run.path / "result.json")
    carried = {key: before[key] for key in ("head", "seed", "data", "train_seconds", "steps", "examples")}
    label = label or SCALABLE.get(config.head, f"{LABELS[config.head]} + scaling")
    result = result_of(
        label,
        model,
        dataset,
        metrics,
        evaluation,
        derived_from=run.path.name,
        fitted_to=told or "validation",
        **carried,
    )
    write_json(directory / "result.json", result)
    scales = f"τ = {found.temperature:.3f}" + (f", noise × {found.noise:g}" if found.noise != 1 else "")
    narrator.say(f"{label}: {scales}, {name} NLL {metrics[name]['nll']:.3f}")


def _fit(trained: Trained, split: Split, seed: int, noise: bool) -> Scales:
    """On at most as many examples as evaluations in training look at."""
    model, config = trained.model, trained.run.config
    rows = np.arange(len(split))
    limit = config.evaluation_examples
    if limit and limit < len(rows):
        rows = np.sort(np.random.default_rng(0).choice(rows, limit, replace=False))
    device = next(model.parameters()).device
    features, read = zip(*feature_batches(model.backbone, split, rows, config.workers, device), strict=True)
    targets = split.labels.take(np.concatenate(read))
    if noise:
        return fit_scales(model.head, features, targets, seed=seed)
    return Scales(fit_temperature(model.head, features, targets, seed=seed), model.head.noise_scale)


def rescale_run(
    directory: Path | str,
    out: Path | None = None,
    *,
    validation: str | None = None,
    noise: bool = True,
    device: str = "auto",
    narrator: Narrator | None = None,
) -> Run:
    """`hetxl rescale`: a trained run with the scales that fit its validation split, or other labels, beside it.

    Args:
        directory: of a finished run; it is left as it is.
        out: directory of the new run; that of the run with "-scaled" behind it without.
        validation: other data with labels to fit to, all of it or its validation split, in the place of the run's own.
        noise: whether the scale of the noise is fitted too.
        device: where to compute.
        narrator: tells the result.
    """
    run = open_run(Path(directory).resolve())  # the name of "." is that of the folder
    if not run.finished:
        raise ValueError(f"{run.path} has not ended; give the command again that trained it, and rescale it then")
    place = run.path.with_name(f"{run.path.name}-scaled") if out is None else out
    if (place / "result.json").exists():
        raise ValueError(f"{place} is there already; remove it, or choose another --out")
    trained = load_run(run.path)
    dataset, split = data_for(trained), None
    if validation is not None:
        other = data_for(trained, validation).splits
        split = other.get("validation", other.get("test"))
        if split is None:
            raise ValueError(f"--validation {validation} has a training split alone; give labels to fit to")
    elif "validation" not in dataset.splits:
        raise ValueError(f"data {run.config.data!r} has no validation split to fit to; give one with --validation")
    options: dict[str, Any] = {"noise": noise, "fitted_to": split, "told": validation, "device": device}
    rescale(run, place, dataset, narrator or Narrator(), **options)
    return open_run(place)
