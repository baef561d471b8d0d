"""hetxl: classification with many classes and noisy labels.

import hetxl

head = hetxl.HetXLHead(in_features=2048, num_classes=21_843)   # was: nn.Linear(2048, 21_843)
loss = head(features, labels)                                    # was: cross_entropy(head(features), labels)
prediction = head.predict(features, top_k=5)

model = hetxl.convert(model)                                     # or a whole model, its last layer swapped
"""

from hetxl import classifiers, contrastive, functional, nn
from hetxl._version import __version__
from hetxl.integrations.convert import convert, fused_loss, predict, revert
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
    "build_head",
    "classifiers",
    "contrastive",
    "convert",
    "functional",
    "fused_loss",
    "nn",
    "predict",
    "revert",
]
