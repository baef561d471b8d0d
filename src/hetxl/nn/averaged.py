"""Two baselines: DET with predictions averaged over dropout masks, or over a Laplace posterior of its weights."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl._checks import integer_at_least, one_of
from hetxl.functional import GaussianNoise, IdentityLift, LogitDistribution, Summary, approximate_log_probs
from hetxl.functional.laplace import Curvature, laplace_variance, last_layer_curvature
from hetxl.functional.links import Averaged, average_logits
from hetxl.nn.classifier import NoisyFeatures
from hetxl.nn.heads import DetHead, Head, HeadOptions, check_features, flipped_summary, top_of
from hetxl.nn.prediction import Prediction


class AveragedHead(DetHead):
    """Train like DET; in evaluation mode and in `predict`, average over `eval_samples` draws of the logits."""

    methods: tuple[str, ...] = ("mc", "deterministic")  # methods of `predict`; evaluation mode uses the first

    @abstractmethod
    def _draws(self, noisy: NoisyFeatures, samples: int) -> Iterator[Tensor]:
        """Yield `samples` draws of the logits [..., K], before τ."""

    def _source(self, noisy: NoisyFeatures) -> tuple[torch.Generator, bool]:
        """Return the generator of the draws [default: of `eval_seed`], and whether all examples share them."""
        if noisy.generator is not None:
            return noisy.generator, False
        return torch.Generator().manual_seed(self.eval_seed), True

    def _average(self, noisy: NoisyFeatures, method: str, samples: int) -> Averaged:
        """Average the probabilities of features [..., D] over all classes."""
        logits = [self._logits(noisy.features)] if method == "deterministic" else self._draws(noisy, samples)
        return average_logits((draw / noisy.temperature for draw in logits), self.link)

    def _logits(self, features: Tensor) -> Tensor:
        """Compute the classifier's logits [..., K] from standardised features [..., D]."""
        return LogitDistribution(features, self._affine() or self.classifier).mean

    def forward(self, features: Tensor, targets: Any = None, **options: Any) -> Tensor:
        """Return log-probabilities [..., K] (sigmoid: logits of the mean probabilities), or the loss of targets.

        Training mode uses a single draw. Takes the options of `Head.forward`, except `noise` and `order`.
        """
        if self.training:
            return super().forward(features, targets, **options)
        check_features(features, self.in_features, self._dtype())
        samples = integer_at_least("num_samples", options.pop("num_samples", None) or self.eval_samples, 1)
        noisy = self._noisy_features(features, samples, generator=options.pop("generator", None))
        logits = self._average(noisy, self.methods[0], samples).logits
        # A head whose classifier is the identity computes the loss of these logits, with all options of a loss.
        own = {"link": self.link, "flip_rate": self.flip_rate}
        identity = DetHead(self.num_classes, self.num_classes, classifier=nn.Identity(), **own)
        return identity(logits.to(features.dtype) if targets is None else logits, targets, **options)

    @torch.no_grad()
    def predict(
        self, features: Tensor, top_k: int | None = None, method: str = "mc", *, num_samples: int | None = None,
        generator: torch.Generator | None = None, target: str = "observed", **options: Any,
    ) -> Prediction:  # fmt: skip
        """Return averaged probabilities with their uncertainty.

        Args:
            features: [..., D]
            top_k: return only the k most probable classes; None for all K.
            method: one of `methods`; "mc" averages over draws, "deterministic" is DET.
            num_samples: S [default: `eval_samples`].
            target: "observed" for labels, a share `flip_rate` of which is wrong, or "clean" for the true class.
            options: accepted for compatibility with `Head.predict`; they have no effect.
        """
        check_features(features, self.in_features, self._dtype())
        one_of("method", method, self.methods)
        samples = integer_at_least("num_samples", self.eval_samples if num_samples is None else num_samples, 1)
        noisy = self._noisy_features(features, samples, generator=generator, drawn=False, bound=True)
        averaged = self._average(noisy, method, samples)
        summary = Summary(averaged.log_p, None, averaged.entropy, averaged.expected_entropy, None)
        if self.flip_rate and target == "observed":
            summary = flipped_summary(summary, self.flip_rate)
        summary = summary if top_k is None else top_of(summary, top_k)
        samples_used = samples if method == "mc" else None
        logits = self._distribution(noisy)
        return Prediction(summary.log_probs.exp(), *summary, noisy.temperature, logits, method, samples_used)


def drop(features: Tensor, rate: float, generator: torch.Generator | None = None, shared: bool = False) -> Tensor:
    """Set a share of the features [..., D] to 0 and divide the others by 1 − rate: `F.dropout` with a generator.

    `shared` uses one mask for all examples. It is drawn on the CPU, so it is the same on every device.
    """
    like = torch.empty(features.shape[-1]) if shared else torch.empty_like(features)
    mask = like.bernoulli_(1 - rate, generator=generator).to(features)
    return features * mask / (1 - rate)


class DropoutHead(AveragedHead):
    """MC dropout (Gal and Ghahramani): DET with dropout on its features, also in prediction, averaged over S masks.

    A prediction passes the features through the classifier S times, and through the network before it once. Dropout
    follows the standardisation of the features, so a dropped feature takes its mean value.

    Args:
        in_features: D
        num_classes: K
        dropout: share of the features to drop.
        **options: see `Head`; `eval_samples` is S.

    >>> DropoutHead(in_features=64, num_classes=1000, dropout=0.1).predict(torch.randn(8, 64)).probs.shape
    torch.Size([8, 1000])
    """

    def __init__(self, in_features: int, num_classes: int, *, dropout: float = 0.1, **options: Unpack[HeadOptions]):
        super().__init__(in_features, num_classes, **options)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, found {dropout}")
        self.dropout = dropout

    def own_options(self) -> dict[str, Any]:
        """Return the share of the features to drop."""
        return {"dropout": self.dropout}

    def _noisy_features(self, features: Tensor, *args: Any, **options: Any) -> NoisyFeatures:
        noisy = super()._noisy_features(features, *args, **options)
        if not self.training or not options.get("drawn", True):
            return noisy
        return replace(noisy, features=drop(noisy.features, self.dropout, noisy.generator))

    def _draws(self, noisy: NoisyFeatures, samples: int) -> Iterator[Tensor]:
        generator, shared = self._source(noisy)
        for _ in range(samples):
            yield self._logits(drop(noisy.features, self.dropout, generator, shared))

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"{super().extra_repr()}, dropout={self.dropout:g}"


class LaplaceHead(AveragedHead):
    """Last-layer Laplace: DET with a Gaussian posterior over W and b, see `hetxl.functional.laplace`.

    `LaplaceHead.of(head)` copies a trained DET, `measure` computes the curvature of its loss on training features, and
    `hetxl.metrics.fit_laplace` does both and chooses the prior on held-out rows. Predictions use "probit", a closed
    form at the cost of a second pass through the classifier, or "mc", an average over S draws of the logits.

    Args:
        in_features: D
        num_classes: K
        **options: see `Head`. The classifier must be linear.
    """

    posterior_values: nn.Parameter
    posterior_square: nn.Parameter
    posterior_prior: nn.Parameter
    methods = ("probit", "mc", "deterministic")

    def __init__(self, in_features: int, num_classes: int, **options: Unpack[HeadOptions]):
        super().__init__(in_features, num_classes, **options)
        affine = self._affine()
        if affine is None:
            kind = type(self.classifier).__name__
            raise ValueError(f"classifier must be a linear layer for a posterior over its weights, found {kind}")
        weight, size = affine.weight, in_features + (affine.bias is not None)
        # Parameters, not buffers: the posterior is stored and counts in the size of the model.
        start = (weight.new_zeros(num_classes), weight.new_zeros(size), torch.eye(size).to(weight), weight.new_ones(()))
        for name, value in zip((*Curvature._fields, "prior"), (*start, weight.new_zeros(())), strict=True):
            self.register_parameter(f"posterior_{name}", nn.Parameter(value, requires_grad=False))

    @classmethod
    def of(cls, head: Head) -> "LaplaceHead":
        """Return a Laplace head with the classifier, the τ and the standardisation of a deterministic head."""
        if head.covariance is not None:
            raise ValueError(
                f"head must be a DetHead, found {type(head).__name__}: a Laplace posterior does not include its noise"
            )
        same = {"link": head.link, "temperature": head.temperature, "flip_rate": head.flip_rate}
        options = {"eval_samples": head.eval_samples, "eval_seed": head.eval_seed, **same}
        copy = cls(head.in_features, head.num_classes, classifier=head.classifier, **options)
        copy.standardize = head.standardize
        return copy.train(head.training)

    @property
    def curvature(self) -> Curvature:
        """Return the curvature of the loss, zero before `measure`."""
        return Curvature(*(getattr(self, f"posterior_{name}") for name in Curvature._fields))

    @property
    def prior(self) -> float:
        """Return the prior variance of the logits: that of the weights times the mean of ‖φ‖². 0, the start, is DET."""
        return float(self.posterior_prior)

    @prior.setter
    def prior(self, variance: float) -> None:
        if not 0 <= variance < float("inf"):
            raise ValueError(f"prior must be a variance of at least 0, found {variance}")
        self.posterior_prior.data.fill_(variance)

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor], rows: int | None = None) -> None:
        """Compute the curvature of the loss on training features [b, D]; `rows` is N if they are a sample of N rows."""
        inputs = (batch if self.standardize is None else self.standardize(batch) for batch in batches)
        options = {"link": self.link, "bias": len(self.posterior_values) > self.in_features, "rows": rows}
        measured = last_layer_curvature(inputs, self._logits, temperature=self.temperature(), **options)
        for own, value in zip(self.curvature, measured, strict=True):
            own.copy_(value)

    def _deviation(self, features: Tensor) -> Tensor:
        """Return the standard deviation [..., K] of the logits of standardised features [..., D]."""
        if not self.posterior_prior:
            return features.new_zeros(*features.shape[:-1], self.num_classes)
        return laplace_variance(features, self.curvature, self.posterior_square / self.posterior_prior).sqrt()

    def _draws(self, noisy: NoisyFeatures, samples: int) -> Iterator[Tensor]:
        mean, deviation = self._logits(noisy.features), self._deviation(noisy.features)
        generator, shared = self._source(noisy)
        like = torch.empty(self.num_classes) if shared else mean
        for _ in range(samples):
            yield mean + deviation * torch.empty_like(like).normal_(generator=generator).to(mean)

    def _average(self, noisy: NoisyFeatures, method: str, samples: int) -> Averaged:
        if method != "probit":
            return super()._average(noisy, method, samples)
        mean, deviation = self._logits(noisy.features), self._deviation(noisy.features)
        # "probit" uses only the variance of each logit, so one factor represents all K.
        rows = mean / noisy.temperature, deviation.unsqueeze(-2) / noisy.temperature
        averaged = Averaged(*approximate_log_probs("probit", *rows, self.link), mean)
        return averaged._replace(expected_entropy=averaged.entropy)

    def _distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        if self.training:
            return super()._distribution(noisy)
        affine = self._affine()
        assert affine is not None
        noise = GaussianNoise(None, residual=self._deviation(noisy.features), residual_kind="diagonal")
        return LogitDistribution(noisy.features, affine, noise, IdentityLift())
