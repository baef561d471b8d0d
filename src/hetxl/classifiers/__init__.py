"""What can stand behind a head in the place of W φ + b, for as many classes as memory or time do not allow otherwise.

Each is a `hetxl.nn.Classifier`: `HetXLHead(D, K, classifier=SampledClassifier(D, K, negatives=4096))`.
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
