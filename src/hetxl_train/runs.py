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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._files import read_json, reading, write_checked
from hetxl._tensors import check_finite, read_tensors, write_tensors
from hetxl.metrics.records import MAX_BYTES
from hetxl.nn import Head, LaplaceHead, Prediction
from hetxl.nn.averaged import AveragedHead
from hetxl_train.backbones import Backbone, build_backbone
from hetxl_train.checkpoint import Checkpoints, weights_of
from hetxl_train.config import Config, ContrastiveConfig, RunConfig, TrainConfig
from hetxl_train.console import Bar, Console
from hetxl_train.data.dataset import InputKind, InputSpec, Split
from hetxl_train.data.fingerprint import changes, fingerprint
from hetxl_train.data.transforms import Preprocessing
from hetxl_train.defaults import with_defaults
from hetxl_train.distributed import World
from hetxl_train.loaders import blocks
from hetxl_train.model import Model, build_model, ensemble_of, feature_batches
from hetxl_train.owner import LOCK
from hetxl_train.parallel import whole_on_main

NOT_PART_OF_THE_RUN = ("out", "workers", "device", "tensorboard", "loggers", "keep", "log_every", "timeout")
"""Options that may differ when a run is resumed: they change nothing in its result."""
HOW_IT_IS_CUT = ("accumulate", "class_shards")
"""Options that may differ as well, as may the number of processes: the resumed run says what they change."""
BEGUN = ("log.jsonl", "checkpoints", "features", "embeddings", "model.safetensors", "result.json")
"""What a run has, or some of it, once it has begun."""

WEIGHTS, WEIGHTS_FORMAT = "model.safetensors", "hetxl-weights-1"
"""The trained weights; files without a format are older and have no checksum."""

RESTORE = "restore it or train again in another --out"

BEFORE: dict[str, Any] = {"standardize": False, "noise_start": 0.0, "flip_rate": 0.0}
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

    def features(
        self, split: Split, rows: np.ndarray, workers: int | None = None
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield features [b, D] of rows of a split on the CPU, batch by batch, and which rows [b] could be read."""
        workers = self.run.config.workers if workers is None else workers
        return feature_batches(self.model.backbone, split, rows, workers, self.model.device)

    @torch.no_grad()
    def predictions(
        self, split: Split, rows: np.ndarray, seed: int, bar: Bar, workers: int | None = None
    ) -> Iterator[tuple[Tensor, Prediction, np.ndarray]]:
        """Yield features [b, D], predictions over all classes, with noise of a seed, and which rows [b] they are of.

        They come in parts whose [b, K] probabilities fit into memory; the bar shows how many are done.
        """
        device, done = self.model.device, 0
        generator = torch.Generator(device).manual_seed(seed)
        size = max(1, MAX_BYTES // (4 * len(self.class_names)))
        with bar:
            for batch, read in self.features(split, rows, workers):
                for part, some in zip(batch.split(size), blocks(read, size), strict=True):
                    features = part.to(device)
                    yield features, self.model.head.predict(features, generator=generator), some
                done += len(read)
                bar.to(done)


def default_directory(config: RunConfig) -> Path:
    """Return runs/DATA-HEAD or runs/contrastive-DATA-HEAD, from the last part of the data's name."""
    name = Path(config.data.split(":")[0]).stem or "data"
    prefix = "contrastive-" if isinstance(config, ContrastiveConfig) else ""
    return Path("runs") / f"{prefix}{name}-{config.head}"


def start_run(config: Config, directory: Path) -> Run[Config]:
    """Create the directory of a run with its config.json, or check that a run there has the same configuration."""
    if (directory / "config.json").exists():
        check_same(config, directory)
    elif directory.exists() and any(path.name != LOCK for path in directory.iterdir()):
        raise ValueError(f"{directory} has files but no run in it; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    write_checked(directory / "config.json", config.to_dict())
    return Run(directory, config)


def check_same(config: Config, directory: Path) -> None:
    """Raise unless the run in a directory has the same options, except those that change nothing.

    A run that ended before its first step, as one of options that do not go together, may have any.
    """
    if not any((directory / name).exists() for name in BEGUN):
        return
    stored = open_run(directory, type(config)).config
    if options := _differing(_options(stored), _options(config)):
        raise ValueError(f"{directory} holds a run with other options ({options}); choose another --out, or remove it")


def _options(config: RunConfig) -> dict[str, Any]:
    """Return the options that change the result of a run."""
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in NOT_PART_OF_THE_RUN + HOW_IT_IS_CUT}


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Say in which options that change the result two runs differ, of those that both have; empty if in none."""
    # Beside steps, epochs say nothing.
    left_out = ("epochs",) if there.get("steps") is not None else ()
    differing = [
        f"{name} {there[name]!r} there, {value!r} here"
        for name, value in here.items()
        if name not in left_out and name in there and there[name] != value
    ]
    return "; ".join(differing[:4] + ["…"] * (len(differing) > 4))


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint knows of its run: the options, with the seed, and the fingerprint of the data."""

    config: RunConfig
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"options": _options(self.config), "data": self.data}

    def difference(self, stored: Any) -> str | None:
        """Say how a stored identity differs; None if it does not."""
        here = json.loads(json.dumps(self.as_dict()))  # as JSON gives it back: lists for tuples
        try:
            differing = _differing(stored["options"], here["options"])
            return differing or changes(stored["data"], here["data"], tuple(here["data"]))
        except (KeyError, TypeError, AttributeError) as error:
            return f"its identity cannot be read ({error})"


def check_data(run: Run, dataset: Any, splits: tuple[str, ...], instead: str) -> None:
    """Raise, and say what to do instead, if splits of a run's data have changed since it was begun.

    Runs without a fingerprint in model.json are believed.
    """
    path = run.path / "model.json"
    before = read_json(path, dict).get("data") if path.exists() else None
    now = None if before is None else fingerprint(dataset)
    with reading(path, f"its fingerprint of the data is damaged; {instead}"):
        difference = None if before is None or now is None else changes(before, now, splits)
    if difference is not None:
        raise ValueError(
            f"{run.config.data} is not what {run.path} was trained on: {difference}. Rows to be tested on may be among "
            f"those it has learned from; {instead}"
        )


def save_model(run: Run, model: nn.Module, world: World | None = None) -> None:
    """Write the weights that prediction uses, in the main process of `world`; all processes call this."""
    weights = model.state_dict() if world is None else whole_on_main(model.state_dict(), world)
    if world is None or world.is_main:
        write_tensors(run.path / WEIGHTS, weights, {"format": WEIGHTS_FORMAT})


def open_run(path: str | Path, kind: type[Config] = TrainConfig) -> Run[Config]:  # pyright: ignore[reportArgumentType]
    """Return the run in a directory; it must be of a kind of configuration."""
    directory = Path(path)
    file = directory / "config.json"
    command, other = "hetxl train", "hetxl contrastive train"
    if kind is ContrastiveConfig:
        command, other = other, command
    if not file.exists():
        raise ValueError(f"{directory} is not a run directory (no config.json). Pass one created by `{command}`.")
    values = read_json(file, instead=RESTORE)
    if isinstance(values, dict) and ("towers" in values) != (kind is ContrastiveConfig):
        raise ValueError(f"{directory} was created by `{other}`. Pass a directory of `{command}`.")
    options = kind.flatten(values, str(file))
    if kind is TrainConfig:
        options = {**BEFORE, **options}
    return Run(directory, kind(**options))


def load_run(path: str | Path, device: torch.device | str = "cpu", console: Console | None = None) -> Trained:
    """Return the trained classifier of a run; before its end, with the weights of its best or last checkpoint.

    Weights with a checksum are verified; the console notes those of an older version that have none.
    """
    run = open_run(path)
    with model_json(run) as about:
        spec, names, link = input_spec(about["input"]), about["class_names"], about["link"]
    # What τ is was decided by the data. Runs from before that have 1.
    temperature = about.get("temperature", "1.0") if run.config.temperature == "auto" else run.config.temperature
    # The trained weights are in the run: published ones need not be downloaded again. All classes are in one process.
    linear = {"classifier": "linear", "class_shards": 0} if run.config.classifier == "sharded" else {}
    config = with_defaults(dataclasses.replace(run.config, pretrained=False, temperature=temperature), spec)
    config = dataclasses.replace(config, **linear)
    with model_json(run):
        models = [build_model(config, spec, len(names), link) for _ in range(about.get("members", 1))]
        for single, answers in zip(models, about.get("answers", ()), strict=False):
            single.head.noise_scale, single.head.flip_rate = answers["noise_scale"], answers["flip_rate"]
    model = models[0] if len(models) == 1 else ensemble_of(models)
    if about.get("laplace"):
        model.head = LaplaceHead.of(model.head)
    load_weights(run, model, console)
    return Trained(run, model.to(device).eval(), spec, names, link, about.get("class_counts"))


def is_contrastive(path: str | Path) -> bool:
    """Whether a directory is that of a run of `hetxl contrastive train`."""
    file = Path(path) / "config.json"
    return file.exists() and "towers" in read_json(file, dict)


def run_input(path: str | Path) -> InputSpec:
    """Return the input of a run's backbone."""
    with model_json(open_run(path)) as about:
        return input_spec(about["input"])


def run_backbone(path: str | Path) -> Backbone:
    """Return the backbone of a run with initial weights."""
    config = dataclasses.replace(open_run(path).config, pretrained=False, start_from=None)
    spec = run_input(path)
    return build_backbone(with_defaults(config, spec), spec)


def check_single(trained: Trained, purpose: str) -> None:
    """Raise for a model that is not one head: an ensemble, or one that averages over dropout or a posterior."""
    if not isinstance(trained.model.head, Head) or isinstance(trained.model.head, AveragedHead):
        raise ValueError(f"{trained.run.path} averages several predictions and cannot be {purpose}; pass a run of DET")


@contextlib.contextmanager
def model_json(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the content of model.json; raise for what cannot be read of it."""
    path = run.path / "model.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; train again in another --out")
    with reading(path, "train again in another --out"):
        yield read_json(path, dict, instead=RESTORE)


def load_weights(run: Run, model: nn.Module, console: Console | None = None) -> None:
    """Load the trained weights, or those of the best or last checkpoint."""
    path = run.path / WEIGHTS
    if path.exists():
        stored = read_tensors(path)
        if not stored.checked:
            if stored.metadata:  # older files have none
                raise ValueError(f"{path} was changed or damaged: its checksum is missing; restore it or train again")
            (console or Console(quiet=True)).say(
                f"{path} has no checksum (it is of an older hetxl) and is not verified"
            )
        tensors = stored.tensors
    else:
        checkpoint, refused = run.checkpoints.best()
        if checkpoint is None:
            raise ValueError(f"{run.path} has no weights yet: {refused[0] if refused else 'no checkpoint was written'}")
        for message in refused:
            (console or Console(quiet=True)).say(f"Not used: {message}")
        tensors = weights_of(checkpoint, averaged=bool(run.config.ema))
    tensors.pop("head.classifier.draws", None)  # of a sharded classifier, which is read as a linear one
    _check_types(path, tensors, model)
    # Buffers may be infinite, such as a mask's.
    check_finite(path, tensors, dict(model.named_parameters()))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        if not path.exists():  # with a frozen backbone, checkpoints hold the head alone
            raise ValueError(
                f"{run.path} has not ended, and its checkpoints do not hold the whole model; let hetxl train finish it"
            ) from None
        raise ValueError(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from None


def _check_types(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Raise if weights have several floating-point types where the model has one: they were put together."""
    types = {name: tensors[name].dtype for name, value in model.named_parameters() if name in tensors}
    if len(set(types.values())) > len({value.dtype for value in model.parameters()}):
        common = max(set(types.values()), key=list(types.values()).count)
        name = next(name for name, dtype in types.items() if dtype != common)
        raise ValueError(f"{path} cannot be used: {name} has type {types[name]}, the other weights {common}")


def input_spec(values: dict[str, Any]) -> InputSpec:
    """Return the input that model.json describes."""
    image = values.get("image")  # runs from before it was saved have the default
    preprocessing = None if image is None else Preprocessing(**image)
    kind, shape, vocabulary = values["kind"], tuple(values["shape"]), values["vocabulary"]
    sizes = (*shape, 1 + vocabulary)
    if kind not in get_args(InputKind) or not shape or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TypeError(f"input is {kind!r:.40} of shape {list(shape)}")
    return InputSpec(kind, shape, vocabulary, preprocessing)
