"""PyTorch Lightning: a module that trains a backbone with a head, and a callback that monitors a head in any module.

Both use the installed package, `lightning` or `pytorch_lightning`.
"""

import dataclasses
import importlib
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from hetxl._checks import integer_at_least
from hetxl.functional import IGNORE_INDEX, LabelLists, check_targets
from hetxl.functional.targets import Targets, TargetsLike
from hetxl.integrations.convert.locate import find_head
from hetxl.metrics import Records, RecordsBuilder, calibration_error
from hetxl.nn import Head, Prediction
from hetxl.nn.classifier import is_plain_linear
from hetxl.optim import (
    DEFAULTS,
    PRIOR,
    Penalty,
    Recipe,
    Scaling,
    add_prior,
    build_optimizer,
    choose_scaling,
    learning_rate_at,
    noise_free_steps,
    parameter_groups,
    prior_penalties,
    prior_steps,
    set_learning_rate,
)

__all__ = ["CalibrationError", "HeadMonitor", "HetXLModule", "noise_scale"]


def import_lightning() -> Any:
    """Return `lightning.pytorch`, or `pytorch_lightning` if only that is installed or already imported."""
    # A Trainer accepts only modules of its own package, so a package that is already imported has priority.
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name.partition(".")[0]:
                raise
    raise ImportError("hetxl.integrations.lightning needs lightning: pip install lightning")


if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torchmetrics
else:
    pl = import_lightning()
    # Imported after Lightning, which installs it, so that the error above is raised if both are missing.
    torchmetrics = importlib.import_module("torchmetrics")

NOISE_CLASSES = 256
"""Number of logits per example in `noise_scale`, evenly spaced over the classes."""


class CalibrationError(torchmetrics.Metric):
    """The expected calibration error with 15 bins of equal mass, as in `hetxl.metrics.calibration_error`. It stores two
    numbers per example, and gathers them from all processes."""

    full_state_update = False
    confidence: list[Tensor]
    hit: list[Tensor]

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("hit", [], dist_reduce_fx="cat")

    def update(self, confidence: Tensor, hit: Tensor) -> None:
        """Add probabilities of the most probable classes [b], and whether these are labels [b]."""
        self.confidence.append(confidence.to(self.device, torch.float32))
        self.hit.append(hit.to(self.device, torch.bool))

    def compute(self) -> Tensor:
        """Return the error over all examples; NaN without any."""
        # A single tensor after gathering from several processes.
        states: list[Any] = [self.confidence, self.hit]
        confidence, hit = [torch.cat(each) if isinstance(each, list) and each else each for each in states]
        if not len(hit):
            return torch.tensor(math.nan, device=self.device)
        columns = {name: np.zeros((len(hit), 1) if name.startswith("top_") else len(hit)) for name in Records.TYPES}
        columns |= {"hit": hit.cpu().numpy(), "top_probs": confidence[:, None].cpu().numpy()}  # pyright: ignore
        return torch.tensor(calibration_error(Records(**columns)), dtype=torch.float32, device=self.device)


@torch.no_grad()
def noise_scale(head: Head, features: Tensor) -> float:
    """Return the size of the noise relative to τ for features [b, D].

    This is the median over the examples of the logits' standard deviation (root mean square over at most 256 classes)
    divided by τ; 0 for a head without noise.
    """
    count = min(head.num_classes, NOISE_CLASSES)
    classes = torch.linspace(0, head.num_classes - 1, count, device=features.device).round().long()
    covariance = head.logit_distribution(features).covariance(classes.expand(len(features), -1))
    variance = covariance.diagonal(dim1=-2, dim2=-1).float().mean(-1)
    return float(variance.sqrt().median() / head.temperature())


def draws(device: torch.device, number: int) -> torch.Generator:
    """Return the generator for a batch of an evaluation, the same each time, without changing torch's random state."""
    return torch.Generator(device).manual_seed(number)


MEASURED_BATCHES, LEAST_ROWS = 100, 20
"""Number of training batches to measure features and choose the prior on, and number of rows below which the prior is
`PRIOR`."""

_MEANS = ("nll", "precision@1", "precision@5")


class HetXLModule(pl.LightningModule):
    """A LightningModule that trains a backbone with a head, using the head's fused loss.

    Batches are pairs of inputs [B, ...] and targets of the head; predictions also accept only inputs. It logs
    `train_loss`, and with the prefix `val_` or `test_`: `nll`, `precision@1`, `precision@5` and `calibration_error`.
    Evaluations use the same noise each time. If targets are class probabilities (softmax, [..., K]), `nll` is the
    cross-entropy, as in training, and the other metrics use the most probable class.

    Args:
        backbone: network from inputs to features [..., D].
        head: a head of hetxl over K classes.
        learning_rate: peak learning rate of AdamW [default: 0.02 if only the head is trained, 0.002 with a network;
            fine-tuning a published network needs less, such as 1e-4].
        weight_decay: weight decay of matrices; τ, biases and norms have none [default: 0.01 with a network; a head
            alone gets a Gaussian prior, chosen on held-out rows of the first training batches, as in `hetxl train`,
            and one deviation for all standardised features if that lowers the NLL].
        temperature_learning_rate: learning rate of a learned τ, as a multiple of `learning_rate`.
        noise_learning_rate: learning rate of the covariance, as a multiple [default: 0.3 for a head alone, else 1].
        noise_start: share of the steps, at the start, without noise [default: 0.3 for a head alone, else 0].
        warmup: steps of linear warm-up; a value below 1 is a share of all steps.
        schedule: decay after the warm-up: "cosine" or "linear" to zero, or "constant".
        optimizer: function from parameter groups with learning rates to an optimiser, to use instead of AdamW, such as
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        top_k: number of classes in `predict_step`; None for all classes.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        *,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        temperature_learning_rate: float = 0.1,
        noise_learning_rate: float | None = None,
        noise_start: float | None = None,
        warmup: float = 0.05,
        schedule: str = "cosine",
        optimizer: Callable[[list[dict]], optim.Optimizer] | None = None,
        top_k: int | None = None,
    ):
        super().__init__()
        if not isinstance(head, Head):
            raise TypeError(f"head must be a head of hetxl, such as hetxl.HetXLHead, found {type(head).__name__}")
        alone = not any(parameter.requires_grad for parameter in backbone.parameters())
        rule = DEFAULTS["head" if alone else "network"]
        start = 0.0 if head.covariance is None else rule.noise_start if noise_start is None else noise_start
        self.has_prior = alone and weight_decay is None and is_plain_linear(head.classifier)
        self.prior: float | None = None
        self.penalties: list[Penalty] = []
        decay = 0.0 if self.has_prior else 0.01 if weight_decay is None else weight_decay
        self.recipe = Recipe(
            learning_rate=rule.learning_rate if learning_rate is None else learning_rate,
            weight_decay=decay,
            temperature_learning_rate=temperature_learning_rate,
            noise_learning_rate=rule.noise_learning_rate if noise_learning_rate is None else noise_learning_rate,
            noise_start=start,
            warmup=warmup,
            schedule=schedule,
        )
        self.save_hyperparameters(ignore=["backbone", "head", "optimizer"])
        self.backbone, self.head, self.optimizer, self.top_k = backbone, head, optimizer, top_k
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores.update({f"{stage}_{name}": torchmetrics.MeanMetric() for name in _MEANS})
            self.scores[f"{stage}_calibration_error"] = CalibrationError()

    def forward(self, inputs: Any) -> Tensor:
        """Return log-probabilities [..., K]; for the sigmoid link the logits of the mean probabilities."""
        return self.head(self.backbone(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        options: dict[str, Any] = {}
        if self.recipe.noise_start and self.global_step < noise_free_steps(self._steps(), self.recipe):
            assert self.head.covariance is not None
            options["noise"] = torch.zeros(1, self.head.covariance.size, device=self.device)
        loss = self.head(self.backbone(inputs), targets, **options)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics."""
        # Lightning resets them too, but after `validate` in inference mode, whose tensors `fit` cannot change.
        score: Any
        for score in self.scores.values():
            score.reset()

    on_test_epoch_start = on_validation_epoch_start

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the prediction for a batch.

        Returns:
            probs: [..., K], or with `top_k` [..., k], most probable first, with classes [..., k].
            entropy: [...], entropy of the averaged probabilities, in nats.
            mutual_information: [...], the part of the entropy that the noise explains.
        """
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        prediction = self.head.predict(self.backbone(inputs), self.top_k, generator=draws(self.device, batch_idx))
        outputs = {"probs": prediction.probs, "entropy": prediction.entropy}
        outputs["mutual_information"] = prediction.mutual_information
        return outputs if prediction.indices is None else outputs | {"classes": prediction.indices}

    def configure_optimizers(self) -> Any:
        """Return AdamW, or the result of `optimizer`, with a learning rate schedule over steps."""
        steps = self._steps()
        by_share = self.recipe.noise_start or 0 < self.recipe.warmup < 1
        if not steps and (self.recipe.schedule != "constant" or by_share):
            raise ValueError(
                f"schedule={self.recipe.schedule!r} with warmup={self.recipe.warmup:g} needs the number of steps; pass "
                "max_steps to the Trainer, or use schedule='constant', a warmup in steps and noise_start=0"
            )
        if self.optimizer is None:
            # A fused step does not support clipping with a gradient scaler.
            scaled = str(self.trainer.precision).startswith("16")
            optimizer = build_optimizer(
                self, dataclasses.replace(self.recipe, precision="float16" if scaled else "float32")
            )
        else:
            groups = parameter_groups(self, self.recipe)
            optimizer = self.optimizer([group | {"lr": self.recipe.learning_rate} for group in groups])
        set_learning_rate(optimizer, self.recipe.learning_rate)

        def share(step: int) -> float:
            step = min(step, steps) if steps else step
            return learning_rate_at(step, steps or 1, self.recipe) / self.recipe.learning_rate

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _steps(self) -> int:
        """Return the number of steps of the fit; 0 if it is unknown."""
        steps = self.trainer.estimated_stepping_batches
        return int(steps) if 0 < steps < math.inf else 0

    def on_fit_start(self) -> None:
        """On training batches, measure the features of a head that standardises them, if not done yet, and choose the
        prior, if the head has one."""
        standardize = self.head.standardize
        measured = standardize is None or bool(standardize.mean.any() or (standardize.deviation != 1).any())
        if measured and not self.has_prior:
            return
        self.trainer.fit_loop.setup_data()
        loader: Any = self.trainer.train_dataloader
        with torch.no_grad():
            batches = [
                (self.backbone(inputs.to(self.device)).flatten(0, -2), targets)
                for inputs, targets in itertools.islice(loader, MEASURED_BATCHES)
            ]
        if standardize is not None and not measured:
            standardize.measure(features for features, _ in batches)
        if self.has_prior:
            self._set_prior(batches, loader, None if measured or standardize is None else standardize.deviation)

    def _set_prior(self, batches: list[tuple[Tensor, Any]], loader: Any, deviation: Tensor | None) -> None:
        """Choose the prior of the head and the scale of its features, with every tenth row held out."""
        head, features = self.head, torch.cat([features for features, _ in batches]).float()
        if self.prior is None:
            chosen = self._choose_scaling(features, [targets for _, targets in batches], deviation)
            # All processes use the choice of the first.
            self.prior, common = self.trainer.strategy.broadcast(chosen)
            if common is not None and head.standardize is not None:
                head.standardize.share(common)
        data: Any = getattr(loader, "dataset", None)
        rows = len(data) if hasattr(data, "__len__") else len(features)
        self.penalties = prior_penalties(head, self.prior, float(rows))

    def _choose_scaling(self, features: Tensor, targets: list[Any], deviation: Tensor | None) -> Scaling:
        head = self.head
        steps = prior_steps(self._steps(), head.num_classes * head.in_features)
        ids = all(isinstance(part, Tensor) and not part.is_floating_point() for part in targets)
        if not steps or not ids or head.link != "softmax" or len(features) < LEAST_ROWS:
            return Scaling(PRIOR, None)
        labels = torch.cat([part.flatten() for part in targets]).to(features.device)
        features, labels = features[labels >= 0], labels[labels >= 0]
        with torch.no_grad():
            features = features if head.standardize is None else head.standardize(features)
        judging = torch.arange(len(labels), device=labels.device) % 10 == 0
        rows = (features[~judging], labels[~judging], features[judging], labels[judging])
        size = len(features) // len(targets)
        with torch.enable_grad():
            return choose_scaling(deviation, *rows, head.num_classes, steps=steps, batch_size=size)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Add the gradient of the prior."""
        if self.penalties:
            silent = self.recipe.noise_start and self.global_step < noise_free_steps(self._steps(), self.recipe)
            add_prior(self.penalties, noise=not silent)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the chosen prior, for a resumed fit."""
        checkpoint["hetxl_prior"] = self.prior

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the prior of the resumed fit."""
        self.prior = checkpoint.get("hetxl_prior")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the validation metrics."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the test metrics."""
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, stage: str, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        features = self.backbone(inputs)
        rows = features.reshape(-1, features.shape[-1])
        prediction = self.head.predict(rows, generator=draws(self.device, batch_idx))
        checked = check_targets(targets, features.shape[:-1], self.head.num_classes, self.head.link)
        labels, soft = _of_rows(checked, self.head.link)
        builder = RecordsBuilder(self.head.link)
        builder.add(prediction, labels, np.arange(len(rows)))
        records = builder.build()

        def add(name: str, *values: np.ndarray) -> None:
            # Some devices lack double precision.
            tensors = [torch.from_numpy(value.astype(np.float32)).to(self.device) for value in values]
            score: Any = self.scores[f"{stage}_{name}"]
            if len(records):
                score.update(*tensors)
            self.log(f"{stage}_{name}", score, on_step=False, on_epoch=True)

        if soft is None:
            add("nll", -records.log_prob)
        else:
            add("nll", -(soft * prediction.log_probs.float()).sum(-1).cpu().numpy())
        add("precision@1", records.rank < 1)
        add("precision@5", records.rank < 5)
        add("calibration_error", records.confidence, records.hit)


def _of_rows(targets: Targets, link: str) -> tuple[Tensor | LabelLists, Tensor | None]:
    """Flatten targets of any leading shape: ids [n] or lists; and class probabilities [n, K], if any."""
    if targets.ids is not None:
        return targets.ids.reshape(-1), None
    if targets.dense is None:
        assert targets.lists is not None
        return targets.lists, None
    dense = targets.dense.reshape(-1, targets.dense.shape[-1])
    if link == "softmax":
        return dense.argmax(-1), dense
    return LabelLists.from_sparse(dense.to_sparse()), None


TARGETS = ("labels", "label", "targets", "target")
"""Keys of the targets in a batch that is a dict."""


class HeadMonitor(pl.Callback):
    """Log the state of a head in any LightningModule that contains one.

    - `temperature`, τ, and `noise_scale`, see the function of that name, for the first examples of a batch: in
      training, with Lightning's log.
    - `calibration_error`: over the examples of each validation epoch in all processes, with 15 bins of equal mass.

    For the calibration, the callback observes how the validation step calls the head. It uses the probabilities of
    `head.predict(…)` or `head(features)`; after `head(features, targets)` it computes a prediction itself. It does not
    change the random numbers of the training.

    Args:
        head: name of the head in the module, such as "model.fc"; None for the only head.
        examples: number of examples of a batch for the noise scale.
        every_n_steps: steps between values of τ and the noise scale [default: the Trainer's `log_every_n_steps`].
        calibration: whether to log the calibration error.
        targets: function from a validation batch to its targets; None for the targets that the head is called with, or
            else the second entry of a tuple, or "labels" or "targets" of a dict. For class probabilities, the most
            probable class is the label; for sigmoid labels in [0, 1], those of at least 0.5.
        prefix: prefix of the three names.
    """

    def __init__(
        self,
        head: str | None = None,
        *,
        examples: int = 32,
        every_n_steps: int | None = None,
        calibration: bool = True,
        targets: Callable[[Any], TargetsLike] | None = None,
        prefix: str = "",
    ):
        self.name = head
        self.examples = integer_at_least("examples", examples, 1)
        self.every_n_steps = None if every_n_steps is None else integer_at_least("every_n_steps", every_n_steps, 1)
        self.calibration, self.targets, self.prefix = calibration, targets, prefix
        self.error = CalibrationError()
        self._head: Head | None = None
        self._release: list[Callable[[], None]] = []
        self._features: Tensor | None = None
        self._labelled: tuple[Tensor, TargetsLike, int] | None = None
        self._probable: tuple[Tensor, Tensor] | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Find the head."""
        self._head = find_head(pl_module, self.name)

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Release the head."""
        self._leave()
        self._head = None

    on_exception = teardown  # pyright: ignore[reportAssignmentType]

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Observe the head."""
        self._watch()

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log τ and the noise scale."""
        own, usual = self.every_n_steps, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        every = usual if own is None else own
        if self._head is not None and every and (trainer.global_step % every == 0 or trainer.is_last_batch):
            values = {"temperature": float(self._head.temperature())}
            if self._features is not None and len(self._features):
                values["noise_scale"] = noise_scale(self._head, self._features)
            named = {f"{self.prefix}{name}": value for name, value in values.items()}
            pl_module.log_dict(named, on_step=True, on_epoch=False, sync_dist=True)
        self._leave()

    def on_validation_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reset the calibration."""
        self.error.to(pl_module.device)
        self.error.reset()

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Observe the calls of the head."""
        if self.calibration:
            self._watch()

    def on_validation_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the batch to the calibration."""
        if self._head is not None and (self._probable or self._labelled):
            self.error.update(*self._outcomes(self._head, batch, batch_idx))
        self._leave()

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Log the calibration error."""
        if not self.calibration:
            return
        if self.error.update_called:
            # Equal in every process.
            pl_module.log(f"{self.prefix}calibration_error", self.error.compute(), sync_dist=True, batch_size=1)
        elif trainer.is_global_zero:
            warnings.warn("HeadMonitor: no validation step used the head, so its calibration is unknown", stacklevel=2)

    def _watch(self) -> None:
        """Observe the head until `_leave`, only within a batch, so that copies made between batches are unaffected."""
        self._leave()
        head = self._head
        if head is None:
            return
        predict = head.predict

        def watched(*args: Any, **kwargs: Any) -> Prediction:
            prediction = predict(*args, **kwargs)
            self._probable = prediction.probs.amax(-1), prediction.top_class
            return prediction

        # `predict` is not a call of the module, so hooks do not see it.
        head.predict = watched
        hook = head.register_forward_hook(self._called, with_kwargs=True)
        self._release = [hook.remove, lambda: delattr(head, "predict")]

    def _leave(self) -> None:
        for release in self._release:
            release()
        self._release = []
        self._features = self._labelled = self._probable = None

    @torch.no_grad()
    def _called(self, head: Head, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> None:
        """Store the result of a call of the head."""
        features = args[0] if args else next(iter(kwargs.values()))
        # A head that replaces a 1 × 1 convolution maps [B, D, H, W] to [B, K, H, W].
        images = getattr(head, "convolution", False) and not kwargs.get("rows") and features.dim() > 2
        if images:
            features = features.movedim(-3, -1)
        # Convert to the head's dtype, because tensors from autocast are used outside of it.
        dtype = next(head.parameters()).dtype
        if head.training:
            self._features = features.detach().reshape(-1, features.shape[-1])[: self.examples].clone().to(dtype)
            return
        targets = args[1] if len(args) > 1 else kwargs.get("targets")
        if targets is not None:
            self._labelled = features.to(dtype), targets, kwargs.get("ignore_index", IGNORE_INDEX)
        elif not getattr(head, "capturing", False):
            outputs = (output.movedim(-3, -1) if images else output).float()
            largest, labels = outputs.max(-1)
            probable = (largest - outputs.logsumexp(-1)).exp() if head.link == "softmax" else largest.sigmoid()
            self._probable = probable, labels

    def _outcomes(self, head: Head, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return confidence and hit of each labelled example, [n]."""
        targets, ignore_index = None, IGNORE_INDEX
        if self._labelled is not None:
            features, targets, ignore_index = self._labelled
            if self._probable is None or self._probable[1].shape != features.shape[:-1]:
                head.predict(features, top_k=1, generator=draws(features.device, batch_idx))
        if self.targets is not None:
            targets = self.targets(batch)
        elif targets is None:
            targets = _targets_of(batch)
        assert self._probable is not None
        confidence, labels = self._probable
        try:
            checked = check_targets(targets, labels.shape, head.num_classes, head.link, ignore_index)
        except (ValueError, TypeError) as error:
            raise type(error)(
                f"{error}; pass targets=, a function of the batch, or calibration=False to HeadMonitor"
            ) from None
        expected, _ = _of_rows(checked, head.link)
        confidence, labels = confidence.flatten(), labels.flatten()
        if isinstance(expected, LabelLists):
            return confidence, expected.dense(head.num_classes).gather(1, labels.unsqueeze(-1)).flatten() >= 0.5
        counted = expected != IGNORE_INDEX
        return confidence[counted], (labels == expected)[counted]


def _targets_of(batch: Any) -> TargetsLike:
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in TARGETS:
            if name in batch:
                return batch[name]
    kind = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise TypeError(
        "a validation batch must be a pair of inputs and targets, or a dict with one of "
        f"{', '.join(TARGETS)}, found {kind}; pass targets=, a function of the batch, or calibration=False"
    )
