"""Softmax, block by block: the loss of hard labels with its gradients in one pass, and log-probabilities.

For one example, with u_s the logits of sample s (already divided by τ), p_s their softmax and y the label,

    loss = −(logsumexp_s log p_s[y] − log S)          d loss / d u_s = w_s (p_s − onehot(y)),  w_s = p_s[y] / Σ p_s′[y].

In factors-first u = M z̃ᵀ with z̃ = [1, z] / τ, so d loss / d M = Σ_s w_s (p_s − onehot(y)) z̃_sᵀ. The weights w need all
samples; they are carried relative to the largest log p_s[y] so far, and the sums rescaled when it grows.

Sampled logits are class-major, [g, k, s] for g examples: both products with them then run along their rows, and the
reductions over classes run over whole vectors of samples.
"""

import math

import torch
from torch import Tensor

VECTOR = 32  # columns that a maximum over rows takes at a time: six times faster when their number is a multiple of it
LARGEST = 60.0  # noise whose exponential, and that of its negative, are far within float32
NEVER = -1e30  # a logit that no exponential sees


def exp_columns(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logits − max) in place of logits [g, k, s], and the maximum and the sum over the classes, two of [g, s]."""
    top = column_max(logits)
    logits.sub_(top.unsqueeze(1)).exp_()
    return top, logits.sum(1)


def column_max(logits: Tensor) -> Tensor:
    """logits.amax(1) of [g, k, s], with several classes put side by side first where they lie so in memory."""
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
    """How many rows of a width to put side by side to reach whole vectors; 1 when that does not go."""
    fold = VECTOR // math.gcd(VECTOR, width)
    return 1 if classes % fold else fold


class Mixer:
    """u = M z̃ᵀ for a group of examples and a block of samples, and back, in buffers that are used again."""

    def __init__(self, group: int, classes: int, rows: int, samples: int, like: Tensor):  # the most of each; P rows
        self.logits = like.new_empty(group * classes * samples)
        self.rows = like.new_empty(group, classes, rows)
        self.sums: Tensor | None = None
        self.first = True

    def start(self, rows: Tensor) -> None:
        """Take the rows [k, g, P] of a group."""
        classes, group, _ = rows.shape
        # A copy, because products with contiguous rows are much faster than with every n-th.
        self.current = self.rows[:group, :classes].copy_(rows.transpose(0, 1))
        self.first = True

    def sample(self, mixing: Tensor) -> Tensor:
        """Logits [g, k, s] from z̃ [g, s, P]."""
        group, classes, _ = self.current.shape
        out = self.logits[: group * classes * mixing.shape[1]].view(group, classes, mixing.shape[1])
        if group == 1:  # one product is faster than a batch of one
            torch.mm(self.current[0], mixing[0].T, out=out[0])
            return out
        return torch.bmm(self.current, mixing.mT, out=out)

    def add(self, logits: Tensor, mixing: Tensor, decay: Tensor | None = None) -> None:
        """Add logits [g, k, s] @ z̃ [g, s, P] to the gradients, after scaling what is there by `decay` [g]."""
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
        """What was added since `start`, [k, g, P]; good until the next."""
        assert self.sums is not None
        return self.sums[: self.current.shape[0], : self.current.shape[1]].transpose(0, 1)


def factors_nll(mixer: Mixer, mixing: Tensor, ids: Tensor, sample_block: int, backward: bool) -> tuple[Tensor, Tensor]:
    """−log p̄[y] of the group a mixer holds, with the rows of all classes, in one pass over the samples.

        u = mixing @ rows                                        # [g, S, K] from z̃ [g, S, P]
        loss = -(logsumexp(log_softmax(u, -1)[y], -1) - log(S))  # [g]

    With `backward` the gradients are left in the mixer; they are to be multiplied by the second result, a scale [g].
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
        share = (log_p - new_top.unsqueeze(-1)).exp()  # w_s, up to its sum
        total = total * decay + share.sum(-1)
        if backward:
            mixer.add(logits, part * (share / column_sum).unsqueeze(-1), decay)
            at_target = at_target * decay.unsqueeze(-1) + (part * share.unsqueeze(-1)).sum(1)
        top = new_top
    if backward:
        subtract_at_targets(mixer.gradient(), ids, at_target)
    return math.log(samples) - top - total.log(), 1 / total


def subtract_at_targets(rows: Tensor, ids: Tensor, values: Tensor, start: int = 0) -> None:
    """rows[y − start, i] −= values[i] for every example i whose label lies in the block: [k, g, P], [g], [g, P]."""
    inside = ids - start
    hit = (inside >= 0) & (inside < rows.shape[0])
    index = (torch.where(hit, inside, 0), torch.arange(len(ids), device=ids.device))
    rows.index_put_(index, torch.where(hit.unsqueeze(-1), -values, 0.0), accumulate=True)


def exclude(logits: Tensor, classes: Tensor | None, examples: slice, group: slice, block: slice) -> None:
    """Make the logits [g, k, s] of one class of each example so small that it does not count, in place.

    They are those of the examples at `group` within `examples`, for the classes of `block`; `classes` [B] may be −1.
    """
    if classes is None:
        return
    inside = classes[examples][group] - block.start
    hit = ((inside >= 0) & (inside < logits.shape[1])).nonzero().squeeze(-1)
    # Not −inf: where it is the only class of a block, the maximum is subtracted from itself.
    logits[hit, inside[hit]] = NEVER


class Normalisers:
    """Running maximum and sum over blocks of classes, giving logsumexp over all of them: [g, S]."""

    def __init__(self, like: Tensor, group: int, samples: int):
        self.top = like.new_full((group, samples), -math.inf)
        self.total = like.new_zeros(group, samples)
        self.target = like.new_zeros(group, samples)

    def add(self, logits: Tensor, ids: Tensor, samples: slice, start: int) -> Tensor:
        """Take the logits [g, k, s] of some samples for the classes from `start` on.

        They are overwritten by exp(logits − top), with the maximum top [g, s] over these classes, which is returned.
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
        """Those of some of the examples; what is added to them is added here."""
        part = Normalisers.__new__(Normalisers)
        part.top, part.total, part.target = self.top[group], self.total[group], self.target[group]
        return part

    def finished(self) -> tuple[Tensor, Tensor]:
        """logsumexp over the classes and log p_s[y], two of [g, S]."""
        normaliser = self.top + self.total.log()
        return normaliser, self.target - normaliser


def log_softmax_columns(logits: Tensor) -> Tensor:
    """log_softmax over the classes, in place of the logits [g, K, s]."""
    logits.sub_(logits.amax(1, keepdim=True))
    return logits.sub_(logits.exp().sum(1, keepdim=True).log_())


def sum_of_softmax(logits: Tensor, scratch: Tensor, entropies: Tensor | None) -> Tensor:
    """The softmax over the classes summed over the samples, [g, K] from logits [g, K, s], with one exponential a logit.

        logits.softmax(1).sum(-1)

    Logits are overwritten; `scratch` is flat, of at least as many elements. `entropies` [g] gets those of the samples.
    """
    logits.sub_(column_max(logits).unsqueeze(1))
    # Like the logits in memory, which may be class-major.
    scaled = scratch[: logits.numel()].as_strided(logits.shape, logits.stride())
    torch.exp(logits, out=scaled)
    total = scaled.sum(1)  # [g, s]
    if entropies is not None:
        inner = logits.mul_(scaled).sum(1)
        entropies += (total.log() - inner / total).sum(-1)
    return torch.bmm(scaled, total.reciprocal_().unsqueeze(-1)).squeeze(-1)


class PairSums:
    """Softmax of m + n and of m − n over the classes, summed over samples n, with one exponential for both.

        (mean + noise).softmax(1).sum(-1) + (mean − noise).softmax(1).sum(-1)

    With a = exp(m − max m), Z± = Σ_k a_k exp(±n_k): the probabilities are a exp(n) / Z₊ and a exp(−n) / Z₋, and their
    entropies log Z± − Σ_k a_k exp(±n_k) (log a_k ± n_k) / Z±.
    """

    def __init__(self, mean: Tensor):  # m, [g, K], divided by τ
        self.log_scale = mean - mean.amax(1, keepdim=True)
        self.scale = self.log_scale.exp()
        self.probs = torch.zeros_like(mean)

    def add(self, noise: Tensor, scratch: Tensor, entropies: Tensor | None) -> None:
        """Take noise n [g, K, s] with scratch like it, both overwritten; `entropies` [g] gets those of the samples."""
        low, high = torch.aminmax(noise)
        if torch.maximum(-low, high) > LARGEST:
            for logits in (noise + self.log_scale.unsqueeze(-1), self.log_scale.unsqueeze(-1) - noise):
                self.probs += sum_of_softmax(logits, scratch.flatten(), entropies)
            return
        half = torch.exp(noise, out=scratch)
        for sign in (1, -1):
            # Both sums over the classes, of a and of a log a, are one product.
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
    """log p̄ of every class, [g, K], gathered over blocks of samples without leaving the logarithm."""

    def __init__(self, like: Tensor, group: int, classes: int):
        self.top = like.new_full((group, classes), -math.inf)
        self.total = like.new_zeros(group, classes)
        self.samples = 0

    def add(self, log_probs: Tensor) -> None:
        """Take log p_s, [g, K, s]; it is overwritten."""
        new_top = torch.maximum(self.top, log_probs.amax(-1))
        log_probs.sub_(new_top.unsqueeze(-1)).exp_()
        self.total.mul_((self.top - new_top).exp_()).add_(log_probs.sum(-1))
        self.top = new_top
        self.samples += log_probs.shape[-1]

    def finished(self) -> Tensor:
        """log p̄, [g, K]"""
        return self.top + self.total.log() - math.log(self.samples)


def log_probs_gradient(log_probs: Tensor, mean: Tensor, gradient: Tensor, samples: int) -> Tensor:
    """Gradient [g, K, s] of the sampled logits from that of log p̄ [g, K], in place of log p_s [g, K, s].

    c_ks = G_k p_ks / (S p̄_k);  d u_ks = c_ks − p_ks Σ_j c_js. The ratio is formed in the logarithm: it is at most 1.
    """
    shares = (log_probs - (mean + math.log(samples)).unsqueeze(-1)).exp_().mul_(gradient.unsqueeze(-1))
    return shares.sub_(log_probs.exp_().mul_(shares.sum(1, keepdim=True)))
