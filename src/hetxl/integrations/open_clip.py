"""Models of open_clip with HET-XL noise on their embeddings, and losses that open_clip's training loop takes.

    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", output_dict=True)
    wrap(model)                                   # noise parameters become the model's own
    loss = loss_for(model)                        # was: open_clip.ClipLoss(...)
    losses = loss(**model(images, texts), output_dict=True)
    head = zero_shot_head(model, text_embeddings) # head.predict(image_embeddings): probabilities and uncertainty

Nothing of open_clip is imported: any model with `visual`, `logit_scale` and its outputs goes.
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
"""Where a wrapped model keeps its noise: `model.hetxl_noise`, `hetxl_noise.*` in its state dict."""


@renamed(features="in_features")
def wrap(
    model: nn.Module, *, in_features: int | None = None, scale_init: float | None = None, **options: Any
) -> nn.Module:
    """Give a model of open_clip noise on its embeddings, in place.

    The noise is a part of the model: its parameters are trained, moved and saved with it. State dicts of the model as
    it was still load, and leave the noise as it is; those of a wrapped model load into one that is wrapped alike.

    Args:
        model: with `visual` and `logit_scale`; the sigmoid link is chosen if it has a `logit_bias`.
        in_features: D; that of the image tower unless stated.
        scale_init: where the learned scale starts; None leaves it. To train from the start, the paper takes 3.
        **options: of `hetxl.contrastive.PairLoss`: noise, covariance, rank, num_samples, gather, local_loss, …

    Returns:
        The model.
    """
    if hasattr(model, NAME):
        raise ValueError("model has noise already; take it away with hetxl.integrations.open_clip.unwrap(model)")
    scale = getattr(model, "logit_scale", None)
    if not isinstance(scale, Tensor):
        raise TypeError(f"model must be one of open_clip, with a logit_scale, found {type(model).__name__}")
    if in_features is None:
        in_features = getattr(getattr(model, "visual", None), "output_dim", None)
        if not isinstance(in_features, int):
            raise ValueError(f"pass in_features: {type(model).__name__} has no visual.output_dim")
    if options.get("normalize", "before") not in ("before", "both"):
        raise ValueError(
            f'normalize must be "before" or "both", found {options["normalize"]!r}: '
            "models of open_clip normalise their embeddings themselves"
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
    """Take the noise away again, in place; a model without any stays as it is."""
    if hasattr(model, NAME):
        delattr(model, NAME)
    return model


def loss_for(model: nn.Module) -> "NoisyLoss":
    """Return the loss of a wrapped model, or of one inside DistributedDataParallel, for open_clip's training loop."""
    return NoisyLoss(_noise_of(model))


@torch.no_grad()
def zero_shot_head(model: nn.Module, weights: Tensor, **options: Any) -> HetXLHead:
    """Return a classifier for image embeddings of length 1: its classes are texts, its noise a copy of the model's.

        softmax(scale · (embedding + noise) @ weights.T + bias, -1).mean(0)     # over draws of the noise

    Args:
        model: a wrapped one.
        weights: [K, D], embeddings of length 1 of the classes' texts, as from `hetxl.contrastive.zero_shot_weights`.
        **options: of `hetxl.HetXLHead`, such as eval_samples.
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
    """Return the noise of a wrapped model, or of one inside DistributedDataParallel."""
    noise = getattr(getattr(model, "module", model), NAME, None)
    if not isinstance(noise, PairLoss):
        raise ValueError("model has no noise; call hetxl.integrations.open_clip.wrap(model) first")
    return noise


class NoisyLoss(nn.Module):
    """A contrastive loss with the signature of open_clip's ClipLoss and SigLipLoss.

    It has no parameters of its own: the noise is the model's, the scale and the bias come with the call. Over several
    processes it is the loss of all of them, whatever ranks and world size an open_clip loss would be told.
    """

    noise: PairLoss

    def __init__(self, noise: PairLoss):
        super().__init__()
        # Not as a submodule: the parameters stay the model's alone.
        object.__setattr__(self, "noise", noise)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` {"contrastive_loss": loss}, as the training loop wants it.

        Features are [B, D], of length 1; `logit_scale` is the exp of the model's own.
        """
        bias = None if logit_bias is None else logit_bias.reshape(())
        loss = self.noise.loss_at(image_features, text_features, logit_scale.reshape(()), bias)
        return {"contrastive_loss": loss} if output_dict else loss


def _keep_noise(noise: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded that knows nothing of noise: put in what the model has."""
    if not any(name.startswith(prefix) for name in state):
        state.update({prefix + name: value for name, value in noise.state_dict().items()})
