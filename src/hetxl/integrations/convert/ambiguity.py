"""Detect models whose last linear layer may not be the classifier.

A model's computation is unknown before it is called, but consecutive layers have matching sizes, and no layer uses a
classifier's outputs. If sizes allow several interpretations, the usual one is assumed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

CLASSIFIERS = ("fc", "head", "heads", "classifier")
"""Names that are nearly always classifiers at the outermost level."""

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus)
ACTIVATIONS += (nn.Tanh, nn.Hardtanh, nn.Hardswish)
"""Activations after hidden layers. Softmax and sigmoid follow outputs, and accept log-probabilities like logits."""

_TAKEN = ("in_features", "in_channels", "num_features", "num_channels", "normalized_shape", "input_size", "embed_dim")
"""Attributes of torch's modules with their number of input features."""

Layers = Mapping[str, nn.Module]


def ambiguity_reason(model: nn.Module, layers: Layers) -> tuple[str, list[str]] | None:
    """Return why the last linear layer may not be the classifier, and the names of the candidates; None if it is clear.

    `layers` are the convertible layers by name, in the order of the model, at least one.
    """
    return next(_reasons(model, layers, list(layers)[-1]), None)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Return a layer's numbers of input and output features."""
    weight: Any = layer.weight
    return weight.shape[1], weight.shape[0]


def _reasons(model: nn.Module, layers: Layers, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield all reasons for the last layer, with names; the most probable candidate comes last, as an example."""
    features, outputs = sizes(layers[name])
    others = {other: sizes(layer) for other, layer in layers.items() if other != name}
    rivals = [other for other, size in others.items() if _beside(other, name) and size[0] == features != size[1]]
    if rivals:
        yield "has several layers with the same number of features", [*rivals, name]
    if _repeats(model, name):
        yield "has linear layers only inside repeated blocks", list(layers)
    takers = _takers(model)
    ends = [other for other in others if _is_end(layers[other], takers)]
    unlike = [other for other in ends if not _is_preferred(name, other)]
    as_many = [other for other in unlike if others[other][1] == outputs]
    if as_many and _is_end(layers[name], takers):
        yield "has several layers with the same number of outputs that no layer uses", [name, *as_many]
    after = [other for other in unlike if others[other][0] == outputs]
    if after:
        yield "has a layer with as many input features as the last layer has outputs", [name, *after]
    branches = [other for other in ends if _branches_off(layers, other, name)]
    if branches:
        yield "has a layer with a classifier's name that is not the last", [name, *branches]
    activation = _activation_after(model, name)
    if activation is not None:
        yield f"has an activation ({activation}) after its last linear layer", [name]


def _beside(name: str, other: str) -> bool:
    """Return whether two names differ in one part, such as head_a.fc and head_b.fc."""
    ours, theirs = name.split("."), other.split(".")
    return len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1


def _repeats(model: nn.Module, name: str) -> bool:
    """Return whether a layer is inside one of several equal blocks, like the last linear layer of a bare backbone."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        holder, block = (model.get_submodule(".".join(parts[:end])) for end in (depth - 1, depth))
        if isinstance(holder, nn.Sequential | nn.ModuleList) and sum(type(o) is type(block) for o in holder) > 1:
            return True
    return False


def _activation_after(model: nn.Module, name: str) -> str | None:
    """Return the type of an activation after a layer in the same nn.Sequential."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    if not isinstance(holder, nn.Sequential):
        return None
    after = list(holder._modules).index(own) + 1
    return next((type(module).__name__ for module in list(holder)[after:] if isinstance(module, ACTIVATIONS)), None)


def _takers(model: nn.Module) -> Counter[int]:
    """Return the number of modules by number of input features."""
    counts: Counter[int] = Counter()
    for module in model.modules():
        values = (getattr(module, name, None) for name in _TAKEN)
        numbers = (value[-1] if isinstance(value, tuple) and value else value for value in values)
        counts.update({number for number in numbers if isinstance(number, int)})
    return counts


def _is_end(layer: nn.Module, takers: Counter[int]) -> bool:
    """Return whether no other module has as many input features as a layer has outputs."""
    features, outputs = sizes(layer)
    return takers[outputs] == (features == outputs)


def _apart(name: str, other: str) -> tuple[list[str], list[str]]:
    """Return the parts of two names without their common prefix."""
    ours, theirs = name.split("."), other.split(".")
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    return ours, theirs


def _is_preferred(name: str, other: str) -> bool:
    """Return whether only the first of two has a classifier's name, such as fc and aux.fc."""
    ours, theirs = _apart(name, other)
    return bool(ours) and ours[0] in CLASSIFIERS and not (theirs and theirs[0] in CLASSIFIERS)


def _branches_off(layers: Layers, other: str, name: str) -> bool:
    """Return whether a layer with a classifier's name has as many input features as a projector's branch."""
    theirs, ours = _apart(other, name)
    if not (ours and theirs) or theirs[0] not in CLASSIFIERS or len(theirs) > 1 + (theirs[0] == "heads"):
        return False
    parts = name.split(".")
    branch = ".".join(parts[: len(parts) - len(ours) + 1])
    first = next(layer for candidate, layer in layers.items() if f"{candidate}.".startswith(f"{branch}."))
    return sizes(first)[0] == sizes(layers[other])[0]
