"""Models of open_clip with HET-XL noise on their embeddings, and losses for open_clip's training loop.

    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", output_dict=True)
    wrap(model)                                   # adds the noise's parameters to the model
    loss = loss_for(model)                        # was: open_clip.ClipLoss(...)
    losses = loss(**model(images, texts), output_dict=True)
    head = zero_shot_head(model, text_embeddings) # head.predict(image_embeddings): probabilities and uncertainty

This module does not import open_clip; it works with any model that has `visual`, `logit_scale` and the same outputs.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from hetxl._checks import positive_float, renamed
from hetxl.contrastive.loss import PairLoss
from hetxl.nn import HetXLHead

NAME = "hetxl_noise"
"""Attribute of a wrapped model with its noise, and prefix in its state dict."""


@renamed(features="in_features")
def wrap(
    model: nn.Module, *, in_features: int | None = None, scale_init: float | None = None, **options: Any
) -> nn.Module:
    """Add noise to the embeddings of an open_clip model, in place.

    The noise is a submodule, so its parameters are trained, moved and saved with the model. State dicts of the original
    model still load and do not change the noise; state dicts of a wrapped model load into a model wrapped in the same
    way.

    Args:
        model: a model with `visual` and `logit_scale`; a `logit_bias` selects the sigmoid link.
        in_features: D [default: output size of the image tower].
        scale_init: new initial value of the learned scale; None keeps it. To train from scratch, the paper uses 3.
        **options: options of `hetxl.contrastive.PairLoss`: noise, covariance, rank, num_samples, gather, local_loss, …

    Returns:
        The model.
    """
    if hasattr(model, NAME):
        raise ValueError("model already has noise; remove it with hetxl.integrations.open_clip.unwrap(model)")
    scale = getattr(model, "logit_scale", None)
    if not isinstance(scale, Tensor):
        raise TypeError(f"model must be an open_clip model with a logit_scale, found {type(model).__name__}")
    if in_features is None:
        in_features = getattr(getattr(model, "visual", None), "output_dim", None)
        if not isinstance(in_features, int):
            raise ValueError(f"pass in_features: {type(model).__name__} has no visual.output_dim")
    if options.get("normalize", "before") not in ("before", "both"):
        raise ValueError(
            f'normalize must be "before" or "both", found {options["normalize"]!r}: '
            "open_clip models normalise their embeddings themselves"
        )
    defaults: dict[str, Any] = {
        "device": scale.device,
        "dtype": torch.promote_types(scale.dtype, torch.float32),
        "link": "softmax" if getattr(model, "logit_bias", None) is None else "sigmoid",
    }
    noise = PairLoss(in_features, **defaults | options)
    noise.register_load_state_dict_pre_hook(_keep_noise)
    model.add_module(NAME, noise)
    if scale_init is not None:
        with torch.no_grad():
            scale.fill_(math.log(positive_float("scale_init", scale_init)))
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Remove the noise, in place; a model without noise does not change."""
    if hasattr(model, NAME):
        delattr(model, NAME)
    return model


def loss_for(model: nn.Module) -> "NoisyLoss":
    """Return the loss of a wrapped model, also inside DistributedDataParallel, for open_clip's training loop."""
    return NoisyLoss(_noise_of(model))


@torch.no_grad()
def zero_shot_head(model: nn.Module, weights: Tensor, **options: Any) -> HetXLHead:
    """Return a classifier for image embeddings of length 1, with texts as classes and a copy of the model's noise.

        softmax(scale · (embedding + noise) @ weights.T + bias, -1).mean(0)     # over samples of the noise

    Args:
        model: a wrapped model.
        weights: [K, D], text embeddings of length 1, for instance from `hetxl.contrastive.zero_shot_weights`.
        **options: options of `hetxl.HetXLHead`, such as eval_samples.
    """
    pairs = _noise_of(model)
    parts: Any = getattr(model, "module", model)
    if pairs.image_noise is None or pairs.normalize != "before":
        raise ValueError(
            f'model must have noise on its image embeddings and normalize="before", found noise={pairs.noise!r} and '
            f"normalize={pairs.normalize!r}; use hetxl.contrastive.zero_shot_log_probs"
        )
    covariance, bias = copy.deepcopy(pairs.image_noise.covariance), getattr(parts, "logit_bias", None)
    layer = nn.Linear(*reversed(weights.shape), bias=bias is not None).to(next(covariance.parameters()))
    layer.weight.copy_(parts.logit_scale.exp() * weights)
    if bias is not None:
        layer.bias.copy_(bias.expand(len(weights)))
    head = HetXLHead(
        layer.in_features, len(weights), link=pairs.link, classifier=layer, covariance="diagonal", **options
    )
    head.covariance = covariance
    return head.eval()


def _noise_of(model: nn.Module) -> PairLoss:
    """Return the noise of a wrapped model, also inside DistributedDataParallel."""
    noise = getattr(getattr(model, "module", model), NAME, None)
    if not isinstance(noise, PairLoss):
        raise ValueError("model has no noise; call hetxl.integrations.open_clip.wrap(model) first")
    return noise


class NoisyLoss(nn.Module):
    """A contrastive loss with the signature of open_clip's ClipLoss and SigLipLoss.

    It has no parameters: the noise belongs to the model, and scale and bias are arguments of the call. With several
    processes it is their joint loss; ranks and world size, which open_clip's losses need, are detected.
    """

    noise: PairLoss

    def __init__(self, noise: PairLoss):
        super().__init__()
        # Not a submodule, so that the parameters belong only to the model.
        object.__setattr__(self, "noise", noise)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` {"contrastive_loss": loss}, as the training loop expects.

        Features are [B, D], of length 1; `logit_scale` is the exponential of the model's parameter.
        """
        bias = None if logit_bias is None else logit_bias.reshape(())
        loss = self.noise.loss_at(image_features, text_features, logit_scale.reshape(()), bias)
        return {"contrastive_loss": loss} if output_dict else loss


def _keep_noise(noise: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the model's current noise to a state dict without noise before it is loaded."""
    if not any(name.startswith(prefix) for name in state):
        state.update({prefix + name: value for name, value in noise.state_dict().items()})
