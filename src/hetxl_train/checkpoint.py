"""Checkpoints: safetensors and JSON, written whole or not at all, checked before they are used, never unpickled; and
the state of a model and its optimiser as tensors.

RUN/checkpoints/step-00000120/tensors.safetensors    weights, buffers, moments of the optimiser, averages
RUN/checkpoints/step-00000120/state.json             the step, the best so far, checksums of both files
RUN/checkpoints/best.json                            which step had the best validation loss
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim

from hetxl._files import read_json, sha256_of, whole_directory, write_json, write_whole

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
TENSORS, STATE, BEST = "tensors.safetensors", "state.json", "best.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to resume bit-exactly."""

    step: int  # steps done
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # for JSON


class Checkpoints:
    """The checkpoints of a run: the last few, and the best. The directory is created when the first is written."""

    def __init__(self, directory: Path, keep: int = 2):
        self.directory, self.keep = directory, keep

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""
        names = {path.name for path in self.directory.glob("step-*")}
        steps = (int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal())
        return sorted(step for step in steps if self._path(step).name in names)

    def best_step(self) -> int | None:
        """Return the step marked as having the best validation loss, if its checkpoint exists."""
        try:
            step = read_json(self.directory / BEST)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if step in self.steps() else None

    def save(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Write a checkpoint, mark it if it is the best, and remove old ones."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".step-*"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        with whole_directory(self._path(checkpoint.step)) as temporary:
            save_tensors(temporary / TENSORS, checkpoint.tensors)
            state = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}
            state["tensors_checksum"] = sha256_of(temporary / TENSORS)
            write_json(temporary / STATE, {**state, "checksum": _checksum(state)})
        if best:
            write_json(self.directory / BEST, {"step": checkpoint.step})
        recent = {*self.steps()[-self.keep :], self.best_step()}
        for step in self.steps():
            if step not in recent:
                shutil.rmtree(self._path(step))

    def load(self, step: int) -> Checkpoint:
        """Read and check one checkpoint; a CheckpointError says what is wrong with it."""
        path = self._path(step)
        changed = "was changed or cut short; its checksum does not match"
        try:
            state = read_json(path / STATE)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {STATE} cannot be read: {error}") from None
        except ValueError as error:
            raise CheckpointError(f"checkpoint {path}: {error}") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint {path}: {STATE} has no format {FORMAT} of this version of hetxl")
        if state.pop("checksum", None) != _checksum(state):
            raise CheckpointError(f"checkpoint {path}: {STATE} {changed}")
        try:
            if state.pop("tensors_checksum", None) != sha256_of(path / TENSORS):
                raise CheckpointError(f"checkpoint {path}: {TENSORS} {changed}")
            tensors = load_file(path / TENSORS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {path}: {TENSORS} cannot be read: {error}") from None
        if state.pop("step", None) != step:
            raise CheckpointError(f"checkpoint {path} was renamed: it is of another step")
        state.pop("format")
        return Checkpoint(step, tensors, state)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is whole, and what was wrong with newer ones."""
        return self._first_whole(self.steps()[::-1])

    def best(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the best checkpoint if it is whole, otherwise the newest that is, and what was wrong."""
        best = self.best_step()
        return self._first_whole([*([] if best is None else [best]), *self.steps()[::-1]])

    def _first_whole(self, steps: list[int]) -> tuple[Checkpoint | None, list[str]]:
        refused = []
        for step in steps:
            try:
                return self.load(step), refused
            except CheckpointError as error:
                refused.append(str(error))
        return None, refused

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than a step: they were refused, and the run resumes from there."""
        for newer in self.steps():
            if newer > step:
                shutil.rmtree(self._path(newer))

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, whole or not at all."""
    # Own, contiguous memory: safetensors refuses tensors that share it.
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_whole(path, lambda temporary: save_file(own, temporary))


# ---- the state of a model and its optimiser


def tensors_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Return weights and the moments of an optimiser, whose groups have "names", under their names in a checkpoint."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{key}.{name}": moments[key] for key in MOMENTS if key in moments}
    return tensors


def load_moments(optimizer: optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's moments into an optimiser."""
    for name, parameter in _named(optimizer):
        stored = {key: checkpoint.tensors[f"optimizer.{key}.{name}"] for key in MOMENTS}
        optimizer.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device, parameter.dtype)
            for key, value in stored.items()
        }


def load_weights(model: nn.Module, checkpoint: Checkpoint, averaged: bool = False) -> None:
    """Load a checkpoint's weights into a model; if asked for, the averaged ones that it has."""
    state = _with_prefix(checkpoint.tensors, "model.")
    if averaged:
        averages = _with_prefix(checkpoint.tensors, "average.")
        state |= {name: value.to(state[name].dtype) for name, value in averages.items()}
    model.load_state_dict(state)


def _named(optimizer: optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
