"""Classes of converted models: an adapter's methods mixed over the model's class.

The class keeps the name of the model's class, so that files with the name can be read without this package. Models can
be copied and pickled.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hetxl.nn import FixedTemperature, LearnedTemperature


class Adapted:
    """Base of adapters, which `adapted_class` mixes over a model's class."""

    hetxl_base: type  # the original class
    hetxl_adapter: "type[Adapted]"  # the adapter
    hetxl_options: dict[str, Any]  # "head", "layer" and the options of `convert`

    @classmethod
    def hetxl_checked(cls, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Return the completed options for a model; raise if it cannot have a head, before anything changes."""
        return options

    @classmethod
    def hetxl_forward(cls, base: type) -> Callable | None:
        """Return a `forward` that replaces the model's; None to keep it."""
        return None

    def hetxl_converted(self) -> None:
        """Run after the head is installed."""

    def hetxl_reverted(self) -> None:
        """Run after the layer is restored."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle by the two base classes, because this class cannot be imported."""
        return _empty, (self.hetxl_base, self.hetxl_adapter), self.__dict__.copy()


@functools.cache
def adapted_class(base: type, adapter: type[Adapted]) -> type:
    """Return a model's class with an adapter mixed in."""
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    forward = adapter.hetxl_forward(base)
    if forward is not None:
        names["forward"] = forward
    return type(base.__name__, (adapter, base), {**names, "hetxl_base": base, "hetxl_adapter": adapter})


def _empty(base: type, adapter: type[Adapted]) -> Any:
    adapted: Any = adapted_class(base, adapter)
    return adapted.__new__(adapted)


def fresh_options(options: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return head, layer and the other options of `Adapted.hetxl_options`, to create a new head."""
    rest = {name: value for name, value in options.items() if name not in ("head", "layer")}
    temperature = rest.get("temperature")
    if isinstance(temperature, nn.Module):
        rest["temperature"] = copy.deepcopy(temperature)
        getattr(rest["temperature"], "reset_parameters", lambda: None)()
    return options["head"], options["layer"], rest


def stored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `convert` in a form for JSON."""
    stored = dict(options)
    temperature = stored.get("temperature")
    if isinstance(temperature, LearnedTemperature):
        stored["temperature"] = {"low": temperature.low, "high": temperature.high, "init": temperature.init}
    elif isinstance(temperature, FixedTemperature):
        stored["temperature"] = temperature.value
    elif isinstance(temperature, nn.Module):
        raise ValueError(
            f"temperature is a {type(temperature).__name__}, which cannot be stored with the model; "
            "use a number or a LearnedTemperature"
        )
    if callable(stored.get("sampler")):
        raise ValueError("sampler is a function, which cannot be stored with the model; use a sampler's name")
    return stored


def restored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `stored_options`."""
    restored = dict(options)
    if isinstance(restored.get("temperature"), Mapping):
        restored["temperature"] = LearnedTemperature(**restored["temperature"])
    return restored
