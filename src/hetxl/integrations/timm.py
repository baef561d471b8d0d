"""Models of timm, or with timm's methods `get_classifier` and `reset_classifier`."""

from typing import Any

from torch import nn

from hetxl.integrations.convert import install
from hetxl.integrations.convert.adapter import Adapted, fresh_options


class TimmAdapter(Adapted):
    """A timm model that keeps its type of head when its number of classes changes.

    `forward_features`, `forward_head(…, pre_logits=True)` and `get_classifier` are timm's methods, which use the head
    as the layer.
    """

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        """Create a new classifier like timm, with a head of the same options; none for num_classes=0."""
        head, layer, options = fresh_options(self.hetxl_options)
        model: Any = self
        model.__class__ = self.hetxl_base
        del model.hetxl_options
        model.reset_classifier(num_classes, *args, **kwargs)
        if num_classes:
            # By name, because the new layer has the old layer's name.
            assert isinstance(model, nn.Module)
            install(model, TimmAdapter, head, layer, options)
