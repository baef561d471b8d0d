"""The loss of a batch of pairs at a given scale: what every contrastive loss module is made of."""

import functools
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl.contrastive.embedding import GROUP, NOISE_INIT, NoisyEmbedding
from hetxl.contrastive.gather import Alone, Peers, Share
from hetxl.contrastive.parts import loss_in_parts
from hetxl.contrastive.queries import Queries, summed_loss
from hetxl.functional import GaussianNoise, Link
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.functional.contrastive import NORMALIZE, Normalize, contrastive_keys, noise_base
from hetxl.functional.links import LINKS
from hetxl.functional.precision import accumulate

NoiseSide = Literal["both", "image", "text", "none"]
SIDES: tuple[NoiseSide, ...] = get_args(NoiseSide)

Normals = tuple[Tensor | None, Tensor | None]
"""Standard normals of images and of texts, [B, S, Q] or [S, Q] each; None to draw them."""


class PairLoss(nn.Module):
    """A contrastive loss without a scale of its own: `ContrastiveLoss` has one, and a model of open_clip as well.

    Args: those of `ContrastiveLoss`, where they are explained.
    """

    def __init__(
        self,
        features: int,
        *,
        link: Link = "softmax",
        noise: NoiseSide = "both",
        covariance: str = "low_rank",
        rank: int = 15,
        residual: str = "rank1",
        noise_init: float = NOISE_INIT,
        samples: int = 1,
        sampler: str = "normal",
        noise_group: int = GROUP,
        normalize: Normalize = "before",
        gather: bool | Literal["ring"] = True,
        group: Any = None,
        local_loss: bool = True,
        chunk: int | None = None,
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        one_of("link", link, LINKS)
        one_of("noise", noise, SIDES)
        one_of("normalize", normalize, NORMALIZE)
        self.features = integer_at_least("features", features, 1)
        self.link: Link = link
        self.noise: NoiseSide = noise
        self.normalize: Normalize = normalize
        self.samples = integer_at_least("samples", samples, 1)
        self.chunk = None if chunk is None else integer_at_least("chunk", chunk, 1)
        self.memory_budget = None if memory_budget is None else integer_at_least("memory_budget", memory_budget, 1)
        self.ring, self.local_loss = gather == "ring", local_loss
        self.peers = Peers(group) if gather else Alone()
        self._check_options(gather)

        def made(side: str) -> NoisyEmbedding | None:
            if noise not in ("both", side):
                return None
            return NoisyEmbedding(
                features,
                covariance=covariance,
                rank=rank,
                residual=residual,
                noise_init=noise_init,
                sampler=sampler,
                group=noise_group,
                device=device,
                dtype=dtype,
            )

        self.image_noise = made("image")
        self.text_noise = made("text")

    def _check_options(self, gather: object) -> None:
        if not isinstance(gather, bool) and gather != "ring":
            raise ValueError(f'gather must be True, False or "ring", found {gather!r}; a process group is group=')
        if self.link == "softmax":
            for name, given in (('gather="ring"', self.ring), (f"chunk={self.chunk}", self.chunk is not None)):
                if given:
                    raise ValueError(f'{name} is for link="sigmoid", found link="softmax"; see memory_budget')
        elif self.ring and not self.local_loss:
            raise ValueError('local_loss=False cannot go with gather="ring": the keys of others come one at a time')

    def embed_image(self, image: Tensor) -> Tensor:
        """Image embeddings [B, D] as they are compared at test time: without noise, of length 1 unless nothing is
        normalised."""
        return contrastive_keys(image, self.normalize)

    def embed_text(self, text: Tensor) -> Tensor:
        """Text embeddings [B, D] as they are compared at test time."""
        return contrastive_keys(text, self.normalize)

    def noise_of_image(self, image: Tensor) -> GaussianNoise:
        """The Gaussian around image embeddings [B, D], which are as the tower gives them."""
        return self._module("image")(noise_base(image, self.normalize))

    def noise_of_text(self, text: Tensor) -> GaussianNoise:
        """The Gaussian around text embeddings [B, D], which are as the tower gives them."""
        return self._module("text")(noise_base(text, self.normalize))

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
        """The loss at a given scale, and for the sigmoid link bias, of the logits; otherwise `ContrastiveLoss.forward`.

        Args:
            image: [B, D]
            text: [B, D]
            scale: a scalar.
            bias: a scalar; None for 0.
            generator: where the noise comes from.
            noise: the standard normals themselves.
            num_samples: S of this call.
        """
        self._check(image, text)
        samples = self.samples if num_samples is None else integer_at_least("num_samples", num_samples, 0)
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
        if samples == 0:
            total = _touched(total, *self.parameters())
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
        """Draws [n, S, D], or what they are drawn from; `keys` of the same embeddings where there are some already."""
        module = self.image_noise if side == "image" else self.text_noise
        if module is None or (samples == 0 and z is None):
            if z is not None:
                raise ValueError(f"noise has normals for the {side} side, which has no noise (noise={self.noise!r})")
            return (contrastive_keys(embeddings, self.normalize) if keys is None else keys).unsqueeze(1)
        batch, shared = len(embeddings), 1
        if z is not None:
            _check_normals(side, z, batch, module.size)
        elif generator is None or share.peers.size == 1:
            z, shared = module.draw(batch, samples, generator), module.group_of(batch, samples)
        else:
            # Every process has the same generator: the draws are those of one process with the whole batch.
            z, shared = module.draw(share.total, samples, generator)[share.own], module.group_of(share.total, samples)
            shared = 1 if share.offset % shared else shared
        unit, base = self.normalize in ("before", "both"), accumulate(embeddings)
        if unit and keys is not None:  # which are what noise is added to: it must not cost a second tensor
            unit, base = False, keys
        if z.shape[-2] > module.size and self.normalize in ("before", "none"):
            # More samples than rows of the basis: the engine lifts the basis once instead of every sample.
            base = F.normalize(base, dim=-1) if unit else base
            return Queries(base, module(base), z.to(base.dtype))
        # Nothing but the loss has the draws, so nothing else their gradient.
        drawn = module.add_to(base, z, shared, unit=unit, overwrite=True).to(base.dtype)
        return F.normalize(drawn, dim=-1) if self.normalize in ("after", "both") else drawn

    def _module(self, side: str) -> NoisyEmbedding:
        module = self.image_noise if side == "image" else self.text_noise
        if module is None:
            raise ValueError(f'noise={self.noise!r} has no noise on the {side} side; build the loss with noise="both"')
        return module

    def _check(self, image: Tensor, text: Tensor) -> None:
        for name, value in (("image", image), ("text", text)):
            if value.dim() != 2 or value.shape[1] != self.features:
                raise ValueError(f"{name} must have shape [B, {self.features}], found {list(value.shape)}")
        if len(image) != len(text):
            raise ValueError(f"image and text must be pairs, found {len(image)} images and {len(text)} texts")

    def extra_repr(self) -> str:
        """The options, as shown when the module is printed."""
        return f"link={self.link!r}, noise={self.noise!r}, samples={self.samples}, normalize={self.normalize!r}"


def _samples(queries: Queries | Tensor) -> Tensor:
    return queries if isinstance(queries, Tensor) else queries.samples


def _alike(images: Queries | Tensor, texts: Queries | Tensor) -> tuple[Queries | Tensor, Queries | Tensor]:
    """Both sides of pairs, whose draws come together: as many of the one as of the other, or one for all."""
    counts = [side.count if isinstance(side, Queries) else side.shape[1] for side in (images, texts)]
    if 1 in counts:
        return images, texts
    if counts[0] != counts[1]:
        raise ValueError(
            f"noise must have as many samples for images as for texts under the sigmoid link, found {counts[0]} and "
            f"{counts[1]}; give num_samples={counts[0]} where one side is drawn"
        )
    return _samples(images), _samples(texts)


def _check_normals(side: str, z: Tensor, batch: int, size: int) -> None:
    if z.dim() not in (2, 3) or z.shape[-1] != size or z.shape[-2] == 0 or (z.dim() == 3 and len(z) != batch):
        raise ValueError(
            f"noise for the {side} side must be normals of shape [{batch}, S, {size}] or [S, {size}], "
            f"found {list(z.shape)}"
        )


def _touched(loss: Tensor, *parameters: Tensor) -> Tensor:
    """The loss as a function of parameters that it does not depend on: DDP waits for a gradient of each."""
    return _Touched.apply(loss, *parameters) if torch.is_grad_enabled() else loss


class _Touched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros_like(parameter) if need else None
            for parameter, need in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        )
        return gradients[0], *zeros
