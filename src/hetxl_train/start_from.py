"""`--start-from`: initialise with the weights of another run, or of a checkpoint of timm or transformers.

| start | backbone | head |
| --- | --- | --- |
| a run of the same classes and head | kept | kept |
| a run of the same classes, another head | kept | its classifier is kept, the rest is new: noise added to a DET run |
| a run of other classes, or another link | kept | new |
| a .safetensors file of timm or transformers | kept | its classifier is kept if it has as many classes, else new |

At another resolution, position embeddings are resized.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._tensors import read_tensors
from hetxl.nn import Head
from hetxl_train.backbones import Pooled, PooledText
from hetxl_train.config import BackboneOptions, TrainConfig
from hetxl_train.model import Model
from hetxl_train.parallel import divided_like, load_state
from hetxl_train.runs import Trained, check_single, load_run, open_run

IMAGES = ("image_size", "image_mean", "image_std", "interpolation", "crop", "resize")
"""Options of images that are inherited from a run."""
LAST_LAYERS = ("classifier", "classifier.1", "fc", "head", "head.fc")
"""Names of the last layer in checkpoints of timm and transformers."""


class Start(NamedTuple):
    """The initial weights of a run."""

    text: str  # description in one line
    head: bool  # whether the classifier was loaded


def inherited(start: str) -> dict[str, Any]:
    """Return the options of a run's backbone and images, the defaults of a run that starts from it."""
    if Path(start).is_file():
        return {}
    config, defaults = open_run(start).config, TrainConfig()
    names = {spec.name for spec in dataclasses.fields(BackboneOptions)} - {"frozen", "pretrained", "start_from"}
    values = {name: getattr(config, name) for name in (*names, *IMAGES)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def start_weights(model: Model, config: TrainConfig, class_names: Sequence[str], link: str) -> Start:
    """Load the configured initial weights into a model, in place; raise a ValueError if they do not fit."""
    path = Path(str(config.start_from))
    if path.is_file():
        return _start_from_file(model, path)
    trained = load_run(path)
    check_single(trained, "started from")
    before, after = trained.model.backbone, model.backbone
    _load_body(after.body, _library_module(before.body).state_dict(), f"--start-from {path}")
    if before.standardize is not None and after.standardize is not None:
        _load(after.standardize, before.standardize.state_dict(), f"--start-from {path}")
    if trained.link != link:
        return Start(f"{path}: the backbone. The head is new: the link is {link}, and was {trained.link}", False)
    if list(trained.class_names) != list(class_names):
        counts = f"{len(class_names):,}, and {len(trained.class_names):,} there"
        return Start(f"{path}: the backbone. The head is new: the classes are others ({counts})", False)
    return Start(f"{path}: the backbone and {_start_head(model.head, trained, config)}", True)


@torch.no_grad()
def _start_head(head: Head, trained: Trained, config: TrainConfig) -> str:
    """Load the head of a run with the same classes, or only the classifier of a different head; return what was
    loaded."""
    before, state = trained.run.config, trained.model.head.state_dict()
    own = head.state_dict()
    kinds = [
        options.classifier.replace("sharded", "linear") for options in (before, config)
    ]  # these have the same weights
    same = before.head == config.head and kinds[0] == kinds[1]
    parts = ("classifier.", "standardize.") if not same else ("",)
    # This run determines whether τ is learned or fixed; the old value of τ is folded into the classifier below.
    state = {name: value for name, value in state.items() if name.startswith(parts)}
    state = {name: value for name, value in state.items() if name in own or not name.startswith("temperature.")}
    # A head without statistics of its features has none here.
    missing = {
        name: value
        for name, value in own.items()
        if not same or name.startswith(("temperature.", "standardize.", "classifier.draws"))
    }
    _load(head, {**missing, **state}, f"--start-from {trained.run.path}")
    # softmax(W φ / τ): if τ changes, W is scaled so that the probabilities do not change.
    ratio = float(head.temperature()) / float(trained.model.head.temperature())
    if ratio != 1:
        for parameter in head.classifier.parameters():
            parameter.mul_(ratio)
    return "the head" if same else f"the classifier. The rest of the head is new: it was {before.head}"


@torch.no_grad()
def _start_from_file(model: Model, path: Path) -> Start:
    state = load_file_into(model.backbone.body, path, f"--start-from {path}")
    classifier: Any = model.head.classifier
    for name in LAST_LAYERS:
        weight, bias = state.get(f"{name}.weight"), state.get(f"{name}.bias")
        if weight is not None and weight.flatten(1).shape == classifier.weight.shape:  # BiT's is [K, D, 1, 1]
            classifier.weight.copy_(divided_like(weight.flatten(1), classifier.weight))
            if bias is not None and classifier.bias is not None:
                classifier.bias.copy_(divided_like(bias, classifier.bias))
            return Start(f"{path}: the backbone and the classifier, its classes taken to be in this order", True)
    return Start(f"{path}: the backbone. The head is new", False)


def load_file_into(body: nn.Module, path: Path, option: str) -> dict[str, Tensor]:
    """Load a .safetensors file of timm or transformers into a network, in place; return all its weights.

    Errors begin with the option that names the file.
    """
    if path.suffix != ".safetensors":
        raise ValueError(f"{option} must be a run directory or a .safetensors file; convert it first")
    try:
        state = read_tensors(path).tensors
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} is not a safetensors file: {error}") from None
    _load_body(body, state, option)
    return state


def _library_module(body: nn.Module) -> nn.Module:
    """Return the module whose weights have the library's names."""
    return body.model if isinstance(body, Pooled | PooledText) else body


def _load_body(body: nn.Module, state: Mapping[str, Tensor], option: str) -> None:
    """Load the weights of a network without its last layer, resized to this network's images."""
    module: Any = _library_module(body)
    own = module.state_dict()
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    # Models of transformers with a classifier have the network as an attribute, whose name prefixes its weights.
    state = {name.removeprefix(prefix): value for name, value in state.items()}
    state = {name: value for name, value in state.items() if name in own or name.rpartition(".")[0] not in LAST_LAYERS}
    library = sys.modules[type(module).__module__]
    if library.__name__.startswith("timm.") and hasattr(library, "checkpoint_filter_fn"):
        state = library.checkpoint_filter_fn(state, module)  # timm resizes position embeddings and maps older names
    _load(module, {name: _resized(value, own[name]) if name in own else value for name, value in state.items()}, option)


def _resized(value: Tensor, own: Tensor) -> Tensor:
    """Resize position embeddings [1, p + n², C] to [1, p + m², C] like images; return other weights unchanged."""
    if value.dim() != 3 or own.dim() != 3 or value.shape[::2] != own.shape[::2] or value.shape == own.shape:
        return value
    prefix = next(
        (p for p in range(3) if all(math.isqrt(t.shape[1] - p) ** 2 == t.shape[1] - p for t in (value, own))), None
    )
    if prefix is None:
        return value
    before, after = (math.isqrt(tensor.shape[1] - prefix) for tensor in (value, own))
    grid = value[:, prefix:].unflatten(1, (before, before)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), size=(after, after), mode="bicubic", antialias=True).to(value.dtype)
    return torch.cat([value[:, :prefix], grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def _load(module: nn.Module, state: Mapping[str, Tensor], option: str) -> None:
    """Load weights by name; raise a ValueError for missing, unknown or differently shaped weights."""
    own = module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    problems += [
        f"{name} has shape {list(state[name].shape)}, {list(own[name].shape)} here"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3:,} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{option} does not fit this model: {'; '.join(problems[:3])}{more}. "
            "Use the same --backbone and the same options of the head"
        )
    load_state(module, state)
