"""Prediction of the top classes, noise for few of them.

With p = softmax of the mean logits, which are exact for all classes, and n_sk the noise of class k in sample s (both
divided by τ), the probabilities of sample s are

    p_sk = p_k exp(n_sk) / Z_s,      Z_s = Σ_k p_k exp(n_sk).

The likeliest classes count by themselves. The others are in clusters of near rows of W, and noise moves those of a
cluster nearly alike. With m_c the mean row of cluster c under p, which is exact, and h_s the noise in front of W,

    exp(w_k · h_s) ≈ exp(m_c · h_s) (1 + (w_k − m_c) · h_s),   so that   Σ_{k in c} p_k exp(n_sk) ≈ P_c exp(m_c · h_s).

What that leaves over is estimated from a few classes, drawn with probability ∝ p_k exp(σ̂²_k / 2), what class k is
expected to weigh by a rough variance of its noise. HET and HET-H have no rows: there the drawn classes stand for all.

How far off a probability is follows from how much the drawn classes differ in what they do to it. Where that is
too much, more are drawn, and in the end all classes are sampled.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hetxl.functional._torch import slices
from hetxl.functional.engine.inputs import GivenMean, Inputs, LinearMean
from hetxl.functional.engine.sigmoid import mean_sigmoid_rows
from hetxl.functional.links import sigmoid_entropy
from hetxl.functional.noise import GaussianNoise
from hetxl.registry import Link

FEWEST_CLASSES = 1024  # with fewer, all of them cost little more
FEWEST_SAMPLES = 16
LIKELIEST = 96  # classes that count by themselves
DRAWN = (64, 192, 640, 1600)  # numbers of classes to draw: the first, then the one that the error requires
LARGEST_SHARE = 1 / 4  # of the classes; with more of them, sampling all costs no more
CLUSTERS = 128  # at most
CLUSTER_SIZE = 64  # classes at least
AXES = 16  # principal axes of W that clusters are cut along
FLOOR = 0.05
"""Least error, relative to that of one sample's Z_s if the noise of all classes were independent of each other: a few
classes may be alike by chance."""
SPREAD = 0.2
"""Standard deviation of what drawn classes do to the top probabilities without clusters, relative to their weight, as
measured on trained heads: a first guess of who can do without."""
SAFETY = 1.6  # how many estimated errors have to fit in the tolerance
LARGEST_VARIANCE = 2.0  # of noise within clusters; beyond, the variance of its exponential cannot be estimated
LEAST = -1e30  # log p, so that p log p is 0 where p is
LARGEST_NOISE = 60.0  # exp of it, and of what is negative, are numbers of float32
BLOCK = 2**21  # numbers that a group of examples may have in one tensor, to stay in a processor's cache
SIGMOID_CANDIDATES = 128
SMALLEST = 1e-30  # that is divided by

Examples = slice | Tensor


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


def rough_variance(inputs: Inputs, classes: Tensor | None = None) -> Tensor:
    """σ̂²_k of some classes [C], or of all: [n, C], divided by τ².

    It is exact for HET and HET-H; otherwise ‖w_k‖² times the mean variance of the noise. The rows of W are taken
    relative to their mean, which shifts all logits alike.
    """
    assert inputs.noise is not None
    variance, lift = inputs.noise.gaussian.variance(), inputs.noise.lift  # [n, N]
    if lift.kind in ("identity", "hash"):
        variance = lift.variance(inputs.noise.gaussian).to(inputs.wide) / inputs.temperature.square()
        return variance if classes is None else variance[:, classes]
    weight = lift.weight
    centre = weight.mean(0, dtype=inputs.wide)
    # ‖w − c‖² = ‖w‖² − 2 w·c + ‖c‖², without a copy of W.
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=inputs.wide).square()
    norms = (norms - 2 * (weight @ centre.to(weight.dtype)).to(inputs.wide) + centre.square().sum()).clamp_(min=0)
    norms = norms if classes is None else norms[classes]
    return (variance.mean(-1, keepdim=True) / inputs.temperature.square()).to(inputs.wide) * norms


def _reordered(inputs: Inputs, classes: Tensor) -> Tensor:
    """`mean_logits` with the classes in another order, by way of W where that is the smaller of the two."""
    mean = inputs.mean
    if isinstance(mean, LinearMean) and mean.weight.numel() <= inputs.batch * inputs.num_classes:
        bias = None if mean.bias is None else mean.bias[classes]
        return mean_logits(replace(inputs, mean=LinearMean(mean.features, _rows_of(mean.weight, classes), bias)))
    return mean_logits(inputs).index_select(1, classes)


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

    def of_examples(self, examples: Examples) -> "Draws":
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
    draws = Draws.of(inputs)
    if link == "sigmoid":
        return _top_labels(inputs, mean_logits(inputs), rough_variance(inputs), draws, top_k)
    selection = Selection(inputs, top_k)
    result = _blank(selection.log_p, top_k)
    # Drawn classes that should do by the last estimate; infinite where these did, or none would.
    needed = torch.where(SAFETY * SPREAD * selection.rest <= tolerance * DRAWN[0] ** 0.5, 0.0, 1.0)
    for count, clustered in ((DRAWN[0], False), *((count, True) for count in DRAWN)):
        if selection.clusters is not None and not clustered:
            some = (needed == 0).nonzero().squeeze(-1)  # hardly anything is left to their clusters
        else:
            some = (needed <= count).nonzero().squeeze(-1)
            clustered = selection.clusters is not None
        rows = selection.likeliest.shape[1] + count
        if not len(some) or rows > LARGEST_SHARE * inputs.num_classes:
            continue
        if clustered and selection.means is None:
            selection.add_means(inputs, needed.isfinite().nonzero().squeeze(-1))
        size = max(1, BLOCK // ((rows + CLUSTERS) * max(inputs.noise_features, inputs.samples)))
        # Slices of a chunk that is still whole are not copied.
        groups = list(slices(len(needed), size)) if len(some) == len(needed) else some.split(size)
        for examples in groups:
            needed[examples] = _sample(result, inputs, selection, draws, examples, count, tolerance, clustered)
        if selection.clusters is not None and not clustered:
            needed[some] = torch.where(result.trusted[some], torch.inf, 1.0)  # with clusters after all
    return result


def _blank(mean: Tensor, top_k: int) -> Result:
    n, indices = len(mean), torch.zeros(len(mean), top_k, dtype=torch.int64, device=mean.device)
    entropy, expected, left_out = mean.new_zeros(3, n)
    trusted = torch.zeros(n, dtype=torch.bool, device=mean.device)
    return Result(mean.new_zeros(n, top_k), indices, entropy, expected, left_out, trusted)


_known_clusters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def clusters_of(weight: Tensor) -> Tensor | None:
    """Classes in clusters of near rows of W, [M, C]; −1 fills up the last places. None for too few classes.

    They are made from W alone, so that no example's prediction depends on others, and kept while W stays as it is.
    """
    levels = min(CLUSTERS, len(weight) // CLUSTER_SIZE).bit_length() - 1
    if levels < 1:
        return None
    version = -1 if weight.is_inference() else weight._version
    known = _known_clusters.get(weight)
    if known is None or known[0] != version or version < 0:
        known = _known_clusters[weight] = version, _clusters(weight.detach(), levels)
    return known[1]


def _clusters(weight: Tensor, levels: int) -> Tensor:
    """Cut the classes in halves `levels` times, each part along the axis on which its rows differ most."""
    K, D = weight.shape
    wide = torch.promote_types(weight.dtype, torch.float32)
    start = torch.randn(D, min(D, AXES), generator=torch.Generator().manual_seed(0), dtype=wide)
    axes = torch.linalg.qr(start.to(weight.device)).Q
    for _ in range(3):  # to the principal axes of W, about
        seen = (weight @ axes.to(weight.dtype)).to(wide)
        axes = torch.linalg.qr((weight.mT @ (seen - seen.mean(0)).to(weight.dtype)).to(wide)).Q
    places = (weight @ axes.to(weight.dtype)).to(wide)
    # The first classes stand twice where halves would not be whole.
    parts = torch.arange(-(-K >> levels) << levels, device=weight.device).unsqueeze(0)  # [parts, classes]
    for _ in range(levels):
        there = places[parts % K]
        axis = there.var(1).argmax(-1)[:, None, None].expand(-1, parts.shape[1], 1)
        order = there.gather(2, axis).squeeze(-1).argsort(dim=1, stable=True)
        parts = parts.gather(1, order).view(2 * len(parts), -1)
    return torch.where(parts < K, parts, -1)


class Selection:
    """Which classes of each example see the noise; the columns of all tensors are places, cluster after cluster."""

    def __init__(self, inputs: Inputs, top_k: int):
        assert inputs.noise is not None
        lift = inputs.noise.lift
        rows = lift.weight if lift.kind in ("classifier", "projection") else None
        self.clusters = clusters = None if rows is None else clusters_of(rows)
        if clusters is None:
            self.classes = torch.arange(inputs.num_classes, device=inputs.temperature.device)
            logits, half = mean_logits(inputs), rough_variance(inputs)
        else:
            self.classes = clusters.flatten().clamp(min=0)
            logits, half = _reordered(inputs, self.classes), rough_variance(inputs, self.classes)
            if len(self.classes) > inputs.num_classes:
                logits[:, (clusters < 0).flatten()] = -torch.inf
        self.log_p = logits.sub_(logits.logsumexp(-1, keepdim=True)).clamp_(min=LEAST)
        score = half.clamp_(max=2 * LARGEST_VARIANCE).mul_(0.5).add_(self.log_p)
        self.likeliest = score.topk(max(LIKELIEST, 4 * top_k)).indices  # [n, C]
        self.tail = self.log_p.exp().scatter_(1, self.likeliest, 0.0)  # p of all others
        self.rest = self.tail.sum(-1)
        self.q = score.exp_().scatter_(1, self.likeliest, 0.0)
        self.sums = self.q.cumsum(-1)
        shape = (inputs.batch, 1 if clusters is None else len(clusters), -1)
        self.entropies = -(self.tail * self.log_p).view(shape).sum(-1)  # of each cluster, [n, M]
        self.mass = self.tail.view(shape).sum(-1)  # P_c, [n, M]
        self.means, self.places = None, None  # P_c m_c of some examples, [w, M, D], and the place of each, [n]

    def add_means(self, inputs: Inputs, examples: Tensor) -> None:
        """Compute the mean rows of the clusters for some examples, by blocks of clusters, each a gather of rows."""
        assert inputs.noise is not None
        assert self.clusters is not None
        rows, tail = inputs.noise.lift.weight, self.tail
        if len(examples) < len(tail):
            self.places = torch.zeros(len(tail), dtype=torch.int64, device=tail.device)
            self.places[examples] = torch.arange(len(examples), device=tail.device)
            tail = tail.index_select(0, examples)
        size = max(1, BLOCK // (self.clusters.shape[1] * max(rows.shape[1], len(tail))))
        tails = tail.view(len(tail), len(self.clusters), -1).transpose(0, 1).to(rows.dtype)
        chosen = self.classes.view(self.clusters.shape)
        parts = [torch.bmm(tails[some], _rows_of(rows, chosen[some])) for some in slices(len(chosen), size)]
        self.means = torch.cat(parts).transpose(0, 1)

    def means_of(self, examples: Examples) -> Tensor:
        """P_c m_c of some of these examples, [g, M, D]."""
        assert self.means is not None
        return _of(self.means, examples if self.places is None else self.places[examples])

    def draw(self, examples: Examples, count: int) -> tuple[Tensor, Tensor]:
        """Places of drawn classes [g, T] by systematic sampling of the sums of q, and what each stands for [g, T]."""
        sums = _of(self.sums, examples)
        steps = (torch.arange(count, device=sums.device, dtype=sums.dtype) + 0.5) / count
        places = torch.searchsorted(sums, steps * sums[:, -1:]).clamp_(max=sums.shape[1] - 1)
        q = _of(self.q, examples).gather(1, places)
        stands_for = torch.where(q > 0, _of(self.tail, examples).gather(1, places) / q, 0.0)
        total = stands_for.sum(-1, keepdim=True).clamp(min=SMALLEST)
        return places, stands_for * (self.rest[examples].unsqueeze(-1) / total)


def _sample(
    result: Result, inputs: Inputs, selection: Selection, draws: Draws, examples: Examples, count: int,
    tolerance: float, clustered: bool,
) -> Tensor:  # fmt: skip
    """Sample the likeliest and some drawn classes of a group [g], write what comes of it into the result, and return
    how many drawn classes should do [g]: infinitely many where these did, or where no number would."""
    assert inputs.noise is not None
    likeliest, (drawn, weight) = selection.likeliest[examples], selection.draw(examples, count)
    C, rest = likeliest.shape[1], selection.rest[examples]
    places = torch.cat((likeliest, drawn), 1)
    log_p, classes = _of(selection.log_p, examples).gather(1, places), selection.classes[places]
    noise, normals = inputs.noise.of_examples(examples), draws.of_examples(examples)
    own, cluster, mass = log_p[:, :C].exp(), None, selection.mass[examples]
    if not clustered:
        factors, centres = factors_at(noise.gaussian, noise.lift, classes).to(inputs.wide), None  # [g, C + T, Q]
    else:
        basis = noise.gaussian.basis()
        factors = (_rows_of(noise.lift.weight, classes).to(basis.dtype) @ basis.mT).to(inputs.wide)
        centres = (selection.means_of(examples).to(basis.dtype) @ basis.mT).to(inputs.wide)  # [g, M, Q]
        centres = centres / mass.clamp(min=SMALLEST).unsqueeze(-1)
    # Relative to the likeliest classes: what moves all logits alike moves no probability.
    middle = (own.unsqueeze(1) @ factors[:, :C]) / own.sum(-1).clamp(min=SMALLEST)[:, None, None]
    spread = factors[:, C:] - middle
    if centres is not None:
        cluster = Clustered(drawn // (selection.q.shape[1] // mass.shape[1]), mass, normals.noise(centres - middle))
        spread = factors[:, C:] - centres.gather(1, _rows(cluster.places, factors.shape[-1]))
    sampled = Sampled(normals.noise(factors - middle), draws.paired, own, weight, cluster)
    log_probs = log_p + sampled.ratio().log()  # log p̄ of every class that was looked at
    values, order = log_probs[:, :C].topk(result.indices.shape[1])
    variance = spread.square().sum(-1) / inputs.temperature.square()  # [g, T]
    mean_variance = (variance * weight).sum(-1) / rest.clamp(min=SMALLEST)
    error = _error(sampled.effect(order, log_p), weight, rest, mean_variance, values, cluster is not None)
    # How far noise may lift others whose probabilities underflow.
    largest, least = variance.amax(-1), inputs.num_classes * torch.finfo(rest.dtype).tiny
    lifted = rest.clamp(min=least) * (largest / 2 + 4 * largest.sqrt()).clamp_(max=88).exp()
    calm = ((rest > 0) | (lifted <= tolerance / 10)) & (mean_variance <= LARGEST_VARIANCE) & sampled.finite
    calm &= log_probs[:, C:].amax(-1) <= values[:, -1]
    trusted = calm & (error <= tolerance)
    # Entropies of the tail without noise are exact; a drawn class says how noise changes that of those like it.
    probs, before = log_probs.exp(), log_p[:, C:].exp()
    changes = (torch.special.entr(probs[:, C:]) - torch.special.entr(before)) / before.clamp(min=SMALLEST)
    entropies = selection.entropies[examples]
    entropy = torch.special.entr(probs[:, :C]).sum(-1) + entropies.sum(-1) + (weight * changes).sum(-1)
    left_out = (1 - probs[:, :C].sum(-1)).clamp_(min=0)
    new = (values, classes.gather(-1, order), entropy, sampled.entropy(log_p, entropies), left_out, trusted)
    for column, value in zip(result, new, strict=True):
        column[examples] = value
    return torch.where(calm & ~trusted, count * (error / tolerance).square(), torch.inf)


def _of(values: Tensor, examples: Examples) -> Tensor:
    """Those of some examples; whole rows are selected faster than indexed."""
    return values[examples] if isinstance(examples, slice) else values.index_select(0, examples)


def _rows_of(weight: Tensor, classes: Tensor) -> Tensor:
    """Rows of W [..., D] of classes [...]."""
    return weight.index_select(0, classes.flatten()).view(*classes.shape, weight.shape[1])


def _rows(index: Tensor, width: int) -> Tensor:
    """An index [g, T] for whole rows, [g, T, width]."""
    return index.unsqueeze(-1).expand(-1, -1, width)


class Clustered(NamedTuple):
    """The clusters of a group."""

    places: Tensor  # cluster of each drawn class, [g, T]
    mass: Tensor  # P_c, [g, M]
    noise: Tensor  # m_c · h_s, [g, M, S or S/2]


class Half(NamedTuple):
    """The samples, or the negatives of all of them."""

    sign: int
    exponentials: Tensor  # exp(n_sk), [g, C + T, S or S/2]
    clusters: Tensor | None  # exp(m_c · h_s), [g, M, S or S/2]
    model: Tensor | None  # that of the cluster of each drawn class, [g, T, S or S/2]
    beyond: Tensor  # what the drawn classes have beyond the model, likewise
    total: Tensor  # Z_s, [g, S or S/2]


class Sampled:
    """exp(n_sk) of the classes and clusters of a group, and Z_s: of samples s, and of their negatives in pairs.

    Args:
        noise: of the likeliest classes and the drawn ones, [g, C + T, S or S/2]
        paired: whether the negatives of the samples belong to them.
        own: p of the likeliest classes, [g, C]
        weight: of the drawn ones, what each stands for, [g, T]
        clustered: the clusters that all classes but the likeliest are in, if they are.
    """

    def __init__(self, noise: Tensor, paired: bool, own: Tensor, weight: Tensor, clustered: Clustered | None):
        self.noise, self.own, self.weight, self.clustered = noise, own, weight, clustered
        self.centre = None  # noise of the cluster of each drawn class
        exponentials, clusters, extremes = noise.exp(), None, [noise.flatten(1).aminmax(dim=1)]
        if clustered is not None:
            self.centre = clustered.noise.gather(1, _rows(clustered.places, noise.shape[-1]))
            clusters = clustered.noise.exp()
            extremes.append(clustered.noise.flatten(1).aminmax(dim=1))
        self.halves = [self._half(1, exponentials, clusters)]
        if paired:
            self.halves += [
                self._half(-1, exponentials.reciprocal(), None if clusters is None else clusters.reciprocal())
            ]
        self.samples = noise.shape[-1] * len(self.halves)
        self.finite = torch.stack([half.total.amin(-1) for half in self.halves]).amin(0) > 0
        for least, largest in extremes:
            self.finite &= (least >= -LARGEST_NOISE) & (largest <= LARGEST_NOISE)

    def _half(self, sign: int, exponentials: Tensor, clusters: Tensor | None) -> Half:
        C = self.own.shape[1]
        beyond, model, total = exponentials[:, C:], None, _sum(self.own, exponentials[:, :C])
        if clusters is not None and self.clustered is not None and self.centre is not None:
            model = clusters.gather(1, _rows(self.clustered.places, clusters.shape[-1]))
            # exp(n) − model (1 + n − centre)
            beyond = beyond - torch.addcmul(model, model, self.noise[:, C:] - self.centre, value=sign)
            total = total + _sum(self.clustered.mass, clusters)
        return Half(sign, exponentials, clusters, model, beyond, total + _sum(self.weight, beyond))

    def ratio(self) -> Tensor:
        """mean_s exp(n_sk) / Z_s, [g, C + T]: p̄_k / p_k."""
        parts = [torch.bmm(half.exponentials, 1 / half.total.unsqueeze(-1)) for half in self.halves]
        return torch.stack(parts).sum(0).squeeze(-1) / self.samples

    def effect(self, places: Tensor, log_p: Tensor) -> Tensor:
        """What a little more of each drawn class in Z_s does to the probabilities of some, [g, k, T] for places [g, k]:
        mean_s p_sk / Z_s times what the class has beyond the model."""
        index = _rows(places, self.noise.shape[-1])
        scale = log_p.gather(-1, places).exp().unsqueeze(-1) / self.samples
        parts = [
            torch.bmm(half.exponentials.gather(1, index) * scale / half.total.square().unsqueeze(1), half.beyond.mT)
            for half in self.halves
        ]
        return torch.stack(parts).sum(0)

    def entropy(self, log_p: Tensor, entropies: Tensor) -> Tensor:
        """The mean over the samples of −Σ_k p_sk log p_sk = log Z_s − Σ_k p_sk (log p_k + n_sk), [g].

        log_p [g, C + T] of the classes, and −Σ p log p of each cluster [g, M].
        """
        weight = torch.cat((self.own, self.weight), 1)
        surprise, drawn = weight * log_p, slice(self.own.shape[1], None)
        parts = []
        for sign, exponentials, clusters, model, _, normaliser in self.halves:
            total = _sum(surprise, exponentials) + sign * _sum(weight, exponentials * self.noise)
            if clusters is not None and model is not None and self.clustered is not None and self.centre is not None:
                moved = _sum(self.clustered.mass, clusters * self.clustered.noise)
                moved = moved - _sum(self.weight, model * self.centre)
                total = total + sign * moved - _sum(entropies, clusters) - _sum(surprise[:, drawn], model)
            parts.append((normaliser.log() - total / normaliser).sum(-1))
        return torch.stack(parts).sum(0) / self.samples


def _sum(weight: Tensor, values: Tensor) -> Tensor:
    """Σ_k weight_k values_ks, [g, s] from [g, k] and [g, k, s]."""
    return torch.bmm(weight.unsqueeze(1), values).squeeze(1)


def _error(effect: Tensor, weight: Tensor, rest: Tensor, variance: Tensor, values: Tensor, modelled: bool) -> Tensor:
    """How far off the top probabilities together may be, [g].

    effect [g, k, T] of drawn classes that weigh [g, T], together rest [g]; the variance of their noise beyond the model
    [g], and log-probabilities `values` [g, k] of the top classes.
    """
    count, weight, whole = weight.shape[1], weight.unsqueeze(1), rest.clamp(min=SMALLEST)[:, None, None]
    middle = (effect * weight).sum(-1, keepdim=True) / whole
    spread = ((effect - middle) * weight).square().sum(-1)  # [g, k]
    spread = (spread * (count / (count - 1))).sqrt().sum(-1)
    variance = variance.clamp(max=10)
    # Variance of exp(n), or of exp(n) − 1 − n, for normal n.
    alone = variance.expm1() * variance.exp()
    if modelled:
        alone = (2 * variance).exp() + 1 + variance - 2 * (variance / 2).exp() * (1 + variance)
    alone = alone.clamp(min=0) / count
    # The reciprocal of an uncertain Z_s is on average too large.
    return SAFETY * spread.maximum(FLOOR * values.exp().sum(-1) * rest * alone.sqrt()) + rest.square() * alone


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
