"""The directory of a contrastive run: what is written there, and reading a trained model back from it.

config.json        every option            model.json          what the towers get
log.jsonl          losses and evaluations  checkpoints/        to go on from
model.safetensors  the trained weights     result.json, examples.json
swaps.npz          pairs that were swapped, where that was asked for
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hetxl.contrastive.config import ContrastiveConfig
from hetxl.contrastive.model import Specs, TwoTowers, build_towers
from hetxl.data.dataset import InputSpec
from hetxl.training.checkpoint import Checkpoints
from hetxl.training.files import read_json, write_json
from hetxl.training.run import prepare, write_weights
from hetxl.training.state import load_weights

CONFIG, MODEL, WEIGHTS, RESULT = "config.json", "model.json", "model.safetensors", "result.json"


@dataclass(frozen=True)
class ContrastiveRun:
    """A directory and the configuration of what is in it."""

    path: Path
    config: ContrastiveConfig

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return (self.path / RESULT).exists()

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        return Checkpoints(self.path / "checkpoints", self.config.keep)


class TrainedTowers(NamedTuple):
    """A model that was read back.

    Attributes:
        run: whose it is.
        model: in evaluation mode.
        specs: what its towers get.
    """

    run: ContrastiveRun
    model: TwoTowers
    specs: Specs


def default_directory(config: ContrastiveConfig) -> Path:
    """runs/contrastive-DATA-HEAD, from the last part of the data's name."""
    name = Path(config.data.split(":")[0]).stem or "data"
    return Path("runs") / f"contrastive-{name}-{config.head}"


def start_run(config: ContrastiveConfig, directory: Path) -> ContrastiveRun:
    """Make the directory of a run, or take up the one that is there if it is of the same configuration.

    Args:
        config: of the run.
        directory: for it.
    """
    prepare(directory, config, lambda: open_run(directory).config)
    return ContrastiveRun(directory, config)


def open_run(path: str | Path) -> ContrastiveRun:
    """The run in a directory.

    Args:
        path: of the directory.
    """
    directory = Path(path)
    file = directory / CONFIG
    if not file.exists():
        raise ValueError(f"{directory} is no run: it has no {CONFIG}; give what hetxl contrastive train wrote")
    values = read_json(file)
    if not isinstance(values, dict) or "towers" not in values:
        raise ValueError(f"{file} is not of a contrastive run; give what hetxl contrastive train wrote")
    return ContrastiveRun(directory, ContrastiveConfig.from_dict(values, str(file)))


def describe_model(run: ContrastiveRun, specs: Specs) -> None:
    """Write what is needed to build the model again without its data.

    Args:
        run: whose model it is.
        specs: what its towers get.
    """
    image, text = dataclasses.asdict(specs.image), None if specs.text is None else dataclasses.asdict(specs.text)
    write_json(run.path / MODEL, {"image": image, "text": text})


def save_model(run: ContrastiveRun, model: TwoTowers) -> None:
    """Write the trained weights, whole or not at all.

    Args:
        run: whose they are.
        model: trained.
    """
    write_weights(model, run.path / WEIGHTS)


def load_run(path: str | Path, device: torch.device | str = "cpu") -> TrainedTowers:
    """The trained model of a run; of one that has not ended, the weights of its last checkpoint.

    Args:
        path: its directory.
        device: where the model goes.
    """
    run = open_run(path)
    try:
        about: dict[str, Any] = read_json(run.path / MODEL)
        specs = Specs(_spec(about["image"]), None if about["text"] is None else _spec(about["text"]))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{run.path / MODEL} cannot be read ({error}); train again in another --out") from None
    model = build_towers(run.config, specs)
    weights = run.path / WEIGHTS
    if weights.exists():
        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{weights} cannot be used: {' '.join(str(error).split())[:300]}") from None
    else:
        checkpoint, refused = run.checkpoints.latest()
        if checkpoint is None:
            raise ValueError(f"{run.path} has no weights yet: {refused[0] if refused else 'no checkpoint was written'}")
        load_weights(model, checkpoint)
    return TrainedTowers(run, model.to(device).eval(), specs)


def _spec(values: dict[str, Any]) -> InputSpec:
    return InputSpec(values["kind"], tuple(values["shape"]), values["vocabulary"])
