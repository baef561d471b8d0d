"""Why the last linear layer of a model may not be its classifier.

What a model does is not known before it is called, but layers that follow each other have sizes that fit, and a
classifier's outputs are taken by no layer. Where sizes allow several answers, the usual one is believed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

CLASSIFIERS = ("fc", "head", "heads", "classifier")
"""Names of classifiers, and rarely of anything else where they stand outermost."""

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus)
ACTIVATIONS += (nn.Tanh, nn.Hardtanh, nn.Hardswish)
"""What follows hidden layers. A softmax or a sigmoid is an output's, and takes log-probabilities as it takes logits."""

_TAKEN = ("in_features", "in_channels", "num_features", "num_channels", "normalized_shape", "input_size", "embed_dim")
"""Attributes of torch's modules that say how many features they take."""

Layers = Mapping[str, nn.Module]


def ambiguity_reason(model: nn.Module, layers: Layers) -> tuple[str, list[str]] | None:
    """Return why the last linear layer of a model may not be its classifier, and the names of those that may be meant.

    `layers` are those that can be converted, by name in the order in which the model has them; one at least.
    """
    return next(_reasons(model, layers, list(layers)[-1]), None)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Return how many features a layer takes, and how many outputs it has."""
    weight: Any = layer.weight
    return weight.shape[1], weight.shape[0]


def _reasons(model: nn.Module, layers: Layers, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield all that apply to the last layer, with names; the likeliest one, or the last, goes last as an example."""
    features, outputs = sizes(layers[name])
    others = {other: sizes(layer) for other, layer in layers.items() if other != name}
    rivals = [other for other, size in others.items() if _beside(other, name) and size[0] == features != size[1]]
    if rivals:
        yield "has several layers that start from as many features", [*rivals, name]
    if _repeats(model, name):
        yield "has linear layers inside repeated blocks only", list(layers)
    takers = _takers(model)
    ends = [other for other in others if _is_end(layers[other], takers)]
    unlike = [other for other in ends if not _is_preferred(name, other)]
    as_many = [other for other in unlike if others[other][1] == outputs]
    if as_many and _is_end(layers[name], takers):
        yield "has several layers of as many outputs that no layer takes", [name, *as_many]
    after = [other for other in unlike if others[other][0] == outputs]
    if after:
        yield "has a layer that takes as many features as its last one has outputs", [name, *after]
    branches = [other for other in ends if _branches_off(layers, other, name)]
    if branches:
        yield "has a layer with a classifier's name that is not its last one", [name, *branches]
    activation = _activation_after(model, name)
    if activation is not None:
        yield f"has an activation ({activation}) after its last linear layer", [name]


def _beside(name: str, other: str) -> bool:
    """Return whether two names differ in one part, as head_a.fc and head_b.fc do."""
    ours, theirs = name.split("."), other.split(".")
    return len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1


def _repeats(model: nn.Module, name: str) -> bool:
    """Return whether a layer is inside one of several equal blocks, as the last linear layer of a bare backbone is."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        holder, block = (model.get_submodule(".".join(parts[:end])) for end in (depth - 1, depth))
        if isinstance(holder, nn.Sequential | nn.ModuleList) and sum(type(o) is type(block) for o in holder) > 1:
            return True
    return False


def _activation_after(model: nn.Module, name: str) -> str | None:
    """Return the kind of an activation that comes after a layer in the same nn.Sequential."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    if not isinstance(holder, nn.Sequential):
        return None
    after = list(holder._modules).index(own) + 1
    return next((type(module).__name__ for module in list(holder)[after:] if isinstance(module, ACTIVATIONS)), None)


def _takers(model: nn.Module) -> Counter[int]:
    """Return the number of modules of a model by the number of features that they take."""
    counts: Counter[int] = Counter()
    for module in model.modules():
        values = (getattr(module, name, None) for name in _TAKEN)
        numbers = (value[-1] if isinstance(value, tuple) and value else value for value in values)
        counts.update({number for number in numbers if isinstance(number, int)})
    return counts


def _is_end(layer: nn.Module, takers: Counter[int]) -> bool:
    """Return whether no other module takes as many features as a layer has outputs."""
    features, outputs = sizes(layer)
    return takers[outputs] == (features == outputs)


def _apart(name: str, other: str) -> tuple[list[str], list[str]]:
    """Return the parts of two names, without those at the start that they share."""
    ours, theirs = name.split("."), other.split(".")
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    return ours, theirs


def _is_preferred(name: str, other: str) -> bool:
    """Return whether the first of two is named as classifiers are, and the second is not, as fc beside aux.fc."""
    ours, theirs = _apart(name, other)
    return bool(ours) and ours[0] in CLASSIFIERS and not (theirs and theirs[0] in CLASSIFIERS)


def _branches_off(layers: Layers, other: str, name: str) -> bool:
    """Return whether a layer with a classifier's name takes as many features as the branch of another, a projector."""
    theirs, ours = _apart(other, name)
    if not (ours and theirs) or theirs[0] not in CLASSIFIERS or len(theirs) > 1 + (theirs[0] == "heads"):
        return False
    parts = name.split(".")
    branch = ".".join(parts[: len(parts) - len(ours) + 1])
    first = next(layer for candidate, layer in layers.items() if f"{candidate}.".startswith(f"{branch}."))
    return sizes(first)[0] == sizes(layers[other])[0]
