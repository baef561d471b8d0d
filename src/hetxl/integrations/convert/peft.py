"""Models under PEFT: the model inside, and which copy of a layer it calls. Nothing of PEFT is imported.

PEFT keeps a layer that is trained beside its adapters (`modules_to_save`) twice, and calls one of the two:

    classifier                            ModulesToSaveWrapper
    classifier.original_module            as it was, called while adapters are disabled
    classifier.modules_to_save.default    the trained copy, called otherwise
"""

from collections.abc import Container, Iterator
from typing import Any

from torch import nn


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is wrapped by PEFT."""
    return _is(model, "PeftModel")


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, its adapters included; any other model itself."""
    wrapper: Any = model
    return wrapper.get_base_model() if is_peft(model) else model


def called_module(module: nn.Module) -> nn.Module:
    """Return the copy of a module that PEFT calls; a module that PEFT does not keep twice, itself."""
    if not _is(module, "ModulesToSaveWrapper"):
        return module
    wrapper: Any = module
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or active[0] not in wrapper.modules_to_save:
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def merged_name(name: str) -> str:
    """Return the name of a layer without that of PEFT's copy, which it has again when the adapters are merged."""
    return name.partition(".modules_to_save.")[0]


def hidden_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT added or does not call: adapters with the layers below them, and unused copies."""
    return set(_hidden(model))


ADAPTED = (
    "adapters of PEFT wrap it; list it in modules_to_save and leave it out of target_modules, or call hetxl.convert "
    "before get_peft_model"
)
"""Why a layer with adapters cannot be converted."""


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer with adapters around it."""
    return _is(module, "BaseTunerLayer")


def adapted_last(model: nn.Module, layers: Container[str]) -> str | None:
    """Return the name of the last linear layer with adapters, if none of the layers, by their names, comes after it."""
    last = None
    for name, module in model.named_modules():
        linear = isinstance(getattr(module, "base_layer", None), nn.Linear | nn.Conv2d)
        last = name if linear and is_adapted(module) else None if name in layers else last
    return last


def _hidden(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if is_adapted(module):
            yield from module.modules()
        elif _is(module, "ModulesToSaveWrapper"):
            called = set(called_module(module).modules())
            yield from (part for part in module.modules() if part not in called)


def _is(module: nn.Module, name: str) -> bool:
    """Return whether a module is of a class of PEFT, by its name."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)
