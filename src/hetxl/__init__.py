"""hetxl: classification with many classes and noisy labels.

import hetxl

head = hetxl.HetXLHead(in_features=2048, num_classes=21_843)   # was: nn.Linear(2048, 21_843)
loss = head(features, labels)                                    # was: cross_entropy(head(features), labels)
prediction = head.predict(features, top_k=5)

model = hetxl.convert(model)                                     # or swap the last layer of a model
model = hetxl.add_noise(model, (inputs, labels))                 # or add noise to a trained model
"""

import importlib
from typing import TYPE_CHECKING, Any

from hetxl import _moved
from hetxl._version import __version__

if TYPE_CHECKING:
    from hetxl import classifiers, contrastive, functional, integrations, metrics, nn
    from hetxl.integrations.convert import add_noise, convert, fused_loss, predict, revert
    from hetxl.nn import (
        DetHead,
        FixedTemperature,
        HetHashHead,
        HetHead,
        HetXLHead,
        LearnedTemperature,
        Prediction,
        build_head,
    )

__all__ = [
    "DetHead",
    "FixedTemperature",
    "HetHashHead",
    "HetHead",
    "HetXLHead",
    "LearnedTemperature",
    "Prediction",
    "__version__",
    "add_noise",
    "build_head",
    "classifiers",
    "contrastive",
    "convert",
    "functional",
    "fused_loss",
    "integrations",
    "metrics",
    "nn",
    "predict",
    "revert",
]

_moved.install()
_PACKAGES = ("classifiers", "contrastive", "functional", "integrations", "metrics", "nn")
_CONVERSION = ("add_noise", "convert", "fused_loss", "predict", "revert")


def __getattr__(name: str) -> Any:
    """Load a public name on first use, because importing torch takes seconds and `hetxl --help` does not need it."""
    if name in _PACKAGES:
        return importlib.import_module(f"hetxl.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'hetxl' has no attribute {name!r}")
    value = getattr(importlib.import_module("hetxl.integrations.convert" if name in _CONVERSION else "hetxl.nn"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
