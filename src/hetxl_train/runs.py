"""A run's directory: what is written there, and reading a trained model back from it.

config.json        every option            model.json          how to build the model without its data
log.jsonl          losses and evaluations  checkpoints/        to resume from
model.safetensors  the trained weights     result.json, examples.json
curves.json, confusions.json, records/     of a classifier
label_noise.npz, swaps.npz                 labels that were replaced, pairs that were swapped
noise_free.*                               the head before its noise was switched on, which may be taken back
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hetxl._files import read_json, write_bytes, write_json
from hetxl.nn import Head, LaplaceHead
from hetxl.nn.averaged import AveragedHead
from hetxl_train.checkpoint import Checkpoints, load_weights, save_tensors
from hetxl_train.config import Config, ContrastiveConfig, RunConfig, TrainConfig
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.describe import changes, fingerprint
from hetxl_train.defaults import with_defaults
from hetxl_train.model import Model, build_model, ensemble_of
from hetxl_train.tasks.towers import Specs, TwoTowers, build_towers

NOT_PART_OF_THE_RUN = ("out", "workers", "device", "tensorboard", "keep", "log_every")
"""Options that may differ when a run is resumed: they change nothing in its result."""
BEGUN = ("log.jsonl", "checkpoints", "features", "model.safetensors", "result.json")
"""What a run has, or some of it, once it has begun."""

BEFORE: dict[str, Any] = {"standardize": False, "noise_start": 0.0}
"""What runs without these options in their config.json were trained with."""


@dataclass(frozen=True)
class Run(Generic[Config]):
    """A directory and the configuration of what is in it."""

    path: Path
    config: Config

    @property
    def finished(self) -> bool:
        """Whether it has a result."""
        return (self.path / "result.json").exists()

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        return Checkpoints(self.path / "checkpoints", self.config.keep)


@dataclass(frozen=True)
class Trained:
    """A classifier that was read back, in evaluation mode."""

    run: Run[TrainConfig]
    model: Model
    spec: InputSpec
    class_names: list[str]
    link: str
    class_counts: list[int] | None  # training examples of each class; None if unknown


class TrainedTowers(NamedTuple):
    """Two towers that were read back, in evaluation mode, with the specs of their inputs."""

    run: Run[ContrastiveConfig]
    model: TwoTowers
    specs: Specs


def default_directory(config: RunConfig) -> Path:
    """Return runs/DATA-HEAD or runs/contrastive-DATA-HEAD, from the last part of the data's name."""
    name = Path(config.data.split(":")[0]).stem or "data"
    prefix = "contrastive-" if isinstance(config, ContrastiveConfig) else ""
    return Path("runs") / f"{prefix}{name}-{config.head}"


def start_run(config: Config, directory: Path) -> Run[Config]:
    """Create the directory of a run with its config.json, or check that a run there has the same configuration."""
    if (directory / "config.json").exists():
        check_same(config, directory)
    elif directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} has files but no run in it; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config.to_dict())
    return Run(directory, config)


def check_same(config: Config, directory: Path) -> None:
    """Raise unless the run in a directory has the same options, except those that change nothing.

    A run that ended before its first step, as one of options that do not go together, may have any.
    """
    if not any((directory / name).exists() for name in BEGUN):
        return
    stored = open_run(directory, type(config)).config
    # Beside steps, epochs say nothing.
    left_out = {*NOT_PART_OF_THE_RUN, *(["epochs"] if stored.steps is not None else [])}
    differing = [
        f"{field.name} {getattr(stored, field.name)!r} there, {getattr(config, field.name)!r} here"
        for field in dataclasses.fields(config)
        if field.name not in left_out and getattr(stored, field.name) != getattr(config, field.name)
    ]
    if differing:
        options = "; ".join(differing[:4] + ["…"] * (len(differing) > 4))
        raise ValueError(f"{directory} holds a run with other options ({options}); choose another --out, or remove it")


def check_data(run: Run, dataset: Any, splits: tuple[str, ...], instead: str) -> None:
    """Raise, and say what to do instead, if splits of a run's data have changed since it was begun.

    Runs without a fingerprint in model.json are believed.
    """
    path = run.path / "model.json"
    before = read_json(path).get("data") if path.exists() else None
    difference = None if before is None else changes(before, fingerprint(dataset), splits)
    if difference is not None:
        raise ValueError(
            f"{run.config.data} is not what {run.path} was trained on: {difference}. Rows to be tested on may be among "
            f"those it has learned from; {instead}"
        )


def save_model(run: Run, model: nn.Module) -> None:
    """Write the weights that prediction uses."""
    save_tensors(run.path / "model.safetensors", model.state_dict())


def open_run(path: str | Path, kind: type[Config] = TrainConfig) -> Run[Config]:  # pyright: ignore[reportArgumentType]
    """Return the run in a directory; it must be of a kind of configuration."""
    directory = Path(path)
    file = directory / "config.json"
    command, other = "hetxl train", "hetxl contrastive train"
    if kind is ContrastiveConfig:
        command, other = other, command
    if not file.exists():
        raise ValueError(f"{directory} is not a run directory (no config.json). Pass one created by `{command}`.")
    values = read_json(file)
    if isinstance(values, dict) and ("towers" in values) != (kind is ContrastiveConfig):
        raise ValueError(f"{directory} was created by `{other}`. Pass a directory of `{command}`.")
    options = kind.flatten(values, str(file))
    if kind is TrainConfig:
        options = {**BEFORE, **options}
    return Run(directory, kind(**options))


def load_run(path: str | Path, device: torch.device | str = "cpu") -> Trained:
    """Return the trained classifier of a run; before its end, with the weights of its best or last checkpoint."""
    run = open_run(path)
    with _model_json(run) as about:
        spec, names, link = _spec(about["input"]), about["class_names"], about["link"]
    # What τ is was decided by the data. Runs from before that have 1.
    temperature = about.get("temperature", "1.0") if run.config.temperature == "auto" else run.config.temperature
    # The trained weights are in the run: published ones need not be downloaded again.
    config = with_defaults(dataclasses.replace(run.config, pretrained=False, temperature=temperature), spec)
    models = [build_model(config, spec, len(names), link) for _ in range(about.get("members", 1))]
    model = models[0] if len(models) == 1 else ensemble_of(models)
    if about.get("laplace"):
        model.head = LaplaceHead.of(model.head)
    try:
        _load_weights(run, model)
    except RuntimeError:  # with a frozen backbone, checkpoints hold the head alone
        raise ValueError(
            f"{run.path} has not ended, and its checkpoints do not hold the whole model; let hetxl train finish it"
        ) from None
    return Trained(run, model.to(device).eval(), spec, names, link, about.get("class_counts"))


def check_single(trained: Trained, purpose: str) -> None:
    """Raise for a model that is not one head: an ensemble, or one that averages over dropout or a posterior."""
    if not isinstance(trained.model.head, Head) or isinstance(trained.model.head, AveragedHead):
        raise ValueError(f"{trained.run.path} averages several predictions and cannot be {purpose}; pass a run of DET")


def load_contrastive_run(path: str | Path, device: torch.device | str = "cpu") -> TrainedTowers:
    """Return the trained towers of a run; before its end, with the weights of its last checkpoint."""
    run = open_run(path, ContrastiveConfig)
    with _model_json(run) as about:
        specs = Specs(_spec(about["image"]), None if about["text"] is None else _spec(about["text"]))
    model = build_towers(run.config, specs)
    _load_weights(run, model)
    return TrainedTowers(run, model.to(device).eval(), specs)


@contextlib.contextmanager
def _model_json(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the content of model.json; raise for what cannot be read of it."""
    path = run.path / "model.json"
    try:
        yield read_json(path)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); train again in another --out") from None


def _load_weights(run: Run, model: nn.Module) -> None:
    """Load the trained weights, or those of the best or last checkpoint."""
    weights = run.path / "model.safetensors"
    if weights.exists():
        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{weights} cannot be used: {' '.join(str(error).split())[:300]}") from None
        return
    checkpoint, refused = run.checkpoints.best()
    if checkpoint is None:
        raise ValueError(f"{run.path} has no weights yet: {refused[0] if refused else 'no checkpoint was written'}")
    load_weights(model, checkpoint, averaged=bool(run.config.ema))


def _spec(values: dict[str, Any]) -> InputSpec:
    return InputSpec(values["kind"], tuple(values["shape"]), values["vocabulary"])


# ---- the log


class Log:
    """Append to `log.jsonl`, one JSON object per line, and to TensorBoard's files in a directory if it is not None.

    Lines after the step `after`, which will be done again, are dropped.
    """

    def __init__(self, path: Path, after: int = 0, tensorboard: Path | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_log(path) if line.get("step", 0) <= after]
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run is
        self._events: Any = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError("--tensorboard needs tensorboard: pip install tensorboard") from None
            self._events = SummaryWriter(str(tensorboard), purge_step=after + 1)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line; numbers also go to TensorBoard."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name.replace('@', '_at_')}", value, values["step"])

    def close(self) -> None:
        """Close all files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without the part of a last line that a killed process left."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
