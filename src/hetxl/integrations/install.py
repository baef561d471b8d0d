"""Putting a head in the place of a layer, with everything decided."""

from typing import Any

from torch import nn

from hetxl.integrations.adapt import Adapted, adapted_class
from hetxl.integrations.find import find_layer, replace
from hetxl.integrations.layer import LAYERS


def install(
    model: nn.Module,
    adapter: type[Adapted] | None,
    head: str,
    layer: str | nn.Module | None,
    options: dict[str, Any],
) -> Any:
    """Replace a layer of a model in place.

    Args:
        model: to convert.
        adapter: mixed over the model's class; None for a model that needs nothing.
        head: its name in `hetxl.nn.HEADS`.
        layer: the name of the layer or itself; None to find it.
        options: of the head.

    Returns:
        The model; the new head where the model is the layer.
    """
    if adapter is not None:
        options = adapter.hetxl_checked(model, dict(options))
    old = find_layer(model, layer)
    new = LAYERS[head](old, **options)
    if model is old:
        return new
    names = replace(model, old, new)
    if adapter is not None:
        if not isinstance(model, Adapted):
            model.__class__ = adapted_class(type(model), adapter)
        assert isinstance(model, Adapted)
        model.hetxl_options = {"head": head, "layer": names[0], **options}
        model.hetxl_converted()
    return model
