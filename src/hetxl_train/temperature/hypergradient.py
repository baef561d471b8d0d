"""The gradient of a validation loss with respect to τ, through the last step of training (Luketina et al.).

With F(t, Θ) the mean loss, t the parameter of τ and Θ all others, a step is Θ′ = Θ − step(∇_Θ F_train(t, Θ)).
One step ahead the validation loss depends on t directly and through Θ′:

    d F_val(t, Θ′) / dt  =  ∂F_val/∂t  +  ⟨∇_Θ F_val, dΘ′/dt⟩
    dΘ′/dt               =  −s ∂_t ∇_Θ F_train      for plain gradient descent with learning rate s

The first term alone is the paper's "simple gradient" (Appendix "Tuning of τ"). All derivatives here are exact. Nothing
is differentiated twice through the backbone, and no graph outlives its step: ∂_t ∇_Θ F = ∇_Θ ∂_t F, where ∂_t F is a
scalar that is a function of the head's parameters and of the features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from hetxl.functional import LabelLists
from hetxl.functional.targets import IGNORE_INDEX
from hetxl.nn import Head

CHUNK_BYTES = 2**23
"""Size of one tensor of sampled logits [b, S, K], such that a few of them fit into the processor's cache."""
CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm."""


@dataclass(frozen=True)
class Batch:
    """The examples over which a loss is computed."""

    inputs: Tensor  # [b, ...]
    targets: Tensor | LabelLists  # class ids [b], or lists of labels

    def __len__(self) -> int:
        return len(self.inputs)


def loss_gradients(
    model: nn.Module, batch: Batch, parameters: Sequence[nn.Parameter], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return the summed loss of some examples and its gradients, 0 for parameters that do not affect it.

        loss = model(batch.inputs, batch.targets, reduction="sum")
        return loss, torch.autograd.grad(loss, parameters)

    `options` are those of the loss, such as `generator`.
    """
    loss = model(batch.inputs, batch.targets, reduction="sum", **options)
    gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True, materialize_grads=True)
    return loss.detach(), list(gradients)


def mixed_derivative(
    backbone: nn.Module,
    head: Head,
    batch: Batch,
    parameters: Sequence[nn.Parameter],
    *,
    generator: torch.Generator | None = None,
    label_smoothing: float = 0.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Tensor]:
    """Return ∂_t ∇_Θ F of the summed loss F of some examples, where t is the parameter of a learned τ.

        gradient, = torch.autograd.grad(loss, head.temperature.raw, create_graph=True)
        return torch.autograd.grad(gradient, parameters)

    The features are computed once; the head evaluates them in chunks of examples.

    Args:
        backbone: maps inputs to features [b, D].
        head: a head with a `LearnedTemperature`.
        parameters: Θ, without the parameter of τ; the result has one tensor for each.
        generator: generator of the noise; pass it in the state in which the loss used it, to draw the same noise.
        chunk_bytes: size of one tensor of sampled logits.
    """
    with torch.enable_grad():
        features = backbone(batch.inputs)
        leaf = features.detach().requires_grad_()
        z = _normals(head, leaf, generator)
        own = {id(parameter) for parameter in head.parameters()}
        head_parameters = [parameter for parameter in parameters if id(parameter) in own]
        sums = {id(parameter): torch.zeros_like(parameter) for parameter in parameters}
        slope = torch.zeros_like(leaf)
        samples = 1 if z is None else z.shape[-2]
        size = max(1, chunk_bytes // (samples * head.num_classes * leaf.element_size()))
        for part, targets in _chunks(batch, size):
            noise = None if z is None else z[part]
            inputs = [*head_parameters, leaf]
            *values, leaf_value = _chunk_derivative(head, leaf[part], targets, noise, label_smoothing, inputs)
            for parameter, value in zip(head_parameters, values, strict=True):
                sums[id(parameter)] += value
            slope += leaf_value
        rest = [parameter for parameter in parameters if id(parameter) not in own]
        if rest and features.requires_grad:
            values = torch.autograd.grad(features, rest, slope, allow_unused=True, materialize_grads=True)
            sums |= {id(parameter): value for parameter, value in zip(rest, values, strict=True)}
    return [sums[id(parameter)] for parameter in parameters]


def _normals(head: Head, features: Tensor, generator: torch.Generator | None) -> Tensor | None:
    """Draw the same standard normals [b, S, Q] as the loss of these features."""
    if head.covariance is None:
        return None
    dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
    samples = head.train_samples if head.training else head.eval_samples
    options = {"generator": generator, "device": features.device, "dtype": dtype}
    return head.covariance.draw(head.sampler, samples, features.shape[:-1], **options).to(features.dtype)


def _chunks(batch: Batch, size: int) -> Iterator[tuple[slice, Tensor | LabelLists]]:
    """Yield slices of consecutive examples with their targets."""
    for start in range(0, len(batch), size):
        stop = min(start + size, len(batch))
        targets = batch.targets
        if isinstance(targets, LabelLists):
            inside = (targets.examples >= start) & (targets.examples < stop)
            values = None if targets.values is None else targets.values[inside]
            targets = LabelLists(targets.examples[inside] - start, targets.classes[inside], values, stop - start)
        else:
            targets = targets[start:stop]
        yield slice(start, stop), targets


def _chunk_derivative(
    head: Head,
    features: Tensor,
    targets: Tensor | LabelLists,
    z: Tensor | None,
    label_smoothing: float,
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return ∇ ∂_t F for the inputs: in closed form for class ids, otherwise by differentiating ∂_t F."""
    [raw] = head.temperature.parameters()
    if head.link == "softmax" and isinstance(targets, Tensor) and targets.dim() == 1 and not label_smoothing:
        logits = head.logit_distribution(features).sample(z)  # [b, S, K]
        tau = head.temperature()
        [rate] = torch.autograd.grad(tau, raw)
        slope = logit_slopes(logits.detach(), targets, tau.detach()) * rate
        return torch.autograd.grad(logits, inputs, slope, allow_unused=True, materialize_grads=True)
    loss = head(features, targets, reduction="sum", noise=z, label_smoothing=label_smoothing)
    [gradient] = torch.autograd.grad(loss, raw, create_graph=True)
    return torch.autograd.grad(gradient.sum(), inputs, allow_unused=True, materialize_grads=True)


@torch.no_grad()
def logit_slopes(logits: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """Return ∂_τ of the gradient of the loss with respect to sampled logits.

        loss = -(logits / tau).log_softmax(-1)[:, :, y].logsumexp(-1).sum()
        gradient, = torch.autograd.grad(loss, logits, create_graph=True)
        return derivative of gradient with respect to tau

    Let a = logits / τ, p_s the softmax of sample s, e the one-hot label, and w_s the share of sample s in the
    probability of the label. The gradient is g_s = w_s (p_s − e) / τ. With ∂_τ a = −a / τ, its derivative is:

        ∂_τ g_s = −((w_s + ẇ_s) (p_s − e) + w_s ṗ_s) / τ²,    ṗ_s = p_s (a_s − ⟨p_s, a_s⟩),
        ẇ_s = w_s (l_s − Σ w l),    l_s = a_s[y] − ⟨p_s, a_s⟩

    Args:
        logits: [b, S, K], before division by the temperature.
        targets: [b], class ids; examples with −100 are left out.
        temperature: τ.
    """
    counted = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[:, None, None].expand(*logits.shape[:2], 1)  # [b, S, 1]
    scaled = logits / temperature
    probs = scaled.softmax(-1)
    mean = (probs * scaled).sum(-1, keepdim=True)  # [b, S, 1], ⟨p, a⟩
    label = scaled.gather(-1, index)
    share = (label - scaled.logsumexp(-1, keepdim=True)).softmax(1)  # w: [b, S, 1]
    growth = label - mean  # l: growth of the log-probability of the label
    moved = share * (1 + growth - (share * growth).sum(1, keepdim=True))  # w + ẇ
    # (w + ẇ) p + w p (a − ⟨p, a⟩), in one pass over p.
    slopes = scaled.sub_(mean).mul_(share).add_(moved).mul_(probs)
    slopes.scatter_add_(-1, index, -moved)
    return slopes.mul_((counted.to(slopes.dtype) * (-1 / temperature**2))[:, None, None])


def clipped_tangents(
    gradients: Sequence[Tensor], tangents: Sequence[Tensor], norm: Tensor, limit: float
) -> list[Tensor]:
    """Return the tangents of gradients after clipping by their norm, where `tangents` are those before clipping.

    The norm is that of all gradients together, before clipping.
    """
    pairs = list(zip(gradients, tangents, strict=True))
    factor = limit / (norm + CLIP_EPSILON)
    shrink = factor * torch.stack([(g * d).sum() for g, d in pairs]).sum() / (norm * (norm + CLIP_EPSILON))
    # torch.where chooses on the device: reading the norm would block on the device.
    return [torch.where(factor < 1, factor * d - shrink * g, d) for g, d in pairs]


@torch.no_grad()
def step_tangent(optimizer: optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, gradient: Tensor,
                 tangent: Tensor) -> Tensor:  # fmt: skip
    """Return the tangent of a parameter after the last step, where `tangent` is that of its gradient.

    This differentiates −s m̂ / (√v̂ + ε), whose averages m̂ and v̂ include the gradient. The optimiser must be Adam or
    AdamW, after the step.
    """
    rate = float(group["lr"])
    if not isinstance(optimizer, optim.Adam) or group["amsgrad"] or group.get("maximize"):
        raise TypeError(f"optimizer must be Adam or AdamW without AMSGrad, found {optimizer!r}")
    state, (beta1, beta2) = optimizer.state[parameter], group["betas"]
    count = state["step"].double()  # a tensor, which a fused step keeps on the device
    first, second = 1 - beta1**count, (1 - beta2**count).sqrt()
    root = state["exp_avg_sq"].sqrt()
    below = root / second + group["eps"]
    # If all gradients were 0, the root has no derivative.
    bend = torch.where(root > 0, (1 - beta2) * gradient * tangent / (root * second), 0.0)
    return -rate / first * ((1 - beta1) * tangent / below - state["exp_avg"] * bend / below.square())
