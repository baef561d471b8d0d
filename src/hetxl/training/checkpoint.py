"""Checkpoints: safetensors and JSON, written whole or not at all, checked before they are used, never unpickled.

RUN/checkpoints/step-00000120/tensors.safetensors    weights, buffers, moments of the optimiser, averages
RUN/checkpoints/step-00000120/state.json             the step, the best so far, checksums of both files
RUN/checkpoints/best.json                            which step had the best validation loss
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetxl.data.build.files import sync
from hetxl.training.files import read_json, write_json

FORMAT = 1
TENSORS, STATE, BEST = "tensors.safetensors", "state.json", "best.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Attributes:
        step: how many steps are done.
        tensors: by name.
        state: anything JSON holds.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run: the last few, and the best.

    Args:
        directory: of the checkpoints; made when the first is written.
        keep: how many of the last to keep.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self.directory, self.keep = directory, keep

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are there, rising."""
        names = {path.name for path in self.directory.glob("step-*")}
        steps = (int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal())
        return sorted(step for step in steps if self._path(step).name in names)

    def best_step(self) -> int | None:
        """The step with the best validation loss, if one was marked and is there."""
        try:
            step = read_json(self.directory / BEST)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if step in self.steps() else None

    def save(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Write a checkpoint, mark it if it is the best, and remove those that are no longer kept."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".step-*"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = self.directory / f".{self._path(checkpoint.step).name}.{os.getpid()}"
        temporary.mkdir()
        # Own, contiguous memory: safetensors refuses tensors that share it.
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in checkpoint.tensors.items()},
                  temporary / TENSORS)  # fmt: skip
        state = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}
        state["tensors_checksum"] = _checksum_of_file(temporary / TENSORS)
        write_json(temporary / STATE, {**state, "checksum": _checksum(state)})
        _sync_file(temporary / TENSORS)
        sync(temporary)
        place = self._path(checkpoint.step)
        if place.exists():  # written before by a run that was then killed: the same, or refused as damaged
            shutil.rmtree(place)
        os.replace(temporary, place)
        sync(self.directory)
        if best:
            write_json(self.directory / BEST, {"step": checkpoint.step})
        kept = {*self.steps()[-self.keep :], self.best_step()}
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self._path(step))

    def load(self, step: int) -> Checkpoint:
        """Read and check one checkpoint; CheckpointError says what is wrong with it."""
        place = self._path(step)
        try:
            state = read_json(place / STATE)
        except OSError as error:
            raise CheckpointError(f"checkpoint {place}: {STATE} cannot be read: {error}") from None
        except ValueError as error:
            raise CheckpointError(f"checkpoint {place}: {error}") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint {place}: {STATE} has no format {FORMAT} of this version of hetxl")
        if state.pop("checksum", None) != _checksum(state):
            raise CheckpointError(f"checkpoint {place}: {STATE} was changed or cut short; its checksum does not match")
        try:
            matches = state.pop("tensors_checksum", None) == _checksum_of_file(place / TENSORS)
            if not matches:
                raise CheckpointError(
                    f"checkpoint {place}: {TENSORS} was changed or cut short; its checksum does not match"
                )
            tensors = load_file(place / TENSORS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {place}: {TENSORS} cannot be read: {error}") from None
        if state.pop("step", None) != step:
            raise CheckpointError(f"checkpoint {place} was renamed: it is of another step")
        state.pop("format")
        return Checkpoint(step, tensors, state)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what was wrong with newer ones."""
        refused = []
        for step in reversed(self.steps()):
            try:
                return self.load(step), refused
            except CheckpointError as error:
                refused.append(str(error))
        return None, refused

    def best(self) -> tuple[Checkpoint | None, list[str]]:
        """The best checkpoint if it is whole, otherwise the newest that is, and what was wrong."""
        step = self.best_step()
        refused = []
        if step is not None:
            try:
                return self.load(step), refused
            except CheckpointError as error:
                refused.append(str(error))
        found, others = self.latest()
        return found, refused + others

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than a step: they were refused, and the run goes on from there."""
        for newer in self.steps():
            if newer > step:
                shutil.rmtree(self._path(newer))

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _checksum_of_file(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in _pieces(file):
            found.update(piece)
    return found.hexdigest()


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(2**22):
        yield piece


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
