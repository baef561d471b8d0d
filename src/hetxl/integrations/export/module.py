"""Heads and models for export, as modules of traceable operations with fixed noise.

probs = head.predict(features, noise=noise).probs                    # [B, K], noise [S, Q] shared by the batch
probs = softmax(head.logit_distribution(features).sample(noise) / head.temperature(), -1).mean(-2)
"""

import copy
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least, one_of
from hetxl.functional import LinearLift, LogitDistribution, Order
from hetxl.functional.distribution import ORDERS
from hetxl.functional.engine.predict import METHODS
from hetxl.functional.links import approximate_log_probs, sigmoid_entropy, softmax_entropy
from hetxl.integrations.convert.adapter import Adapted
from hetxl.integrations.convert.capture import Capturing, logits_of
from hetxl.integrations.convert.layer import HeadLayer
from hetxl.integrations.convert.locate import find_head
from hetxl.metrics.conformal import Conformal, class_scores
from hetxl.nn import Head
from hetxl.nn.prediction import TOP_CLASSES

BLOCK = 2**20
"""Sampled logits of one example in memory, 4 MiB; more if there would be too many blocks."""

BLOCKS = 16
"""Maximum number of blocks: the graph repeats the sampling for each, and export time grows with their square."""

ROWS = 2**24
"""Maximum entries of an example's basis in logit space, 64 MiB; with more, samples are lifted instead."""


class FixedNoiseHead(Capturing, nn.Module):
    """A head with the same noise for every example: features [..., D] → probabilities [..., K].

    Args:
        method: "mc", "deterministic" or one of `hetxl.functional.APPROXIMATIONS`.
        noise: [S, Q] standard normals, for "mc".
        order: "samples" or "factors" to force an order of evaluation; both give the same numbers.
        uncertainty: append entropy, expected entropy and, if the head has a density, the distance to the training data
            as columns, so that they stay with the rows that a model selects or moves.
    """

    noise: Tensor | None
    means: Tensor | None
    whitening: Tensor | None

    def __init__(
        self,
        head: Head,
        method: str,
        noise: Tensor | None = None,
        order: Order | None = None,
        uncertainty: bool = False,
    ):
        super().__init__()
        self.head, self.method, self.order, self.uncertainty = head, method, order, uncertainty
        self.register_buffer("noise", noise)
        density = head.density if uncertainty else None
        for name in ("means", "whitening"):
            value = None if density is None else getattr(density, name).cpu().float().contiguous()
            self.register_buffer(name, value)

    @property
    def columns(self) -> int:
        """Return the number of columns: K, and those of `uncertainty`."""
        return self.head.num_classes + (2 + (self.means is not None) if self.uncertainty else 0)

    def forward(self, features: Tensor, targets: None = None) -> Tensor:
        """Return probabilities [..., K] of features [..., D]; a model may pass targets=None, as to a head.

        For a 1 × 1 convolution: [B, K, H, W] of [B, D, H, W]. With `uncertainty`, K is replaced by `columns`.
        """
        if isinstance(self.head, HeadLayer) and self.head.convolution and features.dim() > 2:
            return self._rows(features.movedim(-3, -1)).movedim(-1, -3)
        return self._rows(features)

    def _observed(self, probs: Tensor) -> Tensor:
        """Return probabilities of labels, of which a share ε is uniformly random."""
        rate = self.head.flip_rate
        return probs * (1 - rate) + rate / self.head.num_classes if rate else probs

    def _rows(self, features: Tensor) -> Tensor:
        if self._captured is not None:
            # Not expanded, because a model may write to the result in place.
            return self._captured.stand_in(features, self.columns).contiguous()
        distribution = self.head.logit_distribution(features)
        temperature = self.head.temperature()
        expected = None  # without samples, the entropy of the averaged probabilities
        if self.method == "deterministic":
            probs = self._link(distribution.mean / temperature)
        elif self.noise is None:
            mean, factors = distribution.mean / temperature, distribution.factors / temperature
            probs = approximate_log_probs(self.method, mean, factors, self.head.link)[0].exp()
        else:
            # Sum block by block, to avoid a [..., S, K] tensor if S·K is large.
            sampled = self._sampled(distribution, temperature, self.noise)
            sums = (self._summed(logits) for logits in sampled)
            total, entropies = reduce(lambda left, right: (left[0] + right[0], left[1] + right[1]), sums)
            probs, expected = total / self.noise.shape[0], entropies / self.noise.shape[0]
        observed = self._observed(probs)
        if not self.uncertainty:
            return observed
        entropy = self._entropy(observed)
        if expected is None:
            expected = entropy
        elif self.head.flip_rate:
            expected = entropy - (self._entropy(probs) - expected)  # keep the part that the noise explains
        columns = [entropy, expected] + ([] if self.means is None else [self._distance(features)])
        return torch.cat((observed, torch.stack(columns, -1)), -1)

    def _summed(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the sums over samples of probabilities, [..., K], and of their entropies, [...], of [..., s, K]."""
        probs = self._link(logits)
        if not self.uncertainty:
            return probs.sum(-2), 0.0
        if self.head.link == "softmax":
            entropy = softmax_entropy(logits.log_softmax(-1))
        else:
            entropy = sigmoid_entropy(nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits))
        return probs.sum(-2), entropy.sum(-1)

    def _entropy(self, probs: Tensor) -> Tensor:
        """Return the entropy of averaged probabilities in nats, [...]."""
        if self.head.link == "softmax":
            return softmax_entropy(probs.log())
        return sigmoid_entropy(probs.log(), (1 - probs).log())

    def _distance(self, features: Tensor) -> Tensor:
        """Return `ClassDensity.distance` of features [..., D] without a tensor of all differences, [...]."""
        assert self.means is not None
        assert self.whitening is not None
        rows = features @ self.whitening
        squares = rows.square().sum(-1, keepdim=True) - 2 * rows @ self.means.T + self.means.square().sum(-1)
        return squares.amin(-1).clamp(min=0) / features.shape[-1]

    def _link(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.head.link == "softmax" else logits.sigmoid()

    def _sampled(self, distribution: LogitDistribution, temperature: Tensor | float, noise: Tensor) -> Iterator[Tensor]:
        """Yield sampled logits divided by τ, [..., s, K] a block."""
        samples = noise.shape[0]
        size = _block_size(samples, max(self.head.num_classes, self.head.in_features))
        # Slices instead of `split`, because ONNX would store the parts of a constant as a sequence, with a warning.
        blocks = [noise[start : start + size] for start in range(0, samples, size)]
        if (self.order or cheaper_order(distribution, samples)) == "samples":
            for z in blocks:
                yield distribution.sample(z, "samples") / temperature
            return
        # The mean is an extra row of weight 1, which saves an addition over the sampled logits.
        rows = torch.cat((distribution.mean.unsqueeze(-2), distribution.factors), -2) / temperature  # [..., 1 + Q, K]
        for z in blocks:
            weights = torch.cat((torch.ones_like(z[:, :1]), z), -1)  # [s, 1 + Q]
            yield weights.expand(*rows.shape[:-2], -1, -1) @ rows


def _block_size(samples: int, width: int) -> int:
    """Return the samples per block: as few blocks as `BLOCK` allows, of about equal size."""
    blocks = min(BLOCKS, math.ceil(samples / max(1, BLOCK // width)))
    return math.ceil(samples / blocks)


def cheaper_order(distribution: LogitDistribution, samples: int) -> Order:
    """Return the cheaper order for S samples shared by all examples, or the order with less memory if the basis is
    large."""
    lift = distribution.lift
    # HET and HET-H lift by copying, so a sample costs only its entries, and mixtures of J are shared by the batch.
    if not isinstance(lift, LinearLift) or samples <= distribution.size:
        return "samples"
    return "factors" if distribution.size * max(lift.weight.shape) <= ROWS else "samples"


class Exportable(nn.Module):
    """A module for export: inputs [B, ...] → probabilities [B, K], or the top k probabilities with their class ids.

    Args:
        model: a `FixedNoiseHead`, or a model that contains one and returns its probabilities, directly or as the
            `.logits` of an object.
        top_k: number of classes; None for all K.
        seed: seed of the noise.
        sets: thresholds of prediction sets: a calibration, or [K] thresholds of the labels' probabilities.
    """

    limits: Tensor | None

    def __init__(
        self, model: nn.Module, top_k: int | None = None, seed: int = 0, sets: Conformal | np.ndarray | None = None
    ):
        super().__init__()
        self.model, self.top_k, self.seed, self.sets = model, top_k, seed, sets
        limits = sets.thresholds if isinstance(sets, Conformal) else sets
        self.register_buffer("limits", None if limits is None else torch.tensor(limits, dtype=torch.float64))

    @property
    def fixed(self) -> FixedNoiseHead:
        """Return the head inside."""
        return next(module for module in self.model.modules() if isinstance(module, FixedNoiseHead))

    @property
    def noise(self) -> Tensor | None:
        """Return the standard normals [S, Q] of "mc"; None for a method without samples."""
        return self.fixed.noise

    @property
    def about(self) -> dict[str, Any]:
        """Return the metadata of an exported file."""
        head, noise = self.fixed.head, self.noise
        entries: dict[str, Any] = {
            "method": self.fixed.method,
            "link": head.link,
            "num_classes": head.num_classes,
            "temperature": float(head.temperature()),
        }
        if noise is not None:
            sampler = head.sampler if isinstance(head.sampler, str) else "custom"
            entries |= {"num_samples": noise.shape[0], "sampler": sampler, "seed": self.seed}
        if head.noise_scale != 1 and self.fixed.method != "deterministic":
            entries["noise_scale"] = head.noise_scale
        if head.flip_rate:
            entries["flip_rate"] = head.flip_rate
        if isinstance(self.sets, Conformal):
            entries |= {"coverage": self.sets.coverage, "score": self.sets.options.kind}
        return entries if self.top_k is None else entries | {"top_k": self.top_k}

    @property
    def output_names(self) -> list[str]:
        """Return the names of the outputs in order: `probs`, `classes`, then the others."""
        names = ["probs"] if self.top_k is None else ["probs", "classes"]
        if self.fixed.uncertainty:
            names += ["entropy", "expected_entropy", "mutual_information"]
            names += ["top_probs", "top_classes"] if self.top_k is None else []
            names += ["novelty"] if self.fixed.means is not None else []
        return names + (["prediction_set", "set_size"] if self.sets is not None else [])

    def probabilities(self, *inputs: Tensor) -> Tensor:
        """Return probabilities of all classes, [B, K] float32."""
        outputs = logits_of(self.model(*inputs))
        return outputs.narrow(self.class_dim(outputs), 0, self.fixed.head.num_classes)

    @torch.no_grad()
    def check(self, *inputs: Tensor) -> None:
        """Raise if the model changes the output of its head, for instance by a softmax; it may select and move rows.

        Operations on logits would give wrong results on probabilities.
        """
        with self.fixed.capture() as captured:
            outputs = logits_of(self.model(*inputs))
        captured.rows_of(outputs, self.fixed.columns)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return probabilities [B, K]; with top_k [B, k], most probable first, and their class ids [B, k] int64.

        For a model that ends in a 1 × 1 convolution: [B, K, H, W], or [B, k, H, W]. Several outputs are a tuple in the
        order of `output_names`.
        """
        outputs = logits_of(self.model(*inputs))
        dim, classes = self.class_dim(outputs), self.fixed.head.num_classes
        probs = outputs.narrow(dim, 0, classes) if self.fixed.uncertainty else outputs
        values = {"probs": probs}
        if self.top_k is not None:
            values["probs"], values["classes"] = probs.topk(self.top_k, dim)
        if self.fixed.uncertainty:
            values["entropy"], values["expected_entropy"] = (outputs.select(dim, classes + at) for at in range(2))
            values["mutual_information"] = values["entropy"] - values["expected_entropy"]
            if self.top_k is None:
                values["top_probs"], values["top_classes"] = probs.topk(min(TOP_CLASSES, classes), dim)
            if self.fixed.means is not None:
                values["novelty"] = outputs.select(dim, classes + 2)
        if self.sets is not None:
            inside = self._inside(probs.movedim(dim, -1)).movedim(-1, dim)
            values |= {"prediction_set": inside, "set_size": inside.sum(dim)}
        results = tuple(values[name] for name in self.output_names)
        return results if len(results) > 1 else probs

    def _inside(self, probs: Tensor) -> Tensor:
        """Return a mask [..., K] of the classes in each row's prediction set, from probabilities [..., K]."""
        assert self.limits is not None
        if not isinstance(self.sets, Conformal):
            return probs >= self.limits
        # Without randomisation (u = 0) the sets are larger, never smaller.
        scores, ids = class_scores(probs, torch.zeros_like(probs[..., 0]), self.sets.options)
        return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, scores <= self.limits[ids])

    def class_dim(self, outputs: Tensor) -> int:
        """Return the dimension of the classes in outputs: the last, or the second for convolutions."""
        head, sizes = self.fixed.head, (self.fixed.columns, self.fixed.head.num_classes)
        dims = (1, -1) if isinstance(head, HeadLayer) and head.convolution else (-1, 1)
        return next((dim for dim in dims if outputs.shape[dim] in sizes), -1)


def exportable(
    model: nn.Module,
    method: str = "mc",
    *,
    num_samples: int | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    order: Order | None = None,
    uncertainty: bool = False,
    sets: Conformal | np.ndarray | None = None,
) -> Exportable:
    """Return a head, or a model with one, as a module for export.

        probs = head.predict(model.backbone(inputs), method=method, noise=exportable(model, method).noise).probs

    The result is a copy on the CPU, in float32 and evaluation mode. The noise of "mc" is drawn once and shared by the
    batch, so the same inputs always give the same probabilities.

    Args:
        model: a head, a backbone with a head, or any module that contains one head and returns its output unchanged;
            exports raise if the module changes it, for instance by a softmax.
        method: method of `head.predict`: "mc", "deterministic", "mean_field", "probit" or "taylor". DET has no noise
            and is always "deterministic".
        num_samples: S [default: the head's `eval_samples`].
        top_k: return only the k most probable classes; None for all.
        seed: seed of the noise, drawn by the head's sampler [default: the head's `eval_seed`, as in `head.predict`].
        order: "samples" or "factors" to force an order of evaluation.
        uncertainty: also return `entropy`, `expected_entropy` and `mutual_information` [B] of `head.predict`,
            `top_probs` and `top_classes` [B, 5] without top_k, and `novelty` [B] if the head has a density.
        sets: also return `prediction_set` [B, K] bool and `set_size` [B], from a calibration of
            `hetxl.metrics.conformal.calibrate`, or for the sigmoid link from `label_thresholds`, [K].
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a head or a module that contains one, found {type(model).__name__}")
    one_of("method", method, METHODS)
    if order is not None:
        one_of("order", order, ORDERS)
    head = find_head(model)
    seed = head.eval_seed if seed is None else integer_at_least("seed", seed, 0)
    if top_k is not None and integer_at_least("top_k", top_k, 1) > head.num_classes:
        raise ValueError(f"top_k must be at most the number of classes, {head.num_classes}, found {top_k}")
    _check_sets(sets, head)
    samples = head.eval_samples if num_samples is None else integer_at_least("num_samples", num_samples, 1)
    if head.covariance is None or not head.noise_scale:
        method = "deterministic"
    copied = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    if isinstance(copied, Adapted):
        # The model's original class, which calls its layer and returns the layer's output.
        copied.__class__ = copied.hetxl_base
    head = find_head(copied)
    noise = fixed_noise(head, samples, seed) if method == "mc" else None
    fixed = FixedNoiseHead(head, method, noise, order, uncertainty)
    for parent in list(copied.modules()):
        for name, child in list(parent._modules.items()):  # named_children omits repeated modules
            if child is head:
                setattr(parent, name, fixed)
    return Exportable(fixed if copied is head else copied, top_k, seed, sets).eval()


def _check_sets(sets: Conformal | np.ndarray | None, head: Head) -> None:
    """Raise unless thresholds of prediction sets fit a head."""
    if sets is None:
        return
    if isinstance(sets, Conformal) != (head.link == "softmax"):
        needed = "a Conformal, from calibrate" if head.link == "softmax" else "an array, from label_thresholds"
        raise TypeError(f"sets must be {needed}, for the {head.link} link, found {type(sets).__name__}")
    limits = sets.thresholds if isinstance(sets, Conformal) else np.asarray(sets)
    if limits.shape != (head.num_classes,):
        raise ValueError(f"sets must have {head.num_classes} thresholds, one for each class, found {limits.shape}")


def fixed_noise(head: Head, num_samples: int, seed: int) -> Tensor:
    """Return the standard normals for the export of a head with noise, [S, Q] float32, from its sampler."""
    assert head.covariance is not None
    return head.covariance.fixed_draws(head.sampler, num_samples, seed).clone()
