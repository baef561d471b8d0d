"""A callback for PyTorch Lightning that watches the head of any module: τ, how large the noise is, and calibration."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, check_targets
from hetxl.functional._checks import integer_at_least
from hetxl.functional.targets import TargetsLike
from hetxl.integrations.find import find_head
from hetxl.integrations.lightning_metrics import CalibrationError, draws, noise_scale, pl
from hetxl.nn import Head, Prediction

TARGETS = ("labels", "label", "targets", "target")
"""Where a batch that is a dict may have its targets."""


class HeadMonitor(pl.Callback):
    """Logs what a head does, in any LightningModule that contains one.

    - `temperature`: τ, and `noise_scale`: see the function of that name, for the first examples of the batch; while
      training, whenever Lightning writes its log.
    - `calibration_error`: over the examples of each validation epoch, of all processes, with 15 bins of equal mass.

    For the calibration it watches what the validation step does with the head. Probabilities from `head.predict(…)` or
    `head(features)` are taken as they are; after `head(features, targets)` alone it predicts by itself. Random numbers
    of the training are not touched.

    Args:
        head: name of the head among the module's, such as "model.fc"; None for the only one.
        examples: of a batch that the noise scale is computed from.
        every_n_steps: between values of τ and the noise scale; None for the Trainer's `log_every_n_steps`.
        calibration: whether to log it.
        targets: takes a validation batch and gives its targets; None to take those that the head is called with, or
            else the second part of a tuple, or "labels" or "targets" of a dict. Of class probabilities the likeliest
            class is meant, and of labels between 0 and 1, sigmoid, those of at least 0.5.
        prefix: in front of the three names.
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
        """Let go of the head."""
        self._leave()
        self._head = None

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Let go of the head."""
        self._leave()
        self._head = None

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Watch the head."""
        self._watch()

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log τ and the noise scale."""
        every = self.every_n_steps
        if every is None:
            every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if self._head is not None and every and (trainer.global_step % every == 0 or trainer.is_last_batch):
            found = {"temperature": float(self._head.temperature())}
            if self._features is not None and len(self._features):
                found["noise_scale"] = noise_scale(self._head, self._features)
            named = {f"{self.prefix}{name}": value for name, value in found.items()}
            pl_module.log_dict(named, on_step=True, on_epoch=False, sync_dist=True)
        self._leave()

    def on_validation_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Start anew."""
        self.error.to(pl_module.device)
        self.error.reset()

    def on_validation_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Watch what the step does with the head."""
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
            # The same value in every process.
            pl_module.log(f"{self.prefix}calibration_error", self.error.compute(), sync_dist=True, batch_size=1)
        elif trainer.is_global_zero:
            warnings.warn("HeadMonitor: no validation step used the head, so its calibration is unknown", stacklevel=2)

    def _watch(self) -> None:
        """Until `_leave`, and only within a batch: copies of the module that are made in between are clean."""
        self._leave()
        head = self._head
        if head is None:
            return
        predict = head.predict

        def watched(*args: Any, **kwargs: Any) -> Prediction:
            found = predict(*args, **kwargs)
            self._probable = found.probs.amax(-1), found.labels
            return found

        # Not a call of the module, so no hook would see it.
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
        """After a call of the head."""
        features = args[0] if args else next(iter(kwargs.values()))
        # A head in the place of a 1 × 1 convolution has features [B, D, H, W] and gives [B, K, H, W].
        pictures = getattr(head, "convolution", False) and not kwargs.get("rows") and features.dim() > 2
        if pictures:
            features = features.movedim(-3, -1)
        # In the head's own dtype: what comes under autocast is used outside of it.
        dtype = next(head.parameters()).dtype
        if head.training:
            self._features = features.detach().reshape(-1, features.shape[-1])[: self.examples].clone().to(dtype)
            return
        targets = args[1] if len(args) > 1 else kwargs.get("targets")
        if targets is not None:
            self._labelled = features.to(dtype), targets, kwargs.get("ignore_index", IGNORE_INDEX)
        elif not getattr(head, "capturing", False):
            outputs = (output.movedim(-3, -1) if pictures else output).float()
            largest, labels = outputs.max(-1)
            probable = (largest - outputs.logsumexp(-1)).exp() if head.link == "softmax" else largest.sigmoid()
            self._probable = probable, labels

    def _outcomes(self, head: Head, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Confidence and hit of each example that counts, [n]."""
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
                f"{error}; give HeadMonitor targets=, a function of the batch, or calibration=False"
            ) from None
        if checked.ids is not None:
            counted = checked.ids != IGNORE_INDEX
            return confidence[counted], (labels == checked.ids)[counted]
        if checked.dense is not None and head.link == "softmax":
            return confidence.flatten(), (labels == checked.dense.argmax(-1)).flatten()
        rows = checked.dense if checked.lists is None else checked.lists.dense(head.num_classes)
        assert rows is not None
        hit = rows.reshape(-1, head.num_classes).gather(1, labels.reshape(-1, 1)) >= 0.5
        return confidence.flatten(), hit.flatten()


def _targets_of(batch: Any) -> TargetsLike:
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in TARGETS:
            if name in batch:
                return batch[name]
    found = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise TypeError(
        "a validation batch must be a pair of inputs and targets, or a dict with one of "
        f"{', '.join(TARGETS)}, found {found}; give HeadMonitor targets=, a function of the batch, or calibration=False"
    )
