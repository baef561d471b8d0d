"""Noise on the embedding of a tower (Section "Contrastive learning with HET-XL")."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import integer_at_least, one_of, positive_float, renamed
from hetxl.contrastive.low_rank_noise import add_noise
from hetxl.functional import SAMPLERS, GaussianNoise
from hetxl.functional.contrastive import noise_scale
from hetxl.nn.covariance import CovarianceOptions, FullCovariance, LowRankCovariance, build_covariance

NOISE_INIT = 0.1
"""Initial length of the noise, as a share of the length of a normalised embedding."""

GROUP = 256
"""Number of consecutive examples that share the coefficients of a sample."""

LEAST_GROUPS = 16
"""Minimum number of groups in a batch: a group shares the length of its noise, and a step needs several lengths."""

BLOCK = 1024
"""Block size of the examples whose covariances are computed and discarded."""


class NoisyEmbedding(nn.Module):
    """A Gaussian around every embedding, with a covariance that depends on the embedding.

    Args:
        in_features: D
        covariance: "low_rank" as in the paper, "efficient", "diagonal" or "full".
        rank: R; 15 in the paper.
        residual: "rank1" or "diagonal".
        noise_init: approximate initial length of the noise, as a share of the embedding's length; the factors and the
            residual contribute equally. The initialisation assumes embeddings of length 1.
        sampler: a name of `hetxl.functional.SAMPLERS`; only samples of "iid" are shared in groups.
        group: number of consecutive examples that share the coefficients of a sample, each with its own random sign; 1
            for independent samples. The distribution of an example's noise does not change and two examples stay
            uncorrelated, but sampling `low_rank` noise costs a tenth. Batches have at least 16 groups.
    """

    @renamed(features="in_features")
    def __init__(
        self,
        in_features: int,
        *,
        covariance: str = "low_rank",
        rank: int = 15,
        residual: str = "rank1",
        noise_init: float = NOISE_INIT,
        sampler: str = "iid",
        group: int = GROUP,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features = integer_at_least("in_features", in_features, 1)
        if sampler == "normal":
            warnings.warn(
                'sampler="normal" is now "iid"; the old name stops working in 0.2', DeprecationWarning, stacklevel=3
            )
            sampler = "iid"
        self.sampler = one_of("sampler", sampler, tuple(SAMPLERS))
        self.group = integer_at_least("group", group, 1)
        self.noise_init = positive_float("noise_init", noise_init)
        options = CovarianceOptions(init=noise_init / math.sqrt(in_features), device=device, dtype=dtype)
        self.covariance = build_covariance(
            covariance, in_features, in_features, rank=rank, residual=residual, **options
        )
        self._fit_to_unit_length()

    @property
    def size(self) -> int:
        """Return Q, the number of standard normals of one sample."""
        return self.covariance.size

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        self.covariance.reset_parameters()
        self._fit_to_unit_length()

    @torch.no_grad()
    def _fit_to_unit_length(self) -> None:
        # The covariance's initialisation assumes unit variance; vectors of length 1 have variance 1 / D.
        for module in self.covariance.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(math.sqrt(self.in_features))

    def forward(self, embeddings: Tensor) -> GaussianNoise:
        """Return the noise for embeddings [B, D], normalised if noise is added after normalisation."""
        return self.covariance(embeddings.to(next(self.parameters()).dtype))

    def draw(self, noise: GaussianNoise | int, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normals, [B, S, Q], for noise over B embeddings, or for the number B."""
        batch = (
            noise if isinstance(noise, int) else len(list(noise.parts().values())[-1])
        )  # the last part has a batch dimension; J, the first, has none
        parameter = next(self.parameters())
        options = {"generator": generator, "device": parameter.device, "dtype": parameter.dtype}
        z = self.covariance.draw(self.sampler, samples, (batch,), **options)
        group = self.group_of(batch, samples)
        if group == 1:
            return z
        firsts = torch.arange(batch, device=z.device) // group * group
        source = parameter.device if generator is None else generator.device
        signs = torch.randint(2, (batch, 1, 1), generator=generator, device=source).to(z) * 2 - 1
        rank = self.covariance.rank
        return torch.cat((z[firsts, :, :rank] * signs, z[..., rank:]), dim=-1)

    def group_of(self, batch: int, samples: int) -> int:
        """Return the number of consecutive examples of a batch that share coefficients up to a sign.

        1 if independent samples cost no more, or if there would be too few groups.
        """
        group, rank = min(self.group, batch // LEAST_GROUPS), self.covariance.rank
        shares = group > 1 and self.sampler == "iid" and isinstance(self.covariance, LowRankCovariance)
        # A group mixes R matrices once; each of its examples then costs one or two products per sample.
        return group if shares and samples * (rank / group + 2) <= rank else 1

    def add_to(
        self, embeddings: Tensor, z: Tensor, group: int = 1, *, unit: bool = False, overwrite: bool = False
    ) -> Tensor:
        """Return embeddings with samples of their noise, [B, S, D], without storing the covariances of the whole batch.

            embeddings = F.normalize(embeddings, dim=-1)        # unit
            embeddings.unsqueeze(1) + self(embeddings).draw(z)

        Args:
            embeddings: [B, D]
            z: [B, S, Q] or [S, Q] standard normals.
            group: `group_of` shared normals; 1 for independent normals.
            unit: see `add_noise`.
            overwrite: see `add_noise`.
        """
        covariance, dtype = self.covariance, next(self.parameters()).dtype
        x, z = embeddings.to(dtype), z.to(dtype)
        if not isinstance(covariance, LowRankCovariance | FullCovariance):
            x = F.normalize(x, dim=-1) if unit else x
            return x.unsqueeze(1) + covariance(x).draw(z)
        residual = covariance.residual
        return add_noise(
            x,
            covariance.loadings.weight,
            covariance.loadings.bias,
            None if residual is None else residual.weight,
            None if residual is None else residual.bias,
            z.expand(len(x), *z.shape[-2:]),
            covariance.rank,
            rows=isinstance(covariance, FullCovariance),
            group=group,
            unit=unit,
            overwrite=overwrite,
        )

    def scale_of(self, embeddings: Tensor) -> Tensor:
        """Return the predicted noise of each embedding [B, D], [B]: the root mean square of its standard deviations.

        It depends on this embedding only, so it cannot detect that an image and a text do not match.
        """
        return torch.cat([noise_scale(self(part)) for part in embeddings.split(BLOCK)])

    def extra_repr(self) -> str:
        """Return the sizes, as shown when the module is printed."""
        return f"D={self.in_features}, noise_init={self.noise_init:g}, sampler={self.sampler!r}"
