"""The contrastive loss with its learned scale: pairs of embeddings in, one number out."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hetxl.contrastive.embedding import GROUP, NOISE_INIT
from hetxl.contrastive.pairs import NoiseSide, Normals, PairLoss
from hetxl.contrastive.scale import LogitScale
from hetxl.functional import Link
from hetxl.functional.contrastive import Normalize

SCALE_WITH_NOISE = 3.0
SCALE_WITHOUT_NOISE = 10.0
"""Starts of the learned scale, as in the paper's experiments."""


class ContrastiveLoss(PairLoss):
    """The contrastive loss of a batch of pairs.

        logits = scale · (q_n + ε_n)ᵀ k_i              ε_n ~ N(0, Σ(q_n)), on the query side alone
        loss   = 1/2B Σ_n (−log p̄(text n | image n) − log p̄(image n | text n)),     p̄ the mean over S draws

    The sigmoid loss has no directions: noise is on both embeddings of a pair.

        loss   = 1/B Σ_n Σ_i −log p̄(pair or not | image n, text i)

    Over several processes it is the loss of their batches together, the same number on each, and its gradients are
    right after the mean that DDP takes. Batches may differ in size.

    Args:
        features: D
        link: "softmax" (CLIP, LiT) or "sigmoid" (SigLIP).
        noise: which towers have noise, on their queries (softmax): "both", "image", "text" or "none". With "none" this
            is exactly the loss of CLIP or SigLIP.
        covariance: of the noise, "low_rank" as in the paper, "efficient", "diagonal" or "full".
        rank: R
        residual: "rank1" or "diagonal".
        noise_init: length of the noise at the start, as a share of a normalised embedding's.
        samples: S; one in the paper's training.
        sampler: "normal", or a name of `hetxl.functional.SAMPLERS`.
        noise_group: how many examples share the coefficients of a draw up to a sign, see `NoisyEmbedding`; 1 for
            independent draws.
        normalize: embeddings to length 1 "before" the noise is added (the paper's choice), "after" it, "both" or
            "none". Keys are normalised unless it is "none".
        scale_init: of the learned scale; None for the paper's 3 with noise and 10 without.
        bias_init: of the learned bias of the logits (sigmoid).
        max_scale: bound of the learned scale.
        gather: True for the keys of all processes, False for this one's alone, "ring" for one process's after the other
            (sigmoid), which never holds more of them.
        group: the process group that shares a batch; None for all processes.
        local_loss: True for this process's queries against all keys; False for all queries on every process, which
            costs as many times as much and saves the sum of gradients.
        chunk: how many keys at a time (sigmoid); None for all that are there.
        memory_budget: bytes of the engine's working memory; None for its default.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        image_noise: NoisyEmbedding or None
        text_noise: NoisyEmbedding or None
        scale: LogitScale
        bias: a scalar parameter for the sigmoid link; None for the softmax.
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
        scale_init: float | None = None,
        bias_init: float = -10.0,
        max_scale: float = 100.0,
        gather: bool | Literal["ring"] = True,
        group: Any = None,
        local_loss: bool = True,
        chunk: int | None = None,
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            features,
            link=link,
            noise=noise,
            covariance=covariance,
            rank=rank,
            residual=residual,
            noise_init=noise_init,
            samples=samples,
            sampler=sampler,
            noise_group=noise_group,
            normalize=normalize,
            gather=gather,
            group=group,
            local_loss=local_loss,
            chunk=chunk,
            memory_budget=memory_budget,
            device=device,
            dtype=dtype,
        )
        if scale_init is None:
            scale_init = SCALE_WITHOUT_NOISE if noise == "none" else SCALE_WITH_NOISE
        self.scale = LogitScale(scale_init, max_scale, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if link == "sigmoid":
            made = torch.tensor(float(bias_init), device=device, dtype=dtype or torch.get_default_dtype())
            self.bias = nn.Parameter(made)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        *,
        generator: torch.Generator | None = None,
        noise: Normals | None = None,
        num_samples: int | None = None,
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            image: [B, D], as the tower gives them.
            text: [B, D]; row n belongs to row n of the images.
            generator: where the noise comes from. Over several processes it must be in the same state on all of them:
                each takes its rows of the whole batch's draws. Without one, torch's default generator of each process
                draws for its own rows; seed them differently.
            noise: the standard normals themselves, for images and for texts, [B, S, Q] or [S, Q] each.
            num_samples: S of this call; 0 for the loss without noise.
        """
        return self.loss_at(
            image, text, self.scale(), self.bias, generator=generator, noise=noise, num_samples=num_samples
        )
