"""Modules that turn features [..., D] into a Gaussian over the noise space [..., N] (Section "Parametrizing the
covariance matrix").

| name | Σ(x) without its residual | parameters |
| --- | --- | --- |
| `efficient` | V ᵀV with V(x) = J ∘ (1 v(x)ᵀ) | D·N + R·N |
| `low_rank` | V ᵀV with V(x) linear in the features | D·R·N |
| `diagonal` | nothing: the residual alone | none |
| `full` | LᵀL with vec(L(x)) = C φ(x); takes no residual | D·N² |

The residual adds d(x) d(x)ᵀ (`rank1`) or diag(d(x)²) (`diagonal`), with D·N parameters. So `covariance="diagonal",
residual="diagonal"` is a diagonal Σ, and `covariance="diagonal"` with the default residual is d dᵀ.

Initial values follow the authors' layer (variance 1/fan-in), times `init`: with features of unit variance every noise
coordinate starts with a standard deviation of about `init` from the factors and 0.7 to 0.9 `init` from the residual.
The authors' own start is `init=1`. A small one lets the classifier find its means first; noise grows where it pays.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hetxl.functional import SAMPLERS, Sampler, draw_normals
from hetxl.functional._checks import integer_at_least, one_of, positive_float
from hetxl.functional.noise import RESIDUALS, GaussianNoise, Residual, residual_scale

CovarianceName = Literal["efficient", "low_rank", "diagonal", "full"]

FULL_PARAMETER_LIMIT = 2**27
"""`full` is refused above this many parameters (512 MiB in float32): D = N = 512 just fits."""


class Covariance(nn.Module, ABC):
    """What the parametrisations share: their sizes, and the residual.

    Args:
        in_features: D
        noise_features: N
        rank: R, rows of the factors.
        residual: "rank1", "diagonal" or None for none.
        init: scale of the noise at the start.
    """

    formula = ""
    where = ""

    def __init__(
        self,
        in_features: int,
        noise_features: int,
        rank: int,
        residual: Residual | None,
        *,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.noise_features = noise_features
        self.rank = rank
        self.init = positive_float("init", init)
        self.residual_kind: Residual | None = residual
        self.residual: nn.Linear | None = None
        if residual is not None:
            self.residual = nn.Linear(in_features, noise_features, device=device, dtype=dtype)

    @property
    def size(self) -> int:
        """Q, the standard normals that one draw takes."""
        return self.rank + {"rank1": 1, "diagonal": self.noise_features, None: 0}[self.residual_kind]

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        if self.residual is not None:
            _lecun_normal(self.residual, gain=self.init)
            # softplus(bias) is `init` times softplus(0), what it is at init = 1.
            nn.init.constant_(self.residual.bias, math.log(math.expm1(self.init * math.log(2))))

    def forward(self, features: Tensor) -> GaussianNoise:
        """The noise for features [..., D], a Gaussian over [..., N]."""
        if self.residual is None or self.residual_kind is None:
            return GaussianNoise(*self._factors(features))
        return GaussianNoise(*self._factors(features), residual_scale(self.residual(features)), self.residual_kind)

    def draw(
        self,
        sampler: str | Sampler,
        num_samples: int,
        batch_shape: Sequence[int] = (),
        *,
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normals, [*batch_shape, S, Q] as `noise=` of a head takes them.

        Args:
            sampler: a name of `hetxl.functional.SAMPLERS`, or a function like those.
            num_samples: S
            batch_shape: of the examples, each with draws of its own; () for [S, Q], which a batch shares.
            generator: where the draws come from; torch's default generator without.
            device: of the result.
            dtype: of the result.
        """
        if isinstance(sampler, str):
            one_of("sampler", sampler, SAMPLERS)
            sampler = SAMPLERS[sampler]
        residual = self.size - self.rank
        examples = math.prod(batch_shape)
        z = draw_normals(
            sampler, examples, num_samples, self.rank, residual, generator=generator, device=device, dtype=dtype
        )
        return z.reshape(*batch_shape, num_samples, self.size)

    @abstractmethod
    def _factors(self, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Factors [R, N] or [..., R, N] and their scale [..., N], each or None."""

    def extra_repr(self) -> str:
        """Σ and the sizes, as shown when the module is printed."""
        terms = [self.formula] if self.formula else []
        if self.residual_kind is not None:
            terms.append({"rank1": "d(x) d(x)ᵀ", "diagonal": "diag(d(x)²)"}[self.residual_kind])
        return f"Σ(x) = {' + '.join(terms)}, {self.where}N={self.noise_features}, R={self.rank}"


class DiagonalCovariance(Covariance):
    """R = 0: no factors, the residual alone."""

    def __init__(
        self,
        in_features: int,
        noise_features: int,
        residual: Residual,
        *,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, noise_features, 0, residual, init=init, device=device, dtype=dtype)
        self.reset_parameters()

    def _factors(self, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, None


class EfficientCovariance(Covariance):
    """The paper's default: factors J shared by all inputs, their columns scaled by v(x)."""

    formula = "V(x)ᵀV(x)"
    where = "V(x) = J ∘ (1 v(x)ᵀ), "

    def __init__(
        self,
        in_features: int,
        noise_features: int,
        rank: int,
        residual: Residual,
        *,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, noise_features, rank, residual, init=init, device=device, dtype=dtype)
        # No bias on J: it would give the noise a mean.
        self.factor = nn.Parameter(torch.empty(rank, noise_features, device=device, dtype=dtype))
        self.scale = nn.Linear(in_features, noise_features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        super().reset_parameters()
        nn.init.normal_(self.factor, std=self.init / math.sqrt(self.rank))
        _lecun_normal(self.scale)

    def _factors(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.factor, self.scale(features)


class LowRankCovariance(Covariance):
    """V(x) linear in the features, R·N outputs."""

    formula = "V(x)ᵀV(x)"

    def __init__(
        self,
        in_features: int,
        noise_features: int,
        rank: int,
        residual: Residual,
        *,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, noise_features, rank, residual, init=init, device=device, dtype=dtype)
        self.loadings = nn.Linear(in_features, noise_features * rank, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        super().reset_parameters()
        # 1/√R keeps the total variance that of `efficient`, whatever the rank.
        _lecun_normal(self.loadings, gain=self.init / math.sqrt(self.rank))

    def _factors(self, features: Tensor) -> tuple[Tensor, None]:
        return self.loadings(features).unflatten(-1, (self.noise_features, self.rank)).mT, None


class FullCovariance(Covariance):
    """Σ(x) = L(x)ᵀL(x) with vec(L(x)) = C φ(x): every direction, D·N² parameters, no residual to add."""

    formula = "L(x)ᵀL(x)"

    def __init__(
        self,
        in_features: int,
        noise_features: int,
        *,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        parameters = in_features * noise_features**2
        if parameters > FULL_PARAMETER_LIMIT:
            raise ValueError(
                f'covariance="full" with {in_features} features and a noise space of {noise_features} dimensions needs '
                f"{parameters:,} parameters; the limit is {FULL_PARAMETER_LIMIT:,}. "
                'Use covariance="low_rank" or "efficient"'
            )
        super().__init__(in_features, noise_features, noise_features, None, init=init, device=device, dtype=dtype)
        self.loadings = nn.Linear(in_features, noise_features**2, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        _lecun_normal(self.loadings, gain=self.init / math.sqrt(self.noise_features))

    def _factors(self, features: Tensor) -> tuple[Tensor, None]:
        return self.loadings(features).unflatten(-1, (self.noise_features, self.noise_features)), None


COVARIANCES: tuple[CovarianceName, ...] = ("efficient", "low_rank", "diagonal", "full")


def check_covariance(covariance: str, rank: int, residual: str) -> None:
    """Raise unless the options name a covariance."""
    one_of("covariance", covariance, COVARIANCES)
    one_of("residual", residual, RESIDUALS)
    integer_at_least("rank", rank, 0)


def build_covariance(
    covariance: str,
    in_features: int,
    noise_features: int,
    *,
    rank: int = 50,
    residual: str = "rank1",
    init: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Covariance:
    """The covariance module of a given name.

    Args:
        covariance: "efficient", "low_rank", "diagonal" or "full".
        in_features: D
        noise_features: N
        rank: R; `diagonal` has none and `full` has N. A rank of 0 is the same as `diagonal`.
        residual: "rank1" or "diagonal"; `full` takes none.
        init: scale of the noise at the start.
        device: where the parameters are made.
        dtype: of the parameters.
    """
    check_covariance(covariance, rank, residual)
    kind: Residual = "rank1" if residual == "rank1" else "diagonal"
    options = {"init": init, "device": device, "dtype": dtype}
    if covariance == "full":
        return FullCovariance(in_features, noise_features, **options)
    if covariance == "diagonal" or rank == 0:
        return DiagonalCovariance(in_features, noise_features, kind, **options)
    module = EfficientCovariance if covariance == "efficient" else LowRankCovariance
    return module(in_features, noise_features, rank, kind, **options)


def _lecun_normal(linear: nn.Linear, gain: float = 1.0) -> None:
    """Variance gain²/fan-in and a bias of zero: outputs start with a variance of gain² for unit-variance inputs."""
    nn.init.normal_(linear.weight, std=gain / math.sqrt(linear.in_features))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
