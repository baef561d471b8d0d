"""Noise for a classifier that is trained already: its mean logits stay, a covariance and τ are learned on other rows.

Labels that the classifier was not trained on show how far its logits can be trusted, as for temperature scaling; noise
can say more than one number, and overfit. So folds decide: with the classifier as it was, with τ alone, and with noise
that is the same for all inputs or that depends on them, each fitted without a fold and judged on it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least
from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.metrics.scaling import fit_temperature
from hetxl.nn import EfficientCovariance, FixedTemperature, Head, HetXLHead, LearnedTemperature
from hetxl.optim import Recipe, learning_rate_at

NOISE_RANK = 10
"""R of noise that is added to a trained classifier: held-out rows are few."""
START = 0.3
"""Scale of the noise at the start, in standard deviations of the features."""
FACTOR_PRIOR, INPUT_PRIOR = 30.0, 0.1
"""Prior variances of the covariance's factors, and of what inputs change in its scale."""
LEARNING_RATE, SAMPLES, EVAL_SAMPLES, BATCH = 0.05, 4, 64, 256
BLOCK = 2**22
"""Sampled logits of held-out rows at a time, about."""

CHOICES = ("none", "temperature", "constant noise", "noise")
INPUT_ROWS = 20
"""Rows for each feature from which noise that depends on inputs is tried: it has D² parameters."""


@dataclass(frozen=True)
class NoiseFit:
    """What held-out rows say of a classifier.

    Attributes:
        choice: "none" to leave it as it is, "temperature" for τ alone, "constant noise" for the same covariance in the
            feature space for all inputs, "noise" for one that depends on them.
        losses: NLL of rows that a fit has not seen, by choice.
        temperature: τ
        factor: [R, D], J of an `EfficientCovariance`; None without noise.
        scale_weight: [D, D] of v(x).
        scale_bias: [D]
    """

    choice: str
    losses: dict[str, float]
    temperature: float = 1.0
    factor: Tensor | None = None
    scale_weight: Tensor | None = None
    scale_bias: Tensor | None = None

    @property
    def has_noise(self) -> bool:
        """Whether noise lowers the NLL of rows that it was not fitted to."""
        return self.factor is not None

    @torch.no_grad()
    def apply(self, head: Head) -> None:
        """Give τ, and the noise if any, to a HET-XL head of rank R over the same classifier."""
        head.temperature = FixedTemperature(self.temperature)
        if self.factor is None or self.scale_weight is None or self.scale_bias is None:
            return
        covariance = head.covariance
        if not isinstance(covariance, EfficientCovariance) or covariance.factor.shape != self.factor.shape:
            raise ValueError(f"head must be HET-XL with the efficient covariance of rank {len(self.factor)}")
        covariance.silence()
        covariance.factor.copy_(self.factor)
        covariance.scale.weight.copy_(self.scale_weight)
        covariance.scale.bias.copy_(self.scale_bias)

    def describe(self) -> str:
        """Return the losses, and what was chosen by them, in one line."""
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        return f"held-out NLL: {losses}; chosen: {self.choice}"


def fit_noise(
    head: Head, features: Tensor, targets: Tensor, *, rank: int = NOISE_RANK, folds: int = 4, steps: int = 100,
    seed: int = 0,
) -> NoiseFit:  # fmt: skip
    """Learn a covariance and τ for a trained classifier, whose mean logits stay as they are.

    It takes seconds: `steps` of Adam on features for each fold. The head is not changed: `fit.apply` gives the
    result to a `HetXLHead` with the same classifier.

    Args:
        head: a trained `DetHead`, or another head with a linear classifier; its noise and τ play no part.
        features: [n, D] of rows that the classifier was not trained on.
        targets: class ids [n], −100 for rows to leave out; for the sigmoid link labels in {0, 1}, [n, K].
        rank: R
        folds: of the rows that decide.
        steps: of one fit.
        seed: of folds, batches and noise.
    """
    affine = head._affine()
    if affine is None:
        raise ValueError("head must have a linear classifier for noise to be added to it")
    features, targets = features.detach().float(), targets.detach()
    if head.standardize is not None:
        with torch.no_grad():
            features = head.standardize(features)
    if head.link == "softmax":
        counted = targets != IGNORE_INDEX
        features, targets = features[counted], targets[counted]
    if len(features) < 2 * integer_at_least("folds", folds, 2):
        raise ValueError(f"noise needs at least {2 * folds} labelled rows to be fitted to, got {len(features)}")
    if not torch.isfinite(features).all():
        raise ValueError("features must be finite, got NaN or infinity")
    mean, scale = features.mean(0), features.std(0, correction=0)
    scale[scale == 0] = 1.0
    weight, bias = affine.weight.detach().float(), affine.bias
    offset = weight @ mean + (0.0 if bias is None else bias.detach().float())
    problem = _Problem(weight * scale, offset, head.link, integer_at_least("rank", rank, 1), steps, seed)
    rows = (features - mean) / scale
    tried = CHOICES if len(rows) >= INPUT_ROWS * rows.shape[1] else CHOICES[:-1]
    losses = {name: torch.zeros(len(rows), dtype=torch.float64) for name in tried}
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)) % folds)
    for number in range(folds):
        own, others = fold == number, fold != number
        for name in tried:
            fitted = problem.fit(name, rows[others], targets[others])
            losses[name][own] = problem.losses(fitted, rows[own], targets[own]).cpu()
    choice = _choose(losses)
    means = {name: float(values.mean()) for name, values in losses.items()}
    fitted = problem.fit(choice, rows, targets)
    temperature = float(fitted.temperature())
    if not fitted.noise_scale:
        return NoiseFit(choice, means, temperature)
    covariance = fitted.covariance
    assert isinstance(covariance, EfficientCovariance)
    # v of standardised features, J in units of them: both as they are for the features themselves.
    slope = covariance.scale.weight.detach() / scale
    start = covariance.scale.bias.detach() - slope @ mean
    return NoiseFit(choice, means, temperature, covariance.factor.detach() * scale, slope, start)


def _choose(losses: dict[str, Tensor]) -> str:
    """Return the choice with the lowest mean loss; noise must be better than τ alone by a standard error."""
    plain = min(CHOICES[:2], key=lambda name: float(losses[name].mean()))
    noisy = min((name for name in losses if name in CHOICES[2:]), key=lambda name: float(losses[name].mean()))
    gain = losses[plain] - losses[noisy]
    return noisy if float(gain.mean()) > float(gain.std()) / math.sqrt(len(gain)) else plain


class _Problem:
    """A classifier W [K, D], b [K] on standardised features, and the fits of noise to it."""

    def __init__(self, weight: Tensor, bias: Tensor, link: str, rank: int, steps: int, seed: int):
        self.weight, self.bias, self.link, self.rank = weight, bias, link, rank
        self.steps, self.seed = integer_at_least("steps", steps, 1), seed

    def head(self) -> HetXLHead:
        """Return the classifier with small noise that is the same for all inputs, and τ = 1."""
        linear = nn.Linear(self.weight.shape[1], len(self.weight), device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = nn.Parameter(self.bias, requires_grad=False)
        options = {"train_samples": SAMPLES, "eval_samples": EVAL_SAMPLES, "rank": self.rank, "link": self.link}
        with torch.random.fork_rng(devices=[]):  # the caller's own random numbers stay as they are
            head = HetXLHead(*reversed(self.weight.shape), classifier=linear, **options)
        assert isinstance(head.covariance, EfficientCovariance)
        head.covariance.silence()
        head.requires_grad_(False)
        factor = torch.randn(head.covariance.factor.shape, generator=torch.Generator().manual_seed(self.seed))
        head.covariance.factor.copy_(factor * START / math.sqrt(self.rank))
        head.covariance.scale.bias.fill_(1.0)
        return head.eval()

    def fit(self, choice: str, features: Tensor, targets: Tensor) -> HetXLHead:
        """Return the classifier with what was fitted to rows [n, D]; without noise, its `noise_scale` is 0."""
        head = self.head()
        if choice in ("none", "temperature"):
            head.noise_scale = 0.0
            if choice == "temperature":
                lists = targets if targets.dim() == 1 else LabelLists.from_sparse(targets.float().to_sparse())
                head.temperature = FixedTemperature(fit_temperature(head, [features], lists, seed=self.seed))
            return head
        self._train(head, features, targets, inputs=choice == "noise")
        return head

    def _train(self, head: HetXLHead, features: Tensor, targets: Tensor, inputs: bool) -> None:
        """Learn J and τ, and with `inputs` what they change in v(x), by Adam with a Gaussian prior."""
        covariance = head.covariance
        assert isinstance(covariance, EfficientCovariance)
        head.temperature = LearnedTemperature(init=1.0).to(features.device)
        priors: list[tuple[Tensor, float]] = [(covariance.factor, self.rank / FACTOR_PRIOR)]
        if inputs:
            priors.append((covariance.scale.weight, features.shape[1] / INPUT_PRIOR))
        learned = [*(parameter.requires_grad_(True) for parameter, _ in priors), *head.temperature.parameters()]
        recipe = Recipe(LEARNING_RATE, weight_decay=0.0, warmup=0.0)
        optimizer = torch.optim.Adam(learned, lr=LEARNING_RATE, betas=(0.9, 0.99))
        draws = torch.Generator(features.device).manual_seed(self.seed)
        order = torch.Generator().manual_seed(self.seed)
        head.train()
        with torch.inference_mode(False), torch.enable_grad():
            for step in range(self.steps):
                batch = torch.randint(len(features), (min(BATCH, len(features)),), generator=order)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_at(step, self.steps, recipe)
                penalty = sum(strength * parameter.square().sum() for parameter, strength in priors)
                loss = head.loss(features[batch], targets[batch], generator=draws) + penalty / (2 * len(features))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        head.requires_grad_(False).eval()

    @torch.no_grad()
    def losses(self, head: HetXLHead, features: Tensor, targets: Tensor) -> Tensor:
        """Return the NLL of each row [n], float64."""
        generator = torch.Generator(features.device).manual_seed(self.seed)
        size = max(1, BLOCK // (EVAL_SAMPLES * len(self.weight)))
        call: Callable[..., Tensor] = head.loss
        parts = zip(features.split(size), targets.split(size), strict=True)
        return torch.cat([call(x, y, "none", generator=generator).double() for x, y in parts])
