"""Create the directory of a run, and load the trained model from it.

config.json        all options             model.json          how to build the model without its data
log.jsonl          losses and evaluations  checkpoints/        to resume from
model.safetensors  the trained weights     result.json, examples.json
curves.json, confusions.json, records/     only for classifiers
label_noise.npz, swaps.npz                 replaced labels, swapped pairs
noise_free.*                               the head before its noise was switched on, restored if that was better
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
"""Options that may differ when a run is resumed, because they do not change its result."""
HOW_IT_IS_CUT = ("accumulate", "class_shards")
"""Options that may differ too, like the number of processes; the resumed run prints what they change."""
BEGUN = ("log.jsonl", "checkpoints", "features", "embeddings", "model.safetensors", "result.json")
"""Files and directories of which a run has at least one once it has begun."""

WEIGHTS, WEIGHTS_FORMAT = "model.safetensors", "hetxl-weights-1"
"""The trained weights; files of older versions have neither format nor checksum."""

RESTORE = "restore it or train again in another --out"

BEFORE: dict[str, Any] = {"standardize": False, "noise_start": 0.0, "flip_rate": 0.0}
"""Values of options for runs whose config.json does not have them."""


@dataclass(frozen=True)
class Run(Generic[Config]):
    """The directory of a run and its configuration."""

    path: Path
    config: Config

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.path / "result.json").exists()

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.path / "checkpoints", self.config.keep)


@dataclass(frozen=True)
class Trained:
    """A trained classifier, loaded from its run, in evaluation mode."""

    run: Run[TrainConfig]
    model: Model
    spec: InputSpec
    class_names: list[str]
    link: str
    class_counts: list[int] | None  # training examples of each class; None if unknown

    def features(
        self, split: Split, rows: np.ndarray, workers: int | None = None
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield features [b, D] on the CPU and the rows [b] that could be read, batch by batch."""
        workers = self.run.config.workers if workers is None else workers
        return feature_batches(self.model.backbone, split, rows, workers, self.model.device)

    @torch.no_grad()
    def predictions(
        self, split: Split, rows: np.ndarray, seed: int, bar: Bar, workers: int | None = None
    ) -> Iterator[tuple[Tensor, Prediction, np.ndarray]]:
        """Yield features [b, D], predictions over all classes, and the rows [b] that could be read.

        The seed determines the noise. Batches are split so that the [b, K] probabilities fit into memory. The bar
        shows the number of finished rows.
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
    """Return runs/DATA-HEAD or runs/contrastive-DATA-HEAD, where DATA is the last part of the data's name."""
    name = Path(config.data.split(":")[0]).stem or "data"
    prefix = "contrastive-" if isinstance(config, ContrastiveConfig) else ""
    return Path("runs") / f"{prefix}{name}-{config.head}"


def start_run(config: Config, directory: Path) -> Run[Config]:
    """Create the directory of a run with its config.json; check the configuration if it already has a run."""
    if (directory / "config.json").exists():
        check_same(config, directory)
    elif directory.exists() and any(path.name != LOCK for path in directory.iterdir()):
        raise ValueError(f"{directory} has files but no run in it; choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    write_checked(directory / "config.json", config.to_dict())
    return Run(directory, config)


def check_same(config: Config, directory: Path) -> None:
    """Raise if the run in a directory differs in an option that changes the result.

    A run that ended before its first step, for example because its options conflict, may have any options.
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
    """Describe the differences of two runs in the options that both have; empty without differences."""
    # The number of steps overrides the epochs.
    left_out = ("epochs",) if there.get("steps") is not None else ()
    differing = [
        f"{name} {there[name]!r} there, {value!r} here"
        for name, value in here.items()
        if name not in left_out and name in there and there[name] != value
    ]
    return "; ".join(differing[:4] + ["…"] * (len(differing) > 4))


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run in its checkpoints: the options, including the seed, and the fingerprint of the data."""

    config: RunConfig
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return {"options": _options(self.config), "data": self.data}

    def difference(self, stored: Any) -> str | None:
        """Describe how a stored identity differs; None if it does not."""
        here = json.loads(json.dumps(self.as_dict()))  # tuples become lists, as in the stored identity
        try:
            differing = _differing(stored["options"], here["options"])
            return differing or changes(stored["data"], here["data"], tuple(here["data"]))
        except (KeyError, TypeError, AttributeError) as error:
            return f"its identity cannot be read ({error})"


def check_data(run: Run, dataset: Any, splits: tuple[str, ...], instead: str) -> None:
    """Raise if splits of a run's data have changed since the run began; `instead` says what to do.

    Runs without a fingerprint in model.json are not checked.
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
    """Write the weights for prediction; all processes of `world` call this, and the main process writes."""
    weights = model.state_dict() if world is None else whole_on_main(model.state_dict(), world)
    if world is None or world.is_main:
        write_tensors(run.path / WEIGHTS, weights, {"format": WEIGHTS_FORMAT})


def open_run(path: str | Path, kind: type[Config] = TrainConfig) -> Run[Config]:  # pyright: ignore[reportArgumentType]
    """Return the run in a directory; raise if its configuration is not of this kind."""
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
    """Return the trained classifier of a run; an unfinished run has the weights of its best or last checkpoint.

    The checksum of the weights is verified. For weights of older versions, without a checksum, the console prints a
    note.
    """
    run = open_run(path)
    with model_json(run) as about:
        spec, names, link = input_spec(about["input"]), about["class_names"], about["link"]
    # With "auto", the data decided about τ, and model.json has the decision. Older runs have 1.
    temperature = about.get("temperature", "1.0") if run.config.temperature == "auto" else run.config.temperature
    # The run has the trained weights, so pretrained ones are not downloaded. One process holds all classes.
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
    """Return whether a directory has a run of `hetxl contrastive train`."""
    file = Path(path) / "config.json"
    return file.exists() and "towers" in read_json(file, dict)


def run_input(path: str | Path) -> InputSpec:
    """Return the input specification of a run's backbone."""
    with model_json(open_run(path)) as about:
        return input_spec(about["input"])


def run_backbone(path: str | Path) -> Backbone:
    """Return a run's backbone with initial weights."""
    config = dataclasses.replace(open_run(path).config, pretrained=False, start_from=None)
    spec = run_input(path)
    return build_backbone(with_defaults(config, spec), spec)


def check_single(trained: Trained, purpose: str) -> None:
    """Raise for a model without a single head: an ensemble, or an average over dropout masks or a posterior."""
    if not isinstance(trained.model.head, Head) or isinstance(trained.model.head, AveragedHead):
        raise ValueError(f"{trained.run.path} averages several predictions and cannot be {purpose}; pass a run of DET")


@contextlib.contextmanager
def model_json(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the content of model.json; report what cannot be read from it as an error of this file."""
    path = run.path / "model.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; train again in another --out")
    with reading(path, "train again in another --out"):
        yield read_json(path, dict, instead=RESTORE)


def load_weights(run: Run, model: nn.Module, console: Console | None = None) -> None:
    """Load the trained weights; for an unfinished run, those of the best or last checkpoint."""
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
    tensors.pop("head.classifier.draws", None)  # a sharded classifier is loaded as a linear one, without draws
    _check_types(path, tensors, model)
    # Buffers may be infinite, for example a mask.
    check_finite(path, tensors, dict(model.named_parameters()))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        if not path.exists():  # with a frozen backbone, checkpoints hold only the head
            raise ValueError(
                f"{run.path} has not ended, and its checkpoints do not hold the whole model; let hetxl train finish it"
            ) from None
        raise ValueError(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from None


def _check_types(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Raise if weights have more data types than the model: the file was assembled from different models."""
    types = {name: tensors[name].dtype for name, value in model.named_parameters() if name in tensors}
    if len(set(types.values())) > len({value.dtype for value in model.parameters()}):
        common = max(set(types.values()), key=list(types.values()).count)
        name = next(name for name, dtype in types.items() if dtype != common)
        raise ValueError(f"{path} cannot be used: {name} has type {types[name]}, the other weights {common}")


def input_spec(values: dict[str, Any]) -> InputSpec:
    """Return the input specification from model.json."""
    image = values.get("image")  # older runs did not save it and use the default
    preprocessing = None if image is None else Preprocessing(**image)
    kind, shape, vocabulary = values["kind"], tuple(values["shape"]), values["vocabulary"]
    sizes = (*shape, 1 + vocabulary)
    if kind not in get_args(InputKind) or not shape or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TypeError(f"input is {kind!r:.40} of shape {list(shape)}")
    return InputSpec(kind, shape, vocabulary, preprocessing)
