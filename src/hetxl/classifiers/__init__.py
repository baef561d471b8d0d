"""Classifiers that replace W φ + b in a head when there are too many classes for memory or time.

Each is a `hetxl.nn.Classifier`, as in `HetXLHead(D, K, classifier=SampledClassifier(D, K, negatives=4096))`.
"""

from hetxl.classifiers.adaptive import AdaptiveClassifier
from hetxl.classifiers.linear import LinearClassifier
from hetxl.classifiers.quantized import QuantizedClassifier
from hetxl.classifiers.retrieved import RetrievedClassifier
from hetxl.classifiers.sampled import SampledClassifier
from hetxl.classifiers.sharded import ShardedClassifier

__all__ = [
    "AdaptiveClassifier",
    "LinearClassifier",
    "QuantizedClassifier",
    "RetrievedClassifier",
    "SampledClassifier",
    "ShardedClassifier",
]
