"""Which layer of a model classifies: the last linear one, unless there is doubt; and which of its modules is a head.

`ambiguity` holds the rules by which there is doubt.
"""

from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from hetxl.integrations.convert.ambiguity import ambiguity_reason, sizes
from hetxl.integrations.convert.peft import ADAPTED, adapted_last, called_module, hidden_modules, is_adapted
from hetxl.nn import Head

SHOWN = 8
"""How many layers a message lists."""


def is_convertible(module: object) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Return whether a module is W φ + b with parameters of its own: an nn.Linear, or an nn.Conv2d of 1 × 1."""
    if isinstance(module, nn.Conv2d):
        plain = (
            type(module).forward is nn.Conv2d.forward
            and (module.kernel_size, module.stride, module.groups) == ((1, 1), (1, 1), 1)
            and module.padding in ((0, 0), 0, "valid")
        )
    else:
        # timm has a linear layer of its own, the same but for casts under torch.jit.
        plain = isinstance(module, nn.Linear) and (
            type(module).forward is nn.Linear.forward or type(module).__module__ == "timm.layers.linear"
        )
    return plain and isinstance(module, nn.Module) and why_not(module) is None


def why_not(layer: nn.Module) -> str | None:
    """Return why a linear layer cannot be taken over; None if it can."""
    for name in ("weight", "bias"):
        if name not in layer._parameters:
            return (
                f"its {name} is computed from other parameters (weight norm, a parametrisation, pruning or an "
                "adapter); remove those"
            )
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without calling it"
    if isinstance(layer.weight, UninitializedParameter):
        return "it has no weight yet; call the model once before"
    if hasattr(layer, "_hf_hook"):
        return "it is offloaded; convert the model before it is dispatched to devices"
    return None


def find_layer(model: nn.Module, layer: str | nn.Module | None = None) -> nn.Linear | nn.Conv2d:
    """Return the layer to convert: of a name in `model.named_modules()`, a module itself, or the classifier."""
    if layer is not None:
        return _named(model, layer)
    if callable(getattr(model, "get_classifier", None)):
        classifier: Any = model.get_classifier()  # pyright: ignore[reportCallIssue]
        return _own_choice(model, called_module(classifier) if isinstance(classifier, nn.Module) else classifier)
    layers = _linear(model)
    adapted = adapted_last(model, layers)
    if adapted is not None:
        raise ValueError(
            f"the last linear layer of {type(model).__name__}, {adapted!r}, cannot be converted: {ADAPTED}"
        )
    if not layers:
        linear = ((name, why_not(part)) for name, part in model.named_modules() if isinstance(part, nn.Linear))
        refused = next((f": {name!r} is one, but {reason}" for name, reason in linear if reason is not None), "")
        raise ValueError(f"model {type(model).__name__} has no linear layer to convert{refused}")
    ambiguity = ambiguity_reason(model, layers)
    if ambiguity is not None:
        raise ValueError(_ambiguous(model, *ambiguity))
    return list(layers.values())[-1]


def find_head(module: nn.Module, name: str | None = None) -> Head:
    """Return the head in a module: the only one, or the one of a name."""
    heads = {path: part for path, part in module.named_modules() if isinstance(part, Head)}
    if name is not None and name not in heads:
        raise ValueError(f"head must name a hetxl head of the module, found {name!r}; it has {list(heads) or 'none'}")
    if not heads:
        raise ValueError(
            f"the module must contain a hetxl head, such as hetxl.HetXLHead; {type(module).__name__} has none"
        )
    if name is None and len(heads) > 1:
        raise ValueError(
            f"the module must contain one hetxl head, found {len(heads)} ({', '.join(heads)}); name one of them, "
            "or pass the part that has it"
        )
    return heads[name] if name is not None else next(iter(heads.values()))


def names_of(model: nn.Module, layer: nn.Module) -> list[str]:
    """Return all names of a module inside a model."""
    return [name for name, module in model.named_modules(remove_duplicate=False) if module is layer]


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> list[str]:
    """Put a module wherever a model has another; return the names."""
    names = names_of(model, old)
    for name in names:
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._modules[own] = new
    return names


def _named(model: nn.Module, layer: str | nn.Module) -> nn.Linear | nn.Conv2d:
    if isinstance(layer, nn.Module):
        if not names_of(model, layer):
            raise ValueError(f"layer is a {type(layer).__name__} that is not part of the model")
        name, module = names_of(model, layer)[0], layer
    else:
        name, modules = layer, dict(model.named_modules(remove_duplicate=False))
        if layer not in modules:
            names = list(_linear(model))
            if not names:
                raise ValueError(f"model {type(model).__name__} has no layer {layer!r}, and no linear layer to convert")
            raise ValueError(_ambiguous(model, f"has no layer {layer!r}; its linear layers are", names))
        module = called_module(modules[layer])
    if not is_convertible(module):
        reason = why_not(module) if isinstance(module, nn.Linear | nn.Conv2d) else None
        reason = (
            ADAPTED if is_adapted(module) else reason or "only an nn.Linear or an nn.Conv2d of 1 × 1 can be converted"
        )
        raise ValueError(f"layer {name!r} is a {type(module).__name__}: {reason}")
    return module


def _own_choice(model: nn.Module, classifier: Any) -> nn.Linear | nn.Conv2d:
    """Return what a model says its classifier is."""
    if is_convertible(classifier):
        return classifier
    if isinstance(classifier, tuple | list | dict | nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"model {type(model).__name__} has several classifiers (get_classifier() gives {len(classifier)}), as "
            "distilled models have: their outputs are averaged after the heads, so none of them alone is the model's "
            "prediction"
        )
    if isinstance(classifier, nn.Identity) or classifier is None:
        raise ValueError(
            f"model {type(model).__name__} has no classifier (get_classifier() gives {type(classifier).__name__}); "
            "make it with num_classes=K"
        )
    if isinstance(classifier, nn.Module) and is_adapted(classifier):
        raise ValueError(f"the classifier of {type(model).__name__} cannot be converted: {ADAPTED}")
    if isinstance(classifier, nn.Module):
        inside = [module for module in classifier.modules() if is_convertible(module)]
        if len(inside) == 1:
            return inside[0]
        reason = why_not(classifier) if isinstance(classifier, nn.Linear | nn.Conv2d) else None
        if reason is not None:
            raise ValueError(f"the classifier of {type(model).__name__} cannot be converted: {reason}")
    what = f"gives a {type(classifier).__name__} by get_classifier(); its linear layers are"
    raise ValueError(_ambiguous(model, what, list(_linear(model))))


def _linear(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers that can be converted, by name."""
    hidden = hidden_modules(model)
    return {name: module for name, module in model.named_modules() if is_convertible(module) and module not in hidden}


def _ambiguous(model: nn.Module, what: str, names: list[str]) -> str:
    by_name = ((name, *sizes(model.get_submodule(name))) for name in names[-SHOWN:])
    listed = [f"{name or '(the model itself)'} ({take:,} features, {give:,} outputs)" for name, take, give in by_name]
    more = f"… {len(names) - SHOWN} more, " if len(names) > SHOWN else ""
    example = next((name for name in reversed(names) if name), "head.fc")
    return f"model {type(model).__name__} {what}: {more}{', '.join(listed)}. Name one, as in layer={example!r}"
