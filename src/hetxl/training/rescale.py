"""What validation labels can still mend in a trained head: its temperature, and how much of its noise is left in."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data.dataset import Dataset
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.scaling import Scales, fit_scales, fit_temperature
from hetxl.nn import FixedTemperature
from hetxl.training.features import feature_batches
from hetxl.training.files import read_json, write_json
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.results import evaluate_split, result_of, write_evaluation
from hetxl.training.run import Run, load_run, open_run, save_model, start_run
from hetxl.training.train import open_data


def rescale(run: Run, directory: Path, dataset: Dataset, narrator: Narrator, label: str, *, noise: bool = True) -> None:
    """A head rescaled to the validation split, as a run of its own: τ (Guo et al.), and how much noise is left in.

    Args:
        run: finished.
        directory: of the new run.
        dataset: it was trained on.
        narrator: tells the result.
        label: how tables call it.
        noise: whether the scale of the noise is fitted too, where there is noise; otherwise τ alone.
    """
    if (directory / "result.json").exists():
        return
    trained = load_run(run.path)
    model, split = trained.model, dataset.splits.get("validation", dataset.splits["train"])
    rows = np.arange(len(split))
    limit = run.config.evaluation_examples
    if limit and limit < len(rows):
        rows = np.sort(np.random.default_rng(0).choice(rows, limit, replace=False))
    device = next(model.parameters()).device
    features, read = zip(*feature_batches(model.backbone, split, rows, run.config.workers, device), strict=True)
    seed = derive(run.config.seed, 15)
    targets = split.labels.take(np.concatenate(read))
    if noise:
        found = fit_scales(model.head, features, targets, seed=seed)
    else:
        found = Scales(fit_temperature(model.head, features, targets, seed=seed), model.head.noise_scale)
    model.head.temperature, model.head.noise_scale = FixedTemperature(found.temperature), found.noise
    # Whatever a τ that learns was told is past.
    fitted: dict[str, Any] = {
        "temperature": str(found.temperature),
        "noise_scale": found.noise,
        "temperature_method": "train",
        "temperature_held_out": 0.0,
    }
    config = dataclasses.replace(run.config, out=str(directory), **fitted)
    scaled = start_run(config, directory)
    save_model(scaled, model)
    write_json(directory / "model.json", read_json(run.path / "model.json"))
    counts = np.asarray(trained.class_counts)
    name = "test" if "test" in dataset.splits else "validation"
    options = {"seed": seed, "workers": config.workers, "class_names": dataset.class_names}
    validation = evaluate_split(model, split, limit=limit, quiet=True, **options)
    evaluation = evaluate_split(model, dataset.splits[name], limit=config.test_examples, confusions=True, **options)
    metrics = {"validation": summarise(validation.records, counts)}
    metrics[name] = write_evaluation(directory, evaluation, dataset, name, counts)
    before = read_json(run.path / "result.json")
    carried = {key: before[key] for key in ("head", "seed", "data", "train_seconds", "steps", "examples")}
    result = result_of(label, model, dataset, metrics, evaluation, derived_from=run.path.name, **carried)
    write_json(directory / "result.json", result)
    told = f"τ = {found.temperature:.3f}" + (f", noise × {found.noise:g}" if found.noise != 1 else "")
    narrator.say(f"{label}: {told}, {name} NLL {metrics[name]['nll']:.3f}")


def rescale_run(
    directory: Path | str,
    out: Path | None = None,
    *,
    validation: str | None = None,
    noise: bool = True,
    narrator: Narrator | None = None,
) -> Run:
    """`hetxl rescale`: a trained run with the scales that fit its validation split, or other labels, beside it.

    Args:
        directory: of a finished run; it is left as it is.
        out: directory of the new run; that of the run with "-scaled" behind it without.
        validation: data with labels to fit to, in the place of the run's own.
        noise: whether the scale of the noise is fitted too.
        narrator: tells the result.
    """
    run = open_run(Path(directory))
    if not run.finished:
        raise ValueError(f"{run.path} has not ended; give the command again that trained it, and rescale it then")
    if validation is not None:
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, validation=validation))
    dataset = open_data(run.config)
    if "validation" not in dataset.splits:
        raise ValueError(f"data {run.config.data!r} has no validation split to fit to; give one with --validation")
    place = run.path.with_name(f"{run.path.name}-scaled") if out is None else out
    if (place / "result.json").exists():
        raise ValueError(f"{place} is there already; remove it, or choose another --out")
    label = f"{read_json(run.path / 'result.json')['label']} + scaling"
    rescale(run, place, dataset, narrator or Narrator(), label, noise=noise)
    return open_run(place)
