"""Models that know their head: a class made from a model's own, with a few methods over it.

The class keeps the name of the model's own, so that files which store it can be read without this package; models can
be copied and pickled.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hetxl.nn import FixedTemperature, LearnedTemperature


class Adapted:
    """Mixed over a model's class by `adapted_class`.

    Attributes:
        hetxl_base: the model's own class.
        hetxl_adapter: what was mixed over it.
        hetxl_options: how its head was made: "head", "layer" and the options of `convert`.
    """

    hetxl_base: type
    hetxl_adapter: "type[Adapted]"
    hetxl_options: dict[str, Any]

    @classmethod
    def hetxl_checked(cls, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """The options for a model, completed; raises for a model that cannot have a head. Before anything changes."""
        return options

    @classmethod
    def hetxl_forward(cls, base: type) -> Callable | None:
        """A `forward` in the place of the model's own; None to leave that."""
        return None

    def hetxl_converted(self) -> None:
        """Called when the head is in its place."""

    def hetxl_reverted(self) -> None:
        """Called when the layer is back in its place."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickled by the two classes that it is made of: this one has no place to be imported from."""
        return _empty, (self.hetxl_base, self.hetxl_adapter), self.__dict__.copy()


@functools.cache
def adapted_class(base: type, adapter: type[Adapted]) -> type:
    """The class of a model, with an adapter's methods over its own."""
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    forward = adapter.hetxl_forward(base)
    if forward is not None:
        names["forward"] = forward
    return type(base.__name__, (adapter, base), {**names, "hetxl_base": base, "hetxl_adapter": adapter})


def _empty(base: type, adapter: type[Adapted]) -> Any:
    made: Any = adapted_class(base, adapter)
    return made.__new__(made)


def fresh_options(options: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Head, layer and the other options of `Adapted.hetxl_options`, for a head anew."""
    rest = {name: value for name, value in options.items() if name not in ("head", "layer")}
    temperature = rest.get("temperature")
    if isinstance(temperature, nn.Module):
        rest["temperature"] = copy.deepcopy(temperature)
        getattr(rest["temperature"], "reset_parameters", lambda: None)()
    return options["head"], options["layer"], rest


def stored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `convert` as JSON can hold them."""
    found = dict(options)
    temperature = found.get("temperature")
    if isinstance(temperature, LearnedTemperature):
        found["temperature"] = {"low": temperature.low, "high": temperature.high, "init": temperature.init}
    elif isinstance(temperature, FixedTemperature):
        found["temperature"] = temperature.value
    elif isinstance(temperature, nn.Module):
        raise ValueError(
            f"temperature is a {type(temperature).__name__}, which cannot be stored with the model; "
            "use a number or a LearnedTemperature"
        )
    if callable(found.get("sampler")):
        raise ValueError("sampler is a function, which cannot be stored with the model; use the name of one")
    return found


def restored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `stored_options`."""
    found = dict(options)
    if isinstance(found.get("temperature"), Mapping):
        found["temperature"] = LearnedTemperature(**found["temperature"])
    return found
