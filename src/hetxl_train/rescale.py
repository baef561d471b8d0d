"""Fit the temperature and the noise scale of a trained head to labels."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hetxl._files import read_json, write_checked
from hetxl._seeds import derive_seed, some_rows
from hetxl.functional import LabelLists
from hetxl.metrics.scaling import Scales, fit_scales, fit_temperature
from hetxl.metrics.summary import summarise
from hetxl.nn import FixedTemperature
from hetxl.nn.heads import CLEAN_NOISE
from hetxl.registry import HEAD_LABELS
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset, Split
from hetxl_train.distributed import find_device
from hetxl_train.evaluate import evaluate_split
from hetxl_train.evaluate_runs import data_for
from hetxl_train.model import Model, answers_of
from hetxl_train.owner import owned
from hetxl_train.runs import Run, Trained, check_single, load_run, open_run, save_model, start_run
from hetxl_train.tasks.classification import result_of, write_evaluation

SCALED, SCALED_XL = "DET + temperature scaling", "HET-XL + scaling"
CLEAN, CLEAN_XL = "DET, clean labels", "HET-XL, clean labels"
CLEANABLE = {"det": CLEAN, "het-xl": CLEAN_XL}
"""Heads for which comparisons also show predictions of the true class instead of the observed label, where training
labels are known or estimated to be wrong; and the names of these predictions in tables."""
SCALABLE = {"det": SCALED, "het-xl": SCALED_XL}
"""Heads that comparisons also show rescaled, and the names of the rescaled heads in tables."""


def rescale(
    run: Run[TrainConfig], directory: Path, dataset: Dataset, console: Console, label: str | None = None, *,
    noise: bool = True, clean: bool = False, fitted_to: Split | None = None, source: str | None = None,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Fit τ (Guo et al.) and the noise scale of a head to labels that it was not trained on; save a new run.

    Args:
        run: a finished run on the dataset.
        directory: directory of the new run; a finished run there does not change.
        label: name in tables; by default that of the head.
        noise: whether to fit the noise scale too, if the head has noise; otherwise fit only τ.
        clean: fit nothing, but scale the noise like `head.predict(target="clean")`.
        fitted_to: the examples to fit to; by default the validation split, or without one the training split.
        source: name of `fitted_to` in result.json.
    """
    if (directory / "result.json").exists():
        return
    trained = load_run(run.path, find_device(device))
    model, own = trained.model, dataset.splits.get("validation", dataset.splits["train"])
    if clean:
        scales = Scales(float(model.head.temperature()), CLEAN_NOISE * model.head.noise_scale)
        model.head.flip_rate = 0.0
    else:
        if fitted_to is not None:
            model.head.flip_rate = 0.0  # these labels are trusted
        scales = _fit(trained, own if fitted_to is None else fitted_to, noise)
    model.head.temperature, model.head.noise_scale = FixedTemperature(scales.temperature), scales.noise
    config = dataclasses.replace(
        run.config, out=str(directory), temperature=str(scales.temperature), noise_scale=scales.noise,
        temperature_method="train", temperature_held_out=0.0,  # have no effect on a fixed τ
    )  # fmt: skip
    label = label or SCALABLE.get(config.head, f"{HEAD_LABELS[config.head]} + scaling")
    scored = write_derived(run, config, model, dataset, label, fitted_to=None if clean else source or "validation")
    text = f"τ = {scales.temperature:.3f}" + (f", noise × {scales.noise:g}" if scales.noise != 1 else "")
    console.say(f"{label}: {text}, {scored}")


def write_derived(
    run: Run[TrainConfig], config: TrainConfig, model: Model, dataset: Dataset, label: str, *, method: str = "mc",
    about: Mapping[str, Any] | None = None, **facts: Any,
) -> str:  # fmt: skip
    """Evaluate a model derived from a finished run and save it as a new run; return its NLL as text.

    Args:
        config: configuration of the new run, with its directory.
        method: how to predict, as in `head.predict`.
        about: entries of model.json that differ from those of the run.
        facts: additional entries of result.json.
    """
    with owned(Path(str(config.out))) as directory:
        return _write_derived(start_run(config, directory), run, model, dataset, label, method, about or {}, facts)


def _write_derived(
    derived: Run[TrainConfig], run: Run[TrainConfig], model: Model, dataset: Dataset, label: str, method: str,
    about: Mapping[str, Any], facts: Mapping[str, Any],
) -> str:  # fmt: skip
    config, directory, stored = derived.config, derived.path, read_json(run.path / "model.json", dict)
    save_model(derived, model)
    write_checked(directory / "model.json", stored | {"answers": answers_of(model)} | dict(about))
    counts = np.asarray(stored.get("class_counts"))
    name = "test" if "test" in dataset.splits else "validation"
    options = {"workers": config.workers, "class_names": dataset.class_names, "method": method}
    options["seed"] = derive_seed(run.config.seed, 15)
    own = dataset.splits.get("validation", dataset.splits["train"])
    validation = evaluate_split(model, own, limit=config.evaluation_examples, quiet=True, **options)
    evaluation = evaluate_split(model, dataset.splits[name], limit=config.test_examples, confusions=True, **options)
    metrics = {"validation": summarise(validation.records, counts)}
    metrics[name] = write_evaluation(directory, evaluation, dataset, name, counts)
    before = read_json(run.path / "result.json")
    carried = {key: before[key] for key in ("head", "seed", "data", "train_seconds", "steps", "examples")}
    result = {
        "label": label,
        **result_of(model, dataset, metrics, evaluation),
        "derived_from": run.path.name,
        **carried,
        **facts,
    }
    write_checked(directory / "result.json", result)
    return f"{name} NLL {metrics[name]['nll']:.3f}"


def held_out_features(trained: Trained, split: Split) -> tuple[tuple[Tensor, ...], Tensor | LabelLists]:
    """Return batches of features [b, D] and the labels, of at most as many examples as validation in the run uses."""
    rows = some_rows(np.arange(len(split)), trained.run.config.evaluation_examples or len(split))
    features, read = zip(*trained.features(split, rows), strict=True)
    return features, split.labels.take(np.concatenate(read))


def _fit(trained: Trained, split: Split, noise: bool) -> Scales:
    head, seed = trained.model.head, derive_seed(trained.run.config.seed, 15)
    features, targets = held_out_features(trained, split)
    if noise:
        return fit_scales(head, features, targets, seed=seed)
    return Scales(fit_temperature(head, features, targets, seed=seed), head.noise_scale)


def rescale_run(
    path: Path | str, out: Path | None = None, *, validation: str | None = None, noise: bool = True,
    device: str = "auto", console: Console | None = None,
) -> Run[TrainConfig]:  # fmt: skip
    """Rescale a finished run to its validation split or to other labels, as a new run (`hetxl rescale`).

    Args:
        out: directory of the new run [default: the directory of the run with the suffix "-scaled"].
        validation: other labelled data to fit to (its validation split, or else all of it); None for the run's own.
        noise: whether to fit the noise scale too.
    """
    run, directory = open_finished(path, out, "scaled")
    trained = load_run(run.path)
    check_single(trained, "rescaled")
    dataset = data_for(trained)
    split = rows_to_fit(trained, dataset, validation)
    fitted_to = None if validation is None else split
    options: dict[str, Any] = {"noise": noise, "fitted_to": fitted_to, "source": validation, "device": device}
    rescale(run, directory, dataset, console or Console(), **options)
    return open_run(directory)


def open_finished(path: Path | str, out: Path | str | None, suffix: str) -> tuple[Run[TrainConfig], Path]:
    """Return a finished run and the directory of a new run derived from it, by default its name with a suffix.

    Raise if the run is not finished, or the new one already is.
    """
    run = open_run(Path(path).resolve())  # resolved, so that "." has a name
    if not run.finished:
        raise ValueError(f"{run.path} has not ended; rerun the command that trained it first")
    directory = run.path.with_name(f"{run.path.name}-{suffix}") if out is None else Path(out)
    if (directory / "result.json").exists():
        raise ValueError(f"{directory} exists already; remove it, or choose another --out")
    return run, directory


def rows_to_fit(trained: Trained, dataset: Dataset, data: str | None) -> Split:
    """Return rows to fit to that a run was not trained on: its validation split, or one of other data."""
    splits = dataset.splits if data is None else data_for(trained, data).splits
    split = splits.get("validation", None if data is None else splits.get("test"))
    if split is None:
        raise ValueError(
            f"{data or trained.run.config.data!r} has no validation split to fit to; "
            "pass labelled data that the run was not trained on"
        )
    return split
