"""Recalibrate a trained classifier by temperature scaling and by scaling its noise."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.functional._torch import to_accumulation_dtype
from hetxl.functional.flips import flipped
from hetxl.metrics.records import MAX_BYTES, LabelEntries, evaluating, label_entries
from hetxl.nn import Classifier, Head
from hetxl.registry import Link

LOW, HIGH = 0.05, 20.0
"""The range of τ."""

_TOLERANCE = 1e-8
_MAX_STEPS = 60
_STEEPNESS = 10.0
"""Factor of the logarithm of the loss, because the first step of L-BFGS is as long as the slope, which is small."""
NOISE_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Candidate scales of the noise."""

Features = Callable[[], Iterable[Tensor]] | Sequence[Tensor]
"""Batches [b, D], or a function that returns them for each pass."""


class Scales(NamedTuple):
    """The scales fitted to a trained head."""

    temperature: float  # τ
    noise: float  # factor of the noise, `head.noise_scale`


def fit_temperature(head: Head, features: Features, targets: Tensor | LabelLists, *, seed: int = 0) -> float:
    """Return the τ in [0.05, 20] that minimises the negative log-likelihood of a trained head.

        min(torch.linspace(0.05, 20, 10**6), key=lambda tau: F.cross_entropy(logits / tau, targets))

    Uses L-BFGS on log τ, whose loss has one minimum, with the same noise samples for all losses. It takes about eight
    passes over the features. The head is not changed; set `head.temperature = FixedTemperature(tau)` to use the result.

    Args:
        head: the head; its current temperature is ignored.
        features: features of the validation split: batches [b, D], or a function that returns them for each pass. With
            noise, all of them are in memory at once.
        targets: targets of all n examples in the same order: class ids [n], −100 for ignored examples; for the sigmoid
            link also lists of labels.
        seed: seed of the noise.

    Returns:
        τ, whose loss is within 1e-5 of the minimum, or an end of the range if the loss still falls there.
    """
    with _Fit(head, features, targets, seed).running() as fit:
        return math.exp(fit.best(head.noise_scale, 0.0)[1])


def fit_scales(head: Head, features: Features, targets: Tensor | LabelLists, *, seed: int = 0) -> Scales:
    """Return the τ and the scale of the noise that minimise the negative log-likelihood of a trained head.

        min(itertools.product(torch.linspace(0.05, 20, 10**6), NOISE_SCALES), key=lambda pair: loss(*pair))

    Noise that was learned from wrong labels can be too large to predict correct labels; noise that was learned with few
    samples can be too small. The search descends among the scales, starting from 1, with a separate τ for each. The
    head is not changed; set `head.noise_scale` and `head.temperature = FixedTemperature(tau)` to use the result.
    Arguments are those of `fit_temperature`.

    Returns:
        τ, and one of `NOISE_SCALES`; for a head without noise the τ of `fit_temperature`, and 1.
    """
    if head.covariance is None:
        return Scales(fit_temperature(head, features, targets, seed=seed), 1.0)
    with _Fit(head, features, targets, seed).running() as fit:
        index = first = NOISE_SCALES.index(1.0)
        fitted = {index: fit.best(1.0, 0.0)}  # loss and log τ by scale
        for side in (-1, 1):
            while 0 <= index + side < len(NOISE_SCALES):
                fitted[index + side] = fit.best(NOISE_SCALES[index + side], fitted[index][1])
                if fitted[index + side][0] >= fitted[index][0]:
                    break
                index += side
            if index != first:  # if one direction descends, the other ascends
                break
        return Scales(math.exp(fitted[index][1]), NOISE_SCALES[index])


class _Temperature(nn.Module):
    """exp(log τ), with gradients only for log τ."""

    def __init__(self, log_temperature: Tensor):
        super().__init__()
        self.log_temperature = log_temperature

    def forward(self) -> Tensor:
        return self.log_temperature.exp()


class _Fit:
    """The loss of a head as a function of log τ and the noise scale, and its minima."""

    def __init__(self, head: Head, features: Features, targets: Tensor | LabelLists, seed: int):
        self.head, self.features, self.targets, self.seed = head, features, targets, seed
        total = targets.batch if isinstance(targets, LabelLists) else len(targets)
        self.labels = label_entries(targets, total, head.num_classes, head.link)
        self.counted = int((self.labels.ids != IGNORE_INDEX).sum())
        if not self.counted:
            raise ValueError(f"targets must hold at least one example with a label, found none among {total}")

    @contextmanager
    def running(self) -> Iterator["_Fit"]:
        """Put the head in evaluation mode without gradients for its parameters, and restore it afterwards."""
        head = self.head
        before = head.temperature, head.noise_scale
        learned = [parameter for parameter in head.parameters() if parameter.requires_grad]
        # The engine computes gradients of everything that requires one.
        for parameter in learned:
            parameter.requires_grad_(False)
        try:
            # log τ needs a gradient even if the caller disabled gradients.
            with evaluating(head), torch.inference_mode(False), torch.enable_grad():
                yield self
        finally:
            head.temperature, head.noise_scale = before
            for parameter in learned:
                parameter.requires_grad_(True)

    def best(self, scale: float, start: float) -> tuple[float, float]:
        """Return the lowest loss for a noise scale, and its log τ, by L-BFGS from a starting point."""
        low, high = math.log(LOW), math.log(HIGH)
        self.head.noise_scale = scale
        point = torch.tensor(start, dtype=torch.float64)
        options = {"max_iter": _MAX_STEPS, "tolerance_grad": 0.0, "tolerance_change": _TOLERANCE}
        optimizer = torch.optim.LBFGS([point], line_search_fn="strong_wolfe", **options)
        passes: dict[float, tuple[float, float]] = {}  # loss and slope by log τ

        def closure() -> Tensor:
            inside = min(max(float(point), low), high)
            if inside not in passes:
                passes[inside] = self._loss_and_slope(inside)
            # Minimise the logarithm of the loss, since the loss of separable classes vanishes long before the end of
            # the range. The loss rounds to 0 before its slope does.
            loss, slope = passes[inside]
            loss = max(loss, abs(slope) / 100, sys.float_info.min)
            slope *= _STEEPNESS / loss
            if (inside == low and slope > 0) or (inside == high and slope < 0):
                slope = 0.0  # the loss still falls at this end of the range, so this is the minimum
            point.grad = torch.tensor(slope, dtype=torch.float64)
            # Beyond an end of the range, the loss continues linearly.
            return torch.tensor(_STEEPNESS * math.log(loss) + slope * (float(point) - inside), dtype=torch.float64)

        optimizer.step(closure)
        # The first of equal losses, so that τ does not change without a gain.
        best = min(passes, key=lambda log_temperature: passes[log_temperature][0])
        return passes[best][0], best

    def _loss_and_slope(self, log_temperature: float) -> tuple[float, float]:
        """Return the mean loss of all examples and its derivative with respect to log τ."""
        point = torch.tensor(log_temperature, dtype=torch.float64, requires_grad=True)
        sums = torch.zeros(2, dtype=torch.float64)
        batches = self.features() if callable(self.features) else self.features
        head, classifier = self.head, getattr(self.head, "classifier", None)
        # Use the head for its samples, and if τ does more than divide the logits.
        whole = head.covariance is not None and head.noise_scale > 0
        whole = whole or (isinstance(classifier, Classifier) and not classifier.linear)
        for loss in self._head_losses(batches, point) if whole else self._logit_losses(batches, point):
            (slope,) = torch.autograd.grad(loss, point)
            sums += torch.stack((loss.detach().cpu().double(), slope))
        loss, slope = (sums / self.counted).tolist()
        if not (math.isfinite(loss) and math.isfinite(slope)):
            raise ValueError(f"features or the head's weights are not finite: the loss is {loss}, its slope {slope}")
        return loss, slope

    def _head_losses(self, batches: Iterable[Tensor], point: Tensor) -> Iterator[Tensor]:
        """Yield the summed loss of all examples at once, so that the samples do not depend on the batches."""
        features, total = torch.cat(list(batches)), len(self.labels.ids)
        if len(features) != total:
            raise ValueError(f"features holds {len(features)} examples and targets {total}")
        generator = torch.Generator(features.device).manual_seed(self.seed)
        self.head.temperature = _Temperature(point.to(features.device, to_accumulation_dtype(features).dtype))
        yield self.head.loss(features, self.targets, "sum", generator=generator)

    def _logit_losses(self, batches: Iterable[Tensor], point: Tensor) -> Iterator[Tensor]:
        """Yield the summed loss of batch after batch, from logits divided by τ."""
        size = max(1, MAX_BYTES // (4 * self.head.num_classes))
        total, seen = len(self.labels.ids), 0
        for features in (part for batch in batches for part in batch.split(size)):
            if seen + len(features) > total:
                raise ValueError(f"features holds more examples than targets, which has {total}")
            labels = self.labels.of(seen, seen + len(features))
            seen += len(features)
            with torch.no_grad():
                logits = self.head.logit_distribution(features).mean
            inverse = point.to(logits.device, logits.dtype).neg().exp()
            yield summed_loss(logits, labels.to(logits.device), inverse, self.head.link, self.head.flip_rate)
        if seen != total:
            raise ValueError(
                f"features holds {seen} examples and targets {total}; return the batches again for each pass"
            )


def summed_loss(
    logits: Tensor, labels: LabelEntries, inverse: Tensor | float, link: Link, flip_rate: float = 0.0
) -> Tensor:
    """Return Σ logsumexp(u/τ) − u_y/τ (softmax, with ε as `flipped`) or Σ softplus(u/τ) − y u/τ (sigmoid), u [b, K]."""
    if link == "softmax":
        # Relative to the label's logit, to avoid cancellation.
        logits = logits[labels.examples] - logits[labels.examples, labels.classes].unsqueeze(-1)
        losses = torch.logsumexp(logits * inverse, dim=-1)
        return -flipped(-losses, flip_rate, logits.shape[-1]).sum() if flip_rate else losses.sum()
    own = logits[labels.examples, labels.classes] * labels.values.to(logits)
    return F.softplus(logits[labels.ids != IGNORE_INDEX] * inverse).sum() - own.sum() * inverse
