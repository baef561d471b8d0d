"""Heads and models as plain modules of traceable operations, with their noise fixed: what is exported.

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
"""Sampled logits of one example that exist at a time, 4 MiB; more where there would be too many blocks."""

BLOCKS = 16
"""The graph repeats the sampling for every block; the time to export grows with the square of their number."""

ROWS = 2**24
"""The basis of one example in logit space may have this many entries, 64 MiB; if it had more, samples are lifted."""


class FixedNoiseHead(Capturing, nn.Module):
    """A head that averages over the same noise for every example: features [..., D] → probabilities [..., K].

    Args:
        method: "mc", "deterministic" or one of `hetxl.functional.APPROXIMATIONS`.
        noise: [S, Q] standard normals, for "mc".
        order: "samples" or "factors" to force an order of evaluation; both give the same numbers.
        uncertainty: append columns to the probabilities: entropy, expected entropy and, if the head has a density,
            the distance to the training data. As columns, they follow the rows that a model chooses or moves.
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
        """Return how many numbers a row has: K, and those of `uncertainty`."""
        return self.head.num_classes + (2 + (self.means is not None) if self.uncertainty else 0)

    def forward(self, features: Tensor, targets: None = None) -> Tensor:
        """Return probabilities [..., K] of features [..., D]; a model may pass targets=None, as it does to a head.

        In the place of a 1 × 1 convolution: [B, K, H, W] of [B, D, H, W]. With `uncertainty`, `columns` in place of K.
        """
        if isinstance(self.head, HeadLayer) and self.head.convolution and features.dim() > 2:
            return self._rows(features.movedim(-3, -1)).movedim(-1, -3)
        return self._rows(features)

    def _observed(self, probs: Tensor) -> Tensor:
        """Return probabilities of labels, a share of which is drawn from all classes alike."""
        rate = self.head.flip_rate
        return probs * (1 - rate) + rate / self.head.num_classes if rate else probs

    def _rows(self, features: Tensor) -> Tensor:
        if self._captured is not None:
            # With memory for every class, as probabilities have: a model may write to them in place.
            return self._captured.stand_in(features, self.columns).contiguous()
        distribution = self.head.logit_distribution(features)
        temperature = self.head.temperature()
        expected = None  # without samples, that of the averaged probabilities
        if self.method == "deterministic":
            probs = self._link(distribution.mean / temperature)
        elif self.noise is None:
            mean, factors = distribution.mean / temperature, distribution.factors / temperature
            probs = approximate_log_probs(self.method, mean, factors, self.head.link)[0].exp()
        else:
            # One block after the other, each added up before the next is there: no [..., S, K] tensor when S·K is
            # large.
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
            expected = entropy - (self._entropy(probs) - expected)  # what the noise explains stays
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
        # Slices, not `split`: ONNX would hold the parts of a constant as a sequence, which its optimiser warns about.
        blocks = [noise[start : start + size] for start in range(0, samples, size)]
        if (self.order or cheaper_order(distribution, samples)) == "samples":
            for z in blocks:
                yield distribution.sample(z, "samples") / temperature
            return
        # The mean as one more row, of weight 1: no addition has to go over the sampled logits.
        rows = torch.cat((distribution.mean.unsqueeze(-2), distribution.factors), -2) / temperature  # [..., 1 + Q, K]
        for z in blocks:
            weights = torch.cat((torch.ones_like(z[:, :1]), z), -1)  # [s, 1 + Q]
            yield weights.expand(*rows.shape[:-2], -1, -1) @ rows


def _block_size(samples: int, width: int) -> int:
    """Samples of a block: the fewest blocks within `BLOCK`, all of about the same size."""
    blocks = min(BLOCKS, math.ceil(samples / max(1, BLOCK // width)))
    return math.ceil(samples / blocks)


def cheaper_order(distribution: LogitDistribution, samples: int) -> Order:
    """Return the order that takes less work for S samples shared by all examples, or less memory where the basis would
    be large."""
    lift = distribution.lift
    # HET and HET-H lift by copying: a sample costs no more than its entries, and mixtures of J serve the whole batch.
    if not isinstance(lift, LinearLift) or samples <= distribution.size:
        return "samples"
    return "factors" if distribution.size * max(lift.weight.shape) <= ROWS else "samples"


class Exportable(nn.Module):
    """A module that can be exported: inputs [B, ...] → probabilities [B, K], or the top k of them with their class ids.

    Args:
        model: a `FixedNoiseHead`, or a model that contains one and returns its probabilities, by themselves or as the
            `.logits` of an object.
        top_k: how many classes; None for all K.
        seed: that the noise was drawn with.
        sets: what prediction sets are made by: a calibration, or [K] probabilities from which each label is given.
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
        """Return what an exported file should tell about itself."""
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
        """Return the names of the outputs, in their order: what is added comes after `probs` and `classes`."""
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
        """Raise for a model that computes with what its head returns, as by a softmax; rows may be chosen and moved.

        The model does so to logits. Done to the probabilities that are here in their place, it is something else.
        """
        with self.fixed.capture() as captured:
            outputs = logits_of(self.model(*inputs))
        captured.rows_of(outputs, self.fixed.columns)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return probabilities [B, K]; with top_k [B, k], most probable first, and their class ids [B, k] int64.

        Of a model that ends in a 1 × 1 convolution: [B, K, H, W], or [B, k, H, W]. With more outputs, a tuple of those
        that `output_names` lists.
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
        """Return which classes are in the prediction set of each row, [..., K] bool, of probabilities [..., K]."""
        assert self.limits is not None
        if not isinstance(self.sets, Conformal):
            return probs >= self.limits
        # Without chance (u = 0) the steps of the cumulative mass are not broken: the sets are larger, never smaller.
        scores, ids = class_scores(probs, torch.zeros_like(probs[..., 0]), self.sets.options)
        return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, scores <= self.limits[ids])

    def class_dim(self, outputs: Tensor) -> int:
        """Return which dimension of outputs has the classes: the last one, or the second as of convolutions."""
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
    """Return a head, or a model with one, as a plain module of traceable operations.

        probs = head.predict(model.backbone(inputs), method=method, noise=exportable(model, method).noise).probs

    It is a copy, on the CPU, in float32 and evaluation mode. The noise of "mc" is drawn once and shared by the batch,
    so the same inputs always give the same probabilities.

    Args:
        model: a head; a backbone with a head; or any module that contains one head and returns what that returns,
            as it comes: exports refuse one that changes it, as by a softmax.
        method: as of `head.predict`: "mc", "deterministic", "mean_field", "probit" or "taylor". DET has no noise, and
            is "deterministic" whatever the method.
        num_samples: S, the head's `eval_samples` without.
        top_k: return the k most probable classes only; None for all.
        seed: of the noise, drawn by the head's sampler; the head's `eval_seed` without, as `head.predict` has it.
        order: "samples" or "factors" to force an order of evaluation.
        uncertainty: also return `entropy`, `expected_entropy` and `mutual_information` [B] as `head.predict` has them,
            `top_probs` and `top_classes` [B, 5] if there is no top_k, and `novelty` [B] if the head has a density.
        sets: also return `prediction_set` [B, K] bool and `set_size` [B], by a calibration of
            `hetxl.metrics.conformal.calibrate`, or for the sigmoid link by `label_thresholds`, [K] probabilities.
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
        # The model's own class: it calls its layer and returns what that returns, and knows nothing of heads.
        copied.__class__ = copied.hetxl_base
    head = find_head(copied)
    noise = fixed_noise(head, samples, seed) if method == "mc" else None
    fixed = FixedNoiseHead(head, method, noise, order, uncertainty)
    for parent in list(copied.modules()):
        for name, child in list(parent._modules.items()):  # named_children leaves second names out
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
    """Return the standard normals that an export of a head with noise holds, [S, Q] float32, by its sampler."""
    assert head.covariance is not None
    return head.covariance.fixed_draws(head.sampler, num_samples, seed).clone()
