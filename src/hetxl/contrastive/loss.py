"""The contrastive loss of a batch of pairs of embeddings, with a learned scale."""

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
"""Standard normals for images and for texts, [B, S, Q] or [S, Q] each; None to draw them."""

SCALE_WITH_NOISE = 3.0
SCALE_WITHOUT_NOISE = 10.0
"""Initial values of the learned scale, as in the paper's experiments."""


class LogitScale(nn.Module):
    """exp(t) with t learned, at most `maximum`.

    The forward pass applies the bound, so training loops need no extra call. At the bound, gradients that would
    increase t are dropped and others are kept, so t neither runs away nor gets stuck.

    Args:
        init: initial value of exp(t).
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
        """Clamp t to 0 … log(maximum), as CLIP's training loops do after every step."""
        self.raw.clamp_(0, math.log(self.maximum))

    def extra_repr(self) -> str:
        """Return the initial value and the bound, shown when the module is printed."""
        return f"init={self.init:g}, maximum={self.maximum:g}"


class PairLoss(nn.Module):
    """A contrastive loss without a learned scale, which `ContrastiveLoss` and open_clip models add.

    Args:
        in_features: D
        link: "softmax" (CLIP, LiT) or "sigmoid" (SigLIP).
        noise: towers with noise on their queries (softmax): "both", "image", "text" or "none", which is exactly the
            loss of CLIP or SigLIP. In calls, `noise` are the standard normals, as in heads.
        num_samples: S; 1 in the paper's training.
        noise_group: `group` of `NoisyEmbedding`.
        normalize: scale embeddings to length 1 "before" the noise is added (as in the paper), "after", "both" or
            "none". Keys are normalised unless it is "none".
        gather: True uses the keys of all processes, False only this process's, "ring" one process's keys after the
            other (sigmoid), which needs the memory of one process's keys.
        group: process group that shares a batch; None for all processes.
        local_loss: True computes this process's queries against all keys; False computes all queries on every process,
            which multiplies the cost by the number of processes and saves summing gradients.
        chunk: number of keys per part (sigmoid); None for all present keys.
        memory_budget: bytes of working memory of the engine; None for the default.
        **noise_options: covariance, rank, residual, noise_init, sampler, device and dtype of `NoisyEmbedding`.
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
            raise ValueError(f'gather must be True, False or "ring", found {gather!r}; pass a process group as group=')
        if link == "softmax":
            for name, is_set in (('gather="ring"', self.ring), (f"chunk={chunk}", chunk is not None)):
                if is_set:
                    raise ValueError(f'{name} is for link="sigmoid", found link="softmax"; see memory_budget')
        elif self.ring and not local_loss:
            raise ValueError('local_loss=False cannot be combined with gather="ring", which never has all keys at once')

        options = {"group": noise_group, **noise_options}
        inspect.signature(NoisyEmbedding).bind(in_features, **options)  # unknown options raise also without noise
        self.image_noise = NoisyEmbedding(in_features, **options) if noise in ("both", "image") else None
        self.text_noise = NoisyEmbedding(in_features, **options) if noise in ("both", "text") else None

    def embed_image(self, image: Tensor) -> Tensor:
        """Return image embeddings [B, D] for comparison at test time: without noise, of length 1 unless `normalize` is
        "none"."""
        return contrastive_keys(image, self.normalize)

    def embed_text(self, text: Tensor) -> Tensor:
        """Return text embeddings [B, D] for comparison at test time."""
        return contrastive_keys(text, self.normalize)

    def noise_of_image(self, image: Tensor) -> GaussianNoise:
        """Return the Gaussian around image embeddings [B, D], the tower's outputs."""
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
        """Return the loss for a given scale, and for the sigmoid link a bias, of the logits, both scalars. The other
        arguments are those of `ContrastiveLoss.forward`."""
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
            if self.noise == "text":  # the side with noise is the query side, because the engine samples queries
                queries, keys = keys, queries
            total = self._direction(queries, _samples(keys), share, options)
        if samples == 0 and torch.is_grad_enabled():
            total = touched(total, *self.parameters())
        if not self.local_loss:  # every process computes the whole sum
            return total / (directions * share.total)
        return share.mean_value(total * (share.weight / directions))

    def _direction(self, queries: Queries | Tensor, keys: Tensor, share: Share, options: dict[str, Any]) -> Tensor:
        """Return the loss of one direction, summed over the queries."""
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
        """Return samples [n, S, D] or their distribution; `keys` are the keys of the same embeddings, if computed."""
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
            # The generator is equal on all processes, so the samples are those of one process with the whole batch.
            z, shared = module.draw(share.total, samples, generator)[share.own], module.group_of(share.total, samples)
            shared = 1 if share.offset % shared else shared
        unit, base = self.normalize in ("before", "both"), to_accumulation_dtype(embeddings)
        if (
            unit and keys is not None
        ):  # reuse the normalised keys, which the noise is added to, instead of a second tensor
            unit, base = False, keys
        if z.shape[-2] > module.size and self.normalize in ("before", "none"):
            # With more samples than basis rows, the engine lifts the basis once instead of every sample.
            base = F.normalize(base, dim=-1) if unit else base
            return Queries(base, module(base), z.to(base.dtype))
        # Only the loss uses the samples, so their gradient may be overwritten.
        drawn = module.add_to(base, z, shared, unit=unit, overwrite=True).to(base.dtype)
        return F.normalize(drawn, dim=-1) if self.normalize in ("after", "both") else drawn

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"link={self.link!r}, noise={self.noise!r}, num_samples={self.num_samples}, normalize={self.normalize!r}"


class ContrastiveLoss(PairLoss):
    """The contrastive loss of a batch of pairs.

        logits = scale · (q_n + ε_n)ᵀ k_i              ε_n ~ N(0, Σ(q_n)), only on the query side
        loss   = 1/2B Σ_n (−log p̄(text n | image n) − log p̄(image n | text n)),     p̄ the mean over S draws

    The sigmoid loss has no directions: noise is on both embeddings of a pair.

        loss   = 1/B Σ_n Σ_i −log p̄(pair or not | image n, text i)

    With several processes it is the loss of their joint batch, equal on each process, and its gradients are correct
    after DDP's mean. Batch sizes may differ between processes.

    Args:
        in_features: D
        scale_init: initial value of the learned scale; None for the paper's 3 with noise and 10 without.
        bias_init: initial value of the learned bias of the logits (sigmoid).
        max_scale: upper bound of the learned scale.
        **options: options of `PairLoss`: link, noise, covariance, rank, num_samples, normalize, gather, …
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
            image: [B, D], outputs of the image tower.
            text: [B, D], outputs of the text tower; row n belongs to row n of the images.
            generator: source of the noise. With several processes it must have the same state on all of them, and each
                process uses its rows of the whole batch's noise. None uses torch's default generator of each process,
                which must be seeded differently.
            noise: the standard normals for images and for texts, [B, S, Q] or [S, Q] each.
            num_samples: S for this call; 0 for the loss without noise.
        """
        bias = None if self.bias is None else self.bias.reshape(())
        return self.loss_at(image, text, self.scale(), bias, generator=generator, noise=noise, num_samples=num_samples)


class _BoundedExp(torch.autograd.Function):
    """exp(min(t, top)), whose gradient at the bound can only decrease t."""

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
        # A positive gradient decreases t.
        return torch.where((raw >= ctx.top) & (slope < 0), 0.0, slope), None


def _samples(queries: Queries | Tensor) -> Tensor:
    return queries if isinstance(queries, Tensor) else queries.samples


def _alike(images: Queries | Tensor, texts: Queries | Tensor) -> tuple[Queries | Tensor, Queries | Tensor]:
    """Return both sides of pairs with equal numbers of samples, or one sample for a side without noise."""
    counts = [side.count if isinstance(side, Queries) else side.shape[1] for side in (images, texts)]
    if 1 in counts:
        return images, texts
    if counts[0] != counts[1]:
        raise ValueError(
            f"noise must have as many samples for images as for texts under the sigmoid link, found {counts[0]} and "
            f"{counts[1]}; pass num_samples={counts[0]} to draw the other side"
        )
    return _samples(images), _samples(texts)
