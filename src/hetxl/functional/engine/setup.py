"""What the primitives settle before they start: whether the engine covers a case, its plan, and its precision."""

import torch
from torch import Tensor

from hetxl.functional.distribution import LogitDistribution, Order
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.plan import Plan, plan
from hetxl.functional.links import Link


def fusable(distribution: LogitDistribution, z: Tensor | None) -> bool:
    """Whether the engine covers a case; the reference evaluation takes the others.

    Those are an opaque classifier under the noise, normals that need a gradient themselves, and graphs that are being
    exported, which must hold plain operations.
    """
    return not (distribution.opaque or (z is not None and z.requires_grad) or torch.compiler.is_exporting())


def plan_for(inputs: Inputs, link: Link, order: Order | None = None, memory_budget: int | None = None) -> Plan:
    """The plan for given inputs."""
    width = inputs.features if inputs.features is not None else inputs.mean
    assert width is not None
    return plan(
        inputs.batch,
        width.shape[-1],
        inputs.num_classes,
        inputs.noise_features,
        0 if inputs.noise is None else inputs.noise.size,
        inputs.samples,
        dtype=width.dtype,
        device=width.device,
        lift="copy" if inputs.lift in ("identity", "hash") else "product",
        link=link,
        order=order,
        memory_budget=memory_budget,
    )


def product_precision(inputs: Inputs) -> torch.dtype:
    """The precision of matrix products: autocast's, or that of the classifier."""
    first = inputs.weight if inputs.weight is not None else inputs.mean
    assert first is not None
    device = inputs.temperature.device.type
    # float64 is left alone by autocast, as torch's own products do.
    if first.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return first.dtype
