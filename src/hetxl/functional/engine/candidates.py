"""Prediction of the top classes, with noise for a few classes only.

With p = softmax of the mean logits, which are exact for all classes, and n_sk the noise of class k in sample s (both
divided by τ), the probabilities of sample s are

    p_sk = p_k exp(n_sk) / Z_s,      Z_s = Σ_k p_k exp(n_sk).

The likeliest classes are sampled individually. The others are grouped into clusters of similar rows of W, and noise
shifts the classes of a cluster nearly alike. With m_c the exact mean row of cluster c under p, and h_s the noise of the
features,

    exp(w_k · h_s) ≈ exp(m_c · h_s) (1 + (w_k − m_c) · h_s),   so that   Σ_{k in c} p_k exp(n_sk) ≈ P_c exp(m_c · h_s).

The remainder is estimated from a few drawn classes. Class k is drawn with probability ∝ p_k exp(σ̂²_k / 2), its
expected weight under a rough variance of its noise. HET and HET-H have no rows: there the drawn classes represent all
others.

The error of a probability is estimated from the spread of the drawn classes' effects on it. Where the error is too
large, more classes are drawn, and finally all classes are sampled.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hetxl.functional._torch import slices
from hetxl.functional.engine.inputs import GivenMean, Inputs, LinearMean
from hetxl.functional.engine.logit_rows import Workspace
from hetxl.functional.engine.sigmoid import mean_sigmoid_rows
from hetxl.functional.links import sigmoid_entropy
from hetxl.functional.noise import GaussianNoise
from hetxl.registry import Link

FEWEST_CLASSES = 1024  # with fewer, sampling all of them costs little more
FEWEST_SAMPLES = 16
LIKELIEST = 64  # number of classes sampled individually
DRAWN = (64, 256, 1024)  # numbers of classes to draw: the first, then what the error requires
LARGEST_SHARE = 1 / 4  # of all classes; with more, sampling all of them costs no more
CLUSTERS = 32  # at most
CLUSTER_SIZE = 64  # classes at least
AXES = 16  # principal axes of W along which clusters are split
WHOLE_ROWS = 2**22  # largest W of which a copy in cluster order is kept; of larger ones only coordinates
FLOOR = 0.05
"""Least error, relative to that of one sample's Z_s if the noise of all classes were independent of each other: a few
classes may be alike by chance."""
LOGARITHMS = 40.0  # largest error of a log-probability, in tolerances of the probability
SAFETY = 1.4  # estimated errors that must fit in the tolerance, plus a term for few drawn classes:
UNSURE = 2.0  # this over the square root of their number, since they may miss relevant classes
LARGEST_VARIANCE = 2.0  # of noise within clusters; above it, the variance of exp(noise) cannot be estimated
LEAST = -1e30  # log p for p = 0, so that p log p is 0
LARGEST_LIFT = 8.0  # bound on the rough variance, so that it raises a weight by at most exp(4)
LARGEST_SUM = 1e17  # Z_s, whose square and its reciprocal are within float32
BLOCK = 2**18  # elements of one tensor for a group of examples, to stay in the cache
FOLD = 8  # classes per block in the search for the largest
DIRECT = 1.5  # largest cost of one product with the samples relative to two with the factors
SIGMOID_CANDIDATES = 128
SMALLEST = 1e-30  # smallest divisor

Examples = slice | Tensor


def applies(inputs: Inputs, top_k: int) -> bool:
    """Return whether a few classes can represent all: many classes and samples, and noise with few rows."""
    if inputs.noise is None or inputs.samples < FEWEST_SAMPLES or inputs.num_classes < FEWEST_CLASSES:
        return False
    weights = (getattr(part, "weight", None) for part in (inputs.mean, inputs.noise.lift))
    if not all(weight is None or isinstance(weight, Tensor) for weight in weights):
        return False  # rows of a quantised W can only be read one by one
    # A diagonal residual has one row for each dimension.
    return 16 * top_k <= inputs.num_classes and inputs.noise.gaussian.num_residual <= 1


def mean_logits(inputs: Inputs, out: Tensor | None = None) -> Tensor:
    """Compute the exact logits without noise over τ, [n, K]; in `out` [n, K] if products have its precision."""
    mean, products = inputs.mean, inputs.product_precision()
    if isinstance(mean, GivenMean):
        return mean.mean.to(inputs.wide) / inputs.temperature
    features = (mean.features.to(inputs.wide) / inputs.temperature).to(products)
    bias = None if mean.bias is None else (mean.bias.to(inputs.wide) / inputs.temperature).to(products)
    weight = mean.weight.to(products)
    if out is None or products != out.dtype:
        return torch.nn.functional.linear(features, weight, bias).to(inputs.wide)
    logits = torch.mm(features, weight.mT, out=out)
    return logits if bias is None else logits.add_(bias)


def rough_variance(inputs: Inputs, rows: "Rows | None" = None, workspace: Workspace | None = None) -> Tensor:
    """Estimate σ̂²_k, [n, K], divided by τ².

    It is exact for HET and HET-H. Otherwise the estimate is the sum of half an isotropic variance, ‖w_k‖² times the
    mean variance, and the variance along the one direction of the principal axes with the most effect on the classes.
    """
    assert inputs.noise is not None
    gaussian, lift = inputs.noise.gaussian, inputs.noise.lift
    if rows is None:
        return lift.variance(gaussian).to(inputs.wide) / inputs.temperature.square()
    variance = gaussian.variance().mean(-1, keepdim=True) / (2 * inputs.temperature.square())
    factors = gaussian.project(rows.axes.to(gaussian.dtype)).to(inputs.wide) / inputs.temperature  # [n, A, Q]
    factors = factors * rows.deviations.unsqueeze(-1)
    gram = power = factors @ factors.mT
    for _ in range(3):  # the eighth power is nearly of rank one
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=SMALLEST)[:, None, None]
        power = power @ power
    best = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None].expand(-1, power.shape[1], 1)
    axis = torch.nn.functional.normalize(power.gather(2, best), dim=1)  # [n, A, 1]
    size = (axis.mT @ gram @ axis).sqrt().squeeze(-1)  # [n, 1]
    out = None if workspace is None else workspace.take("variance", inputs.batch * len(rows.places))
    out = None if out is None else out.view(inputs.batch, -1)
    along = torch.matmul(axis.squeeze(-1) * size / rows.deviations, rows.places.mT, out=out)  # [n, K]
    return along.square_().addcmul_(variance.to(inputs.wide), rows.norms)


def squared_norms(weight: Tensor) -> Tensor:
    """Compute ‖w_k − c‖² of the rows [K, D] without a copy of W; their mean c shifts all logits alike."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    centre = weight.mean(0, dtype=wide)
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    return (norms - 2 * (weight @ centre.to(weight.dtype)).to(wide) + centre.square().sum()).clamp_(min=0)


def factors_at(noise: GaussianNoise, lift: object, classes: Tensor) -> Tensor:
    """Return the lifted basis f_k, n_sk = z_s · f_k, at some classes [n, C] of each example, [n, C, Q]."""
    kind = getattr(lift, "kind", "")
    if kind == "identity":
        return noise.rows_at(classes)
    if kind == "hash":
        return noise.rows_at(lift.buckets[classes])  # pyright: ignore[reportAttributeAccessIssue]
    return noise.project(lift.weight[classes].to(noise.dtype))  # pyright: ignore[reportAttributeAccessIssue]


class Draws(NamedTuple):
    """The normals of all samples, stored as one half if they come in pairs z, −z."""

    z: Tensor  # [S or S/2, Q], or [n, S or S/2, Q]
    paired: bool

    @staticmethod
    def of(inputs: Inputs) -> "Draws":
        """Return the normals of a batch divided by τ, as one set if all examples share it."""
        assert inputs.noise is not None
        z = inputs.noise.normals
        shared = z.stride(0) == 0 or z.shape[0] == 1
        z = (z[0] if shared else z).to(inputs.wide) / inputs.temperature
        half = z[..., 0::2, :]
        paired = z.shape[-2] % 2 == 0 and torch.equal(half, -z[..., 1::2, :])
        return Draws(half if paired else z, paired)

    def of_examples(self, examples: Examples) -> "Draws":
        """Select examples."""
        return self if self.z.dim() == 2 else Draws(self.z[examples], self.paired)

    def noise(self, factors: Tensor) -> Tensor:
        """Compute the noise [n, C, S or S/2] from factors [n, C, Q]."""
        if self.z.dim() == 2:
            return (factors.flatten(0, 1) @ self.z.T).unflatten(0, factors.shape[:2])
        return torch.bmm(factors, self.z.mT)


class Result(NamedTuple):
    """The top classes of n examples."""

    log_probs: Tensor  # [n, k]
    indices: Tensor  # [n, k]
    entropy: Tensor  # [n]
    expected: Tensor  # [n]
    left_out: Tensor  # [n]
    trusted: Tensor  # [n], whether the estimated error is within the tolerance


def top_classes(
    inputs: Inputs, link: Link, choice: int | Tensor, tolerance: float, rows: "Rows | None", workspace: Workspace
) -> Result:
    """Predict the most probable classes of a chunk, or the stated ones [n, k] (softmax), from few candidates.
    `trusted` marks the examples for which these suffice."""
    draws = Draws.of(inputs)
    if link == "sigmoid":
        logits, variance = mean_logits(inputs), rough_variance(inputs, rows)
        if rows is not None:
            variance = rows.in_order(variance)
        assert isinstance(choice, int)
        return _top_labels(inputs, logits, variance, draws, choice)
    selection = Selection(inputs, choice, rows, workspace)
    result = _blank(selection.log_p, choice if isinstance(choice, int) else choice.shape[1])
    # Number of classes to draw by the last estimate; infinite where these sufficed, or no number would.
    needed = torch.zeros_like(selection.rest)
    for count in DRAWN:
        some = (needed <= count).nonzero().squeeze(-1)
        candidates = selection.likeliest.shape[1] + count
        if not len(some) or candidates > LARGEST_SHARE * inputs.num_classes:
            continue
        size = max(1, BLOCK // ((candidates + CLUSTERS) * max(inputs.noise_features, inputs.samples // 2)))
        # Use slices of a chunk that is still whole, to avoid copies.
        groups = list(slices(len(needed), size)) if len(some) == len(needed) else some.split(size)
        for examples in groups:
            needed[examples] = _sample(result, inputs, selection, draws, examples, count, tolerance, workspace)
    return result


def _blank(mean: Tensor, top_k: int) -> Result:
    n, indices = len(mean), torch.zeros(len(mean), top_k, dtype=torch.int64, device=mean.device)
    entropy, expected, left_out = mean.new_zeros(3, n)
    trusted = torch.zeros(n, dtype=torch.bool, device=mean.device)
    return Result(mean.new_zeros(n, top_k), indices, entropy, expected, left_out, trusted)


class Rows(NamedTuple):
    """Rows of W in clusters of similar rows, and their statistics, ordered by cluster."""

    classes: Tensor  # [K′] ids; the last positions of a cluster may be −1
    num_clusters: int
    norms: Tensor  # ‖w_k − c‖² [K′]
    centre: Tensor  # c, the mean row, [D]
    axes: Tensor  # principal axes of W, [A, D]
    places: Tensor  # (w_k − c) · axes, [K′, A]
    deviations: Tensor  # of the places, [A]
    whole: Tensor | None  # the rows, [K′, D]; None for a large W
    positions: Tensor  # [K], position of each class

    @property
    def coordinates(self) -> Tensor:
        """Return the values that cluster means are computed from, [K′, D or A]."""
        return self.places if self.whole is None else self.whole

    def in_order(self, values: Tensor) -> Tensor:
        """Reorder values [n, K′] of positions to those of the classes, [n, K]."""
        return values[:, self.positions]


_known_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def rows_of(inputs: Inputs) -> Rows | None:
    """Return the clustered rows that noise goes through; None for noise on the logits or too few classes.

    Clusters depend on W alone, so that no prediction depends on other examples, and are cached until W changes.
    """
    assert inputs.noise is not None
    lift = inputs.noise.lift
    if lift.kind not in ("classifier", "projection"):
        return None
    weight = lift.weight
    levels = min(CLUSTERS, len(weight) // CLUSTER_SIZE).bit_length() - 1
    if levels < 1:
        return None
    version = -1 if weight.is_inference() else weight._version
    known = _known_rows.get(weight)
    if known is None or known[0] != version or version < 0:
        known = _known_rows[weight] = version, _rows_in_clusters(weight.detach(), levels)
    return known[1]


def _rows_in_clusters(weight: Tensor, levels: int) -> Rows:
    """Halve the classes `levels` times, each part along the axis of largest variance among its rows."""
    K, D = weight.shape
    wide = torch.promote_types(weight.dtype, torch.float32)
    start = torch.randn(D, min(D, AXES), generator=torch.Generator().manual_seed(0), dtype=wide)
    axes = torch.linalg.qr(start.to(weight.device)).Q
    for _ in range(3):  # approximates the principal axes of W
        seen = (weight @ axes.to(weight.dtype)).to(wide)
        axes = torch.linalg.qr((weight.mT @ (seen - seen.mean(0)).to(weight.dtype)).to(wide)).Q
    places = (weight @ axes.to(weight.dtype)).to(wide)
    places -= places.mean(0)
    # The first classes appear twice where a part cannot be halved exactly.
    parts = torch.arange(-(-K >> levels) << levels, device=weight.device).unsqueeze(0)  # [parts, classes]
    for _ in range(levels):
        there = places[parts % K]
        axis = there.var(1).argmax(-1)[:, None, None].expand(-1, parts.shape[1], 1)
        order = there.gather(2, axis).squeeze(-1).argsort(dim=1, stable=True)
        parts = parts.gather(1, order).view(2 * len(parts), -1)
    classes = torch.where(parts < K, parts, -1).flatten()
    known = classes.clamp(min=0)
    norms, centre = squared_norms(weight)[known], weight.mean(0, dtype=wide)
    whole = weight.to(wide)[known] if weight.numel() <= WHOLE_ROWS else None
    deviations = places.std(0).clamp(min=SMALLEST)
    real = (classes >= 0).nonzero().squeeze(-1)
    positions = torch.empty_like(real).scatter_(0, classes[real], real)
    return Rows(classes, len(parts), norms, centre, axes.mT.contiguous(), places[known], deviations, whole, positions)


class Selection:
    """The classes of each example that are sampled; the columns of all tensors are positions, ordered by cluster."""

    def __init__(self, inputs: Inputs, choice: int | Tensor, rows: Rows | None, workspace: Workspace):
        assert inputs.noise is not None
        self.rows = rows
        if rows is None:
            self.classes = torch.arange(inputs.num_classes, device=inputs.temperature.device)
            logits, score = mean_logits(inputs), rough_variance(inputs)
        else:
            self.classes = rows.classes.clamp(min=0)
            logits, score = _reordered(inputs, rows, self.classes, workspace), rough_variance(inputs, rows, workspace)
        logits.sub_(logits.amax(-1, keepdim=True))
        p = torch.exp(logits, out=_like(logits, "probabilities", workspace))
        total = p.sum(-1, keepdim=True)
        self.log_p = logits.sub_(total.log()).clamp_(min=LEAST)
        self.tail = p.div_(total)  # p without the likeliest classes
        self.score = score.clamp_(max=LARGEST_LIFT).mul_(0.5).add_(self.log_p)
        self.stated, self.counts = (None, None) if isinstance(choice, int) else (choice, None)
        self.likeliest = largest(score, max(LIKELIEST, 4 * choice if isinstance(choice, int) else 0))  # [n, C]
        if self.stated is not None:
            places = self.stated if rows is None else rows.positions[self.stated]
            self.likeliest = torch.cat((self.likeliest, places), 1)
            # Count a class that appears twice only once.
            same = self.likeliest.unsqueeze(2) == self.likeliest.unsqueeze(1)
            self.counts = ~same.tril(-1).any(-1)
        self.tail.scatter_(1, self.likeliest, 0.0)
        shape = (inputs.batch, 1 if rows is None else rows.num_clusters, -1)
        scratch = _like(logits, "sums", workspace)
        self.entropies = -torch.mul(self.tail, self.log_p, out=scratch).view(shape).sum(-1)  # of each cluster, [n, M]
        self.sums = torch.exp(score, out=scratch).scatter_(1, self.likeliest, 0.0)
        torch.cumsum(self.sums, -1, out=self.sums)
        self.mass = self.tail.view(shape).sum(-1)  # P_c, [n, M]
        self.rest = self.mass.sum(-1)
        self.means = None  # the coordinates of m_c, [n, M, A]
        if rows is not None:
            tails = self.tail.view(shape).transpose(0, 1)
            means = torch.bmm(tails, rows.coordinates.to(tails.dtype).view(shape[1], -1, rows.coordinates.shape[1]))
            self.means = means.transpose(0, 1) / self.mass.clamp(min=SMALLEST).unsqueeze(-1)

    def draw(self, examples: Examples, count: int) -> tuple[Tensor, Tensor]:
        """Draw classes by systematic sampling of q: their positions [g, T] and weights [g, T]."""
        sums = _of(self.sums, examples)
        steps = (torch.arange(count, device=sums.device, dtype=sums.dtype) + 0.5) / count
        places = torch.searchsorted(sums, steps * sums[:, -1:]).clamp_(max=sums.shape[1] - 1)
        # p / q, or 0 for the likeliest classes.
        difference = (_of(self.log_p, examples).gather(1, places) - _of(self.score, examples).gather(1, places)).exp()
        stands_for = torch.where(_of(self.tail, examples).gather(1, places) > 0, difference, 0.0)
        total = stands_for.sum(-1, keepdim=True).clamp(min=SMALLEST)
        return places, stands_for * (self.rest[examples].unsqueeze(-1) / total)


def _like(values: Tensor, name: str, workspace: Workspace) -> Tensor:
    """Return memory of the workspace, shaped like values."""
    return workspace.take(name, values.numel()).view(values.shape)


def _reordered(inputs: Inputs, rows: Rows, classes: Tensor, workspace: Workspace) -> Tensor:
    """Compute `mean_logits` with the classes in the order of the rows, and −∞ at positions without a class."""
    mean = inputs.mean
    assert inputs.noise is not None
    out = workspace.take("logits", inputs.batch * len(classes)).view(inputs.batch, -1)
    if rows.whole is not None and isinstance(mean, LinearMean) and inputs.noise.lift.kind == "classifier":
        bias = None if mean.bias is None else mean.bias[classes]
        weight = rows.whole.to(mean.weight.dtype)
        logits = mean_logits(replace(inputs, mean=LinearMean(mean.features, weight, bias)), out)
    else:
        logits = torch.index_select(mean_logits(inputs), 1, classes, out=out)
    if len(classes) > inputs.num_classes:
        logits.masked_fill_(rows.classes < 0, -torch.inf)
    return logits


def largest(values: Tensor, count: int) -> Tensor:
    """Return positions [n, count] of the largest values [n, K], unsorted: first find blocks, then search in them."""
    n, K = values.shape
    blocks = K // FOLD
    if K % FOLD or blocks <= 2 * count:
        return values.topk(count, sorted=False).indices
    folded = values.view(n, FOLD, blocks)
    block = folded.amax(1).topk(count, sorted=False).indices  # each of the largest is in one of these
    places = (block.unsqueeze(1) + torch.arange(0, K, blocks, device=values.device).view(-1, 1)).flatten(1)
    return places.gather(1, values.gather(1, places).topk(count, sorted=False).indices)


class Noise:
    """Sampled noise of a group of examples: rows of W [g, k, N] → [g, k, S or S/2]."""

    def __init__(self, gaussian: GaussianNoise, draws: Draws, wide: torch.dtype):
        self.gaussian, self.draws, self.wide = gaussian, draws, wide
        N, Q, S = gaussian.features, gaussian.size, draws.z.shape[-2]
        # Either draw in the noise space once, or project the rows on the basis first.
        self.direct = N * S <= DIRECT * Q * (N + S)
        self.space = gaussian.draw(draws.z.to(gaussian.dtype)) if self.direct else gaussian.basis()  # [g, S or Q, N]

    def of(self, rows: Tensor) -> Tensor:
        """Compute the noise of rows [g, k, N], or of shared rows [k, N]."""
        projected = (rows.to(self.space.dtype) @ self.space.mT).to(self.wide)
        return projected if self.direct else self.draws.noise(projected)


def _sample(
    result: Result, inputs: Inputs, selection: Selection, draws: Draws, examples: Examples, count: int,
    tolerance: float, workspace: Workspace,
) -> Tensor:  # fmt: skip
    """Sample the likeliest and some drawn classes of a group [g], and write the predictions into the result.

    Return how many drawn classes should suffice [g]; infinity where these did, or where no number would."""
    assert inputs.noise is not None
    likeliest, (drawn, weight) = selection.likeliest[examples], selection.draw(examples, count)
    C, rest, rows = likeliest.shape[1], selection.rest[examples], selection.rows
    places = torch.cat((likeliest, drawn), 1)
    log_p, classes = _of(selection.log_p, examples).gather(1, places), selection.classes[places]
    noise, normals = inputs.noise.of_examples(examples), draws.of_examples(examples)
    own, cluster = log_p[:, :C].exp(), None
    if selection.counts is not None:
        own = own * selection.counts[examples]
    if rows is None or selection.means is None:
        values = normals.noise(factors_at(noise.gaussian, noise.lift, classes).to(inputs.wide))  # [g, C + T, S or S/2]
    else:
        seen = Noise(noise.gaussian, normals, inputs.wide)
        means, mass = _of(selection.means, examples), _of(selection.mass, examples)
        of_drawn = drawn // (selection.log_p.shape[1] // rows.num_clusters)
        if rows.whole is not None:
            values, centres = seen.of(_rows_at(rows.whole, places)), seen.of(means)
            at_drawn = _rows_in(centres, of_drawn)
            beside = values[:, C:] - at_drawn
        else:
            values = seen.of(_rows_at(noise.lift.weight, classes))
            along = seen.of(torch.cat((rows.centre.unsqueeze(0), rows.axes)))  # [g, 1 + A, S or S/2]
            centres = torch.baddbmm(along[:, :1], means, along[:, 1:])
            at_drawn = _rows_in(centres, of_drawn)
            beside = torch.bmm(_rows_at(rows.places, drawn) - _rows_in(means, of_drawn), along[:, 1:])
        entropies = _of(selection.entropies, examples)
        cluster = Clustered(mass, entropies, centres, at_drawn, beside, of_drawn)
    # Relative to the likeliest classes, since a shift of all logits changes no probability.
    middle = torch.bmm(own.unsqueeze(1), values[:, :C]).div_(own.sum(-1).clamp(min=SMALLEST)[:, None, None])
    values -= middle
    if cluster is not None:
        cluster = cluster._replace(noise=cluster.noise - middle, at_drawn=cluster.at_drawn - middle)
    sampled = Sampled(values, draws.paired, log_p, own, weight, cluster, workspace)
    log_probs = log_p + sampled.ratio.log()  # log p̄ of every sampled class
    if selection.stated is None:
        top, order = log_probs[:, :C].topk(result.indices.shape[1])
    else:
        top = log_probs[:, C - selection.stated.shape[1] : C]
        order = torch.arange(C - top.shape[1], C, device=top.device).expand_as(top)
    spread = values[:, C:] if cluster is None else values[:, C:] - cluster.at_drawn
    variance = spread.square().mean(-1)  # [g, T]
    mean_variance = (variance * weight).sum(-1) / rest.clamp(min=SMALLEST)
    stated = selection.stated is not None
    error = _error(sampled.effect(order), weight, rest, mean_variance, top.exp(), cluster is not None, stated)
    # Upper bound on the noisy probability of the classes whose p underflows.
    largest, least = variance.amax(-1), inputs.num_classes * torch.finfo(rest.dtype).tiny
    lifted = rest.clamp(min=least) * (largest / 2 + 4 * largest.sqrt()).clamp_(max=88).exp()
    calm = torch.where(rest > 0, mean_variance <= LARGEST_VARIANCE, False) | (lifted <= tolerance / 10)
    calm &= sampled.finite
    if not stated:
        calm &= log_probs[:, C:].amax(-1) <= top[:, -1]
    trusted = calm & (error <= tolerance)
    # The tail's entropy without noise is exact; drawn classes estimate how noise changes it.
    probs, before = log_probs.exp(), log_p[:, C:].exp()
    changes = (torch.special.entr(probs[:, C:]) - torch.special.entr(before)) / before.clamp(min=SMALLEST)
    entropies = selection.entropies[examples].sum(-1)
    mine = probs[:, :C] if selection.counts is None else probs[:, :C] * selection.counts[examples]
    entropy = torch.special.entr(mine).sum(-1) + entropies + (weight * changes).sum(-1)
    left_out = (1 - mine.sum(-1)).clamp_(min=0)
    new = (top, classes.gather(-1, order), entropy, sampled.entropy, left_out, trusted)
    for column, value in zip(result, new, strict=True):
        column[examples] = value
    return torch.where(calm & ~trusted, count * (error / tolerance).square(), torch.inf)


def _of(values: Tensor, examples: Examples) -> Tensor:
    """Select examples; index_select is faster for whole rows than indexing."""
    return values[examples] if isinstance(examples, slice) else values.index_select(0, examples)


def _rows_at(weight: Tensor, places: Tensor) -> Tensor:
    """Return the rows [..., D] of a matrix [K, D] at positions [...]."""
    return weight.index_select(0, places.flatten()).view(*places.shape, weight.shape[1])


def _rows_in(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows [g, t, s] of values [g, k, s] at positions [g, t]; faster than gathering single elements."""
    start = torch.arange(0, values.shape[0] * values.shape[1], values.shape[1], device=places.device)
    return _rows_at(values.flatten(0, 1), places + start.unsqueeze(-1))


class Clustered(NamedTuple):
    """The clusters of a group of examples."""

    mass: Tensor  # P_c, [g, M]
    entropies: Tensor  # −Σ p log p, [g, M]
    noise: Tensor  # m_c · h_s, [g, M, S or S/2]
    at_drawn: Tensor  # `noise` of each drawn class's cluster, [g, T, S or S/2]
    beside: Tensor  # known part of (w_k − m_c) · h_s, which cancels in the mean, likewise
    of_drawn: Tensor  # the cluster of each drawn class, [g, T]


class Sampled:
    """Means over the samples of a group of examples, and over their negatives if `paired`.

    Args:
        noise: noise of the likeliest and the drawn classes, [g, C + T, S or S/2]
        log_p: log p of the same classes, [g, C + T]
        own: p of the likeliest classes, [g, C]
        weight: weight of each drawn class, [g, T]
        clustered: the clusters of all but the likeliest classes; None without clusters.

    Attributes:
        ratio: p̄_k / p_k = mean_s exp(n_sk) / Z_s, [g, C + T]
        entropy: mean over the samples of −Σ_k p_sk log p_sk, [g]
        finite: whether all values are far within float32, [g]
    """

    def __init__(
        self, noise: Tensor, paired: bool, log_p: Tensor, own: Tensor, weight: Tensor, clustered: Clustered | None,
        workspace: Workspace,
    ):  # fmt: skip
        C, self.samples = own.shape[1], noise.shape[-1] * (2 if paired else 1)
        self.log_p = log_p
        whole = torch.cat((own, weight), 1)
        both = torch.stack((whole, whole * log_p), 1)  # [g, 2, C + T]
        up = torch.exp(noise, out=_like(noise, "up", workspace))
        scratch = _like(noise, "scratch", workspace)
        clusters = None if clustered is None else clustered.noise.exp()
        self.halves: list[tuple[Tensor, Tensor, Tensor]] = []  # exp(n), 1 / Z, beyond the model of the clusters
        ratio, entropy, self.finite = 0.0, 0.0, own[:, 0] >= 0
        for sign in (1, -1) if paired else (1,):
            if sign < 0:
                up = torch.reciprocal(up, out=_like(up, "down", workspace))
                clusters = None if clusters is None else clusters.reciprocal()
            sums = torch.bmm(both, up)  # Σ p exp(n) and Σ p log p exp(n), [g, 2, S or S/2]
            total = sums[:, 0]
            # Σ p_k exp(n_k) (log p_k + n_k)
            moved = sums[:, 1] + sign * _sum(whole, torch.mul(up, noise, out=scratch))
            beyond = up[:, C:]
            if clustered is not None and clusters is not None:
                model = _rows_in(clusters, clustered.of_drawn)
                # exp(n) − model (1 + n − centre)
                beyond = torch.addcmul(beyond - model, model, clustered.beside, value=-sign)
                rows = torch.stack((clustered.mass, clustered.entropies), 1)
                means = torch.bmm(rows, clusters)
                moved = moved - means[:, 1] + sign * _sum(clustered.mass, clusters * clustered.noise)
                moved = moved - _sum(both[:, 1, C:], model) - sign * _sum(weight, model * clustered.at_drawn)
                total = _sum(own, up[:, :C]) + means[:, 0] + _sum(weight, beyond)
            inverse = total.reciprocal()
            ratio = ratio + torch.bmm(inverse.unsqueeze(1), up.mT).squeeze(1)
            entropy = entropy + (total.log() - moved * inverse).sum(-1)
            least, largest = total.amin(-1), total.amax(-1)
            self.finite = self.finite & (least > 1 / LARGEST_SUM) & (largest < LARGEST_SUM)
            self.halves.append((up, inverse, beyond))
        assert isinstance(ratio, Tensor)
        self.ratio, self.entropy = ratio / self.samples, entropy / self.samples

    def effect(self, places: Tensor) -> Tensor:
        """Return the effect of each drawn class through Z_s on the probabilities at positions [g, k], [g, k, T]:
        the mean over s of p_sk / Z_s times the class's deviation from the model."""
        scale = self.log_p.gather(-1, places).exp().unsqueeze(-1) / self.samples
        parts = [
            torch.bmm(_rows_in(up, places) * scale * inverse.square().unsqueeze(1), beyond.mT)
            for up, inverse, beyond in self.halves
        ]
        return torch.stack(parts).sum(0)


def _sum(weight: Tensor, values: Tensor) -> Tensor:
    """Compute Σ_k weight_k values_ks, [g, s], from [g, k] and [g, k, s]."""
    return torch.bmm(weight.unsqueeze(1), values).squeeze(1)


def _error(
    effect: Tensor, weight: Tensor, rest: Tensor, variance: Tensor, probs: Tensor, modelled: bool, stated: bool
) -> Tensor:
    """Estimate the joint error of the top probabilities, or the largest of the stated ones and their logarithms, [g].

    Takes the effect [g, k, T] and the weights [g, T] of the drawn classes, with their sum, rest [g]; the variance of
    their noise beyond the model [g]; and the probabilities [g, k].
    """
    count, weight, whole = weight.shape[1], weight.unsqueeze(1), rest.clamp(min=SMALLEST)[:, None, None]
    middle = (effect * weight).sum(-1, keepdim=True) / whole
    spread = ((effect - middle) * weight).square().sum(-1)  # [g, k]
    spread = (spread * (count / (count - 1))).sqrt()
    share = torch.ones_like(rest)
    if stated:
        relative = (LOGARITHMS * probs).clamp(min=SMALLEST, max=1)
        spread, probs = spread / relative, probs / relative
        share = probs.amax(-1)
    both = torch.stack((spread, probs))
    spread, probs = both.amax(-1) if stated else both.sum(-1)
    variance = variance.clamp(max=10)
    # Variance of exp(n), or of exp(n) − 1 − n, for normal n.
    alone = variance.expm1() * variance.exp()
    if modelled:
        alone = (2 * variance).exp() + 1 + variance - 2 * (variance / 2).exp() * (1 + variance)
    alone = alone.clamp(min=0) / count
    safety = SAFETY * (1 + UNSURE / count**0.5)
    # The reciprocal of a noisy Z_s is biased upwards.
    return safety * spread.maximum(FLOOR * probs * rest * alone.sqrt()) + share * rest.square() * alone


def _top_labels(inputs: Inputs, mean: Tensor, variance: Tensor, draws: Draws, top_k: int) -> Result:
    """Predict the top labels (sigmoid). Labels are independent, so those of the candidates are exact. Entropies of the
    others are second-order in the noise, with its variance scaled to that of the candidates."""
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
    """Return the entropy of each label, in nats."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)
