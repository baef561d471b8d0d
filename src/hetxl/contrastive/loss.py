"""The contrastive loss of a batch of pairs, with its learned scale: pairs of embeddings in, one number out."""

import functools
import inspect
import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl._checks import integer_at_least, one_of, positive_float, renamed
from hetxl.contrastive.chunked_loss import Queries, loss_in_parts, summed_loss
from hetxl.contrastive.embedding import GROUP, NoisyEmbedding
from hetxl.contrastive.gather import Alone, Peers, Share
from hetxl.functional import GaussianNoise, Link
from hetxl.functional._torch import Factory, take_scalars, to_accumulation_dtype, touched
from hetxl.functional.contrastive import NORMALIZE, Normalize, contrastive_keys, noise_base
from hetxl.registry import LINKS

NoiseSide = Literal["both", "image", "text", "none"]
SIDES: tuple[NoiseSide, ...] = get_args(NoiseSide)

Normals = tuple[Tensor | None, Tensor | None]
"""Standard normals of images and of texts, [B, S, Q] or [S, Q] each; None to draw them."""

SCALE_WITH_NOISE = 3.0
SCALE_WITHOUT_NOISE = 10.0
"""Starts of the learned scale, as in the paper's experiments."""


class LogitScale(nn.Module):
    """exp(t) with t learned, at most `maximum`.

    The bound is part of the forward pass, so a training loop needs no call for it. At the bound a gradient that would
    carry t further up is dropped and one that brings it back is kept: t neither runs away nor gets stuck.

    Args:
        init: exp(t) at the start.
        maximum: the largest scale; 100 in CLIP.
        **factory: device and dtype of t.
    """

    def __init__(self, init: float, maximum: float = 100.0, **factory: Unpack[Factory]):
        super().__init__()
        self.init = positive_float("init", init)
        self.maximum = positive_float("maximum", maximum)
        if self.init > self.maximum:
            raise ValueError(f"init must be at most maximum={self.maximum:g}, found {self.init:g}")
        self.raw = nn.Parameter(torch.full((1,), math.log(self.init), **factory))
        self.register_load_state_dict_pre_hook(take_scalars)

    def forward(self) -> Tensor:
        """Return the scale, a scalar in at least float32."""
        raw = self.raw if self.raw.dtype == torch.float64 else self.raw.float()
        return _BoundedExp.apply(raw.reshape(()), math.log(self.maximum))

    @torch.no_grad()
    def clamp_(self) -> None:
        """Put t back between 0 and log(maximum), as CLIP's training loops do after every step."""
        self.raw.clamp_(0, math.log(self.maximum))

    def extra_repr(self) -> str:
        """Return the start and the bound, as shown when the module is printed."""
        return f"init={self.init:g}, maximum={self.maximum:g}"


class PairLoss(nn.Module):
    """A contrastive loss without a scale of its own: `ContrastiveLoss` has one, and a model of open_clip as well.

    Args:
        in_features: D
        link: "softmax" (CLIP, LiT) or "sigmoid" (SigLIP).
        noise: which towers have noise, on their queries (softmax): "both", "image", "text" or "none". With "none" this
            is exactly the loss of CLIP or SigLIP. In calls, `noise` is the standard normals themselves, as of heads.
        num_samples: S; one in the paper's training.
        noise_group: `group` of `NoisyEmbedding`.
        normalize: embeddings to length 1 "before" the noise is added (the paper's choice), "after" it, "both" or
            "none". Keys are normalised unless it is "none".
        gather: True for the keys of all processes, False for this one's alone, "ring" for one process's after the other
            (sigmoid), which never holds more of them.
        group: the process group that shares a batch; None for all processes.
        local_loss: True for this process's queries against all keys; False for all queries on every process, which
            costs as many times as much and saves the sum of gradients.
        chunk: how many keys at a time (sigmoid); None for all that are there.
        memory_budget: bytes of the engine's working memory; None for its default.
        **noise_options: of `NoisyEmbedding`: covariance, rank, residual, noise_init, sampler, device and dtype.
    """

    @renamed(features="in_features", samples="num_samples")
    def __init__(
        self,
        in_features: int,
        *,
        link: Link = "softmax",
        noise: NoiseSide = "both",
        num_samples: int = 1,
        noise_group: int = GROUP,
        normalize: Normalize = "before",
        gather: bool | Literal["ring"] = True,
        group: Any = None,
        local_loss: bool = True,
        chunk: int | None = None,
        memory_budget: int | None = None,
        **noise_options: Any,
    ):
        super().__init__()
        one_of("link", link, LINKS)
        one_of("noise", noise, SIDES)
        one_of("normalize", normalize, NORMALIZE)
        self.in_features = integer_at_least("in_features", in_features, 1)
        self.link: Link = link
        self.noise: NoiseSide = noise
        self.normalize: Normalize = normalize
        self.num_samples = integer_at_least("num_samples", num_samples, 1)
        self.chunk = None if chunk is None else integer_at_least("chunk", chunk, 1)
        self.memory_budget = None if memory_budget is None else integer_at_least("memory_budget", memory_budget, 1)
        self.ring, self.local_loss = gather == "ring", local_loss
        self.peers = Peers(group) if gather else Alone()
        if not isinstance(gather, bool) and gather != "ring":
            raise ValueError(f'gather must be True, False or "ring", found {gather!r}; a process group is group=')
        if link == "softmax":
            for name, is_set in (('gather="ring"', self.ring), (f"chunk={chunk}", chunk is not None)):
                if is_set:
                    raise ValueError(f'{name} is for link="sigmoid", found link="softmax"; see memory_budget')
        elif self.ring and not local_loss:
            raise ValueError('local_loss=False cannot go with gather="ring": the keys of others come one at a time')

        options = {"group": noise_group, **noise_options}
        inspect.signature(NoisyEmbedding).bind(in_features, **options)  # an unknown option raises without noise as well
        self.image_noise = NoisyEmbedding(in_features, **options) if noise in ("both", "image") else None
        self.text_noise = NoisyEmbedding(in_features, **options) if noise in ("both", "text") else None

    def embed_image(self, image: Tensor) -> Tensor:
        """Return image embeddings [B, D] as compared at test time: without noise, of length 1 unless left as is."""
        return contrastive_keys(image, self.normalize)

    def embed_text(self, text: Tensor) -> Tensor:
        """Return text embeddings [B, D] as they are compared at test time."""
        return contrastive_keys(text, self.normalize)

    def noise_of_image(self, image: Tensor) -> GaussianNoise:
        """Return the Gaussian around image embeddings [B, D], which are as the tower gives them."""
        if self.image_noise is None:
            raise ValueError(f'noise={self.noise!r} has no noise on the image side; build the loss with noise="both"')
        return self.image_noise(noise_base(image, self.normalize))

    def loss_at(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        noise: Normals | None = None,
        num_samples: int | None = None,
    ) -> Tensor:
        """Return the loss at a scale, and for the sigmoid link a bias, of the logits: scalars. All else is as of
        `ContrastiveLoss.forward`."""
        for name, value in (("image", image), ("text", text)):
            if value.dim() != 2 or value.shape[1] != self.in_features:
                raise ValueError(f"{name} must have shape [B, {self.in_features}], found {list(value.shape)}")
        if len(image) != len(text):
            raise ValueError(f"image and text must be pairs, found {len(image)} images and {len(text)} texts")
        samples = self.num_samples if num_samples is None else integer_at_least("num_samples", num_samples, 0)
        share = self.peers.share_of(len(image), image.device)
        if share.total == 0:
            raise ValueError("image and text must hold at least one pair, found none")
        z_image, z_text = noise or (None, None)
        draw = {"samples": samples, "generator": generator, "share": share}
        options = {"link": self.link, "scale": scale, "bias": bias, "memory_budget": self.memory_budget}
        images = functools.partial(self._queries, "image", image, z=z_image, **draw)
        texts = functools.partial(self._queries, "text", text, z=z_text, **draw)
        directions = 1
        if self.link == "softmax":
            keys = contrastive_keys(image, self.normalize), contrastive_keys(text, self.normalize)
            total = self._direction(images(keys[0]), keys[1], share, options)
            total = total + self._direction(texts(keys[1]), keys[0], share, options)
            directions = 2
        else:
            queries, keys = _alike(images(), texts())
            if self.noise == "text":  # the side that has draws asks: the engine mixes those of queries
                queries, keys = keys, queries
            total = self._direction(queries, _samples(keys), share, options)
        if samples == 0 and torch.is_grad_enabled():
            total = touched(total, *self.parameters())
        if not self.local_loss:  # every process has the whole sum
            return total / (directions * share.total)
        return share.mean_value(total * (share.weight / directions))

    def _direction(self, queries: Queries | Tensor, keys: Tensor, share: Share, options: dict[str, Any]) -> Tensor:
        """Σ over the queries of the losses of one direction."""
        if self.ring:
            return loss_in_parts(_samples(queries), keys, chunk=self.chunk, ring=share, **options)
        keys = share.gather(keys, same_loss=not self.local_loss)
        offset = share.offset
        if share.peers.size > 1 and not self.local_loss:
            queries, offset = share.gather(_samples(queries), same_loss=True), 0
        if isinstance(queries, Tensor) or self.chunk is not None:
            return loss_in_parts(_samples(queries), keys, offset=offset, chunk=self.chunk, **options)
        own = torch.arange(offset, offset + len(queries.features), device=keys.device)
        return summed_loss(queries, keys if self.link == "softmax" else keys.squeeze(1), own, **options)

    def _queries(
        self,
        side: str,
        embeddings: Tensor,
        keys: Tensor | None = None,
        *,
        z: Tensor | None,
        samples: int,
        generator: torch.Generator | None,
        share: Share,
    ) -> Queries | Tensor:
        """Return draws [n, S, D], or what they are drawn from; `keys` of the same embeddings if they exist already."""
        module = self.image_noise if side == "image" else self.text_noise
        if module is None or (samples == 0 and z is None):
            if z is not None:
                raise ValueError(f"noise has normals for the {side} side, which has no noise (noise={self.noise!r})")
            return (contrastive_keys(embeddings, self.normalize) if keys is None else keys).unsqueeze(1)
        batch, shared, size = len(embeddings), 1, module.size
        if z is not None:
            if z.dim() not in (2, 3) or z.shape[-1] != size or z.shape[-2] == 0 or (z.dim() == 3 and len(z) != batch):
                raise ValueError(
                    f"noise for the {side} side must be normals of shape [{batch}, S, {size}] or [S, {size}], "
                    f"found {list(z.shape)}"
                )
        elif generator is None or share.peers.size == 1:
            z, shared = module.draw(batch, samples, generator), module.group_of(batch, samples)
        else:
            # Every process has the same generator: the draws are those of one process with the whole batch.
            z, shared = module.draw(share.total, samples, generator)[share.own], module.group_of(share.total, samples)
            shared = 1 if share.offset % shared else shared
        unit, base = self.normalize in ("before", "both"), to_accumulation_dtype(embeddings)
        if unit and keys is not None:  # which are what noise is added to: it must not cost a second tensor
            unit, base = False, keys
        if z.shape[-2] > module.size and self.normalize in ("before", "none"):
            # More samples than rows of the basis: the engine lifts the basis once instead of every sample.
            base = F.normalize(base, dim=-1) if unit else base
            return Queries(base, module(base), z.to(base.dtype))
        # Nothing but the loss has the draws, so nothing else their gradient.
        drawn = module.add_to(base, z, shared, unit=unit, overwrite=True).to(base.dtype)
        return F.normalize(drawn, dim=-1) if self.normalize in ("after", "both") else drawn

    def extra_repr(self) -> str:
        """Return the options, as shown when the module is printed."""
        return f"link={self.link!r}, noise={self.noise!r}, num_samples={self.num_samples}, normalize={self.normalize!r}"


class ContrastiveLoss(PairLoss):
    """The contrastive loss of a batch of pairs.

        logits = scale · (q_n + ε_n)ᵀ k_i              ε_n ~ N(0, Σ(q_n)), on the query side alone
        loss   = 1/2B Σ_n (−log p̄(text n | image n) − log p̄(image n | text n)),     p̄ the mean over S draws

    The sigmoid loss has no directions: noise is on both embeddings of a pair.

        loss   = 1/B Σ_n Σ_i −log p̄(pair or not | image n, text i)

    Over several processes it is the loss of their batches together, the same number on each, and its gradients are
    right after the mean that DDP takes. Batches may differ in size.

    Args:
        in_features: D
        scale_init: of the learned scale; None for the paper's 3 with noise and 10 without.
        bias_init: of the learned bias of the logits (sigmoid).
        max_scale: bound of the learned scale.
        **options: of `PairLoss`: link, noise, covariance, rank, samples, normalize, gather, …
    """

    @renamed(features="in_features", samples="num_samples")
    def __init__(
        self,
        in_features: int,
        *,
        scale_init: float | None = None,
        bias_init: float = -10.0,
        max_scale: float = 100.0,
        **options: Any,
    ):
        super().__init__(in_features, **options)
        device, dtype = options.get("device"), options.get("dtype")
        if scale_init is None:
            scale_init = SCALE_WITHOUT_NOISE if self.noise == "none" else SCALE_WITH_NOISE
        self.scale = LogitScale(scale_init, max_scale, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if self.link == "sigmoid":
            self.bias = nn.Parameter(torch.full((1,), float(bias_init), device=device, dtype=dtype))
            self.register_load_state_dict_pre_hook(take_scalars)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        *,
        generator: torch.Generator | None = None,
        noise: Normals | None = None,
        num_samples: int | None = None,
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            image: [B, D], as the tower gives them.
            text: [B, D]; row n belongs to row n of the images.
            generator: where the noise comes from. Over several processes it must be in the same state on all of them:
                each takes its rows of the whole batch's draws. Without one, torch's default generator of each process
                draws for its own rows; seed them differently.
            noise: the standard normals themselves, for images and for texts, [B, S, Q] or [S, Q] each.
            num_samples: S of this call; 0 for the loss without noise.
        """
        bias = None if self.bias is None else self.bias.reshape(())
        return self.loss_at(image, text, self.scale(), bias, generator=generator, noise=noise, num_samples=num_samples)


class _BoundedExp(torch.autograd.Function):
    """exp(min(t, top)), whose gradient at the bound leads back only."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, top: float) -> Tensor:
        value = raw.clamp(max=top).exp()
        ctx.save_for_backward(raw, value)
        ctx.top = top
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        raw, value = ctx.saved_tensors
        slope = gradients[0] * value
        # A positive gradient makes a step down.
        return torch.where((raw >= ctx.top) & (slope < 0), 0.0, slope), None


def _samples(queries: Queries | Tensor) -> Tensor:
    return queries if isinstance(queries, Tensor) else queries.samples


def _alike(images: Queries | Tensor, texts: Queries | Tensor) -> tuple[Queries | Tensor, Queries | Tensor]:
    """Return both sides of pairs, whose draws come together: as many of the one as of the other, or one for all."""
    counts = [side.count if isinstance(side, Queries) else side.shape[1] for side in (images, texts)]
    if 1 in counts:
        return images, texts
    if counts[0] != counts[1]:
        raise ValueError(
            f"noise must have as many samples for images as for texts under the sigmoid link, found {counts[0]} and "
            f"{counts[1]}; give num_samples={counts[0]} where one side is drawn"
        )
    return _samples(images), _samples(texts)
