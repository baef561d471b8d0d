"""Prediction of the top classes, noise for few of them.

With p = softmax of the mean logits, which are exact for all classes, and n_sk the noise of class k in sample s (both
divided by τ), the probabilities of sample s are

    p_sk = p_k exp(n_sk) / Z_s,      Z_s = Σ_k p_k exp(n_sk).

Few classes carry Z_s. With q_k ∝ p_k exp(σ̂²_k / 2), what class k is expected to weigh by a rough variance of its noise,
every class with q_k ≥ t counts by itself, and the others are drawn with probability q_k / t (systematic sampling, one
pass over the sums of q) and stand for t / q_k classes like them. So there are at most 1 / t classes, far fewer where
the head is confident; t is chosen for each example from what the classes below it weigh. Their noise is computed by
factors first.

How far off a probability is follows from how much the drawn classes differ in what they do to it. Where that is
too much t is made smaller, and in the end all classes are sampled.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.functional.engine.inputs import GivenMean, Inputs
from hetxl.functional.engine.sigmoid import mean_sigmoid_rows
from hetxl.functional.links import sigmoid_entropy
from hetxl.functional.noise import GaussianNoise
from hetxl.registry import Link

FEWEST_CLASSES = 1024  # with fewer, all of them cost little more
FEWEST_SAMPLES = 16
THRESHOLDS = (1 / 64, 1 / 256, 1 / 1024, 1 / 4096)  # t
WIDER = 8  # by how much t is made smaller for examples whose error is too large, once
GAIN = 6  # by how much that lowers the error; where it would not be enough, all classes are sampled at once
LARGEST_SHARE = 1 / 10  # of the classes; with more of them, sampling all costs no more
SPREAD = 0.2
"""Standard deviation of what drawn classes do to the top probabilities, relative to their weight: a first guess, as
measured on trained heads, from which t is chosen."""
FEW = 16  # drawn classes, below which their spread says nothing: then what they stand for has to be next to nothing
DRAWN = 64  # classes that are drawn at least, however little they weigh: noise may lift what they stand for
FLOOR = 0.3
"""Least error, relative to that of one sample's Z_s if the noise of all classes were independent of each other: a few
classes may be alike by chance."""
SAFETY = 1.6  # how many estimated errors have to fit in the tolerance
LARGEST_VARIANCE = 3.0  # of the noise of drawn classes; beyond, the variance of its exponential cannot be estimated
LARGEST_NOISE = 60.0  # exp of it, and of what is negative, are numbers of float32
BLOCK = 2**21  # numbers that a group of examples may have in one tensor, to stay in a processor's cache
SIGMOID_CANDIDATES = 128
SMALLEST = 1e-30  # that is divided by


def applies(inputs: Inputs, top_k: int) -> bool:
    """Whether few classes can stand for all: enough classes and samples, and noise with few rows."""
    if inputs.noise is None or inputs.samples < FEWEST_SAMPLES or inputs.num_classes < FEWEST_CLASSES:
        return False
    weights = (getattr(part, "weight", None) for part in (inputs.mean, inputs.noise.lift))
    if not all(weight is None or isinstance(weight, Tensor) for weight in weights):
        return False  # a quantised W is read by rows alone
    # A diagonal residual has a row for every dimension.
    return 16 * top_k <= inputs.num_classes and inputs.noise.gaussian.num_residual <= 1


def mean_logits(inputs: Inputs) -> Tensor:
    """The logits without noise, divided by τ: [n, K], exact."""
    mean, products = inputs.mean, inputs.product_precision()
    if isinstance(mean, GivenMean):
        return mean.mean.to(inputs.wide) / inputs.temperature
    features = (mean.features.to(inputs.wide) / inputs.temperature).to(products)
    bias = None if mean.bias is None else (mean.bias.to(inputs.wide) / inputs.temperature).to(products)
    return torch.nn.functional.linear(features, mean.weight.to(products), bias).to(inputs.wide)


def rough_variance(inputs: Inputs) -> Tensor:
    """σ̂²_k, [n, K], divided by τ²: exact for HET and HET-H; otherwise ‖w_k‖² times the mean variance of the noise.

    The rows of W are taken relative to their mean, which shifts all logits alike.
    """
    assert inputs.noise is not None
    variance, lift = inputs.noise.gaussian.variance(), inputs.noise.lift  # [n, N]
    if lift.kind in ("identity", "hash"):
        return lift.variance(inputs.noise.gaussian).to(inputs.wide) / inputs.temperature.square()
    weight = lift.weight
    centre = weight.mean(0, dtype=inputs.wide)
    # ‖w − c‖² = ‖w‖² − 2 w·c + ‖c‖², without a copy of W.
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=inputs.wide).square()
    norms = (norms - 2 * (weight @ centre.to(weight.dtype)).to(inputs.wide) + centre.square().sum()).clamp_(min=0)
    return (variance.mean(-1, keepdim=True) / inputs.temperature.square()).to(inputs.wide) * norms


def factors_at(noise: GaussianNoise, lift: object, classes: Tensor) -> Tensor:
    """The lifted basis at some classes of each example, [n, C, Q] for classes [n, C]: rows of f_k, n_sk = z_s · f_k."""
    kind = getattr(lift, "kind", "")
    if kind == "identity":
        return noise.rows_at(classes)
    if kind == "hash":
        return noise.rows_at(lift.buckets[classes])  # pyright: ignore[reportAttributeAccessIssue]
    return noise.project(lift.weight[classes].to(noise.dtype))  # pyright: ignore[reportAttributeAccessIssue]


class Draws(NamedTuple):
    """The samples as pairs z, −z if they are pairs, and otherwise as they are."""

    z: Tensor  # [S or S/2, Q], or [n, S or S/2, Q]
    paired: bool

    @staticmethod
    def of(inputs: Inputs) -> "Draws":
        """Those of a batch, each divided by τ; one set where all examples share it."""
        assert inputs.noise is not None
        z = inputs.noise.normals
        shared = z.stride(0) == 0 or z.shape[0] == 1
        z = (z[0] if shared else z).to(inputs.wide) / inputs.temperature
        half = z[..., 0::2, :]
        paired = z.shape[-2] % 2 == 0 and torch.equal(half, -z[..., 1::2, :])
        return Draws(half if paired else z, paired)

    def of_examples(self, examples: Tensor) -> "Draws":
        """Those of some examples."""
        return self if self.z.dim() == 2 else Draws(self.z[examples], self.paired)

    def noise(self, factors: Tensor) -> Tensor:
        """n, [n, C, S or S/2], from factors [n, C, Q]."""
        if self.z.dim() == 2:
            return (factors.flatten(0, 1) @ self.z.T).unflatten(0, factors.shape[:2])
        return torch.bmm(factors, self.z.mT)


class Result(NamedTuple):
    """The top classes of examples [n]."""

    log_probs: Tensor  # [n, k]
    indices: Tensor  # [n, k]
    entropy: Tensor  # [n]
    expected: Tensor  # [n]
    left_out: Tensor  # [n]
    trusted: Tensor  # [n], whether the estimated error is within the tolerance


def top_classes(inputs: Inputs, link: Link, top_k: int, tolerance: float) -> Result:
    """The most probable classes of a chunk of examples, where few candidates do; `trusted` says where."""
    mean, variance = mean_logits(inputs), rough_variance(inputs)
    draws = Draws.of(inputs)
    if link == "sigmoid":
        return _top_labels(inputs, mean, variance, draws, top_k)
    selection = Selection(mean, variance, top_k, tolerance)
    result = _blank(mean, top_k)
    waiting = torch.arange(len(mean), device=mean.device)
    for last in (False, True):
        counts = selection.counts[waiting]
        # Too few are there where the others underflow; their noise, relative to each other, is not seen then.
        waiting = waiting[(counts >= max(top_k, FEW)) & (counts <= LARGEST_SHARE * inputs.num_classes)]
        for examples, classes in selection.groups(waiting, inputs.mean.first.shape[-1] + inputs.samples):
            _sample(result, inputs, selection, draws, examples, classes, tolerance)
        waiting = waiting[selection.may_go_on[waiting]]
        if last or not len(waiting):
            break
        selection.widen(waiting)
    return result


def _blank(mean: Tensor, top_k: int) -> Result:
    n, indices = len(mean), torch.zeros(len(mean), top_k, dtype=torch.int64, device=mean.device)
    entropy, expected, left_out = mean.new_zeros(3, n)
    trusted = torch.zeros(n, dtype=torch.bool, device=mean.device)
    return Result(mean.new_zeros(n, top_k), indices, entropy, expected, left_out, trusted)


class Selection:
    """Which classes of each example see the noise, and how many others each of them stands for."""

    def __init__(self, mean: Tensor, variance: Tensor, top_k: int, tolerance: float):
        self.mean, self.top_k = mean, top_k
        self.normaliser = mean.logsumexp(-1)
        # Of noise that is too large for a selection, the variance would choose and not the mean.
        self.q = variance.clamp_(max=2 * LARGEST_VARIANCE).mul_(0.5).add_(mean).softmax(-1)
        # The likeliest always count by themselves, however small they are.
        self.least = self.q.topk(4 * top_k).values[:, -1]
        self.threshold = self._choose(tolerance)
        self.may_go_on = torch.zeros_like(self.least, dtype=torch.bool)  # those for which more classes could do
        self.rest = torch.zeros_like(self.least)  # probability without noise of the classes that are drawn from
        self._draw(torch.arange(len(mean), device=mean.device))

    def _choose(self, tolerance: float) -> Tensor:
        """The largest t that should do: its error is about SPREAD √(t · weight of the classes below t)."""
        chosen = torch.full_like(self.least, THRESHOLDS[-1])
        for t in reversed(THRESHOLDS[:-1]):
            below = torch.where(self.q < t, self.q, 0.0).sum(-1)
            error = SPREAD * (t * below).sqrt()
            chosen = torch.where(error <= tolerance / SAFETY, t, chosen)
        return chosen

    def widen(self, examples: Tensor) -> None:
        """Take more classes of some examples."""
        self.threshold[examples] /= WIDER
        self._draw(examples)

    def _draw(self, examples: Tensor) -> None:
        """Draw the classes of some examples: those whose q crosses a multiple of t as q is summed up."""
        q, t = self.q[examples], torch.minimum(self.threshold[examples], self.least[examples]).unsqueeze(-1)
        below = torch.where(q < t, q, 0.0).sum(-1, keepdim=True)
        t = torch.minimum(t, below / DRAWN).clamp_(min=torch.finfo(q.dtype).tiny)
        self.threshold[examples] = t.squeeze(-1)
        certain = q >= t
        probs = (self.mean[examples] - self.normaliser[examples].unsqueeze(-1)).exp_()
        self.rest[examples] = probs.masked_fill_(certain, 0.0).sum(-1)
        steps = q.masked_fill(certain, 0.0).cumsum(-1).div_(t).add_(0.5).floor_()
        certain[:, 0] |= steps[:, 0] >= 1
        certain[:, 1:] |= steps[:, 1:] != steps[:, :-1]
        self.counts = torch.zeros(len(self.q), dtype=torch.int64, device=q.device)
        self.counts[examples] = certain.sum(-1)
        self.starts = torch.zeros_like(self.counts)
        self.starts[examples] = self.counts[examples].cumsum(0) - self.counts[examples]
        self.flat = certain.nonzero()[:, 1]

    def groups(self, examples: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Examples with about as many classes, [g], with those classes [g, C], −1 where there are fewer."""
        order = examples[self.counts[examples].argsort()]
        counts = self.counts[order].tolist()
        end = len(order)
        while end > 0:  # from those with the most classes on
            size = max(1, min(end, BLOCK // max(1, counts[end - 1] * width)))
            start = end - size
            while counts[start] < 0.7 * counts[end - 1] and start < end - 1:
                start += 1
            some, columns = order[start:end], torch.arange(counts[end - 1], device=order.device)
            places = (self.starts[some].unsqueeze(-1) + columns).clamp_(max=len(self.flat) - 1)
            yield some, torch.where(columns < self.counts[some].unsqueeze(-1), self.flat[places], -1)
            end = start

    def weights(self, examples: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log p of classes [g, C], what each weighs in Z_s, which were drawn, and what all of these weigh [g]."""
        valid, index = classes >= 0, classes.clamp(min=0)
        log_p = (self.mean[examples.unsqueeze(-1), index] - self.normaliser[examples].unsqueeze(-1)).masked_fill_(
            ~valid, -torch.inf
        )
        p, q = log_p.exp(), self.q[examples.unsqueeze(-1), index]
        drawn = valid & (q < self.threshold[examples].unsqueeze(-1))
        rest, stands_for = self.rest[examples], torch.where(drawn, p / q, 0.0)
        total = stands_for.sum(-1, keepdim=True)
        share = stands_for * (rest.unsqueeze(-1) / torch.where(total > 0, total, 1.0))
        return log_p, torch.where(drawn, share, p), drawn, rest


def _sample(
    result: Result,
    inputs: Inputs,
    selection: Selection,
    draws: Draws,
    examples: Tensor,
    classes: Tensor,
    tolerance: float,
) -> None:
    """Sample the classes [g, C] of some examples and write what comes of it into the result."""
    assert inputs.noise is not None
    log_p, weight, drawn, rest = selection.weights(examples, classes)
    gaussian = inputs.noise.gaussian.of_examples(examples)
    factors = factors_at(gaussian, inputs.noise.lift, classes.clamp(min=0)).to(inputs.wide)  # [g, C, Q]
    # Relative to the candidates' mean: what moves all logits alike moves no probability.
    own = torch.where(drawn, 0.0, weight)
    factors = factors - (own.unsqueeze(1) @ factors) / own.sum(-1).clamp(min=SMALLEST)[:, None, None]
    noise = draws.of_examples(examples).noise(factors)  # [g, C, S or S/2]
    undrawn = torch.where(drawn.any(-1), 0.0, rest)  # nothing was drawn to stand for them
    sampled = Sampled(noise, weight, undrawn, draws.paired)
    log_probs = log_p + sampled.ratio().log()  # log p̄ of every class that was looked at
    values, places = log_probs.topk(selection.top_k)
    variance = factors.square().sum(-1).masked_fill_(classes < 0, 0.0) / inputs.temperature.square()
    effect = sampled.effect(places, log_p)
    error, calm = _error(effect, variance, values, weight, drawn, rest, inputs.num_classes, tolerance)
    calm &= noise.abs().amax((1, 2)) <= LARGEST_NOISE
    trusted = calm & (error <= tolerance)
    probs = log_probs.exp()
    # A drawn class stands for as many like it as it weighs more than itself.
    times = torch.where(weight > 0, weight / log_p.exp(), 0.0)
    entropy = (times * torch.special.entr(probs)).sum(-1)
    left_out = (1 - torch.where(drawn, 0.0, probs).sum(-1)).clamp_(min=0)
    new = (values, classes.gather(-1, places), entropy, sampled.entropy(log_p), left_out, trusted)
    for column, value in zip(result, new, strict=True):
        column[examples] = value
    selection.may_go_on[examples] = calm & ~trusted & (error <= GAIN * tolerance)


class Sampled:
    """exp(n_sk) of the classes of a group, and Z_s: of samples s, and of their negatives if they are pairs."""

    def __init__(self, noise: Tensor, weight: Tensor, undrawn: Tensor, paired: bool):
        self.noise, self.weight = noise, weight  # [g, C, S or S/2], [g, C]
        exponentials = noise.exp()
        self.halves = [exponentials, exponentials.reciprocal()] if paired else [exponentials]
        self.totals = [self._sum(half) + undrawn.unsqueeze(-1) for half in self.halves]  # Z_s, [g, S or S/2]
        self.samples = noise.shape[-1] * len(self.halves)

    def _sum(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """Σ_k weight_k values_ks, [g, S or S/2]."""
        return torch.bmm((self.weight if weight is None else weight).unsqueeze(1), values).squeeze(1)

    def ratio(self) -> Tensor:
        """mean_s exp(n_sk) / Z_s, [g, C]: p̄_k / p_k."""
        parts = [torch.bmm(half, 1 / total.unsqueeze(-1)) for half, total in self._both()]
        return torch.stack(parts).sum(0).squeeze(-1) / self.samples

    def effect(self, places: Tensor, log_p: Tensor) -> Tensor:
        """What a little more of each class in Z_s does to the probabilities of some, [g, k, C] for places [g, k]:
        mean_s p_sk exp(n_s·) / Z_s."""
        index = places.unsqueeze(-1).expand(-1, -1, self.noise.shape[-1])
        scale = log_p.gather(-1, places).exp().unsqueeze(-1) / self.samples
        parts = [
            torch.bmm(half.gather(1, index) * scale / total.square().unsqueeze(1), half.mT)
            for half, total in self._both()
        ]
        return torch.stack(parts).sum(0)

    def entropy(self, log_p: Tensor) -> Tensor:
        """The mean over the samples of −Σ_k p_sk log p_sk = log Z_s − Σ_k p_sk (log p_k + n_sk), [g]."""
        surprise = self.weight * log_p.masked_fill(self.weight == 0, 0.0)
        parts = []
        for sign, (half, total) in zip((1, -1), self._both(), strict=False):
            moved = sign * self._sum(self.noise * half)
            parts.append((total.log() - (self._sum(half, surprise) + moved) / total).sum(-1))
        return torch.stack(parts).sum(0) / self.samples

    def _both(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.halves, self.totals, strict=True))


def _error(
    effect: Tensor, variance: Tensor, values: Tensor, weight: Tensor, drawn: Tensor, rest: Tensor, num_classes: int,
    tolerance: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """How far off the top probabilities together may be, [g], and whether the noise lets that be estimated, [g].

    effect [g, k, C] and log-probabilities `values` [g, k] of the top classes; of the classes [g, C] the variance of the
    noise, what they weigh and which were drawn; rest [g] is what the drawn ones weigh together.
    """
    count, weight = drawn.sum(-1), torch.where(drawn, weight, 0.0)
    whole = rest.clamp(min=SMALLEST)
    middle = (effect * weight.unsqueeze(1)).sum(-1, keepdim=True) / whole[:, None, None]
    spread = ((effect - middle) * weight.unsqueeze(1)).square().sum(-1)  # [g, k]
    spread = (spread * (count / (count - 1).clamp(min=1)).unsqueeze(-1)).sqrt().sum(-1)
    mean_variance = (variance * weight).sum(-1) / whole
    alone = values.exp().sum(-1) * rest * mean_variance.clamp(max=10).expm1().sqrt() / count.clamp(min=1).sqrt()
    # The reciprocal of an uncertain Z_s is on average too large.
    bias = rest.square() / count.clamp(min=1) * mean_variance.clamp(max=10).exp()
    # How far noise may lift the others, by the largest that was seen; also others whose probabilities underflow.
    largest, least = variance.amax(-1), num_classes * torch.finfo(rest.dtype).tiny
    lifted = rest.clamp(min=least) * (largest / 2 + 4 * largest.sqrt()).clamp_(max=88).exp()
    calm = ((count >= FEW) | (lifted <= tolerance / 10)) & (mean_variance <= LARGEST_VARIANCE)
    return SAFETY * spread.maximum(FLOOR * alone) + bias, calm


def _top_labels(inputs: Inputs, mean: Tensor, variance: Tensor, draws: Draws, top_k: int) -> Result:
    """Sigmoid: labels do not know of each other, so those of the candidates are exact; of the others, entropies are to
    second order in the noise, with the variance scaled to that of the candidates."""
    assert inputs.noise is not None
    size = min(max(SIGMOID_CANDIDATES, 4 * top_k), inputs.num_classes)
    score = torch.add(mean, variance, alpha=0.5)
    classes = score.topk(size).indices
    noise = inputs.noise
    factors = factors_at(noise.gaussian, noise.lift, classes).to(inputs.wide)  # [n, C, Q]
    logits = draws.noise(factors)
    logits = torch.cat((logits, -logits), -1) if draws.paired else logits
    means = mean_sigmoid_rows(logits + mean.gather(-1, classes).unsqueeze(-1), False, entropy=True)
    assert means.entropy is not None
    values, places = means.log_p.topk(top_k)
    exact = factors.square().sum(-1) / inputs.temperature.square()
    ratio = exact.sum(-1, keepdim=True) / variance.gather(-1, classes).sum(-1, keepdim=True).clamp(min=SMALLEST)
    variance = (variance * ratio).scatter_(-1, classes, 0.0)
    p = mean.sigmoid()
    change = variance * p * (1 - p)
    averaged = (p + 0.5 * change * (1 - 2 * p)).clamp_(0, 1)
    outside = averaged.scatter(-1, classes, 0.0).amax(-1)

    def others(values: Tensor) -> Tensor:
        return values.scatter(-1, classes, 0.0).sum(-1)

    entropy = sigmoid_entropy(means.log_p, means.log_not_p) + others(_label_entropy(averaged))
    # The entropy h(u) of σ(u) has h″(u) = −p(1 − p)(1 + u (1 − 2p)).
    second = -0.5 * change * (1 + mean * (1 - 2 * p))
    expected = means.entropy.sum(-1) + others((_label_entropy(p) + second).clamp_(min=0))
    trusted = (outside <= 0.5 * values[:, -1].exp()) & (variance.amax(-1) <= LARGEST_VARIANCE)
    return Result(values, classes.gather(-1, places), entropy, expected, outside, trusted)


def _label_entropy(probs: Tensor) -> Tensor:
    """Entropy of each label, in nats."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)
