"""A run's directory: what is written there, and reading a trained model back from it.

config.json        every option            model.json          what the model is: inputs, classes, link
log.jsonl          losses and evaluations  checkpoints/        to go on from
model.safetensors  the trained weights     result.json, curves.json, confusions.json, examples.json, records/
label_noise.npz    labels that were replaced, where that was asked for
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hetxl.data.dataset import Dataset, InputSpec
from hetxl.data.fingerprint import changes, fingerprint
from hetxl.training.checkpoint import Checkpoints
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json, write_json
from hetxl.training.model import Model, build_model
from hetxl.training.state import load_weights

NOT_PART_OF_THE_RUN = ("out", "workers", "device", "tensorboard", "keep", "log_every")
"""Options that may differ when a run is taken up again: they change nothing in its result."""
BEGUN = ("log.jsonl", "checkpoints", "features", "model.safetensors", "result.json")
"""What a run has, or some of it, once it has begun."""


@dataclass(frozen=True)
class Run:
    """A directory and the configuration of what is in it."""

    path: Path
    config: TrainConfig

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return (self.path / "result.json").exists()

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        return Checkpoints(self.path / "checkpoints", self.config.keep)


@dataclass(frozen=True)
class Trained:
    """A model that was read back.

    Attributes:
        run: where from.
        model: with its trained weights, in evaluation mode.
        spec: what inputs it takes.
        class_names: K of them.
        link: of its head.
        class_counts: training examples of each class; None if unknown.
    """

    run: Run
    model: Model
    spec: InputSpec
    class_names: list[str]
    link: str
    class_counts: list[int] | None


def default_directory(config: TrainConfig) -> Path:
    """runs/DATA-HEAD, from the last part of the data's name."""
    name = Path(config.data.split(":")[0]).stem or "data"
    return Path("runs") / f"{name}-{config.head}"


def start_run(config: TrainConfig, directory: Path) -> Run:
    """Make the directory of a run, or take up the one that is there if it is of the same configuration."""
    prepare(directory, config, lambda: open_run(directory).config)
    return Run(directory, config)


def check_same(config: TrainConfig, directory: Path) -> None:
    """Raise unless the run in a directory has the same options, but for those that change nothing."""
    compare_options(config, lambda: open_run(directory).config, directory)


def prepare(directory: Path, config: Any, stored: Callable[[], Any]) -> None:
    """Make a run's directory with its config.json, or raise where another run or other files are.

    Args:
        directory: of the run.
        config: a dataclass of options with `to_dict`.
        stored: reads the options of the run that is there.
    """
    if (directory / "config.json").exists():
        compare_options(config, stored, directory)
    elif directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} has files but no run in it; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config.to_dict())


def compare_options(config: Any, read: Callable[[], Any], directory: Path) -> None:
    """Raise unless the run in a directory has the same options, but for those that change nothing.

    A run that ended before its first step, as one of options that do not go together, is nothing to go on with, and may
    have any.

    Args:
        config: a dataclass of options.
        read: gives those of the run that is there.
        directory: of that run.
    """
    if not any((directory / name).exists() for name in BEGUN):
        return
    stored = read()
    # Beside steps, epochs say nothing.
    left_out = {*NOT_PART_OF_THE_RUN, *(["epochs"] if stored.steps is not None else [])}
    differing = [
        f"{field.name} {getattr(stored, field.name)!r} there, {getattr(config, field.name)!r} here"
        for field in dataclasses.fields(config)
        if field.name not in left_out and getattr(stored, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise ValueError(
            f"{directory} holds a run with other options ({'; '.join(differing[:4])}"
            f"{'; …' if len(differing) > 4 else ''}); choose another --out, or remove it"
        )


def describe_model(run: Run, dataset: Dataset, link: str, temperature: str = "1.0") -> None:
    """Write what is needed to build the model again without its data; `temperature` as it was decided."""
    counts = dataset.splits["train"].labels.counts(dataset.num_classes).tolist()
    write_json(
        run.path / "model.json",
        {
            "input": dataclasses.asdict(dataset.input),
            "link": link,
            "temperature": temperature,
            "dataset": dataset.name,
            "class_names": list(dataset.class_names),
            "class_counts": counts,
            "data": fingerprint(dataset),
        },
    )


def check_data(run: Run, dataset: Dataset, splits: Sequence[str], instead: str) -> None:
    """Raise where data has changed since a run was begun; those of before fingerprints were kept are believed.

    Args:
        run: with its model.json.
        dataset: the run's own data as it is now.
        splits: which of its splits matter.
        instead: what to do about it.
    """
    path = run.path / "model.json"
    then = read_json(path).get("data") if path.exists() else None
    found = None if then is None else changes(then, fingerprint(dataset), splits)
    if found is not None:
        raise ValueError(
            f"{run.config.data} is not what {run.path} was trained on: {found}. Rows to be tested on may be among "
            f"those it has learned from; {instead}"
        )


def save_model(run: Run, model: Model) -> None:
    """Write the weights that prediction uses."""
    write_weights(model, run.path / "model.safetensors")


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the weights of a model, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}, temporary
    )
    temporary.chmod(0o644)  # as the files beside it
    temporary.replace(path)


def open_run(path: str | Path) -> Run:
    """The run in a directory."""
    directory = Path(path)
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} is no run: it has no config.json; give the directory that hetxl train wrote")
    config = TrainConfig.from_dict(read_json(directory / "config.json"), str(directory / "config.json"))
    return Run(directory, config)


def load_run(path: str | Path, device: torch.device | str = "cpu") -> Trained:
    """The trained model of a run; of one that has not ended, the weights of its best or last checkpoint.

    Args:
        path: its directory.
        device: where the model goes.
    """
    run = open_run(path)
    try:
        about: dict[str, Any] = read_json(run.path / "model.json")
        spec = InputSpec(about["input"]["kind"], tuple(about["input"]["shape"]), about["input"]["vocabulary"])
        names, link = about["class_names"], about["link"]
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{run.path / 'model.json'} cannot be read ({error}); train again in another --out") from None
    # What τ is was decided by the data. Runs of before that was so have 1.
    temperature = about.get("temperature", "1.0") if run.config.temperature == "auto" else run.config.temperature
    # The trained weights are in the run: published ones need not be fetched again.
    config = dataclasses.replace(run.config, pretrained=False, temperature=temperature)
    model = build_model(config, spec, len(names), link)
    weights = run.path / "model.safetensors"
    if weights.exists():
        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{weights} cannot be used: {' '.join(str(error).split())[:300]}") from None
    else:
        checkpoint, refused = run.checkpoints.best()
        if checkpoint is None:
            raise ValueError(f"{run.path} has no weights yet: {refused[0] if refused else 'no checkpoint was written'}")
        try:
            load_weights(model, checkpoint, averaged=bool(run.config.ema))
        except RuntimeError:  # with a frozen backbone, checkpoints hold the head alone
            raise ValueError(
                f"{run.path} has not ended, and its checkpoints do not hold the whole model; let hetxl train finish it"
            ) from None
    return Trained(run, model.to(device).eval(), spec, names, link, about.get("class_counts"))
