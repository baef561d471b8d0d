"""hetxl beside other libraries and formats: files of heads, export, converted models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetxl.integrations.flax_weights import import_weights

__all__ = ["import_weights"]

_MODULES = {"import_weights": "hetxl.integrations.flax_weights"}


def __getattr__(name: str) -> Any:
    # Each name brings its module when it is first used.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
