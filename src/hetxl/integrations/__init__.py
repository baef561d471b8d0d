"""Integrations with other libraries and formats: head files, export, converted models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetxl.integrations.flax import import_weights

__all__ = ["import_weights"]


def __getattr__(name: str) -> Any:
    # Modules are imported when a name is first used.
    if name in __all__:
        return getattr(importlib.import_module("hetxl.integrations.flax"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
