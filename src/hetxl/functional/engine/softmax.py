"""Softmax, block by block: the loss of hard labels with its gradients in one pass, and log-probabilities.

For one example, with u_s the logits of sample s (already divided by τ), p_s their softmax and y the label,

    loss = −(logsumexp_s log p_s[y] − log S)          d loss / d u_s = w_s (p_s − onehot(y)),  w_s = p_s[y] / Σ p_s′[y].

In factors-first u = M z̃ᵀ with z̃ = [1, z] / τ, so d loss / d M = Σ_s w_s (p_s − onehot(y)) z̃_sᵀ. The weights w depend
on all samples, so they are kept relative to the largest log p_s[y] so far, and the sums are rescaled when it grows.

Sampled logits are class-major, [g, k, s] for g examples: both products with them then run along their rows, and the
reductions over classes run over whole vectors of samples.
"""

import math

import torch
from torch import Tensor

VECTOR = 32  # vector width: a maximum over rows is six times faster if the number of columns is a multiple of it
LARGEST = 60.0  # exp(±noise) is far within float32 up to this noise
NEVER = -1e30  # a logit whose exponential is 0


def exp_columns(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits [g, k, s] by exp(logits − max); return the maximum and the sum over the classes, two of [g, s]."""
    top = column_max(logits)
    logits.sub_(top.unsqueeze(1)).exp_()
    return top, logits.sum(1)


def column_max(logits: Tensor) -> Tensor:
    """Return logits.amax(1) of [g, k, s]; classes that are adjacent in memory are first joined to wider rows."""
    group, classes, samples = logits.shape
    rows = logits.transpose(0, 1)  # [k, g, s]
    if rows.is_contiguous():
        fold = _fold(group * samples, classes)
        if fold == 1:
            return logits.amax(1)
        return rows.view(classes // fold, -1).amax(0).view(fold, group, samples).amax(0)
    fold = _fold(samples, classes)
    if fold == 1 or not logits.is_contiguous():
        return logits.amax(1)
    return logits.view(group, -1, fold * samples).amax(1).view(group, fold, samples).amax(1)


def _fold(width: int, classes: int) -> int:
    """Return how many rows of a width to join to get whole vectors; 1 if that is not possible."""
    fold = VECTOR // math.gcd(VECTOR, width)
    return 1 if classes % fold else fold


class Mixer:
    """Compute u = M z̃ᵀ for a group of examples and a block of samples, and its backward pass, in reused buffers."""

    def __init__(self, group: int, classes: int, rows: int, samples: int, like: Tensor):  # maximum of each; P rows
        self.logits = like.new_empty(group * classes * samples)
        self.rows = like.new_empty(group, classes, rows)
        self.sums: Tensor | None = None
        self.first = True

    def start(self, rows: Tensor) -> None:
        """Start a group with its rows [k, g, P]."""
        classes, group, _ = rows.shape
        # Copy, because products with contiguous rows are much faster than with strided ones.
        self.current = self.rows[:group, :classes].copy_(rows.transpose(0, 1))
        self.first = True

    def sample(self, mixing: Tensor) -> Tensor:
        """Compute logits [g, k, s] from z̃ [g, s, P]."""
        group, classes, _ = self.current.shape
        out = self.logits[: group * classes * mixing.shape[1]].view(group, classes, mixing.shape[1])
        if group == 1:  # a single product is faster than a batch of one
            torch.mm(self.current[0], mixing[0].T, out=out[0])
            return out
        return torch.bmm(self.current, mixing.mT, out=out)

    def add(self, logits: Tensor, mixing: Tensor, decay: Tensor | None = None) -> None:
        """Add logits [g, k, s] @ z̃ [g, s, P] to the gradients, after scaling these by `decay` [g]."""
        if self.sums is None:
            self.sums = torch.empty_like(self.rows)
        sums = self.sums[: self.current.shape[0], : self.current.shape[1]]
        if self.first:
            torch.bmm(logits, mixing, out=sums)
        else:
            if decay is not None:
                sums.mul_(decay.view(-1, 1, 1))
            if len(sums) == 1:
                sums[0].addmm_(logits[0], mixing[0])
            else:
                sums.baddbmm_(logits, mixing)
        self.first = False

    def gradient(self) -> Tensor:
        """Return the sum since `start`, [k, g, P]; valid until the next `start`."""
        assert self.sums is not None
        return self.sums[: self.current.shape[0], : self.current.shape[1]].transpose(0, 1)


def factors_nll(mixer: Mixer, mixing: Tensor, ids: Tensor, sample_block: int, backward: bool) -> tuple[Tensor, Tensor]:
    """Return −log p̄[y] of the group in a mixer, which has the rows of all classes, in one pass over the samples.

        u = mixing @ rows                                        # [g, S, K] from z̃ [g, S, P]
        loss = -(logsumexp(log_softmax(u, -1)[y], -1) - log(S))  # [g]

    With `backward` the mixer contains the gradients, to be multiplied by the second result, a scale [g].
    """
    group, samples, width = mixing.shape
    top = mixing.new_full((group,), -math.inf)
    total = mixing.new_zeros(group)
    at_target = mixing.new_zeros(group, width)
    examples = torch.arange(group, device=ids.device)
    for start in range(0, samples, sample_block):
        part = mixing[:, start : start + sample_block]  # [g, s, P]
        logits = mixer.sample(part)  # [g, K, s]
        target = logits[examples, ids]  # [g, s], a copy
        column_top, column_sum = exp_columns(logits)
        log_p = target - column_top - column_sum.log()  # [g, s]
        new_top = torch.maximum(top, log_p.amax(-1))
        decay = (top - new_top).exp()
        share = (log_p - new_top.unsqueeze(-1)).exp()  # w_s before normalisation
        total = total * decay + share.sum(-1)
        if backward:
            mixer.add(logits, part * (share / column_sum).unsqueeze(-1), decay)
            at_target = at_target * decay.unsqueeze(-1) + (part * share.unsqueeze(-1)).sum(1)
        top = new_top
    if backward:
        subtract_at_targets(mixer.gradient(), ids, at_target)
    return math.log(samples) - top - total.log(), 1 / total


def subtract_at_targets(rows: Tensor, ids: Tensor, values: Tensor, start: int = 0) -> None:
    """rows[y − start, i] −= values[i] for each example i whose label is in the block: [k, g, P], [g], [g, P]."""
    inside = ids - start
    hit = (inside >= 0) & (inside < rows.shape[0])
    index = (torch.where(hit, inside, 0), torch.arange(len(ids), device=ids.device))
    rows.index_put_(index, torch.where(hit.unsqueeze(-1), -values, 0.0), accumulate=True)


def exclude(logits: Tensor, classes: Tensor | None, examples: slice, group: slice, block: slice) -> None:
    """Exclude one class of each example by a very small logit, in place of the logits [g, k, s].

    These belong to the examples at `group` within `examples` and the classes of `block`; `classes` [B] may be −1.
    """
    if classes is None:
        return
    inside = classes[examples][group] - block.start
    hit = ((inside >= 0) & (inside < logits.shape[1])).nonzero().squeeze(-1)
    # Not −inf, because the maximum is subtracted: −inf minus itself is NaN if the class is alone in its block.
    logits[hit, inside[hit]] = NEVER


class Normalisers:
    """Running maximum and sum over blocks of classes, for logsumexp over all of them: [g, S]."""

    def __init__(self, like: Tensor, group: int, samples: int):
        self.top = like.new_full((group, samples), -math.inf)
        self.total = like.new_zeros(group, samples)
        self.target = like.new_zeros(group, samples)

    def add(self, logits: Tensor, ids: Tensor, samples: slice, start: int) -> Tensor:
        """Add the logits [g, k, s] of some samples for the classes from `start` on.

        Overwrites them by exp(logits − top) and returns top [g, s], their maximum over these classes.
        """
        inside = ids - start
        hit = (inside >= 0) & (inside < logits.shape[1])
        at_target = logits[torch.arange(len(ids), device=ids.device), torch.where(hit, inside, 0)]
        self.target[:, samples] += torch.where(hit.unsqueeze(-1), at_target, 0.0)
        top, total = exp_columns(logits)
        old_top, old_total = self.top[:, samples], self.total[:, samples]
        new_top = torch.maximum(old_top, top)
        self.total[:, samples] = old_total * (old_top - new_top).exp() + total * (top - new_top).exp()
        self.top[:, samples] = new_top
        return top

    def of(self, group: slice) -> "Normalisers":
        """Return a view of some of the examples; additions to it are additions to this object."""
        part = Normalisers.__new__(Normalisers)
        part.top, part.total, part.target = self.top[group], self.total[group], self.target[group]
        return part

    def finished(self) -> tuple[Tensor, Tensor]:
        """Return logsumexp over the classes and log p_s[y], two of [g, S]."""
        normaliser = self.top + self.total.log()
        return normaliser, self.target - normaliser


def log_softmax_columns(logits: Tensor) -> Tensor:
    """Replace logits [g, K, s] by their log_softmax over the classes."""
    logits.sub_(logits.amax(1, keepdim=True))
    return logits.sub_(logits.exp().sum(1, keepdim=True).log_())


def sum_of_softmax(logits: Tensor, scratch: Tensor, entropies: Tensor | None) -> Tensor:
    """Sum the softmax over the samples, [g, K] from logits [g, K, s], with one exponential for each logit.

        logits.softmax(1).sum(-1)

    Overwrites the logits; `scratch` is flat with at least as many elements. Adds the samples' entropies to `entropies`.
    """
    logits.sub_(column_max(logits).unsqueeze(1))
    # Use the memory layout of the logits, which may be class-major.
    scaled = scratch[: logits.numel()].as_strided(logits.shape, logits.stride())
    torch.exp(logits, out=scaled)
    total = scaled.sum(1)  # [g, s]
    if entropies is not None:
        inner = logits.mul_(scaled).sum(1)
        entropies += (total.log() - inner / total).sum(-1)
    return torch.bmm(scaled, total.reciprocal_().unsqueeze(-1)).squeeze(-1)


class PairSums:
    """Sum of the softmax of m + n and of m − n over samples n, with one exponential for both.

        (mean + noise).softmax(1).sum(-1) + (mean − noise).softmax(1).sum(-1)

    With a = exp(m − max m), Z± = Σ_k a_k exp(±n_k): the probabilities are a exp(n) / Z₊ and a exp(−n) / Z₋, and their
    entropies log Z± − Σ_k a_k exp(±n_k) (log a_k ± n_k) / Z±.
    """

    def __init__(self, mean: Tensor):  # m, [g, K], divided by τ
        self.log_scale = mean - mean.amax(1, keepdim=True)
        self.scale = self.log_scale.exp()
        self.probs = torch.zeros_like(mean)

    def add(self, noise: Tensor, scratch: Tensor, entropies: Tensor | None) -> None:
        """Add noise n [g, K, s]; overwrite it and a scratch like it. Add the samples' entropies to `entropies`."""
        low, high = torch.aminmax(noise)
        if torch.maximum(-low, high) > LARGEST:
            for logits in (noise + self.log_scale.unsqueeze(-1), self.log_scale.unsqueeze(-1) - noise):
                self.probs += sum_of_softmax(logits, scratch.flatten(), entropies)
            return
        half = torch.exp(noise, out=scratch)
        for sign in (1, -1):
            # One product computes both sums over the classes, with a and with a log a.
            rows = self.scale if entropies is None else torch.stack((self.scale, self.scale * self.log_scale), 1)
            sums = torch.bmm(rows.view(len(half), -1, half.shape[1]), half)  # [g, 1 or 2, s]
            total = sums[:, 0]
            if entropies is not None:
                weighed = noise * half if sign == 1 else noise.mul_(half)
                moved = torch.bmm(self.scale.unsqueeze(1), weighed).squeeze(1)
                entropies += (total.log() - (sums[:, 1] + sign * moved) / total).sum(-1)
            self.probs.addcmul_(torch.bmm(half, total.reciprocal().unsqueeze(-1)).squeeze(-1), self.scale)
            if sign == 1:
                half.reciprocal_()


class MeanLogProbs:
    """log p̄ of every class, [g, K], accumulated over blocks of samples in logarithms."""

    def __init__(self, like: Tensor, group: int, classes: int):
        self.top = like.new_full((group, classes), -math.inf)
        self.total = like.new_zeros(group, classes)
        self.samples = 0

    def add(self, log_probs: Tensor) -> None:
        """Add log p_s, [g, K, s], and overwrite it."""
        new_top = torch.maximum(self.top, log_probs.amax(-1))
        log_probs.sub_(new_top.unsqueeze(-1)).exp_()
        self.total.mul_((self.top - new_top).exp_()).add_(log_probs.sum(-1))
        self.top = new_top
        self.samples += log_probs.shape[-1]

    def finished(self) -> Tensor:
        """Return log p̄, [g, K]."""
        return self.top + self.total.log() - math.log(self.samples)


def log_probs_gradient(log_probs: Tensor, mean: Tensor, gradient: Tensor, samples: int) -> Tensor:
    """Replace log p_s [g, K, s] by the gradient of the sampled logits, given that of log p̄ [g, K].

    c_ks = G_k p_ks / (S p̄_k);  d u_ks = c_ks − p_ks Σ_j c_js. The ratio is at most 1; it is computed in logarithms.
    """
    shares = (log_probs - (mean + math.log(samples)).unsqueeze(-1)).exp_().mul_(gradient.unsqueeze(-1))
    return shares.sub_(log_probs.exp_().mul_(shares.sum(1, keepdim=True)))
