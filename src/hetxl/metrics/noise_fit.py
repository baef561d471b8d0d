"""Add noise to a trained classifier: its mean logits do not change; a covariance and τ are learned on held-out rows.

Held-out labels show how far the logits can be trusted, as in temperature scaling. Noise has more parameters than τ and
can overfit, so cross-validation chooses between five candidates: the unchanged classifier, τ alone, a share ε of
uniformly random labels, constant noise, and noise that depends on the input. τ alone is the reference: another
candidate must be better by two standard errors.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import integer_at_least
from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.functional.flips import fit_flip_rate
from hetxl.functional.links import log_mean_exp
from hetxl.metrics.scaling import fit_temperature
from hetxl.nn import EfficientCovariance, FixedTemperature, Head, HetXLHead, LearnedTemperature
from hetxl.optim import Recipe, learning_rate_at

NOISE_RANK = 10
"""R of the noise, small because there are few held-out rows."""
START = 0.3
"""Initial scale of the noise, in standard deviations of the features."""
FACTOR_PRIOR, INPUT_PRIOR = 30.0, 0.1
"""Prior variances of the covariance's factors, and of the dependence of its scale on the input."""
LEARNING_RATE, SAMPLES, EVAL_SAMPLES, BATCH = 0.08, 4, 256, 256
FOLDS, STEPS = 3, 80
BLOCK = 2**22
"""Approximate number of sampled logits in memory, and of logits for the estimate of ε."""

SHARED_START, SHARED_PRIOR, SHARED_SAMPLES, SHARED_BATCH = 0.1, 3.0, 8, 64
"""The same for constant noise, in units that change a class's logit over τ by 1."""
TEMPERATURE_PRIOR = 0.25
"""Prior variance of log τ around the best value without noise."""

CHOICES = ("temperature", "none", "flips", "constant noise", "noise")
"""The candidates in order of preference."""
ERRORS = 2.0
"""Standard errors by which a candidate must be better than the best before it."""
INPUT_ROWS = 20
"""Minimum number of rows per feature to try noise that depends on the input, which has D² parameters."""


@dataclass(frozen=True)
class NoiseFit:
    """The result of `fit_noise`.

    Attributes:
        choice: "none" for the unchanged classifier, "temperature" for τ alone, "flips" for τ and ε, "constant noise"
            for one covariance in the feature space, "noise" for a covariance that depends on the input; noise includes
            ε if the labels support it.
        losses: cross-validated NLL of each candidate.
        temperature: τ
        flip_rate: ε, share of uniformly random labels.
        factor: [R, D], J of an `EfficientCovariance`; None without noise.
        scale_weight: [D, D] of v(x).
        scale_bias: [D]
    """

    choice: str
    losses: dict[str, float]
    temperature: float = 1.0
    flip_rate: float = 0.0
    factor: Tensor | None = None
    scale_weight: Tensor | None = None
    scale_bias: Tensor | None = None

    @property
    def has_noise(self) -> bool:
        """Return whether a covariance lowers the NLL of held-out rows."""
        return self.factor is not None

    @property
    def helps(self) -> bool:
        """Return whether a covariance or ε lowers the NLL of held-out rows more than τ alone."""
        return self.choice not in CHOICES[:2]

    @torch.no_grad()
    def apply(self, head: Head) -> None:
        """Set τ, ε and the noise of a head with the same classifier; noise needs HET-XL of rank R."""
        head.temperature, head.flip_rate = FixedTemperature(self.temperature), self.flip_rate
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
        """Return the losses and the choice in one line."""
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        return f"held-out NLL: {losses}; chosen: {self.choice}"


def fit_noise(
    head: Head, features: Tensor, targets: Tensor, *, rank: int = NOISE_RANK, folds: int = FOLDS, steps: int = STEPS,
    seed: int = 0,
) -> NoiseFit:  # fmt: skip
    """Learn a covariance, τ and ε for a trained classifier, whose mean logits do not change.

    This takes a fraction of a second: `steps` steps of Adam on features for each fold. The head is not changed;
    `fit.apply` applies the result to a `HetXLHead` with the same classifier.

    Args:
        head: a trained `DetHead`, or another head with a linear classifier; its noise and τ are ignored, its ε is used.
        features: [n, D], features of rows that the classifier was not trained on.
        targets: class ids [n], −100 for ignored rows; for the sigmoid link labels in {0, 1}, [n, K].
        rank: R
        folds: number of folds of the cross-validation.
        steps: number of steps of one fit.
        seed: seed of folds, batches and noise.
    """
    affine = head._affine()
    if affine is None:
        raise ValueError("head must have a linear classifier to add noise to")
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
    options = {"flip_rate": head.flip_rate, "rank": integer_at_least("rank", rank, 1), "steps": steps, "seed": seed}
    problem = _Problem(weight * scale, offset, head.link, **options)
    rows = (features - mean) / scale
    skipped = {"flips"} if head.link == "sigmoid" else set()
    skipped |= {"noise"} if len(rows) < INPUT_ROWS * rows.shape[1] else set()
    tried = [name for name in CHOICES if name not in skipped]
    losses = {name: torch.zeros(len(rows), dtype=torch.float64) for name in tried}
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)) % folds)
    # The last part is all rows, because no fold is −1. Its fits cost little beside the others; one is the result.
    parts = [torch.from_numpy(np.flatnonzero(fold != number)).to(rows.device) for number in (*range(folds), -1)]
    results = {}
    for name in tried:
        *judged, results[name] = problem.fit(name, rows, targets, parts)
        for number, fitted in enumerate(judged):
            own = fold == number
            losses[name][own] = problem.losses(fitted, rows[own], targets[own]).cpu()
    choice = _choose(losses)
    means = {name: float(values.mean()) for name, values in losses.items()}
    fitted = results[choice]
    own = (choice, means, float(fitted.temperature()), fitted.flip_rate)
    if not fitted.noise_scale:
        return NoiseFit(*own)
    covariance = fitted.covariance
    assert isinstance(covariance, EfficientCovariance)
    # Convert v and J from standardised features to the original features.
    slope = covariance.scale.weight.detach() / scale
    start = covariance.scale.bias.detach() - slope @ mean
    return NoiseFit(*own, covariance.factor.detach() * scale, slope, start)


def _choose(losses: dict[str, Tensor]) -> str:
    """Return the candidate with a low mean loss, see `CHOICES`."""
    chosen, *others = losses
    for name in others:
        gain = losses[chosen] - losses[name]
        if float(gain.mean()) > ERRORS * float(gain.std()) / math.sqrt(len(gain)):
            chosen = name
    return chosen


class _Problem:
    """Fits of noise to a classifier W [K, D], b [K] on standardised features."""

    def __init__(self, weight: Tensor, bias: Tensor, link: str, flip_rate: float, rank: int, steps: int, seed: int):
        self.weight, self.bias, self.link, self.flip_rate, self.rank = weight, bias, link, flip_rate, rank
        self.steps, self.seed = integer_at_least("steps", steps, 1), seed
        # Shared by the candidates: ε by part of the rows, and τ by part and ε.
        self._flip_rates: dict[int, float] = {}
        self._temperatures: dict[tuple[int, float], float] = {}

    def head(self) -> HetXLHead:
        """Return the classifier with small constant noise and τ = 1."""
        linear = nn.Linear(self.weight.shape[1], len(self.weight), device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = nn.Parameter(self.bias, requires_grad=False)
        options = {"train_samples": SAMPLES, "eval_samples": EVAL_SAMPLES, "rank": self.rank, "link": self.link}
        with torch.random.fork_rng(devices=[]):  # do not change the caller's random state
            head = HetXLHead(*reversed(self.weight.shape), classifier=linear, flip_rate=self.flip_rate, **options)
        assert isinstance(head.covariance, EfficientCovariance)
        head.covariance.silence()
        head.requires_grad_(False)
        factor = torch.randn(head.covariance.factor.shape, generator=torch.Generator().manual_seed(self.seed))
        head.covariance.factor.copy_(factor * START / math.sqrt(self.rank))
        head.covariance.scale.bias.fill_(1.0)
        return head.eval()

    def fit(self, choice: str, features: Tensor, targets: Tensor, parts: Sequence[Tensor]) -> list[HetXLHead]:
        """Return the classifier with the fit to each part of the rows; without noise, its `noise_scale` is 0.

        Args:
            features: [n, D]
            targets: [n], or [n, K]
            parts: rows of each fit; the same in all calls.
        """
        heads = [self._without_noise(choice, k, features[part], targets[part]) for k, part in enumerate(parts)]
        if choice == "constant noise" and self.link == "softmax":
            self._train_shared(heads, features, targets, parts)
        elif "noise" in choice:
            for head, part in zip(heads, parts, strict=True):
                self._train(head, features[part], targets[part], inputs=choice == "noise")
        return heads

    def _without_noise(self, choice: str, number: int, features: Tensor, targets: Tensor) -> HetXLHead:
        """Return the classifier with the τ and ε of a candidate, for a part of the rows."""
        head = self.head()
        if choice not in CHOICES[:2] and self.link == "softmax":
            if number not in self._flip_rates:
                self._flip_rates[number] = self._fit_flip_rate(features, targets)
            head.flip_rate = self._flip_rates[number]
        head.noise_scale = 0.0
        if choice != "none":
            key = (number, head.flip_rate)
            if key not in self._temperatures:
                lists = targets if targets.dim() == 1 else LabelLists.from_sparse(targets.float().to_sparse())
                self._temperatures[key] = fit_temperature(head, [features], lists, seed=self.seed)
            head.temperature = FixedTemperature(self._temperatures[key])
        head.noise_scale = float("noise" in choice)
        return head

    def _fit_flip_rate(self, features: Tensor, targets: Tensor) -> float:
        """Estimate ε on at most one block of rows; 0 if the labels do not support it."""
        count = max(1, BLOCK // len(self.weight))
        estimate = fit_flip_rate(F.linear(features[:count], self.weight, self.bias), targets[:count])
        return estimate.rate if estimate.significant else 0.0

    def _train_shared(
        self, heads: Sequence[HetXLHead], features: Tensor, targets: Tensor, parts: Sequence[Tensor]
    ) -> None:
        """Learn J and τ of constant noise (softmax), for F parts of the rows at once.

        All rows of a step share their normals z [S, R], and gradients are written out, since there are few numbers and
        many steps. For one part, with W in units of its rows' mean distance from their mean:

            sampled = (logits / τ).unsqueeze(1) + z @ J @ W.T                                          # [B, S, K]
            loss = −flipped(log_mean_exp(sampled.log_softmax(-1)[…, target], 1)).mean() + prior
        """
        K, device = len(self.weight), features.device
        directions = self.weight - self.weight.mean(0)
        unit = directions.square().sum(1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        lift, logits = directions.T / unit, F.linear(features, self.weight, self.bias)
        draws, order = (torch.Generator(where).manual_seed(self.seed) for where in (device, "cpu"))
        size = min(SHARED_BATCH, max(1, BLOCK // (SHARED_SAMPLES * K * len(parts))))
        covariances = [cast("EfficientCovariance", head.covariance) for head in heads]
        factor = torch.stack([covariance.factor for covariance in covariances]) * (SHARED_START / START)  # [F, R, D]
        start = torch.tensor([float(head.temperature()) for head in heads], device=device).log()  # [F]
        flat = torch.tensor([head.flip_rate / K for head in heads], device=device).log().view(-1, 1)
        unflipped = torch.tensor([1 - head.flip_rate for head in heads], device=device).log().view(-1, 1)
        rows = torch.tensor([len(part) for part in parts], device=device)
        log_tau = start.clone()
        for step in self._steps((factor, log_tau)):
            picked = [part[torch.randint(len(part), (size,), generator=order).to(device)] for part in parts]
            batch = torch.stack(picked)  # [F, B]
            scaled = logits[batch] / log_tau.exp().view(-1, 1, 1)  # [F, B, K]
            half = torch.randn(SHARED_SAMPLES // 2, self.rank, generator=draws, device=device)
            z = torch.cat((half, -half))
            sampled = scaled.unsqueeze(2) + (z @ (factor @ lift)).unsqueeze(1)  # [F, B, S, K]
            log_probs = sampled.log_softmax(-1)
            ids = targets[batch][:, :, None, None].expand(-1, -1, SHARED_SAMPLES, -1)
            own = log_probs.gather(-1, ids)  # [F, B, S, 1]
            right = log_mean_exp(own.squeeze(-1), -1) + unflipped  # [F, B]
            share = own.softmax(2) * ((right - torch.logaddexp(right, flat)).exp() / size)[:, :, None, None]
            slope = (
                log_probs.exp_().mul_(share).scatter_add_(-1, ids, -share)
            )  # gradient with respect to the sampled logits
            by_draw, by_row = slope.sum(1), slope.sum(2)  # [F, S, K], [F, B, K]
            factor.grad = z.T @ by_draw @ lift.T + factor / (SHARED_PRIOR * rows.view(-1, 1, 1))
            log_tau.grad = (log_tau - start) / (TEMPERATURE_PRIOR * rows) - (by_row * scaled).sum((1, 2))
            step()
        for head, covariance, learned, tau in zip(heads, covariances, factor, log_tau.exp(), strict=True):
            covariance.factor.copy_(learned * tau / unit)
            head.temperature = FixedTemperature(float(tau))

    def _steps(self, learned: Sequence[Tensor]) -> Iterator[Callable[[], Any]]:
        """Yield a function for each step of Adam, to call after the gradients are computed."""
        recipe = Recipe(LEARNING_RATE, weight_decay=0.0, warmup=0.0)
        optimizer = torch.optim.Adam(learned, lr=LEARNING_RATE, betas=(0.9, 0.99))
        for step in range(self.steps):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = learning_rate_at(step, self.steps, recipe)
            yield optimizer.step

    def _train(self, head: HetXLHead, features: Tensor, targets: Tensor, inputs: bool) -> None:
        """Learn J and τ, and with `inputs` the dependence of v(x) on x, by Adam with a Gaussian prior."""
        covariance = head.covariance
        assert isinstance(covariance, EfficientCovariance)
        head.temperature = LearnedTemperature(init=1.0).to(features.device)
        priors: list[tuple[Tensor, float]] = [(covariance.factor, self.rank / FACTOR_PRIOR)]
        if inputs:
            priors.append((covariance.scale.weight, features.shape[1] / INPUT_PRIOR))
        learned = [*(parameter.requires_grad_(True) for parameter, _ in priors), *head.temperature.parameters()]
        draws, order = (torch.Generator(device).manual_seed(self.seed) for device in (features.device, "cpu"))
        head.train()
        with torch.inference_mode(False), torch.enable_grad():
            for step in self._steps(learned):
                batch = torch.randint(len(features), (min(BATCH, len(features)),), generator=order)
                penalty = sum(strength * parameter.square().sum() for parameter, strength in priors)
                loss = head.loss(features[batch], targets[batch], generator=draws) + penalty / (2 * len(features))
                loss.backward()
                step()
        head.requires_grad_(False).eval()

    @torch.no_grad()
    def losses(self, head: HetXLHead, features: Tensor, targets: Tensor) -> Tensor:
        """Return the NLL of each row [n], float64; all rows share the same samples."""
        size = max(1, BLOCK // (EVAL_SAMPLES * len(self.weight)))
        call: Callable[..., Tensor] = head.loss
        parts = zip(features.split(size), targets.split(size), strict=True)
        return torch.cat([call(x, y, "none").double() for x, y in parts])
