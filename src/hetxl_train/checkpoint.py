"""Write and read checkpoints, and convert the state of a model and its optimiser to tensors.

Checkpoints are safetensors and JSON, written atomically, verified before use and never unpickled.

RUN/checkpoints/step-00000120/tensors.safetensors    weights, buffers, moments of the optimiser, averaged weights
RUN/checkpoints/step-00000120/tensors/               the same if processes divide the weights: one file per process
RUN/checkpoints/step-00000120/state.json             the step, the best loss so far, checksums of all files
RUN/checkpoints/best.json                            the step with the best validation loss
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from hetxl._files import read_checked, read_json, sha256_of, whole_directory, write_checked
from hetxl._tensors import read_tensors, write_tensors
from hetxl_train.distributed import START, World
from hetxl_train.parallel import divided_like, load_state

FORMAT = 1
NUMBERS, GROUPS = "optimizer_numbers", "optimizer_groups"  # optimiser state that is not stored as tensors
TENSORS, PARTS, STATE, BEST = "tensors.safetensors", "tensors", "state.json", "best.json"


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to resume bit-exactly."""

    step: int  # number of steps done
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # as JSON


class Identity(Protocol):
    """Values that identify a run."""

    def as_dict(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        ...

    def difference(self, stored: Any) -> str | None:
        """Describe how the identity in a checkpoint differs from this one; None if it does not."""
        ...


class Checkpoints:
    """Store the last few checkpoints of a run and the best one. The first write creates the directory.

    If an identity is passed, checkpoints store it, and a checkpoint with another identity is refused.

    Attributes:
        divided: parameters, by name, of which this process holds a part; it reads only its part of them and of their
            moments.
    """

    def __init__(self, directory: Path, keep: int = 2, identity: Identity | None = None):
        self.directory, self.keep, self.identity = directory, keep, identity
        self.divided: Mapping[str, DTensor] = {}
        self._group: Any = None  # the process group that writes parts

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""
        names = {path.name for path in self.directory.glob("step-*")}
        steps = (int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal())
        return sorted(step for step in steps if self._path(step).name in names)

    def best_step(self) -> int | None:
        """Return the step marked as having the best validation loss, if its checkpoint exists."""
        with contextlib.suppress(CheckpointError):
            return self._marked()
        return None

    def _marked(self) -> int | None:
        """Return the step marked as the best; raise a CheckpointError if the mark is damaged."""
        try:
            step = read_json(self.directory / BEST, dict)["step"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{error}; the newest checkpoint is taken for the best") from None
        return step if step in self.steps() else None

    def save(self, checkpoint: Checkpoint, world: World | None = None) -> None:
        """Write a checkpoint and remove old ones; all processes of `world` call this, and the main process writes.

        Every process writes its parts of divided tensors.
        """
        world = world or World(torch.device("cpu"))
        world.on_main(self._remove_leftovers)
        parts = self.directory / f".{self._path(checkpoint.step).name}.{PARTS}"
        checksums: dict[str, str] = {}
        if any(isinstance(value, DTensor) for value in checkpoint.tensors.values()):
            checksums = self._write_parts(parts, checkpoint.tensors, world)
        world.on_main(lambda: self._write(checkpoint, parts, checksums))

    def _remove_leftovers(self) -> None:
        """Remove the partial files of a process that was killed while it wrote."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _write_parts(self, directory: Path, tensors: dict[str, Tensor], world: World) -> dict[str, str]:
        """Write the parts of all processes as safetensors; return the checksum of each file in the main process."""
        from torch.distributed import checkpoint as dcp  # a large import that other runs do not need

        # Writing can take long, so its collectives use a group without a short time-out.
        self._group = self._group or dist.new_group(backend="gloo", timeout=START)
        writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
        # The main process writes tensors that are equal in all processes, such as the statistics of batch norms.
        own = {name: value for name, value in tensors.items() if world.is_main or isinstance(value, DTensor)}
        dcp.save(own, storage_writer=writer, process_group=self._group)
        names = sorted(path.name for path in directory.iterdir())
        checksums = world.gather(lambda: {name: sha256_of(directory / name) for name in world.share(names)})
        return {name: checksum for some in checksums for name, checksum in some.items()}

    def _write(self, checkpoint: Checkpoint, parts: Path, checksums: dict[str, str]) -> None:
        """Write a checkpoint. If there are `checksums`, its tensors are already in `parts`."""
        with whole_directory(self._path(checkpoint.step)) as temporary:
            state = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}
            if self.identity is not None:
                state["run"] = self.identity.as_dict()
            if checksums:
                parts.rename(temporary / PARTS)
                state["parts_checksums"] = checksums
            else:
                write_tensors(temporary / TENSORS, checkpoint.tensors)
                state["tensors_checksum"] = sha256_of(temporary / TENSORS)
            write_checked(temporary / STATE, state)
        self._remove_old()

    def update(self, step: int, state: dict[str, Any], best: bool) -> None:
        """Replace entries of a checkpoint's state, mark the checkpoint if it is the best, and remove old ones."""
        path = self._path(step) / STATE
        stored = {**read_json(path, dict), **state}
        if best:
            write_checked(self.directory / BEST, {"step": step})
        write_checked(path, stored)
        self._remove_old()

    def _remove_old(self) -> None:
        recent = {*self.steps()[-self.keep :], self.best_step()}
        for step in self.steps():
            if step not in recent:
                shutil.rmtree(self._path(step))

    def load(self, step: int) -> Checkpoint:
        """Read and verify one checkpoint; raise a CheckpointError if it cannot be used."""
        path = self._path(step)
        changed = "was changed or cut short; its checksum does not match"
        try:
            state = read_checked(path / STATE, "an older checkpoint is used if there is one")
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {STATE} cannot be read: {error}") from None
        except ValueError as error:
            raise CheckpointError(f"checkpoint {path}: {error}") from None
        if state.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint {path}: {STATE} has no format {FORMAT} of this version of hetxl")
        parts = state.pop("parts_checksums", {})
        if not isinstance(parts, dict) or not all(Path(name).name == name for name in parts):
            raise CheckpointError(f"checkpoint {path}: {STATE} names no files of its own, but {parts!r:.80}")
        checksums = {f"{PARTS}/{name}": checksum for name, checksum in parts.items()}
        checksums = checksums or {TENSORS: state.pop("tensors_checksum", None)}
        name = TENSORS
        try:
            for name, checksum in checksums.items():
                if checksum != sha256_of(path / name):
                    raise CheckpointError(f"checkpoint {path}: {name} {changed}")
            whole_file = TENSORS in checksums and not self.divided
            tensors = read_tensors(path / TENSORS).tensors if whole_file else self._read_parts(path, checksums)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read: {error}") from None
        if state.pop("step", None) != step:
            raise CheckpointError(f"checkpoint {path} was renamed: it is of another step")
        state.pop("format")
        stored = state.pop("run", None)  # older checkpoints have none
        if self.identity is not None and stored is not None and (difference := self.identity.difference(stored)):
            raise CheckpointError(f"checkpoint {path} is of another run: {difference}")
        return Checkpoint(step, tensors, state)

    def _read_parts(self, path: Path, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors from files: this process's part of divided tensors, and other tensors in full."""
        from torch.distributed import checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str((path / next(iter(names))).parent))
        stored: Any = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
        for name in stored:
            like = next((value for key, value in self.divided.items() if name.endswith(f".{key}")), None)
            if like is not None and like.shape == tensors[name].shape:
                tensors[name] = torch.empty_like(like, dtype=tensors[name].dtype)
        with warnings.catch_warnings():
            # Each process reads independently, as intended; torch warns that it assumes so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, and the errors of newer ones."""
        return self._first_whole(self.steps()[::-1])

    def best(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the best checkpoint if it is valid, otherwise the newest valid one, and the errors of damaged ones."""
        try:
            best, damaged = self._marked(), []
        except CheckpointError as error:
            best, damaged = None, [str(error)]
        checkpoint, refused = self._first_whole([*([] if best is None else [best]), *self.steps()[::-1]])
        return checkpoint, damaged + refused

    def _first_whole(self, steps: list[int]) -> tuple[Checkpoint | None, list[str]]:
        refused = []
        for step in steps:
            try:
                return self.load(step), refused
            except CheckpointError as error:
                refused.append(str(error))
        return None, refused

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than a step: they were refused, and the run resumes from that step."""
        for newer in self.steps():
            if newer > step:
                shutil.rmtree(self._path(newer))

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


# ---- the state of a model and its optimiser


def tensors_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Return weights and optimiser state by their names in a checkpoint; the optimiser's groups must have "names"."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                prefix = "optimizer" if isinstance(value, Tensor) else NUMBERS
                tensors[f"{prefix}.{key}.{name}"] = _as_tensor(value)
    for index, group in enumerate(optimizer.param_groups):
        if "step" in group:  # some optimisers count steps per group
            tensors[f"{GROUPS}.step.{index}"] = _as_tensor(group["step"])
    return tensors


def _as_tensor(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


ADAMW = frozenset(("step", "exp_avg", "exp_avg_sq"))
"""AdamW's state of each parameter."""


def load_moments(optimizer: optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state into an optimiser."""
    by_name: dict[str, dict[str, Any]] = {}
    parameters = dict(_named(optimizer))
    for prefix in ("optimizer.", f"{NUMBERS}."):
        for stored, value in _with_prefix(checkpoint.tensors, prefix).items():
            key, _, name = stored.partition(".")
            if name in parameters and value.shape == parameters[name].shape:
                value = divided_like(value, parameters[name])
            by_name.setdefault(name, {})[key] = value if prefix == "optimizer." else value.item()
    names = list(parameters)
    if by_name and (differing := set(names) ^ set(by_name)):
        raise KeyError(min(differing))
    if isinstance(optimizer, optim.AdamW):  # other optimisers with incomplete state fail in torch or reset moments
        for name, state in by_name.items():
            for key in ADAMW.difference(state):
                raise KeyError(f"optimizer.{key}.{name}")
    groups = optimizer.state_dict()["param_groups"]
    for stored, value in _with_prefix(checkpoint.tensors, f"{GROUPS}.step.").items():
        groups[int(stored)]["step"] = value.item()
    # Load through torch, which knows on which device to count the steps.
    state = {index: by_name[name] for index, name in enumerate(names) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_weights(model: nn.Module, checkpoint: Checkpoint, averaged: bool = False) -> None:
    """Load a checkpoint's weights into a model; with `averaged`, use averaged weights where it has them."""
    load_state(model, weights_of(checkpoint, averaged))


def weights_of(checkpoint: Checkpoint, averaged: bool = False) -> dict[str, Tensor]:
    """Return a checkpoint's weights; with `averaged`, use averaged weights where it has them."""
    state = _with_prefix(checkpoint.tensors, "model.")
    if averaged:
        averages = _with_prefix(checkpoint.tensors, "average.")
        state |= {name: value.to(state[name].dtype) for name, value in averages.items()}
    return state


def _named(optimizer: optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
