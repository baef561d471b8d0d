"""`HetXLClassifier`: a head behind scikit-learn's interface, for rows of numbers.

from hetxl.integrations.sklearn import HetXLClassifier

model = HetXLClassifier(random_state=0).fit(X, y)
model.predict_proba(X_test)
"""

import copy
import math
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetxl.functional import Sampler
from hetxl.integrations.rows import BLOCK, Examples, RowNetwork, RowTrainer
from hetxl.nn import Head, LearnedTemperature, build_head

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

    from hetxl.integrations.sklearn_parameters import check_parameters
except ImportError as error:
    raise ImportError(
        "hetxl.integrations.sklearn needs scikit-learn 1.6 or newer: pip install -U scikit-learn"
    ) from error

EPOCHS = 50
STEPS = 500
"""What `max_iter=None` stands for: so many epochs, or more where few rows make short ones, for so many steps."""

RATES = {False: 0.02, True: 0.005}
"""What `learning_rate=None` stands for, without and with hidden layers."""

NOISE_PARAMETER_LIMIT = 2**27
"""A wide input straight into a noisy head is refused above this many parameters in one part of its noise."""


class Uncertainty(NamedTuple):
    """How unsure predictions are, in nats; with several labels a row, summed over them.

    Attributes:
        entropy: [n] of the averaged probabilities.
        expected_entropy: [n] mean entropy of the single draws of the noise; the difference to `entropy` is what the
            noise explains.
    """

    entropy: np.ndarray
    expected_entropy: np.ndarray


class HetXLClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for noisy labels: standardised features, hidden layers if any, and a head of `hetxl.nn`.

    It is trained by AdamW; `fit` lets the rate fall to zero along a cosine. A weight counts as that many repetitions of
    its row, exactly so while one batch holds all rows; a row of weight zero is left out. With a matrix y of zeros and
    ones every column is a label of its own, by the sigmoid link.

    Args:
        head: "het-xl", "het", "het-h", or "det" for the usual classifier without noise.
        rank: R, of the covariance of the noise.
        hidden: sizes of hidden layers with ReLU; () for a linear classifier.
        temperature: τ, a number, or "learned".
        noise_init: scale of the noise at the start.
        train_samples: S in training.
        eval_samples: S of predictions.
        sampler: "orthogonal", "iid", "antithetic", "sobol", or a function like those in `hetxl.functional.samplers`.
        learning_rate: of AdamW, at the start; None for 0.02 without hidden layers and 0.005 with some.
        weight_decay: of AdamW, on weights and not on biases.
        batch_size: rows of a step.
        max_iter: epochs; None for 50, or more where those would be fewer than 500 steps.
        tol: training ends when the loss has not fallen by this much for `n_iter_no_change` epochs; 0 to go on.
        early_stopping: watch the loss of rows held out of training, not the training loss, and keep the weights that
            were best there.
        validation_fraction: share of the rows held out.
        n_iter_no_change: epochs to wait.
        standardize: bring features to mean 0 and variance 1; `partial_fit` keeps running moments.
        class_weight: None, "balanced", or a dict from label to weight.
        warm_start: let `fit` go on from the last fit.
        random_state: of initial weights, order of rows and noise.
        device: where to compute, such as "cpu" or "cuda".
        verbose: print the loss of each epoch.

    Attributes:
        classes_: [K] labels, sorted; the numbers of the columns for a matrix y.
        network_: the trained `RowNetwork`: `network_(rows)` gives the features of `network_.head`.
        n_iter_: epochs done.
        loss_curve_: training loss of each epoch.
        validation_loss_curve_: with `early_stopping`, that of the rows held out.
        scales_: τ and the factor of the noise, once `rescale` has fitted them.
        n_features_in_: D
        feature_names_in_: [D], where X came with names.
    """

    def __init__(
        self,
        *,
        head: str = "het-xl",
        rank: int = 10,
        hidden: tuple[int, ...] = (),
        temperature: float | str = 1.0,
        noise_init: float = 0.1,
        train_samples: int = 16,
        eval_samples: int = 256,
        sampler: str | Sampler = "orthogonal",
        learning_rate: float | None = None,
        weight_decay: float = 0.1,
        batch_size: int = 128,
        max_iter: int | None = None,
        tol: float = 1e-4,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        standardize: bool = True,
        class_weight: str | dict[Any, float] | None = None,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device = "cpu",
        verbose: bool = False,
    ):
        self.head = head
        self.rank = rank
        self.hidden = hidden
        self.temperature = temperature
        self.noise_init = noise_init
        self.train_samples = train_samples
        self.eval_samples = eval_samples
        self.sampler = sampler
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.standardize = standardize
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "HetXLClassifier":
        """Train.

        Args:
            X: [n, D], dense or sparse.
            y: [n] labels of any kind that can be sorted, or [n, K] zeros and ones.
            sample_weight: [n], not negative; only their proportions matter.
        """
        check_parameters(self)
        fresh = not (self.warm_start and hasattr(self, "network_"))
        X, y = self._validate(X, y, reset=fresh)
        classes = self.classes_ if not fresh else np.arange(y.shape[1]) if y.ndim == 2 else np.unique(y)
        examples = self._examples(X, y, classes, sample_weight)
        if fresh:
            self._start(X, y, classes)
        self._forget_scales()
        rows, held_out = np.flatnonzero(examples.weight), np.array([], dtype=np.int64)
        if self.early_stopping:
            size = max(1, round(self.validation_fraction * len(rows)))
            held_out, rows = np.split(self._trainer.rng.permutation(rows), [size])
            if not len(rows):
                raise ValueError("early_stopping=True needs at least two rows, one to train on and one to hold out")
        examples = examples._replace(weight=examples.weight / examples.weight[rows].mean())
        self._update_moments(examples, rows)
        steps = math.ceil(len(rows) / self.batch_size)
        epochs = self.max_iter or max(EPOCHS, math.ceil(STEPS / steps))
        self.n_iter_, self.loss_curve_, self.validation_loss_curve_ = 0, [], []
        best, waited, kept = math.inf, 0, None
        for epoch in range(epochs):
            done = (epoch + np.arange(steps) / steps) / epochs
            loss = self._epoch(examples, rows, self._rate * (0.5 + 0.5 * np.cos(np.pi * done)))
            if self.early_stopping:
                loss = self._trainer.evaluate(examples, held_out)
                self.validation_loss_curve_.append(loss)
            waited = 0 if loss < best - self.tol else waited + 1
            if loss < best:
                best = loss
                kept = copy.deepcopy(self.network_.state_dict()) if self.early_stopping else None
            if self.tol and waited >= self.n_iter_no_change:
                break
        if kept is not None:
            self.network_.load_state_dict(kept)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> "HetXLClassifier":
        """Train for one epoch on some rows, from where the last call ended, at a constant rate.

        Args:
            X: [n, D], dense or sparse.
            y: [n] labels, or [n, K] zeros and ones.
            classes: [K] all labels there are; needed by the first call, unless y is a matrix.
            sample_weight: [n], not negative; factors of the rows' losses.
        """
        check_parameters(self)
        if self.class_weight == "balanced":
            raise ValueError('class_weight="balanced" needs all labels at once: use fit, or give a dict')
        fresh = not hasattr(self, "network_")
        X, y = self._validate(X, y, reset=fresh)
        if classes is None and fresh and y.ndim == 1:
            raise ValueError("classes must be given to the first call of partial_fit: all labels that will come")
        if classes is None:
            classes = np.arange(y.shape[1]) if fresh else self.classes_
        classes = np.unique(np.asarray(classes))
        if not fresh and not np.array_equal(classes, self.classes_):
            raise ValueError(f"classes must be those of the first call, {self.classes_}, found {classes}")
        examples = self._examples(X, y, classes, sample_weight)
        if fresh:
            self._start(X, y, classes)
            self.n_iter_, self.loss_curve_ = 0, []
        self._forget_scales()
        rows = np.flatnonzero(examples.weight)
        self._update_moments(examples, rows)
        self._epoch(examples, rows, repeat(self._rate))
        return self

    def rescale(self, X: Any, y: Any) -> "HetXLClassifier":
        """Fit τ and the scale of the noise to labels that can be trusted, and that `fit` has not seen.

        A model of noisy labels is as unsure as they are wrong; a few right ones tell how sure it may be. The classes
        that it predicts hardly change, their probabilities do. Training that goes on has the scales of before.

        Args:
            X: [n, D], dense or sparse.
            y: [n] labels, or [n, K] zeros and ones, of the classes of the fit.
        """
        check_is_fitted(self)
        X, y = self._validate(X, y, reset=False)
        self._trainer.unscale()
        self.scales_ = self._trainer.rescale(self._examples(X, y, self.classes_, None))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row of X [n, D]: [n], or [n, K] zeros and ones for a matrix y."""
        outputs = self._outputs(X)
        return (outputs > 0).astype(np.int64) if self._multilabel else self.classes_[outputs.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities for X [n, D], averaged over the noise: [n, K], in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of the probabilities for X [n, D], [n, K]; finite where a probability underflows."""
        outputs = self._outputs(X)
        return -np.logaddexp(0, -outputs) if self._multilabel else outputs

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-probabilities for X [n, D], [n, K]; log-odds for two classes, [n], and for a matrix y, [n, K]."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 and not self._multilabel else outputs

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Entropies of the predictions for X [n, D]: of the averaged probabilities, and within single draws, [n]."""
        parts = self._predict(X, lambda head, features, noise: head.predict(features, noise=noise))
        return Uncertainty(
            torch.cat([part.entropy for part in parts]).cpu().numpy(),
            torch.cat([part.expected_entropy for part in parts]).cpu().numpy(),
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags

    @property
    def _multilabel(self) -> bool:
        return self.network_.head.link == "sigmoid"

    @property
    def _rate(self) -> float:
        return self.learning_rate or RATES[bool(self.hidden)]

    def _validate(self, X: Any, y: Any, reset: bool) -> tuple[Any, np.ndarray]:
        """X as floats [n, D], dense or CSR; y as labels [n] or as zeros and ones [n, K]."""
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], multi_output=True, reset=reset
        )
        check_classification_targets(y)
        kind = type_of_target(y)
        several = kind not in ("binary", "multiclass")
        if not reset and several != self._multilabel:
            raise ValueError(f"y is {kind}, and the y of the fit that this one goes on from was not")
        if not several:
            return X, column_or_1d(y, warn=True)
        y = y.toarray() if hasattr(y, "toarray") else y
        if not np.isin(y, (0, 1)).all():
            raise ValueError("y with several columns must hold zeros and ones, a column for each label")
        if self.class_weight is not None:
            raise ValueError("class_weight is for one label a row; with several use sample_weight")
        return X, y

    def _start(self, X: Any, y: np.ndarray, classes: np.ndarray) -> None:
        """A new network, and all that its training carries along."""
        width = int(self.hidden[-1]) if self.hidden else X.shape[1]
        noise_size = {"det": 0, "het": len(classes)}.get(self.head, width)
        if width * noise_size > NOISE_PARAMETER_LIMIT:
            raise ValueError(
                f"head={self.head!r} on {width:,} features needs {width * noise_size:,} parameters for one part of its "
                "noise; put a smaller hidden layer before it, such as hidden=(512,)"
            )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):  # the caller's own random numbers stay as they are
            torch.manual_seed(seed)
            head = build_head(
                self.head,
                width,
                len(classes),
                rank=int(self.rank),
                noise_init=float(self.noise_init),
                link="sigmoid" if y.ndim == 2 else "softmax",
                temperature=LearnedTemperature(init=1.0) if self.temperature == "learned" else float(self.temperature),
                train_samples=int(self.train_samples),
                eval_samples=int(self.eval_samples),
                sampler=self.sampler,
            )
            network = RowNetwork(X.shape[1], [int(size) for size in self.hidden], head)
        wide = X.dtype == np.float64 and torch.device(self.device).type != "mps"  # which has no float64
        self.network_ = network.to(self.device, torch.float64 if wide else torch.float32)
        self._trainer = RowTrainer(self.network_, weight_decay=float(self.weight_decay), seed=seed)
        # Without the mean, so that it takes sparse rows: the network subtracts it from dense batches.
        self._scaler = StandardScaler(with_mean=False)
        self.classes_ = classes

    def _examples(self, X: Any, y: np.ndarray, classes: np.ndarray, sample_weight: Any) -> Examples:
        """Labels as class ids [n], or as numbers [n, K]; and the weights of rows and of their classes together."""
        weight = np.ones(X.shape[0])
        if sample_weight is not None:
            weight = np.asarray(check_array(sample_weight, ensure_2d=False, input_name="sample_weight"), np.float64)
            if weight.shape != (X.shape[0],):
                raise ValueError(f"sample_weight must have shape {(X.shape[0],)}, found {weight.shape}")
            if weight.min() < 0:
                raise ValueError(f"sample_weight must not be negative, found {weight.min():g}")
        if y.ndim == 2:
            if y.shape[1] != len(classes):
                raise ValueError(f"y must have {len(classes)} columns, one for each class, found {y.shape[1]}")
            targets = y.astype(np.float64)
        else:
            targets = np.searchsorted(classes, y).clip(max=len(classes) - 1)
            unknown = classes[targets] != y
            if unknown.any():
                raise ValueError(f"y has labels that are not among the classes: {np.unique(y[unknown])[:5]}")
            if self.class_weight == "balanced":
                sums = np.bincount(targets, weights=weight)
                weight = weight * (weight.sum() / np.where(sums > 0, sums, 1))[targets]
            elif self.class_weight is not None:
                weight = weight * compute_class_weight(self.class_weight, classes=classes, y=y)[targets]
        if not weight.any():
            raise ValueError("all weights are zero: sample_weight and class_weight leave no row to train on")
        return Examples(X, targets, weight)

    def _update_moments(self, examples: Examples, rows: np.ndarray) -> None:
        """Add rows to the running mean and variance that features are standardised by."""
        if not self.standardize:
            return
        for block in np.array_split(rows, math.ceil(len(rows) / BLOCK)):
            self._scaler.partial_fit(examples.X[block], sample_weight=examples.weight[block])
        self.network_.mean.copy_(torch.as_tensor(self._scaler.mean_))
        self.network_.scale.copy_(torch.as_tensor(self._scaler.scale_))

    def _forget_scales(self) -> None:
        """What is trained is trained as it was before `rescale`."""
        self._trainer.unscale()
        if hasattr(self, "scales_"):
            del self.scales_

    def _epoch(self, examples: Examples, rows: np.ndarray, rates: Iterable[float]) -> float:
        loss = self._trainer.epoch(examples, rows, int(self.batch_size), rates)
        self.n_iter_ += 1
        self.loss_curve_.append(loss)
        if self.verbose:
            print(f"epoch {self.n_iter_}: loss {loss:.6f}")
        return loss

    def _predict(self, X: Any, function: Callable[[Head, Tensor, Tensor | None], Any]) -> list[Any]:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        return self._trainer.predict(X, function)

    def _outputs(self, X: Any) -> np.ndarray:
        """Log-probabilities, or log-odds for a matrix y, [n, K]."""
        return torch.cat(self._predict(X, lambda head, features, noise: head(features, noise=noise))).cpu().numpy()
