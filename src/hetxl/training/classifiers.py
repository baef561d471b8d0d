"""From the name of a classifier to the module that stands behind a head."""

from torch import nn

from hetxl.classifiers import LinearClassifier, RetrievedClassifier, SampledClassifier
from hetxl.nn import Classifier
from hetxl.training.config import TrainConfig


def build_classifier(
    config: TrainConfig, in_features: int, num_classes: int, bias_init: float | None
) -> Classifier | None:
    """The classifier that a configuration names; None for the head's own linear layer.

    Args:
        config: with its options.
        in_features: D
        num_classes: K
        bias_init: start of its bias; None for that of nn.Linear.
    """
    made: LinearClassifier
    if config.classifier == "linear":
        return None
    if config.classifier == "sampled":
        made = SampledClassifier(in_features, num_classes, negatives=config.negatives)
    else:
        # More neighbours than classes find nothing new.
        neighbours = min(config.neighbours, num_classes)
        made = RetrievedClassifier(in_features, num_classes, neighbours=neighbours, others=config.negatives)
    if bias_init is not None and made.bias is not None:
        nn.init.constant_(made.bias, bias_init)
    return made
