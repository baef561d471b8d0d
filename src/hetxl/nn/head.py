"""What the four heads share: calling them, the loss, and prediction. A head only says what its noise is and how it is
lifted."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from hetxl.functional import (
    IGNORE_INDEX,
    SAMPLERS,
    Affine,
    Lift,
    LogitDistribution,
    Order,
    Sampler,
    Weights,
    check_targets,
)
from hetxl.functional._checks import integer_at_least, non_negative_float, one_of
from hetxl.functional.distribution import ORDERS
from hetxl.functional.engine.predict import METHODS, TOLERANCE
from hetxl.functional.links import LINKS, Link
from hetxl.functional.targets import TargetsLike
from hetxl.functional.weighting import REDUCTIONS
from hetxl.nn.classifier import Averages, Classifier, GetLogits, Plain, as_classifier, factory_options, is_plain_linear
from hetxl.nn.covariance import Covariance, build_covariance, check_covariance
from hetxl.nn.inputs import check_features, check_normals, under_autocast
from hetxl.nn.noisy import NoisyFeatures
from hetxl.nn.prediction import Prediction
from hetxl.nn.temperature import LearnedTemperature, as_temperature

TRAIN_SAMPLES = 16
EVAL_SAMPLES = 256
"""Orthogonal draws: as exact as the paper's 1,000 independent ones unless the noise is large (docs/samplers.md)."""
NOISE_INIT = 0.1
"""A small start: noise as large as the authors' slows short trainings down (docs/experiments.md)."""


class Head(nn.Module, ABC):
    """A classifier over K classes that averages its probabilities over Gaussian noise; the base of the four heads.

    Args:
        in_features: D
        num_classes: K
        rank: R, rows of the covariance's factors.
        covariance: "efficient", "low_rank", "diagonal" or "full", see `hetxl.nn.covariance`.
        residual: "rank1" or "diagonal", what the covariance has beside its factors.
        noise_init: scale of the noise at the start; 1 for that of the paper's authors.
        noise_scale: factor of the noise in predictions and in evaluation mode: 1 for what was learned, 0 for none. What
            suits the labels to be predicted, `hetxl.evaluation.fit_scales` finds.
        link: "softmax" for one label among K, "sigmoid" for any number of labels.
        temperature: τ, a positive number or a module such as `LearnedTemperature`; None for the head's own default: 1
            for DET, learned from 1 on for the others, so that a head over a trained classifier starts with its logits.
        train_samples: S of `head(...)` and `head.loss(...)` in training mode.
        eval_samples: S of `head.predict(...)`, and of the former in evaluation mode.
        sampler: where the normals come from: "orthogonal", "iid", "antithetic", "sobol", or a function like those in
            `hetxl.functional.samplers`.
        memory_budget: bytes of working memory of losses and predictions, see `hetxl.functional.plan`; None for 448 MiB.
        bias: whether a new classifier has one.
        bias_init: initial value of a new classifier's bias; the paper's sigmoid recipe takes −10.
        classifier: None for a new nn.Linear; an nn.Linear is kept by reference, with its dtype, device and tying; one
            of `hetxl.classifiers` answers for millions of classes or on several devices; any other module or function
            is taken as an opaque `get_logits`, [*, D] → [*, K].
        device: of new parameters; an existing classifier's by default.
        dtype: likewise.
    """

    _learns_temperature = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rank: int = 50,
        covariance: str = "efficient",
        residual: str = "rank1",
        noise_init: float = NOISE_INIT,
        noise_scale: float = 1.0,
        link: str = "softmax",
        temperature: float | nn.Module | None = None,
        train_samples: int = TRAIN_SAMPLES,
        eval_samples: int = EVAL_SAMPLES,
        sampler: str | Sampler = "orthogonal",
        memory_budget: int | None = None,
        bias: bool = True,
        bias_init: float | None = None,
        classifier: nn.Module | Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features = integer_at_least("in_features", in_features, 1)
        self.num_classes = integer_at_least("num_classes", num_classes, 1)
        one_of("link", link, LINKS)
        self.link: Link = "softmax" if link == "softmax" else "sigmoid"
        self.train_samples = integer_at_least("train_samples", train_samples, 1)
        self.eval_samples = integer_at_least("eval_samples", eval_samples, 1)
        if not callable(sampler):
            one_of("sampler", sampler, SAMPLERS)
        self.sampler = sampler
        self.noise_scale = noise_scale
        self.memory_budget = None if memory_budget is None else integer_at_least("memory_budget", memory_budget, 1)
        self.bias_init = bias_init
        made = as_classifier(
            classifier, in_features, num_classes, bias=bias, bias_init=bias_init, device=device, dtype=dtype
        )
        # A function stays a function; the type says what nearly every head has.
        self.classifier = cast("nn.Module", made)
        options = factory_options(classifier, device, dtype)
        if temperature is None:
            temperature = LearnedTemperature(init=1.0, **options) if self._learns_temperature else 1.0
        self.temperature = as_temperature(temperature)
        check_covariance(covariance, rank, residual)
        noise_features = self._noise_features()
        if isinstance(made, Classifier) and not made.complete and self._lifts_beside():
            raise ValueError(
                f"classifier {type(made).__name__} never looks at all classes at once, so noise must go through it: "
                "use DetHead, or HetXLHead without noise_features"
            )
        self.covariance: Covariance | None = None
        if noise_features is not None:
            self.covariance = build_covariance(
                covariance, in_features, noise_features, rank=rank, residual=residual, init=noise_init, **options
            )

    @property
    def noise_scale(self) -> float:
        """Factor of the noise in predictions and in evaluation mode."""
        return self._noise_scale

    @noise_scale.setter
    def noise_scale(self, value: float) -> None:
        self._noise_scale = non_negative_float("noise_scale", value)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after `to_empty`."""
        for module in (self.classifier, self.covariance, self.temperature):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        if self.bias_init is not None and is_plain_linear(self.classifier):
            nn.init.constant_(self.classifier.bias, self.bias_init)

    def forward(
        self,
        features: Tensor,
        targets: TargetsLike | None = None,
        *,
        reduction: str = "mean",
        weight: Tensor | None = None,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        order: Order | None = None,
    ) -> Tensor:
        """Log-probabilities, or with targets their negative log-likelihood.

        Args:
            features: [..., D]
            targets: class ids [...] (−100 leaves an example out), or one row for each example, [..., K]: class
                probabilities (softmax) or labels in [0, 1] (sigmoid); for the sigmoid link also a list of class ids for
                each example, a sparse [B, K] tensor or `LabelLists`.
            reduction: of the loss: "mean" over the examples that count, "sum" or "none".
            weight: of each example's loss, [...]; the mean is then the weighted mean.
            class_weight: of each class, [K], as `weight` of torch.nn.functional.cross_entropy; for the sigmoid link a
                factor of each class's binary cross-entropy.
            label_smoothing: share of the target that is spread evenly over all classes (softmax).
            ignore_index: another class id that leaves an example out, such as 255 in segmentation.
            num_samples: S for this call.
            generator: where the draws come from; torch's default generator without.
            noise: the standard normals themselves, [..., S, Q] or [S, Q] shared by all examples.
            order: "samples" or "factors" to force an order of evaluation; both give the same numbers.

        Returns:
            Without targets [..., K]: log-probabilities, or for the sigmoid link the logits of the mean probabilities;
            a drop-in for the output of nn.Linear under any loss. With targets the loss, a scalar or [...], in at least
            float32.
        """
        check_features(features, self.in_features, self._dtype())
        one_of("reduction", reduction, REDUCTIONS)
        samples = self.train_samples if self.training else self.eval_samples
        scale = 1.0 if self.training else self.noise_scale
        noisy = self._sampling(features, samples, num_samples, generator, noise, order, scale=scale)
        answering = self._answering()
        if targets is not None:
            checked = check_targets(targets, features.shape[:-1], self.num_classes, self.link, ignore_index)
            weights = Weights(weight, class_weight, label_smoothing)
            weights.check(features.shape[:-1], self.num_classes, self.link)
            return answering.nll(noisy, checked, reduction, weights)
        log_probs = answering.log_probs(noisy)
        # Half precision in, half precision out; under autocast the result stays wide, as that of log_softmax does.
        return log_probs if under_autocast(features) else log_probs.to(features.dtype)

    def loss(
        self,
        features: Tensor,
        targets: TargetsLike,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        order: Order | None = None,
    ) -> Tensor:
        """`head(features, targets, …)` by name: the same call, through the module's hooks."""
        return self(
            features,
            targets,
            reduction=reduction,
            weight=weight,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            num_samples=num_samples,
            generator=generator,
            noise=noise,
            order=order,
        )

    @torch.no_grad()
    def predict(
        self,
        features: Tensor,
        top_k: int | None = None,
        method: str = "mc",
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        order: Order | None = None,
        tolerance: float = TOLERANCE,
    ) -> Prediction:
        """Averaged probabilities with their uncertainty; without gradients.

        Args:
            features: [..., D]
            top_k: only the k most probable classes; None for all K.
            method: "mc" averages over samples; "deterministic" leaves the noise out; "mean_field", "probit" and
                "taylor" average over it without samples, approximately (`hetxl.functional.approximations`).
            num_samples: S for this call, `eval_samples` without.
            generator: where the draws come from; torch's default generator without.
            noise: the standard normals themselves, [..., S, Q] or [S, Q] shared by all examples.
            order: "samples" or "factors" to force an order of evaluation.
            tolerance: with top_k and many classes, only those that matter are sampled by themselves, and the others as
                one (`Prediction.left_out`); this far off the probabilities may be, by estimate. 0 samples all classes.
        """
        check_features(features, self.in_features, self._dtype())
        one_of("method", method, METHODS)
        if top_k is not None and integer_at_least("top_k", top_k, 1) > self.num_classes:
            raise ValueError(f"top_k must be at most the number of classes, {self.num_classes}, found {top_k}")
        scale = self.noise_scale
        if self.covariance is None or not scale:
            method = "deterministic"
        options = {"drawn": method == "mc", "scale": scale}
        noisy = self._sampling(features, self.eval_samples, num_samples, generator, noise, order, **options)
        answering = self._answering()
        summary = answering.predict(noisy, method, top_k, tolerance)
        return Prediction(
            probs=summary.log_probs.exp(),
            log_probs=summary.log_probs,
            indices=summary.indices,
            entropy=summary.entropy,
            expected_entropy=summary.expected_entropy,
            left_out=summary.left_out,
            temperature=noisy.temperature,
            logits=answering.distribution(noisy),
            method=method,
            num_samples=None if noisy.z is None else noisy.z.shape[-2],
        )

    def logit_distribution(self, features: Tensor) -> LogitDistribution:
        """The Gaussian over the logits before the temperature: `.mean` [..., K], `.factors` [..., Q, K], lazily.

        Args:
            features: [..., D]
        """
        check_features(features, self.in_features, self._dtype())
        scale = 1.0 if self.training else self.noise_scale
        return self._answering().distribution(self._sampling(features, 1, drawn=False, scale=scale))

    @abstractmethod
    def _noise_features(self) -> int | None:
        """N, the size of the noise space; None for a head without noise."""

    def _lift(self) -> Lift | None:
        """How noise reaches the logits beside the classifier; None for through the classifier, or without noise."""
        return None

    def _lifts_beside(self) -> bool:
        """Whether noise reaches the logits beside the classifier, and not through it."""
        return False

    @property
    def _own(self) -> Classifier | None:
        """A classifier that answers for itself; None for a linear layer, a function, or a layer that is W itself."""
        found = getattr(self, "classifier", None)
        return found if isinstance(found, Classifier) else None

    def _affine(self) -> Affine | None:
        """A linear layer as W φ + b; None for anything else."""
        if not is_plain_linear(self.classifier):
            return None
        return Affine(self.classifier.weight, self.classifier.bias)

    def _answering(self) -> Averages:
        """What answers for losses and predictions."""
        return self._own or Plain(self._affine() or GetLogits(self.classifier, self.num_classes))

    def _sampling(
        self,
        features: Tensor,
        samples: int,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        order: Order | None = None,
        *,
        drawn: bool = True,
        scale: float = 1.0,
    ) -> NoisyFeatures:
        """The features with so much of their noise, and the normals [..., S, Q] of a call if they are to be `drawn`."""
        if order is not None:
            one_of("order", order, ORDERS)
        if num_samples is not None:
            samples = integer_at_least("num_samples", num_samples, 1)
        if noise is not None and drawn:
            size = 0 if self.covariance is None else self.covariance.size
            check_normals(noise, features.shape[:-1], size, num_samples)
        z, gaussian, lift = None, None, None
        is_noisy = self.covariance is not None and scale > 0
        if drawn and is_noisy:
            z = self._draw(features, samples, generator) if noise is None else noise
            z = z.to(features.dtype)
        if self._own is not None:
            features = self._own.prepare(features)
        if is_noisy:
            assert self.covariance is not None
            gaussian, lift = self.covariance(features), self._lift()
            gaussian = gaussian if scale == 1 else gaussian.scaled(scale)
        return NoisyFeatures(
            features, gaussian, z, lift, self.temperature(), self.link, order, self.memory_budget, generator
        )

    def _draw(self, features: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
        """Standard normals [..., S, Q], in at least float32."""
        if generator is not None and torch._C._current_graph_task_id() != -1:
            # A forward pass inside a backward pass: activation checkpointing, which restores torch's default generator
            # before it recomputes, and no other.
            raise RuntimeError(
                "generator= cannot be used under activation checkpointing: the recomputation would draw other noise. "
                "Leave generator out, or pass the normals themselves as noise="
            )
        if generator is None and self._own is not None:
            generator = self._own.noise_generator()
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        options = {"generator": generator, "device": features.device, "dtype": dtype}
        assert self.covariance is not None
        return self.covariance.draw(self.sampler, samples, features.shape[:-1], **options)

    def _dtype(self) -> torch.dtype | None:
        """The dtype that features must have; None when there is nothing to go by."""
        if self._own is not None:
            return self._own.dtype
        affine = self._affine()
        if affine is not None:
            return affine.weight.dtype
        return None if self.covariance is None else next(self.covariance.parameters()).dtype

    def extra_repr(self) -> str:
        """The options as shown when the module is printed."""
        sampler = self.sampler if isinstance(self.sampler, str) else getattr(self.sampler, "__name__", "custom")
        scaled = f", noise_scale={self.noise_scale:g}" if self.noise_scale != 1 else ""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, link={self.link!r}, "
            f"train_samples={self.train_samples}, eval_samples={self.eval_samples}, sampler={sampler!r}{scaled}"
        )
