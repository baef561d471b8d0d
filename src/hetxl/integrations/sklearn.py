"""`HetXLClassifier`: a head behind scikit-learn's interface, for rows of numbers.

from hetxl.integrations.sklearn import HetXLClassifier

model = HetXLClassifier(random_state=0).fit(X, y)
model.predict_proba(X_test)
"""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.functional import SAMPLERS, LabelLists, Sampler
from hetxl.metrics.scaling import Scales, fit_scales
from hetxl.nn import HEADS, FixedTemperature, Head, LearnedTemperature, build_head
from hetxl.nn.heads import TARGETS
from hetxl.optim import (
    DEFAULTS,
    PRIOR,
    Defaults,
    Penalty,
    Recipe,
    add_prior,
    build_optimizer,
    choose_scaling,
    estimate_flips,
    learning_rate_at,
    noise_free_steps,
    prior_penalties,
    prior_steps,
    set_learning_rate,
    start_bias,
)
from hetxl.registry import EVAL_SAMPLES, RANK, TEMPERATURE, TRAIN_SAMPLES

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state, check_scalar
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(
        "hetxl.integrations.sklearn needs scikit-learn 1.6 or newer: pip install -U scikit-learn"
    ) from error

BLOCK = 4096
"""Rows that are evaluated or predicted at a time."""

Result = TypeVar("Result")


class Examples(NamedTuple):
    """Rows with what is known of them."""

    X: Any  # [n, D] array, or a sparse matrix whose rows can be chosen
    targets: np.ndarray  # [n] class ids, or [n, K] numbers for the sigmoid link
    weight: np.ndarray  # [n]


class Step(NamedTuple):
    """A step of training."""

    learning_rate: float
    noise: bool = True  # whether the head has its noise yet


class RowNetwork(nn.Module):
    """Rows [B, D] → the features of a head: standardised, then through hidden layers of some sizes, each with a ReLU.

    The head has a linear classifier of its own.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, in_features: int, hidden: Sequence[int], head: Head):
        super().__init__()
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))
        sizes = [in_features, *hidden]
        layers = (layer for pair in zip(sizes, hidden, strict=False) for layer in (nn.Linear(*pair), nn.ReLU()))
        self.body = nn.Sequential(*layers)
        self.head = head
        # Equal probabilities at the start, and no weight on what never varies.
        for parameter in head.classifier.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the features of rows [B, D]."""
        return self.body((rows - self.mean) / self.scale)


class RowTrainer:
    """A network with what its training carries along: the optimiser, AdamW, and the random numbers.

    The rows of a batch share their noise, [S, Q], which changes with every step; evaluations and predictions share one
    draw. So no result depends on where in a batch a row is, or on which others are there.
    """

    def __init__(self, network: RowNetwork, recipe: Recipe, seed: int):
        self.network, self.recipe = network, recipe
        self.optimizer = build_optimizer(network, recipe)
        self.penalties: list[Penalty] = []  # of a prior on the weights
        self.rng = np.random.default_rng(seed)
        self.noise_seed = network.head.eval_seed = self._new_seed()
        self._unscaled: tuple[Any, float, float] | None = None

    def epoch(self, examples: Examples, rows: np.ndarray, batch_size: int, schedule: Iterable[Step]) -> float:
        """Go once through some rows of the examples; return the weighted mean of their losses, each before its step.

        Batches have at most `batch_size` rows and are of one size, give or take one row.
        """
        head = self.network.head
        steps = math.ceil(len(rows) / batch_size)
        # With one batch its order does not matter, and random numbers must not depend on the number of rows, so that
        # weights are equivalent to repeated rows.
        order = self.rng.permutation(rows) if steps > 1 else rows
        total = 0.0
        self.network.train()
        for batch, step in zip(np.array_split(order, steps), schedule, strict=False):
            noise = self._normals(head.train_samples, self._new_seed())
            if noise is not None and not step.noise:
                noise = torch.zeros_like(noise[:1])
            loss = self._loss(examples, batch, noise)
            self.optimizer.zero_grad()
            (loss / len(batch)).backward()
            add_prior(self.penalties, noise=step.noise)
            set_learning_rate(self.optimizer, step.learning_rate)
            self.optimizer.step()
            total += loss.item()
        return total / float(examples.weight[rows].sum())

    def start_bias(self, examples: Examples) -> None:
        """Start the bias of several labels at the log-odds of each, by the weights of the rows."""
        if self.network.head.link == "sigmoid":
            counts = torch.from_numpy(examples.weight @ examples.targets)
            start_bias(cast("nn.Linear", self.network.head.classifier).bias, counts, float(examples.weight.sum()))

    @torch.no_grad()
    def evaluate(self, examples: Examples, rows: np.ndarray) -> float:
        """Return the weighted mean loss of some rows, with the noise of predictions."""
        self.network.eval()
        noise = self._normals(self.network.head.eval_samples, self.noise_seed)
        blocks = np.array_split(rows, math.ceil(len(rows) / BLOCK))
        total = sum(self._loss(examples, block, noise).item() for block in blocks)
        return total / float(examples.weight[rows].sum())

    @torch.no_grad()
    def predict(self, X: Any, function: Callable[[Head, Tensor, Tensor | None], Result]) -> list[Result]:
        """Return a function of head, features [B, D] and noise [S, Q] of each block of the rows of X [n, D]."""
        head = self.network.eval().head
        noise = self._normals(head.eval_samples, self.noise_seed)
        blocks = np.array_split(np.arange(X.shape[0]), math.ceil(X.shape[0] / BLOCK))
        return [function(head, self.network(self._rows(X, block)), noise) for block in blocks]

    def rescale(self, examples: Examples) -> Scales:
        """Give the head the τ and the scale of the noise that are best for some rows, all of one weight.

        Their labels are right, so that none is flipped.
        """
        head, features = self.network.head, self.predict(examples.X, lambda head, features, noise: features)
        labels = torch.from_numpy(examples.targets).to(features[0].device)
        targets = LabelLists.from_sparse(labels.to_sparse()) if labels.dim() == 2 else labels
        self._unscaled = head.temperature, head.noise_scale, head.flip_rate
        head.flip_rate = 0.0
        scales = fit_scales(head, features, targets, seed=self.noise_seed)
        head.temperature = FixedTemperature(scales.temperature)
        head.noise_scale = scales.noise
        return scales

    def unscale(self) -> None:
        """Undo `rescale`."""
        if self._unscaled is not None:
            head = self.network.head
            head.temperature, head.noise_scale, head.flip_rate = self._unscaled
            self._unscaled = None

    def _loss(self, examples: Examples, rows: np.ndarray, noise: Tensor | None) -> Tensor:
        """Return the sum of the weighted losses of some rows."""
        features = self.network(self._rows(examples.X, rows))
        targets = torch.from_numpy(examples.targets[rows]).to(features.device)
        weight = torch.from_numpy(examples.weight[rows]).to(features)
        return self.network.head(features, targets, weight=weight, reduction="sum", noise=noise)

    def _rows(self, X: Any, rows: np.ndarray) -> Tensor:
        """Return some rows as a dense tensor, [B, D]."""
        return torch.from_numpy(dense(X[rows])).to(self.network.mean)

    def _normals(self, samples: int, seed: int) -> Tensor | None:
        """Return standard normals [S, Q]; None for a head without noise."""
        head = self.network.head
        if head.covariance is None:
            return None
        generator, like = torch.Generator().manual_seed(seed), self.network.mean
        return head.covariance.draw(head.sampler, samples, generator=generator, device=like.device, dtype=like.dtype)

    def _new_seed(self) -> int:
        return int(self.rng.integers(2**63))


EPOCHS = 50
"""What `max_iter=None` stands for: this many epochs, or more where few rows make short ones, for `Defaults.steps`."""

PRIOR_ROWS = 20_000
"""Rows that the prior is chosen on, at most; every tenth is held out to judge by."""

NOISE_PARAMETER_LIMIT = 2**27
"""A wide input straight into a noisy head is refused above this many parameters in one part of its noise."""


class Uncertainty(NamedTuple):
    """The uncertainty of predictions, in nats; with several labels per row, summed over them.

    The difference between the two is what the noise explains.
    """

    entropy: np.ndarray  # [n], of the averaged probabilities
    expected_entropy: np.ndarray  # [n], mean entropy of the single draws of the noise


class HetXLClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for noisy labels: standardised features, hidden layers if any, and a head of `hetxl.nn`.

    It is trained by AdamW; `fit` lets the rate fall to zero along a cosine. Without hidden layers the head trains for
    30 % of the steps without its noise, then with it. A weight counts as that many repetitions of its row, exactly so
    while one batch holds all rows; a row of weight zero is left out. With a matrix y of zeros and ones every column is
    a label of its own, by the sigmoid link.

    Args:
        head: "het-xl", "het", "het-h", or "det" for the usual classifier without noise.
        rank: R, of the covariance of the noise.
        hidden: sizes of hidden layers with ReLU; () for a linear classifier.
        temperature: τ, a number, or "learned".
        noise_init: scale of the noise at the start.
        train_samples: S in training.
        eval_samples: S of predictions.
        sampler: "orthogonal", "iid", "antithetic", "sobol", or a function like those in `hetxl.functional.samplers`.
        learning_rate: peak of AdamW's; None for 0.02 without hidden layers and 0.002 with some.
        weight_decay: of AdamW, on weights and not on biases; None for 0.01 with hidden layers, and without them for a
            Gaussian prior, whose variance `fit` chooses on held-out rows before it trains on all of them.
        flip_rate: ε, share of uniformly random labels; None to estimate it on held-out rows, without hidden
            layers. `predict_proba(X, target="clean")` leaves it out.
        batch_size: rows of a step.
        max_iter: epochs; None for 50, or more where those would be fewer than 2,000 steps (1,000 with hidden layers).
        tol: training ends when the loss has not fallen by this much for `n_iter_no_change` epochs; 0 never stops early.
            The training loss ends nothing in the first half of the epochs with noise.
        early_stopping: watch the loss of rows held out of training, not the training loss, and keep the weights that
            were best there.
        validation_fraction: share of the rows held out.
        standardize: bring features to mean 0 and variance 1, or without hidden layers to a variance of 1 on average,
            if that suits the held-out rows better; `partial_fit` keeps running moments.
        class_weight: None, "balanced", or a dict from label to weight.
        warm_start: let `fit` continue from the last fit.
        random_state: of initial weights, order of rows and noise.
        verbose: print the loss of each epoch.

    Attributes:
        classes_: [K] labels, sorted; the numbers of the columns for a matrix y.
        network_: the trained `RowNetwork`: `network_(rows)` gives the features of `network_.head`.
        n_iter_: epochs done.
        loss_curve_: training loss of each epoch.
        validation_loss_curve_: with `early_stopping`, that of the rows held out.
        scales_: τ and the factor of the noise, once `rescale` has fitted them.
        prior_: variance of the logits under the prior; None where weight decay takes its place.
        flip_rate_: ε, as stated or estimated.
    """

    def __init__(
        self,
        *,
        head: str = "het-xl",
        rank: int = RANK,
        hidden: tuple[int, ...] = (),
        temperature: float | str = TEMPERATURE,
        noise_init: float = 0.1,
        train_samples: int = TRAIN_SAMPLES,
        eval_samples: int = EVAL_SAMPLES,
        sampler: str | Sampler = "orthogonal",
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        flip_rate: float | None = None,
        batch_size: int = 256,
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
        self.head, self.rank, self.hidden = head, rank, hidden
        self.temperature, self.noise_init = temperature, noise_init
        self.train_samples, self.eval_samples, self.sampler = train_samples, eval_samples, sampler
        self.learning_rate, self.weight_decay, self.batch_size = learning_rate, weight_decay, batch_size
        self.flip_rate = flip_rate
        self.max_iter, self.tol, self.n_iter_no_change = max_iter, tol, n_iter_no_change
        self.early_stopping, self.validation_fraction = early_stopping, validation_fraction
        self.standardize, self.class_weight, self.warm_start = standardize, class_weight, warm_start
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "HetXLClassifier":
        """Train.

        Args:
            X: [n, D], dense or sparse.
            y: [n] labels of any kind that can be sorted, or [n, K] zeros and ones.
            sample_weight: [n], not negative; each counts as that many repetitions of its row.
        """
        check_parameters(self)
        fresh = not (self.warm_start and hasattr(self, "network_"))
        X, y = self._validate(X, y, reset=fresh)
        classes = self.classes_ if not fresh else np.arange(y.shape[1]) if y.ndim == 2 else np.unique(y)
        examples = self._examples(X, y, classes, sample_weight)
        if fresh:
            self._start(X, y, classes)
            self._trainer.start_bias(examples)
        self._forget_scales()
        rows, held_out = np.flatnonzero(examples.weight), np.array([], dtype=np.int64)
        if self.early_stopping:
            size = max(1, round(self.validation_fraction * len(rows)))
            held_out, rows = np.split(self._trainer.rng.permutation(rows), [size])
            if not len(rows):
                raise ValueError("early_stopping=True needs at least two rows, one to train on and one to hold out")
        self._update_moments(examples, rows)
        self._set_prior(examples, rows)
        examples = examples._replace(weight=examples.weight / examples.weight[rows].mean())
        steps = math.ceil(len(rows) / self.batch_size)
        epochs = self.max_iter or max(EPOCHS, math.ceil(self._defaults.steps / steps))
        recipe = self._trainer.recipe
        # A fit that continues an earlier one has its noise already.
        recipe = recipe if fresh else dataclasses.replace(recipe, noise_start=0.0)
        silent = noise_free_steps(epochs * steps, recipe)
        # At a high learning rate the training loss may stand still, or rise, that falls later.
        watched = silent if self.early_stopping else (silent + epochs * steps) // 2
        self.n_iter_, self.loss_curve_, self.validation_loss_curve_ = 0, [], []
        best, waited, best_state = math.inf, 0, None
        for epoch in range(epochs):
            numbers = range(epoch * steps, (epoch + 1) * steps)
            schedule = [Step(learning_rate_at(step, epochs * steps, recipe), step >= silent) for step in numbers]
            loss = self._epoch(examples, rows, schedule)
            if numbers[-1] < watched:
                continue  # neither the end nor the best is sought before the noise is there
            if self.early_stopping:
                loss = self._trainer.evaluate(examples, held_out)
                self.validation_loss_curve_.append(loss)
            waited = 0 if loss < best - self.tol else waited + 1
            if loss < best:
                best = loss
                best_state = copy.deepcopy(self.network_.state_dict()) if self.early_stopping else None
            if self.tol and waited >= self.n_iter_no_change:
                break
        if best_state is not None:
            self.network_.load_state_dict(best_state)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> "HetXLClassifier":
        """Train for one epoch on some rows, from where the last call ended, at a constant rate.

        Args:
            X: see `fit`.
            y: see `fit`.
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
            self._trainer.start_bias(examples)
            self.n_iter_, self.loss_curve_ = 0, []
        self._forget_scales()
        rows = np.flatnonzero(examples.weight)
        self._update_moments(examples, rows)
        self._epoch(examples, rows, repeat(Step(self._trainer.recipe.learning_rate)))
        return self

    def rescale(self, X: Any, y: Any) -> "HetXLClassifier":
        """Fit τ and the scale of the noise to labels that can be trusted, and that `fit` has not seen.

        A model that is trained on wrong labels is too uncertain; a few correct labels show how certain it should be.
        The predicted classes hardly change, but their probabilities do. Continued training keeps the fitted scales. For
        X and y see `fit`; the classes must be the same.
        """
        check_is_fitted(self)
        X, y = self._validate(X, y, reset=False)
        self._trainer.unscale()
        self.scales_ = self._trainer.rescale(self._examples(X, y, self.classes_, None))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row of X [n, D]: [n], or [n, K] zeros and ones for a matrix y."""
        outputs = self._outputs(X)
        return (outputs > 0).astype(np.int64) if self._multilabel else self.classes_[outputs.argmax(1)]

    def predict_proba(self, X: Any, target: str = "observed") -> np.ndarray:
        """Return probabilities for X [n, D], averaged over the noise: [n, K], in the order of `classes_`.

        They are those of the label that a row would be given, "observed", or of the class that it has, "clean".
        """
        return np.exp(self.predict_log_proba(X, target))

    def predict_log_proba(self, X: Any, target: str = "observed") -> np.ndarray:
        """Return logarithms of the probabilities for X [n, D], [n, K]; finite where a probability underflows."""
        outputs = self._outputs(X, target)
        return -np.logaddexp(0, -outputs) if self._multilabel else outputs

    def decision_function(self, X: Any) -> np.ndarray:
        """Return log-probabilities for X [n, D], [n, K]; log-odds for two classes, [n], and for a matrix y, [n, K]."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 and not self._multilabel else outputs

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return entropies of predictions for X [n, D]: of the averaged probabilities, and within single draws, [n]."""
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

    def _validate(self, X: Any, y: Any, reset: bool) -> tuple[Any, np.ndarray]:
        """X as floats [n, D], dense or CSR; y as labels [n] or as zeros and ones [n, K]."""
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], multi_output=True, reset=reset
        )
        check_classification_targets(y)
        kind = type_of_target(y)
        several = kind not in ("binary", "multiclass")
        if not reset and several != self._multilabel:
            raise ValueError(f"y is {kind}, and the y of the fit that this one continues was not")
        if not several:
            return X, column_or_1d(y, warn=True)
        y = y.toarray() if hasattr(y, "toarray") else y
        if not np.isin(y, (0, 1)).all():
            raise ValueError("y with several columns must hold zeros and ones, a column for each label")
        if self.class_weight is not None:
            raise ValueError("class_weight is for one label per row; with several labels use sample_weight")
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
                flip_rate=float(self.flip_rate or 0.0) if y.ndim == 1 else 0.0,
                train_samples=int(self.train_samples),
                eval_samples=int(self.eval_samples),
                sampler=self.sampler,
            )
            network = RowNetwork(X.shape[1], [int(size) for size in self.hidden], head)
        wide = X.dtype == np.float64 and torch.device(self.device).type != "mps"  # which has no float64
        self.network_ = network.to(self.device, torch.float64 if wide else torch.float32)
        self.prior_: float | None = None
        self._common_scale = False  # whether all features are divided by one deviation
        self.flip_rate_ = head.flip_rate
        rule, decay = self._defaults, self.weight_decay
        recipe = Recipe(
            learning_rate=float(self.learning_rate or rule.learning_rate),
            weight_decay=float(decay if decay is not None else rule.weight_decay or 0.0),
            temperature_learning_rate=1.0,
            noise_learning_rate=rule.noise_learning_rate,
            noise_start=0.0 if head.covariance is None else rule.noise_start,
        )
        self._trainer = RowTrainer(self.network_, recipe, seed)
        # Without the mean, so that it takes sparse rows: the network subtracts it from dense batches.
        self._scaler = StandardScaler(with_mean=False)
        self.classes_ = classes

    @property
    def _defaults(self) -> Defaults:
        return DEFAULTS["network" if self.hidden else "head"]

    def _set_prior(self, examples: Examples, rows: np.ndarray) -> None:
        """Choose the prior on held-out rows, unless weight decay takes its place; weights count as repetitions."""
        if self.weight_decay is not None or self.hidden:
            return
        chosen = rows[:: max(1, len(rows) // PRIOR_ROWS)]
        # By what a row holds, so that its repetitions are on one side, as one row with their weight is.
        keys = [zlib.crc32(np.ascontiguousarray(dense(examples.X[[row]])).tobytes()) for row in chosen]
        held_out = np.array(keys) % 10 == 0
        prior = PRIOR
        if held_out.any() and not held_out.all():
            link, like = self.network_.head.link, self.network_.mean
            parts: list[Tensor] = []
            weights: list[Tensor] = []
            for side in (chosen[~held_out], chosen[held_out]):
                with torch.no_grad():
                    parts.append(self.network_(torch.from_numpy(dense(examples.X[side])).to(like)))
                parts.append(torch.from_numpy(examples.targets[side]).to(like.device))
                weights.append(torch.from_numpy(examples.weight[side]).to(like))
            options: dict[str, Any] = {"weight": weights[0], "held_out_weight": weights[1]}
            training, judging = (parts[0], parts[1]), (parts[2], parts[3])
            classes, head = len(self.classes_), self.network_.head
            steps = prior_steps(self._defaults.steps, classes * head.in_features)
            options |= {"batch_size": int(self.batch_size), "seed": self._trainer.noise_seed, "steps": steps}
            # A fit that continues an earlier one keeps the scale of its features.
            deviation = self.network_.scale if self.standardize and self.prior_ is None else None
            prior, common = choose_scaling(
                deviation, *training, *judging, classes, link=link, flip_rate=head.flip_rate, **options
            )
            if deviation is not None and common is not None:
                factor = deviation / common
                training, judging = (parts[0] * factor, parts[1]), (parts[2] * factor, parts[3])
                self._common_scale = True
                self._set_scale()
            if self.flip_rate is None and link == "softmax":
                head.flip_rate, prior = estimate_flips(*training, *judging, classes, prior=prior, **options)
        self.prior_, self.flip_rate_ = prior, self.network_.head.flip_rate
        total = float(examples.weight[rows].sum())
        self._trainer.penalties = prior_penalties(self.network_.head, prior, total)

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
        self._set_scale()

    def _set_scale(self) -> None:
        """Divide features by their deviations, or by the root mean square of all: of those that vary."""
        variance = np.asarray(self._scaler.var_)
        common = np.sqrt(variance[variance > 0].mean()) if self._common_scale and variance.any() else None
        self.network_.scale.copy_(torch.as_tensor(self._scaler.scale_ if common is None else common))

    def _forget_scales(self) -> None:
        """What is trained is trained as it was before `rescale`."""
        self._trainer.unscale()
        if hasattr(self, "scales_"):
            del self.scales_

    def _epoch(self, examples: Examples, rows: np.ndarray, schedule: Iterable[Step]) -> float:
        loss = self._trainer.epoch(examples, rows, int(self.batch_size), schedule)
        self.n_iter_ += 1
        self.loss_curve_.append(loss)
        if self.verbose:
            print(f"epoch {self.n_iter_}: loss {loss:.6f}")
        return loss

    def _predict(self, X: Any, function: Callable[[Head, Tensor, Tensor | None], Any]) -> list[Any]:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        return self._trainer.predict(X, function)

    def _outputs(self, X: Any, target: str = "observed") -> np.ndarray:
        """Return log-probabilities, or log-odds for a matrix y, [n, K]."""

        def outputs(head: Head, features: Tensor, noise: Tensor | None) -> Tensor:
            return head(features, noise=noise)

        def clean(head: Head, features: Tensor, noise: Tensor | None) -> Tensor:
            prediction = head.predict(features, noise=noise, target="clean")
            return prediction.log_probs if head.link == "softmax" else torch.logit(prediction.probs)

        one_of("target", target, TARGETS)
        return torch.cat(self._predict(X, clean if target == "clean" else outputs)).cpu().numpy()


def dense(rows: Any) -> np.ndarray:
    """Return rows of an array or of a sparse matrix as an array [b, D]."""
    return rows.toarray() if hasattr(rows, "toarray") else rows


def check_parameters(model: HetXLClassifier) -> None:
    """Raise for a parameter that is out of range: scikit-learn wants them unchecked until an estimator is fitted."""
    one_of("head", model.head, HEADS)
    for name in ("train_samples", "eval_samples", "batch_size", "n_iter_no_change"):
        check_scalar(getattr(model, name), name, Integral, min_val=1)
    check_scalar(model.rank, "rank", Integral, min_val=0)
    if model.flip_rate is not None:
        check_scalar(model.flip_rate, "flip_rate", Real, min_val=0, max_val=1, include_boundaries="left")
    if model.max_iter is not None:
        check_scalar(model.max_iter, "max_iter", Integral, min_val=1)
    if model.learning_rate is not None:
        check_scalar(model.learning_rate, "learning_rate", Real, min_val=0, include_boundaries="neither")
    if not isinstance(model.hidden, (tuple, list)):
        raise TypeError(f"hidden must be a tuple of sizes such as (512,), found {model.hidden!r}")
    for size in model.hidden:
        check_scalar(size, "hidden", Integral, min_val=1)
    check_scalar(model.tol, "tol", Real, min_val=0)
    if model.weight_decay is not None:
        check_scalar(model.weight_decay, "weight_decay", Real, min_val=0)
    for name, high in (("noise_init", None), ("validation_fraction", 1)):
        check_scalar(getattr(model, name), name, Real, min_val=0, max_val=high, include_boundaries="neither")
    if isinstance(model.temperature, str):
        one_of("temperature", model.temperature, ("learned",))
    else:
        check_scalar(model.temperature, "temperature", Real, min_val=0, include_boundaries="neither")
    if isinstance(model.class_weight, str):
        one_of("class_weight", model.class_weight, ("balanced",))
    if not callable(model.sampler):
        one_of("sampler", model.sampler, SAMPLERS)
