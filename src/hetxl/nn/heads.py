"""The four heads of the paper. Each says how large its noise space is and how noise is lifted; `Head` does the rest."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl.functional import HashLift, IdentityLift, Lift, LinearLift, Sampler, hash_classes
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.nn.head import Head


class HeadOptions(TypedDict, total=False):
    """The options that all heads share; see `Head`."""

    rank: int
    covariance: str
    residual: str
    noise_init: float
    noise_scale: float
    link: str
    temperature: float | nn.Module | None
    train_samples: int
    eval_samples: int
    sampler: str | Sampler
    memory_budget: int | None
    bias: bool
    bias_init: float | None
    classifier: nn.Module | Callable[[Tensor], Tensor] | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class DetHead(Head):
    """DET, the deterministic classifier softmax(W φ / τ) that the others are measured against (Eq. 1).

    It takes the options of the other heads, so that heads can be swapped by name; those of the noise have no effect.
    τ is 1 unless stated; a `LearnedTemperature` is the paper's ablation "DET w/ learn τ".

    >>> DetHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    _learns_temperature = False

    def _noise_features(self) -> None:
        return None


class HetHead(Head):
    """HET: noise on the logits themselves, N = K; its parameters grow with D·K (Eq. heteroscedastic_probs).

    >>> HetHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    def _noise_features(self) -> int:
        return self.num_classes

    def _lifts_beside(self) -> bool:
        return True

    def _lift(self) -> Lift:
        return IdentityLift()


class HetHashHead(Head):
    """HET-H: noise in H buckets that classes share through a fixed hash, N = H (Eq. het_hashing).

    Args:
        in_features: D
        num_classes: K
        buckets: H; None for H = D, which gives it as many parameters as HET-XL.
        hash_seed: which of the fixed hashes to use. It is stored with the weights, as the buffer `hash` [K].
        **options: see `Head`.

    >>> HetHashHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    hash: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        buckets: int | None = None,
        hash_seed: int = 0,
        **options: Unpack[HeadOptions],
    ):
        # Plain numbers, so they may be set before the module is initialised: its noise space depends on them.
        self.buckets = in_features if buckets is None else integer_at_least("buckets", buckets, 1)
        self.hash_seed = integer_at_least("hash_seed", hash_seed, 0)
        super().__init__(in_features, num_classes, **options)
        assert self.covariance is not None
        device = next(self.covariance.parameters()).device
        self.register_buffer("hash", self._hash().to(device))

    def reset_parameters(self) -> None:
        """Draw the parameters anew and compute the hash again."""
        super().reset_parameters()
        with torch.no_grad():
            self.hash.copy_(self._hash())

    def _hash(self) -> Tensor:
        return hash_classes(self.num_classes, self.buckets, self.hash_seed)

    def _noise_features(self) -> int:
        return self.buckets

    def _lifts_beside(self) -> bool:
        return True

    def _lift(self) -> Lift:
        return HashLift(self.hash)

    def extra_repr(self) -> str:
        """The options as shown when the module is printed."""
        return f"{super().extra_repr()}, buckets={self.buckets}, hash_seed={self.hash_seed}"


class HetXLHead(Head):
    """HET-XL: noise on the features, through the same classifier, N = D (Eq. het-xs). Its extra parameters do not grow
    with the number of classes.

    Args:
        in_features: D
        num_classes: K
        noise_features: M for noise in a space of its own, lifted by its own projection W′ [K, M] (`projection.weight`,
            Eq. het_xl_ind_d); None to share the classifier.
        **options: see `Head`. With `classifier=` an opaque `get_logits`, the noise goes through it with the features.

    >>> HetXLHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        noise_features: int | None = None,
        **options: Unpack[HeadOptions],
    ):
        self.noise_features, self._own_projection = in_features, noise_features is not None
        if noise_features is not None:
            self.noise_features = integer_at_least("noise_features", noise_features, 1)
        super().__init__(in_features, num_classes, **options)
        self.projection: nn.Linear | None = None
        if noise_features is not None:
            assert self.covariance is not None
            like = next(self.covariance.parameters())
            self.projection = nn.Linear(noise_features, num_classes, bias=False, device=like.device, dtype=like.dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        super().reset_parameters()
        if self.projection is not None:
            self.projection.reset_parameters()

    def _noise_features(self) -> int:
        return self.noise_features

    def _lifts_beside(self) -> bool:
        return self._own_projection

    def _lift(self) -> Lift | None:
        return None if self.projection is None else LinearLift(self.projection.weight)


HEADS: dict[str, type[Head]] = {"det": DetHead, "het": HetHead, "het-h": HetHashHead, "het-xl": HetXLHead}
"""The heads by the names that commands and options use."""


def build_head(head: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """The head of a given name, "det", "het", "het-h" or "het-xl", with the options of its class."""
    one_of("head", head, HEADS)
    return HEADS[head](in_features, num_classes, **options)
