"""Samplers of standard normals. Every sample is N(0, I), so every estimate is unbiased; the samplers differ in how the
samples of one example depend on each other, which lowers the variance.

| sampler | the S samples of an example | cost beyond the normals |
| --- | --- | --- |
| `iid` | independent | none |
| `antithetic` | pairs z, −z | half the normals |
| `orthogonal` | pairs z, −z; up to Q pairs at right angles to each other | one thin QR for each example |
| `sobol` | a scrambled Sobol net, with a random shift for each example | an inverse normal for each number |

`docs/methods.md` measures them.
"""

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from hetxl.functional._torch import constant_when_compiled, not_compiled

Rng = torch.Generator | None
Device = torch.device | None
Dtype = torch.dtype


class Sampler(Protocol):
    """Draw standard normals [B, S, Q]: independent over B, N(0, I) for each of the S."""

    def __call__(
        self,
        batch: int,
        samples: int,
        size: int,
        *,
        generator: Rng = None,
        device: Device = None,
        dtype: Dtype = torch.float32,
    ) -> Tensor:
        """Draw [batch, samples, size]."""
        ...


def iid(
    batch: int, samples: int, size: int, *, generator: Rng = None, device: Device = None, dtype: Dtype = torch.float32
) -> Tensor:
    """Independent draws, [batch, samples, size]."""
    return _randn(batch, samples, size, generator=generator, device=device, dtype=dtype)


def _randn(*shape: int, generator: Rng, device: Device, dtype: Dtype) -> Tensor:
    # torch's form with a generator, even None, does not accept a symbolic batch size when compiled.
    if generator is None:
        return torch.randn(shape, device=device, dtype=dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def antithetic(
    batch: int, samples: int, size: int, *, generator: Rng = None, device: Device = None, dtype: Dtype = torch.float32
) -> Tensor:
    """Pairs z, −z; with an odd number of samples the last is unpaired. [batch, samples, size]."""
    return _pair(iid(batch, (samples + 1) // 2, size, generator=generator, device=device, dtype=dtype), samples)


def orthogonal(
    batch: int, samples: int, size: int, *, generator: Rng = None, device: Device = None, dtype: Dtype = torch.float32
) -> Tensor:
    """Antithetic pairs along orthogonal directions with chi-distributed lengths, [batch, samples, size].

    Directions come in blocks of at most `size`, orthogonal within a block and independent between blocks. They are the
    orthonormal factor Q of a Gaussian matrix G = Q R with a positive diagonal in R (Haar distributed), and the lengths
    are those of the columns of G: Gram-Schmidt uses only the columns' directions, so lengths and Q are independent.
    """
    pairs = (samples + 1) // 2
    if size == 0 or batch == 0:
        return torch.zeros(batch, samples, size, device=device, dtype=dtype)
    block = min(size, pairs)
    blocks = -(-pairs // block)
    wide = torch.promote_types(dtype, torch.float32)  # torch has no QR in half precision
    gaussian = _randn(batch, blocks, size, block, generator=generator, device=device, dtype=wide)
    directions, upper = torch.linalg.qr(gaussian)
    # The sign of R's diagonal depends on the library; making it positive makes the directions uniform.
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()
    lengths = gaussian.norm(dim=-2) * signs  # [B, blocks, block]
    half = (directions * lengths.unsqueeze(-2)).mT.reshape(batch, blocks * block, size)
    return _pair(half[:, :pairs], samples).to(dtype)


def sobol(
    batch: int, samples: int, size: int, *, generator: Rng = None, device: Device = None, dtype: Dtype = torch.float32
) -> Tensor:
    """A scrambled Sobol net through the inverse normal distribution, [batch, samples, size].

    Each call scrambles one net; each example then gets a random digital shift (the same random word flips the bits of
    all its points), which keeps the net's structure and makes every point uniform.
    """
    if size > SobolEngine.MAXDIM:
        raise ValueError(
            f'sampler="sobol" has at most {SobolEngine.MAXDIM} dimensions and this noise needs {size}; '
            'use sampler="orthogonal"'
        )
    if size == 0 or batch == 0:
        return torch.zeros(batch, samples, size, device=device, dtype=dtype)
    return _sobol(batch, samples, size, generator, dtype).to(device)


@not_compiled
def _sobol(batch: int, samples: int, size: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    bits = SobolEngine.MAXBIT
    source = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (1,), generator=generator, device=source))
    shift = torch.randint(2**bits, (batch, 1, size), generator=generator, device=source).cpu()
    net = SobolEngine(size, scramble=True, seed=seed).draw(samples, dtype=torch.float64)
    words = (net * 2**bits).long() ^ shift  # [B, S, Q]
    # Half a step away from 0 and 1, where the inverse normal is infinite.
    return torch.special.ndtri((words.double() + 0.5) / 2**bits).to(dtype)


def _pair(half: Tensor, samples: int) -> Tensor:
    """[B, pairs, Q] → z₁, −z₁, z₂, −z₂, …, cut to [B, samples, Q]."""
    return torch.stack((half, -half), dim=2).flatten(1, 2)[:, :samples]


SAMPLERS: dict[str, Sampler] = {"iid": iid, "antithetic": antithetic, "orthogonal": orthogonal, "sobol": sobol}


def draw_normals(
    sampler: Sampler,
    batch: int,
    samples: int,
    rank: int,
    residual: int,
    *,
    generator: Rng = None,
    device: Device = None,
    dtype: Dtype = torch.float32,
) -> Tensor:
    """Draw the normals of one call, [batch, samples, rank + residual].

    With at most one residual column, the sampler draws all columns. The many columns of a diagonal residual are drawn
    separately as antithetic pairs: in that many dimensions Gaussian directions are nearly orthogonal anyway, and a QR
    or a Sobol net would cost more than the loss. Both parts put −z after z, so pairs stay pairs.

    A generator draws on its own device, so a CPU generator gives the same noise for heads on all devices.
    """
    source = device if generator is None else generator.device
    options = {"generator": generator, "device": source, "dtype": dtype}
    if residual <= 1:
        z = sampler(batch, samples, rank + residual, **options)
    else:
        spread = iid if sampler is iid else antithetic
        z = torch.cat((sampler(batch, samples, rank, **options), spread(batch, samples, residual, **options)), dim=-1)
    return z.to(device)


REMEMBERED = 2**22  # largest set of fixed normals that is cached, 16 MiB; larger sets are drawn each time


@constant_when_compiled
def fixed_normals(
    sampler: Sampler, samples: int, rank: int, residual: int, seed: int, device: torch.device, dtype: Dtype
) -> Tensor:
    """Return the normals of a seed, [samples, rank + residual], the same on every device and in every precision.

    draw_normals(sampler, 1, samples, rank, residual, generator=torch.Generator().manual_seed(seed))[0]
    """
    if samples * (rank + residual) > REMEMBERED or torch.compiler.is_exporting():
        return _from_seed(sampler, samples, rank, residual, seed).to(device, dtype)
    return _remembered(sampler, samples, rank, residual, seed, device, dtype)


@lru_cache(maxsize=8)
def _remembered(
    sampler: Sampler, samples: int, rank: int, residual: int, seed: int, device: torch.device, dtype: Dtype
) -> Tensor:
    return _from_seed(sampler, samples, rank, residual, seed).to(device, dtype)


def _from_seed(sampler: Sampler, samples: int, rank: int, residual: int, seed: int) -> Tensor:
    # Not an inference tensor, which a later call with gradients could not use.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        return draw_normals(sampler, 1, samples, rank, residual, generator=generator)[0].clone()
