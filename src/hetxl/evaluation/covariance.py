"""How the noise ties the logits of a few classes together, without the basis of all classes."""

import torch
from torch import Tensor

from hetxl.functional import HashLift, IdentityLift, LinearLift, LogitDistribution
from hetxl.functional.distribution import accumulate


@torch.no_grad()
def logit_covariance(distribution: LogitDistribution, classes: Tensor) -> Tensor:
    """The covariance of the logits of some classes of each example: `distribution.covariance(classes)`.

    That builds the basis [b, Q, N] of the noise, which for HET is larger than the probabilities by Q. Here only the
    columns of the wanted classes are formed.

    Args:
        distribution: over the logits, [b, K].
        classes: [b, k]

    Returns:
        [b, k, k]
    """
    noise, lift = distribution.noise, distribution.lift
    if noise is None:
        return torch.zeros(*classes.shape, classes.shape[-1], device=classes.device)
    if isinstance(lift, LinearLift):
        weight = lift.weight[classes]  # [b, k, N]
        rows = []
        if noise.factors is not None:
            scaled = weight if noise.scale is None else weight * noise.scale.unsqueeze(-2)
            rows.append(scaled @ noise.factors.mT)  # [b, k, R]
        if noise.residual is not None:
            spread = weight * noise.residual.unsqueeze(-2)
            rows.append(spread.sum(-1, keepdim=True) if noise.residual_kind == "rank1" else spread)
        joined = accumulate(torch.cat(rows, dim=-1))
        return joined @ joined.mT
    if isinstance(lift, IdentityLift | HashLift):
        columns = lift.buckets[classes] if isinstance(lift, HashLift) else classes  # [b, k]
        covariance = torch.zeros((), device=classes.device)
        if noise.factors is not None:
            # Shared factors [R, N] are read by column; those of each example by gathering.
            if noise.factors.dim() == 2:
                factors = noise.factors.T[columns]  # [b, k, R]
            else:
                index = columns.unsqueeze(-2).expand(-1, noise.factors.shape[-2], -1)
                factors = noise.factors.gather(-1, index).mT
            if noise.scale is not None:
                factors = factors * noise.scale.gather(-1, columns).unsqueeze(-1)
            factors = accumulate(factors)
            covariance = factors @ factors.mT
        if noise.residual is not None:
            residual = accumulate(noise.residual.gather(-1, columns))
            product = residual.unsqueeze(-1) * residual.unsqueeze(-2)
            if noise.residual_kind == "diagonal":
                # One normal for each column: only classes of the same bucket share it.
                product = product * (columns.unsqueeze(-1) == columns.unsqueeze(-2))
            covariance = covariance + product
        return covariance
    return distribution.covariance(classes)
