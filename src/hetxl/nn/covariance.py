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
The authors use `init=1`. With a small value the classifier learns its means first, and the noise grows where it helps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl._checks import integer_at_least, one_of, positive_float
from hetxl.functional import SAMPLERS, Sampler, draw_normals
from hetxl.functional._torch import Factory
from hetxl.functional.noise import GaussianNoise, residual_scale
from hetxl.functional.samplers import fixed_normals
from hetxl.registry import COVARIANCES, RESIDUALS, Residual

FULL_PARAMETER_LIMIT = 2**27
"""Largest number of parameters of `full` (512 MiB in float32): exactly that of D = N = 512."""


class CovarianceOptions(Factory, total=False):
    """Options of all covariances; see `Covariance`."""

    init: float


class Covariance(nn.Module, ABC):
    """Base of the parametrisations: the sizes and the residual.

    Args:
        in_features: D
        noise_features: N
        rank: R, rows of the factors.
        residual: "rank1", "diagonal" or None for none.
        init: scale of the noise at the start.
        **factory: device and dtype of the parameters.
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
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.in_features, self.noise_features, self.rank = in_features, noise_features, rank
        self.init = positive_float("init", init)
        self.residual_kind: Residual | None = residual
        self.residual: nn.Linear | None = None
        if residual is not None:
            self.residual = nn.Linear(in_features, noise_features, **factory)
        self._add_parameters(factory)
        self.reset_parameters()

    def _add_parameters(self, factory: Factory) -> None:
        """Create the parameters other than those of the residual."""

    @property
    def size(self) -> int:
        """Return Q, the number of standard normals of one sample."""
        return self.rank + {"rank1": 1, "diagonal": self.noise_features, None: 0}[self.residual_kind]

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        if self.residual is not None:
            _lecun_normal(self.residual, gain=self.init)
            # softplus(bias) is `init` times softplus(0), its value at init = 1.
            scale = self.init * math.log(2)
            bias = (
                math.log(math.expm1(scale)) if scale < 40 else scale
            )  # equal in float64 from 40 on; expm1 may overflow
            nn.init.constant_(self.residual.bias, bias)

    @torch.no_grad()
    def silence(self) -> None:
        """Minimise the noise: no factors, and a residual of 1e-3."""
        for parameter in self.parameters():
            parameter.zero_()
        if self.residual is not None:
            self.residual.bias.fill_(-100.0)  # its softplus is 0

    def forward(self, features: Tensor) -> GaussianNoise:
        """Return the noise for features [..., D], a Gaussian over [..., N]."""
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
        """Draw standard normals [*batch_shape, S, Q], for the argument `noise=` of a head.

        Args:
            sampler: a name of `hetxl.functional.SAMPLERS`, or a function like those.
            num_samples: S
            batch_shape: shape of the examples, which get separate draws; () for [S, Q], shared by the batch.
            generator: source of the draws [default: torch's default generator].
            device: device of the result.
            dtype: dtype of the result.
        """
        sizes = (math.prod(batch_shape), num_samples, self.rank, self.size - self.rank)
        z = draw_normals(_sampler(sampler), *sizes, generator=generator, device=device, dtype=dtype)
        return z.reshape(*batch_shape, num_samples, self.size)

    def fixed_draws(
        self,
        sampler: str | Sampler,
        num_samples: int,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw the standard normals [S, Q] of a seed, the same on every device, for evaluation mode.

        self.draw(sampler, num_samples, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

        Callers share the result and must not change it in place.
        """
        sizes = (num_samples, self.rank, self.size - self.rank)
        return fixed_normals(_sampler(sampler), *sizes, seed, torch.device(device), dtype)

    @abstractmethod
    def _factors(self, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute the factors [R, N] or [..., R, N] and their scale [..., N]; either may be None."""

    def extra_repr(self) -> str:
        """Return Σ and the sizes, shown when the module is printed."""
        terms = [self.formula] if self.formula else []
        if self.residual_kind is not None:
            terms.append({"rank1": "d(x) d(x)ᵀ", "diagonal": "diag(d(x)²)"}[self.residual_kind])
        return f"Σ(x) = {' + '.join(terms)}, {self.where}N={self.noise_features}, R={self.rank}"


class DiagonalCovariance(Covariance):
    """The residual alone, without factors (R = 0)."""

    def __init__(self, in_features: int, noise_features: int, residual: Residual, **options: Unpack[CovarianceOptions]):
        super().__init__(in_features, noise_features, 0, residual, **options)

    def _factors(self, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, None


class EfficientCovariance(Covariance):
    """The paper's default: factors J shared by all inputs, their columns scaled by v(x)."""

    formula = "V(x)ᵀV(x)"
    where = "V(x) = J ∘ (1 v(x)ᵀ), "

    def _add_parameters(self, factory: Factory) -> None:
        # No bias on J: it would give the noise a mean.
        self.factor = nn.Parameter(torch.empty(self.rank, self.noise_features, **factory))
        self.scale = nn.Linear(self.in_features, self.noise_features, **factory)

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        super().reset_parameters()
        nn.init.normal_(self.factor, std=self.init / math.sqrt(self.rank))
        _lecun_normal(self.scale)

    def _factors(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.factor, self.scale(features)


class LowRankCovariance(Covariance):
    """V(x) linear in the features, R·N outputs."""

    formula = "V(x)ᵀV(x)"

    def _add_parameters(self, factory: Factory) -> None:
        self.loadings = nn.Linear(self.in_features, self.noise_features * self.rank, **factory)

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        super().reset_parameters()
        # 1/√R keeps the total variance that of `efficient`, whatever the rank.
        _lecun_normal(self.loadings, gain=self.init / math.sqrt(self.rank))

    def _factors(self, features: Tensor) -> tuple[Tensor, None]:
        return self.loadings(features).unflatten(-1, (self.noise_features, self.rank)).mT, None


class FullCovariance(Covariance):
    """Σ(x) = L(x)ᵀL(x) with vec(L(x)) = C φ(x): every direction, D·N² parameters, no residual to add."""

    formula = "L(x)ᵀL(x)"

    def __init__(self, in_features: int, noise_features: int, **options: Unpack[CovarianceOptions]):
        parameters = in_features * noise_features**2
        if parameters > FULL_PARAMETER_LIMIT:
            raise ValueError(
                f'covariance="full" with {in_features} features and a noise space of {noise_features} dimensions needs '
                f"{parameters:,} parameters; the limit is {FULL_PARAMETER_LIMIT:,}. "
                'Use covariance="low_rank" or "efficient"'
            )
        super().__init__(in_features, noise_features, noise_features, None, **options)

    def _add_parameters(self, factory: Factory) -> None:
        self.loadings = nn.Linear(self.in_features, self.noise_features**2, bias=False, **factory)

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        _lecun_normal(self.loadings, gain=self.init / math.sqrt(self.noise_features))

    def _factors(self, features: Tensor) -> tuple[Tensor, None]:
        return self.loadings(features).unflatten(-1, (self.noise_features, self.noise_features)), None


COVARIANCE_CLASSES: dict[str, type[Covariance]] = {
    "efficient": EfficientCovariance,
    "low_rank": LowRankCovariance,
    "diagonal": DiagonalCovariance,
    "full": FullCovariance,
}
"""Covariance classes by the names in `hetxl.registry.COVARIANCES`."""


def check_covariance(covariance: str, rank: int, residual: str) -> None:
    """Raise if the options do not name a covariance."""
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
    **options: Unpack[CovarianceOptions],
) -> Covariance:
    """Return the covariance "efficient", "low_rank", "diagonal" or "full", with the arguments of `Covariance`.

    R is N for `full`, which takes no residual, and 0 for `diagonal`; a rank of 0 is the same as `diagonal`.
    """
    check_covariance(covariance, rank, residual)
    kind = one_of("residual", residual, RESIDUALS)
    if covariance == "full":
        return FullCovariance(in_features, noise_features, **options)
    if covariance == "diagonal" or rank == 0:
        return DiagonalCovariance(in_features, noise_features, kind, **options)
    return COVARIANCE_CLASSES[covariance](in_features, noise_features, rank, kind, **options)


def _sampler(sampler: str | Sampler) -> Sampler:
    """Return a sampler by its name, or the function itself."""
    if not isinstance(sampler, str):
        return sampler
    one_of("sampler", sampler, SAMPLERS)
    return SAMPLERS[sampler]


def _lecun_normal(linear: nn.Linear, gain: float = 1.0) -> None:
    """Draw weights of variance gain²/fan-in and set biases to 0: unit-variance inputs give variance gain²."""
    nn.init.normal_(linear.weight, std=gain / math.sqrt(linear.in_features))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
