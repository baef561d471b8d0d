"""HET's draws over some classes, samples-first, in as few passes over [n, S, k] as there can be.

HET's noise space is the classes, so its draws are as large as the logits, and what they cost is how often memory is
gone through. With factors J that all examples share, and deviations v(x) and d(x),

    logits = (mean + v · (z J) + z_Q d) / τ

takes a product and two passes. On the way back, with G the gradient [n, S, k], Σ_s G for the mean and Σ_s z_Q G for d
are one product, and zᵀ (G · v) for J is another; Σ_s G · (z J) for v takes a pass.
"""

import torch
from torch import Tensor

from hetxl.functional.noise import GaussianNoise


class ClassDraws:
    """Draws of HET with shared factors and a rank-1 residual.

        noise.draw(z)

    Args:
        noise: of n examples and k classes.
        z: [n, S, Q] standard normals.
    """

    def __init__(self, noise: GaussianNoise, z: Tensor):
        assert noise.factors is not None
        assert noise.scale is not None
        assert noise.residual is not None
        self.scale, self.residual = noise.scale.detach(), noise.residual.detach()  # [n, k]
        z = z.to(self.scale.dtype)
        self.shared, self.own = z[..., : noise.rank].flatten(0, 1), z[..., noise.rank :]  # [n·S, R], [n, S, 1]
        self.mixed = (self.shared @ noise.factors.detach()).unflatten(0, z.shape[:2])  # [n, S, k]

    @staticmethod
    def fit(noise: GaussianNoise, dtype: torch.dtype) -> bool:
        """Whether noise is of this kind, in the precision of the sums."""
        parts = (noise.factors, noise.scale, noise.residual)
        if noise.residual_kind != "rank1" or any(part is None or part.dtype != dtype for part in parts):
            return False
        assert noise.factors is not None
        return noise.factors.dim() == 2

    def logits(self, mean: Tensor, temperature: Tensor, memory: Tensor | None = None) -> Tensor:
        """(mean + draws) / τ, [n, S, k].

        Args:
            mean: [k, n]
            temperature: τ
            memory: of as many elements, to put them in.
        """
        mean, scale, residual = (
            (part / temperature).unsqueeze(1) for part in (mean.T.contiguous(), self.scale, self.residual)
        )  # [n, 1, k]
        out = None if memory is None else memory.view(self.mixed.shape)
        return torch.addcmul(mean, self.mixed, scale, out=out).addcmul_(self.own, residual)

    def backward(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of the mean [k, n] and of the Gaussian's parts from that of the draws.

        Args:
            gradient: [n, S, k]; it is overwritten, and so are the draws.
        """
        weights = torch.cat((torch.ones_like(self.own), self.own), dim=-1).mT  # [n, 2, S]
        mean, residual = torch.bmm(weights, gradient).unbind(1)
        scale = self.mixed.mul_(gradient).sum(1)
        factors = self.shared.T @ gradient.mul_(self.scale.unsqueeze(1)).flatten(0, 1)
        return mean.T, {"factors": factors, "scale": scale, "residual": residual}
