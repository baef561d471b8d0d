"""The four heads of the paper. `Head` implements the forward pass, the loss and prediction; each of the four defines
only the size of its noise space and the lift."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl._checks import integer_at_least, integer_between, non_negative_float, one_of
from hetxl.functional import (
    IGNORE_INDEX,
    SAMPLERS,
    Affine,
    HashLift,
    IdentityLift,
    Lift,
    LinearLift,
    LogitDistribution,
    Order,
    Sampler,
    Summary,
    Targets,
    Weights,
    check_targets,
    hash_classes,
    softmax_entropy,
)
from hetxl.functional.distribution import ORDERS
from hetxl.functional.engine.predict import METHODS, TOLERANCE
from hetxl.functional.flips import flipped, flipped_log_probs
from hetxl.functional.targets import REDUCTIONS, UNWEIGHTED, TargetsLike, reduce_losses
from hetxl.nn.classifier import Classifier, GetLogits, NoisyFeatures, as_classifier, factory_options, is_plain_linear
from hetxl.nn.covariance import Covariance, build_covariance, check_covariance
from hetxl.nn.density import ClassDensity
from hetxl.nn.prediction import Prediction
from hetxl.nn.standardize import Standardize
from hetxl.nn.temperature import as_temperature
from hetxl.registry import EVAL_SAMPLES, HEAD_ENTRIES, LINKS, RANK, TEMPERATURE, TRAIN_SAMPLES, Link

NOISE_INIT = 0.1  # the authors' 1 makes short runs learn more slowly (lab/docs/experiments.md)


TARGETS = ("observed", "clean")
MAX_SAMPLES = 2**24
"""Largest S; the normals of more samples would take gigabytes."""
CLEAN_NOISE = 0.25
"""Scale of the noise in predictions of clean labels. Of 0, 0.25, 0.5 and 1 it had the lowest NLL on clean test labels
after training on 30 % wrong labels, symmetric or confusable (fashion-MNIST, lab/docs/experiments.md)."""


class HeadOptions(TypedDict, total=False):
    """Options of all heads; see `Head`."""

    rank: int
    covariance: str
    residual: str
    noise_init: float
    noise_scale: float
    flip_rate: float
    link: str
    temperature: float | nn.Module
    train_samples: int
    eval_samples: int
    eval_seed: int
    sampler: str | Sampler
    memory_budget: int | None
    bias: bool
    bias_init: float | None
    classifier: nn.Module | Callable[[Tensor], Tensor] | None
    standardize: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Head(nn.Module, ABC):
    """A classifier over K classes that averages its probabilities over Gaussian noise; the base of the four heads.

    Args:
        in_features: D
        num_classes: K
        rank: R, rows of the covariance's factors.
        covariance: "efficient", "low_rank", "diagonal" or "full", see `hetxl.nn.covariance`.
        residual: "rank1" or "diagonal", the term that the covariance adds to its factors.
        noise_init: initial scale of the noise; the paper's authors use 1.
        noise_scale: factor of the noise in predictions and in evaluation mode: 1 for the learned noise, 0 for none.
            `hetxl.metrics.fit_scales` fits it to held-out labels.
        flip_rate: ε, share of labels drawn uniformly from all K classes (softmax). Losses and predictions then use the
            probability (1 − ε) p + ε / K; `predict(target="clean")` returns p.
        link: "softmax" for one label among K, "sigmoid" for any number of labels.
        temperature: τ, a positive number or a module such as `LearnedTemperature`, which is the paper's choice.
        train_samples: S of `head(...)` and `head.loss(...)` in training mode.
        eval_samples: S of `head.predict(...)`, and of `head(...)` and `head.loss(...)` in evaluation mode.
        eval_seed: seed of the draws in evaluation mode. All examples share them, [S, Q], so the same features give the
            same predictions in any batch and on any device.
        sampler: source of the normals: "orthogonal", "iid", "antithetic", "sobol", or a function like those in
            `hetxl.functional.samplers`.
        memory_budget: bytes of working memory of losses and predictions, see `hetxl.functional.plan`; None for 448 MiB.
        bias: whether a new classifier has a bias.
        bias_init: initial value of a new classifier's bias; the paper's sigmoid recipe uses −10.
        classifier: None for a new nn.Linear. An nn.Linear is kept by reference, with its dtype, device and tied
            weights. A class of `hetxl.classifiers` serves millions of classes or several devices. Any other module or
            function is an opaque `get_logits`, [*, D] → [*, K].
        standardize: normalise features to mean 0 and variance 1, so that the same learning rate works for features of
            any scale. `head.standardize.measure(batches)` measures both on training features.
        device: device of new parameters [default: that of an existing classifier].
        dtype: dtype of new parameters, likewise.
    """

    density: ClassDensity | None = None
    """Density of the training features (`hetxl.nn.fit_density`), for `Prediction.novelty`; not in the state dict."""

    _bypasses_classifier = False  # whether noise is added to the logits without going through the classifier

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rank: int = RANK,
        covariance: str = "efficient",
        residual: str = "rank1",
        noise_init: float = NOISE_INIT,
        noise_scale: float = 1.0,
        flip_rate: float = 0.0,
        link: str = "softmax",
        temperature: float | nn.Module = TEMPERATURE,
        train_samples: int = TRAIN_SAMPLES,
        eval_samples: int = EVAL_SAMPLES,
        eval_seed: int = 0,
        sampler: str | Sampler = "orthogonal",
        memory_budget: int | None = None,
        bias: bool = True,
        bias_init: float | None = None,
        classifier: nn.Module | Callable[[Tensor], Tensor] | None = None,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type such as torch.float32, found {dtype}")
        self.in_features = integer_at_least("in_features", in_features, 1)
        self.num_classes = integer_at_least("num_classes", num_classes, 1)
        self.link: Link = one_of("link", link, LINKS)
        self.train_samples = integer_between("train_samples", train_samples, 1, MAX_SAMPLES)
        self.eval_samples = integer_between("eval_samples", eval_samples, 1, MAX_SAMPLES)
        self.eval_seed = integer_at_least("eval_seed", eval_seed, 0)
        if not callable(sampler):
            one_of("sampler", sampler, SAMPLERS)
        self.sampler, self.noise_scale = sampler, noise_scale
        self.memory_budget = None if memory_budget is None else integer_at_least("memory_budget", memory_budget, 1)
        self.bias_init = bias_init
        layer = as_classifier(
            classifier, in_features, num_classes, bias=bias, bias_init=bias_init, device=device, dtype=dtype
        )
        self._register_classifier(layer)
        options = factory_options(classifier, device, dtype)
        self.standardize = Standardize(in_features, **options) if standardize else None
        self.temperature = as_temperature(temperature)
        self.flip_rate = flip_rate
        check_covariance(covariance, rank, residual)
        noise_features = self._noise_features()
        if isinstance(layer, Classifier) and not layer.complete and self._bypasses_classifier:
            raise ValueError(
                f"classifier {type(layer).__name__} does not compute all logits at once, so noise must go through it: "
                "use DetHead, or HetXLHead without noise_features"
            )
        self.covariance: Covariance | None = None
        if noise_features is not None:
            self.covariance = build_covariance(
                covariance, in_features, noise_features, rank=rank, residual=residual, init=noise_init, **options
            )

    @property
    def noise_scale(self) -> float:
        """Return the factor of the noise in predictions and in evaluation mode."""
        return self._noise_scale

    @noise_scale.setter
    def noise_scale(self, value: float) -> None:
        self._noise_scale = non_negative_float("noise_scale", value)

    @property
    def flip_rate(self) -> float:
        """Return ε, the share of labels drawn uniformly from all classes."""
        return self._flip_rate

    @flip_rate.setter
    def flip_rate(self, value: float) -> None:
        rate = non_negative_float("flip_rate", value)
        custom = self._custom_classifier
        if rate >= 1:
            raise ValueError(f"flip_rate must be below 1, found {value}")
        if rate and self.link == "sigmoid":
            raise ValueError('flip_rate needs one label per example, found link="sigmoid"; leave it 0')
        if rate and custom is not None and not custom.complete:
            raise ValueError(f"flip_rate needs a loss over all classes, found {type(custom).__name__}; leave it 0")
        self._flip_rate = rate

    def own_options(self) -> dict[str, Any]:
        """Return the options that only this class of heads has, by the names of its constructor."""
        return {}

    def reset_parameters(self) -> None:
        """Initialise all parameters again, for instance after `to_empty`."""
        for module in (self.classifier, self.covariance, self.temperature, self.standardize):
            getattr(module, "reset_parameters", lambda: None)()
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
        """Return log-probabilities, or the negative log-likelihood of targets.

        Args:
            features: [..., D]
            targets: class ids [...] (−100 ignores an example), or one row per example, [..., K]: class probabilities
                (softmax) or labels in [0, 1] (sigmoid). The sigmoid link also takes a list of class ids per example, a
                sparse [B, K] tensor or `LabelLists`.
            reduction: reduction of the loss: "mean" over the examples that are not ignored, "sum" or "none".
            weight: weight of each example's loss, [...]; the mean is then the weighted mean.
            class_weight: weight of each class, [K], as `weight` of torch.nn.functional.cross_entropy; for the sigmoid
                link a factor of each class's binary cross-entropy.
            label_smoothing: share of the target spread evenly over all classes (softmax).
            ignore_index: another class id to ignore, such as 255 in segmentation.
            num_samples: S for this call.
            generator: source of the draws, separate for each example [default: torch's default generator in training
                mode; in evaluation mode the shared draws of `eval_seed`].
            noise: the standard normals, [..., S, Q] or [S, Q] shared by all examples.
            order: "samples" or "factors" to force an order of evaluation; both give the same numbers.

        Returns:
            Without targets [..., K]: log-probabilities, or for the sigmoid link the logits of the mean probabilities.
            They replace the output of nn.Linear under any loss. With targets the loss, a scalar or [...], in at least
            float32.
        """
        check_features(features, self.in_features, self._dtype())
        one_of("reduction", reduction, REDUCTIONS)
        samples = self.train_samples if self.training else self.eval_samples
        scale = 1.0 if self.training else self.noise_scale
        options = {"scale": scale, "fixed": not self.training}
        noisy = self._noisy_features(features, samples, num_samples, generator, noise, order, **options)
        custom = self._custom_classifier
        if targets is not None:
            checked = check_targets(targets, features.shape[:-1], self.num_classes, self.link, ignore_index)
            weights = Weights(weight, class_weight, label_smoothing)
            weights.check(features.shape[:-1], self.num_classes, self.link)
            return (self._flipped_nll if self.flip_rate else self._nll)(noisy, checked, reduction, weights)
        log_probs = noisy.log_probs(self._distribution(noisy)) if custom is None else custom.log_probs(noisy)
        log_probs = flipped_log_probs(log_probs, self.flip_rate) if self.flip_rate else log_probs
        # Half-precision inputs give half-precision outputs; under autocast the result stays wide, like log_softmax.
        return log_probs if under_autocast(features) else log_probs.to(features.dtype)

    def _nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return the negative log-likelihood of targets without ε."""
        if self._custom_classifier is not None:
            return self._custom_classifier.nll(noisy, targets, reduction, weights)
        return noisy.nll(self._distribution(noisy), targets, reduction, weights)

    def _flipped_nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return −log((1 − ε) p + ε / K) of class ids. Wrong labels, where p is small, lose their weight."""
        if targets.ids is None or weights.smoothing:
            raise ValueError(
                "flip_rate needs class ids as targets and no label_smoothing; change these or set flip_rate=0"
            )
        losses = -flipped(-self._nll(noisy, targets, "none", UNWEIGHTED), self.flip_rate, self.num_classes)
        factor, normaliser = weights.factors(targets, targets.ids.shape, self.link, losses)
        return reduce_losses(losses, factor, normaliser, reduction)

    def loss(self, features: Tensor, targets: TargetsLike, reduction: str = "mean", **options: Any) -> Tensor:
        """Return `head(features, targets, …)`: the same call with the same options, hooks of the module included."""
        return self(features, targets, reduction=reduction, **options)

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
        target: str = "observed",
        classes: Tensor | None = None,
    ) -> Prediction:
        """Return averaged probabilities with their uncertainty, without gradients.

        Args:
            features: [..., D]
            top_k: return only the k most probable classes; None for all K.
            method: "mc" averages over samples; "deterministic" ignores the noise; "mean_field", "probit" and "taylor"
                approximate the average without samples (`hetxl.functional.APPROXIMATIONS`).
            num_samples: S for this call [default: `eval_samples`].
            generator: source of the draws, separate for each example [default: the shared draws of `eval_seed`].
            noise: the standard normals, [..., S, Q] or [S, Q] shared by all examples.
            order: "samples" or "factors" to force an order of evaluation.
            tolerance: largest estimated error of the probabilities. With top_k and many classes, only the likely
                classes are sampled one by one, and the others together (`Prediction.left_out`). 0 samples every class.
            target: "observed" predicts the label that an annotator would assign, wrong labels included; "clean"
                predicts the true class, without ε and with `CLEAN_NOISE` of the noise, since the noise also models
                errors of the labels.
            classes: return only these classes of each example, [..., k] ids, in this order; instead of `top_k`. With
                labels as classes, `-log_probs` is the negative log-likelihood.
        """
        check_features(features, self.in_features, self._dtype())
        one_of("method", method, METHODS)
        one_of("target", target, TARGETS)
        non_negative_float("tolerance", tolerance)
        if top_k is not None and integer_at_least("top_k", top_k, 1) > self.num_classes:
            raise ValueError(f"top_k must be at most the number of classes, {self.num_classes}, found {top_k}")
        if classes is not None:
            check_classes(classes, features.shape[:-1], self.num_classes, top_k)
        if features.dtype == torch.float16 and self._custom_classifier is None and (features.abs() > LARGE_HALF).any():
            options: dict[str, Any] = {"num_samples": num_samples, "generator": generator, "order": order}
            options |= {
                "tolerance": tolerance,
                "noise": None if noise is None else noise.float(),
                "target": target,
                "classes": classes,
            }
            return copy.deepcopy(self).float().predict(features.float(), top_k, method, **options)
        scale = self.noise_scale * (CLEAN_NOISE if target == "clean" else 1.0)
        if self.covariance is None or not scale:
            method = "deterministic"
        options = {"drawn": method == "mc", "scale": scale, "fixed": True, "bound": True}
        noisy = self._noisy_features(features, self.eval_samples, num_samples, generator, noise, order, **options)
        flipped = self.flip_rate > 0 and target == "observed"
        sizes = (None if flipped else top_k, tolerance)
        if self._custom_classifier is not None:
            summary = self._custom_classifier.predict(noisy, method, *sizes)
        else:
            summary = noisy.predict(self._distribution(noisy), method, *sizes, None if flipped else classes)
        if flipped:
            summary = flipped_summary(summary, self.flip_rate)
            summary = summary if top_k is None else top_of(summary, top_k)
        if classes is not None and summary.indices is None:
            summary = summary.of_classes(classes)
        samples = None if noisy.z is None else noisy.z.shape[-2]
        probs, logits = summary.log_probs.exp(), self._distribution(noisy)
        distance = None if self.density is None else self.density.distance(features)
        return Prediction(probs, *summary, noisy.temperature, logits, method, samples, distance)

    def logit_distribution(self, features: Tensor) -> LogitDistribution:
        """Return the Gaussian over the logits of features before τ; lazy `.mean` [..., K], `.factors` [..., Q, K]."""
        check_features(features, self.in_features, self._dtype())
        scale = 1.0 if self.training else self.noise_scale
        return self._distribution(self._noisy_features(features, 1, drawn=False, scale=scale))

    @abstractmethod
    def _noise_features(self) -> int | None:
        """Return N, the size of the noise space; None for a head without noise."""

    def _lift(self) -> Lift | None:
        """Return the lift of noise that bypasses the classifier; None if it goes through it, or without noise."""
        return None

    def _register_classifier(self, layer: Any) -> None:
        # It may also be a function. The cast gives the attribute the type that nearly every head has.
        self.classifier = cast("nn.Module", layer)

    @property
    def _custom_classifier(self) -> Classifier | None:
        """Return the classifier if it is a `Classifier`, with its own loss and predictions; None for a linear layer, a
        function, or a layer that is W itself."""
        classifier = getattr(self, "classifier", None)
        return classifier if isinstance(classifier, Classifier) else None

    def _affine(self) -> Affine | None:
        """Return a linear layer as W φ + b; None for anything else."""
        linear = self.classifier
        return Affine(linear.weight, linear.bias) if is_plain_linear(linear) else None

    def _distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """Return the Gaussian over the logits."""
        if self._custom_classifier is not None:
            return self._custom_classifier.distribution(noisy)
        return noisy.through(self._affine() or GetLogits(self.classifier, self.num_classes))

    def _noisy_features(
        self,
        features: Tensor,
        samples: int,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        order: Order | None = None,
        *,
        drawn: bool = True,
        fixed: bool = False,
        scale: float = 1.0,
        bound: bool = False,
    ) -> NoisyFeatures:
        """Return the features with their noise times `scale`, and if `drawn` the normals of this call.

        `bound` scales rows down that would overflow in the products. The normals are [..., S, Q], or with `fixed` and
        no generator those of `eval_seed`, [S, Q].
        """
        if order is not None:
            one_of("order", order, ORDERS)
        if num_samples is not None:
            samples = integer_between("num_samples", num_samples, 1, MAX_SAMPLES)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, found {type(generator).__name__}")
        if noise is not None and drawn:
            size = 0 if self.covariance is None else self.covariance.size
            check_normals(noise, features.shape[:-1], size, num_samples)
        if self.standardize is not None:
            features = self.standardize(bounded(features, 0.75) if bound else features)
        features = bounded(features) if bound else features
        z, gaussian, lift = None, None, None
        is_noisy = self.covariance is not None and scale > 0
        if drawn and is_noisy:
            if noise is None:
                fixed = fixed and generator is None
                noise = self._fixed_draws(features, samples) if fixed else self._draw(features, samples, generator)
            z = noise.to(features.dtype)
        if self._custom_classifier is not None:
            features = self._custom_classifier.prepare(features)
        if is_noisy:
            assert self.covariance is not None
            gaussian, lift = self.covariance(features), self._lift()
            gaussian = gaussian if scale == 1 else gaussian.scaled(scale)
        return NoisyFeatures(
            features, gaussian, z, lift, self.temperature(), self.link, order, self.memory_budget, generator
        )

    def _draw(self, features: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
        """Draw standard normals [..., S, Q], in at least float32."""
        if generator is not None and torch._C._current_graph_task_id() != -1:
            # A forward pass inside a backward pass is activation checkpointing. Before it recomputes, it restores
            # torch's default generator, but not this one.
            raise RuntimeError(
                "generator= cannot be used under activation checkpointing: the recomputation would draw other noise. "
                "Omit generator, or pass the normals as noise="
            )
        if generator is None and self._custom_classifier is not None:
            generator = self._custom_classifier.noise_generator()
        options = {"generator": generator, "device": features.device, "dtype": _drawn_dtype(features)}
        assert self.covariance is not None
        return self.covariance.draw(self.sampler, samples, features.shape[:-1], **options)

    def _fixed_draws(self, features: Tensor, samples: int) -> Tensor:
        """Draw the standard normals of evaluation mode, [S, Q], shared by all examples."""
        assert self.covariance is not None
        factory = {"device": features.device, "dtype": _drawn_dtype(features)}
        return self.covariance.fixed_draws(self.sampler, samples, self.eval_seed, **factory)

    def _dtype(self) -> torch.dtype | None:
        """Return the dtype that features must have; None for a function without parameters."""
        if self._custom_classifier is not None:
            return self._custom_classifier.dtype
        affine = self._affine()
        if affine is not None:
            return affine.weight.dtype
        return None if self.covariance is None else next(self.covariance.parameters()).dtype

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        sampler = self.sampler if isinstance(self.sampler, str) else getattr(self.sampler, "__name__", "custom")
        scaled = f", noise_scale={self.noise_scale:g}" if self.noise_scale != 1 else ""
        scaled += f", flip_rate={self.flip_rate:g}" if self.flip_rate else ""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, link={self.link!r}, "
            f"train_samples={self.train_samples}, eval_samples={self.eval_samples}, sampler={sampler!r}{scaled}"
        )


def _drawn_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype in which normals are drawn: at least float32."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def flipped_summary(summary: Summary, rate: float) -> Summary:
    """Add ε to a prediction over all classes; the part of the entropy that comes from noise stays."""
    log_probs = flipped_log_probs(summary.log_probs, rate)
    entropy = softmax_entropy(log_probs)
    return Summary(log_probs, None, entropy, entropy - (summary.entropy - summary.expected_entropy), None)


def top_of(summary: Summary, top_k: int) -> Summary:
    """Return the k most probable classes of a prediction over all classes."""
    log_probs, indices = summary.log_probs.topk(top_k)
    return summary._replace(log_probs=log_probs, indices=indices)


def check_features(features: Tensor, in_features: int, dtype: torch.dtype | None) -> None:
    """Raise if features [..., D] do not fit a head; a dtype of None allows every dtype."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = f"dtype {features.dtype}" if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"features must be a floating-point tensor [..., {in_features}], found {kind}")
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise ValueError(f"features must have shape [..., {in_features}] (in_features), found {list(features.shape)}")
    if dtype is not None and dtype != features.dtype and not under_autocast(features):
        raise TypeError(
            f"features have dtype {features.dtype} but the head has {dtype}; "
            f"cast one of them (features.to({dtype}) or head.to({features.dtype})) or use torch.autocast"
        )


LARGE_HALF = 256.0
"""Largest feature that a float16 head predicts in float16; a float32 copy of the head predicts larger ones. Logits and
variances are sums of products of features, and float16 ends at 65,504."""


def bounded(features: Tensor, power: float = 1 / 3) -> Tensor:
    """Scale down rows of features [..., D] whose products would overflow; other rows stay equal to the bit.

    Logits and their noise grow with the features. For features this large the averaged probabilities depend only on
    the ratio of the two, so they do not change.

    Args:
        power: power of the largest number of the dtype that bounds the features; 1/3 keeps sums of variances finite.
    """
    if features.dtype == torch.float16:
        return features  # `predict` handles large features in float32
    limit = torch.finfo(features.dtype).max ** power
    return features / (features.abs().amax(-1, keepdim=True) / limit).clamp(min=1)


def check_classes(classes: Tensor, batch_shape: Sequence[int], num_classes: int, top_k: int | None) -> None:
    """Raise if `classes=` does not hold ids [..., k] for the batch, or top_k is passed too."""
    if top_k is not None:
        raise ValueError(f"classes and top_k exclude each other, found both (top_k={top_k}); pass one of them")
    if not isinstance(classes, Tensor) or classes.dtype != torch.int64:
        kind = classes.dtype if isinstance(classes, Tensor) else type(classes).__name__
        raise TypeError(f"classes must be a tensor of class ids (torch.int64), found {kind}")
    if classes.dim() == 0 or list(classes.shape[:-1]) != list(batch_shape) or not classes.shape[-1]:
        raise ValueError(
            f"classes must have shape {[*batch_shape, 'k']} with k at least 1, found {list(classes.shape)}"
        )
    if torch.compiler.is_compiling() or not classes.numel():
        return
    if not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ValueError(
            f"classes must lie in 0 … {num_classes - 1}, found {int(classes.min())} … {int(classes.max())}"
        )


def check_normals(z: Tensor, batch_shape: Sequence[int], size: int, num_samples: int | None) -> None:
    """Raise if `noise=` does not match the batch shape, Q, and S if `num_samples=` is passed too."""
    shape, expected = list(z.shape), list(batch_shape)
    if shape[-1:] != [size] or shape[:-2] not in (expected, []) or len(shape) < 2 or shape[-2] < 1:
        raise ValueError(
            f"noise must have shape {[*expected, 'S', size]}, or {['S', size]} shared by all examples, "
            f"with S at least 1; found {shape}".replace("'S'", "S")
        )
    if num_samples is not None and num_samples != shape[-2]:
        raise ValueError(f"num_samples is {num_samples} but noise holds {shape[-2]} samples; pass one of them")


def under_autocast(values: Tensor) -> bool:
    """Return whether autocast computes products of these values in another precision."""
    kind = values.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class DetHead(Head):
    """DET, the deterministic classifier softmax(W φ / τ), the baseline (Eq. 1).

    It accepts the options of the other heads, so that heads can be swapped by name; options of the noise have no
    effect. With a `LearnedTemperature` it is the paper's ablation "DET w/ learn τ".

    >>> DetHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    def _noise_features(self) -> None:
        return None


class HetHead(Head):
    """HET: noise on the logits themselves, N = K; its parameters grow with D·K (Eq. heteroscedastic_probs).

    >>> HetHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    _bypasses_classifier = True

    def _noise_features(self) -> int:
        return self.num_classes

    def _lift(self) -> Lift:
        return IdentityLift()


class HetHashHead(Head):
    """HET-H: noise in H buckets that classes share through a fixed hash, N = H (Eq. het_hashing).

    Args:
        in_features: D
        num_classes: K
        buckets: H; None for H = D, with as many parameters as HET-XL.
        hash_seed: seed of the fixed hash, which is stored with the weights as the buffer `hash` [K].
        **options: see `Head`.

    >>> HetHashHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    hash: Tensor
    _bypasses_classifier = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        buckets: int | None = None,
        hash_seed: int = 0,
        **options: Unpack[HeadOptions],
    ):
        # Set before the module is initialised, because its noise space depends on them; plain numbers allow that.
        self.buckets = in_features if buckets is None else integer_at_least("buckets", buckets, 1)
        self.hash_seed = integer_at_least("hash_seed", hash_seed, 0)
        super().__init__(in_features, num_classes, **options)
        assert self.covariance is not None
        device = next(self.covariance.parameters()).device
        self.register_buffer("hash", self._hash().to(device))

    def reset_parameters(self) -> None:
        """Initialise the parameters and compute the hash again."""
        super().reset_parameters()
        with torch.no_grad():
            self.hash.copy_(self._hash())

    def own_options(self) -> dict[str, Any]:
        """Return the number of buckets and the seed of the hash."""
        return {"buckets": self.buckets, "hash_seed": self.hash_seed}

    def _hash(self) -> Tensor:
        return hash_classes(self.num_classes, self.buckets, self.hash_seed)

    def _noise_features(self) -> int:
        return self.buckets

    def _lift(self) -> Lift:
        return HashLift(self.hash)

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"{super().extra_repr()}, buckets={self.buckets}, hash_seed={self.hash_seed}"


class HetXLHead(Head):
    """HET-XL: noise on the features, which goes through the classifier with them, N = D (Eq. het-xs). The number of its
    extra parameters does not grow with the number of classes.

    Args:
        in_features: D
        num_classes: K
        noise_features: M for noise in a separate space, with its own projection W′ [K, M] (`projection.weight`,
            Eq. het_xl_ind_d); None to share the classifier.
        **options: see `Head`. With `classifier=` an opaque `get_logits`, the noise goes through it with the features.

    >>> HetXLHead(in_features=64, num_classes=1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    def __init__(
        self, in_features: int, num_classes: int, *, noise_features: int | None = None, **options: Unpack[HeadOptions]
    ):
        self.noise_features, self._bypasses_classifier = in_features, noise_features is not None
        if noise_features is not None:
            self.noise_features = integer_at_least("noise_features", noise_features, 1)
        super().__init__(in_features, num_classes, **options)
        self.projection: nn.Linear | None = None
        if noise_features is not None:
            assert self.covariance is not None
            like = next(self.covariance.parameters())
            self.projection = nn.Linear(noise_features, num_classes, bias=False, device=like.device, dtype=like.dtype)

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        super().reset_parameters()
        if self.projection is not None:
            self.projection.reset_parameters()

    def own_options(self) -> dict[str, Any]:
        """Return M; None if the noise goes through the classifier."""
        return {"noise_features": self.noise_features if self._bypasses_classifier else None}

    def _noise_features(self) -> int:
        return self.noise_features

    def _lift(self) -> Lift | None:
        return None if self.projection is None else LinearLift(self.projection.weight)


HEADS: dict[str, type[Head]] = {entry.name: globals()[entry.class_name] for entry in HEAD_ENTRIES}
"""Head classes by the names in `hetxl.registry`, which commands and options use."""


def build_head(head: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """Create the head "det", "het", "het-h" or "het-xl" with the options of its class."""
    one_of("head", head, HEADS)
    return HEADS[head](in_features, num_classes, **options)
