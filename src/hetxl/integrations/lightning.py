"""PyTorch Lightning: a module that trains a backbone with a head, and a callback that watches the head of any module.

Both are of the package that the program uses, `lightning` or `pytorch_lightning`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from hetxl.evaluation import RecordsBuilder
from hetxl.functional import LabelLists, check_targets
from hetxl.functional.targets import Targets
from hetxl.integrations.lightning_metrics import CalibrationError, draws, noise_scale, pl, torchmetrics
from hetxl.integrations.lightning_monitor import HeadMonitor
from hetxl.nn import Head
from hetxl.training.config import TrainConfig
from hetxl.training.schedule import build_optimizer, learning_rate_at, parameter_groups, set_learning_rate

__all__ = ["CalibrationError", "HeadMonitor", "HetXLModule", "noise_scale"]

_MEANS = ("nll", "precision@1", "precision@5")


class HetXLModule(pl.LightningModule):
    """A backbone with a head, trained with the head's fused loss.

    Batches are pairs of inputs [B, ...] and targets as heads take them; for predictions inputs alone will do. It logs
    `train_loss`, and with the prefix `val_` or `test_`: `nll`, `precision@1`, `precision@5` and `calibration_error`.
    Draws in evaluation are the same each time, whatever was drawn before. Where targets are probabilities of classes
    (softmax, [..., K]), `nll` is the cross-entropy with them, as in training; the others ask for the likeliest class.

    Args:
        backbone: inputs to features [..., D].
        head: one of hetxl's, over K classes.
        learning_rate: peak of AdamW's.
        weight_decay: of matrices; none on τ, biases and norms.
        temperature_learning_rate: of a learned τ, as a multiple.
        warmup: steps of linear warm-up; below 1 a share of all steps.
        schedule: what follows: decay to zero, "cosine" or "linear", or "constant".
        optimizer: takes the parameter groups, learning rates included, and gives an optimiser to use instead of AdamW:
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        top_k: of `predict_step`; None for all classes.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        *,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        temperature_learning_rate: float = 0.1,
        warmup: float = 0.05,
        schedule: str = "cosine",
        optimizer: Callable[[list[dict]], optim.Optimizer] | None = None,
        top_k: int | None = None,
    ):
        super().__init__()
        if not isinstance(head, Head):
            raise TypeError(f"head must be one of hetxl's, such as hetxl.HetXLHead, found {type(head).__name__}")
        # The options of hetxl's own training, which checks them.
        self.recipe = TrainConfig(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            temperature_learning_rate=temperature_learning_rate,
            warmup=warmup,
            warmup_from=0.0,
            schedule=schedule,
        )
        self.save_hyperparameters(ignore=["backbone", "head", "optimizer"])
        self.backbone, self.head, self.optimizer, self.top_k = backbone, head, optimizer, top_k
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores.update({f"{stage}_{name}": torchmetrics.MeanMetric() for name in _MEANS})
            self.scores[f"{stage}_calibration_error"] = CalibrationError()

    def forward(self, inputs: Any) -> Tensor:
        """Log-probabilities [..., K]; for the sigmoid link the logits of the mean probabilities."""
        return self.head(self.backbone(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = self.head(self.backbone(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start the validation metrics anew."""
        self._reset("val")

    def on_test_epoch_start(self) -> None:
        """Start the test metrics anew."""
        self._reset("test")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the validation metrics."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the test metrics."""
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The prediction for a batch.

        Returns:
            probs: [..., K], or [..., k] with `top_k`, most probable first; then also classes [..., k].
            entropy: [...], of the averaged probabilities, in nats.
            mutual_information: [...], the part of it that the noise explains.
        """
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        prediction = self.head.predict(self.backbone(inputs), self.top_k, generator=draws(self.device, batch_idx))
        found = {"probs": prediction.probs, "entropy": prediction.entropy}
        found["mutual_information"] = prediction.mutual_information
        return found if prediction.indices is None else found | {"classes": prediction.indices}

    def configure_optimizers(self) -> Any:
        """AdamW, or what `optimizer` gives, with a learning rate for every step."""
        steps = self.trainer.estimated_stepping_batches
        known = 0 < steps < math.inf
        if not known and (self.recipe.schedule != "constant" or 0 < self.recipe.warmup < 1):
            raise ValueError(
                f"schedule={self.recipe.schedule!r} with warmup={self.recipe.warmup:g} needs the number of steps: give "
                "the Trainer max_steps, or use schedule='constant' and a warmup in steps"
            )
        if self.optimizer is None:
            # A fused step cannot be clipped under a gradient scaler.
            scaled = str(self.trainer.precision).startswith("16")
            optimizer = build_optimizer(
                self, dataclasses.replace(self.recipe, precision="float16" if scaled else "float32")
            )
        else:
            groups = parameter_groups(self, self.recipe)
            optimizer = self.optimizer([group | {"lr": self.recipe.learning_rate} for group in groups])
        set_learning_rate(optimizer, self.recipe.learning_rate)
        total = int(steps) if known else 1

        def share(step: int) -> float:
            step = min(step, total) if known else step
            return learning_rate_at(step, total, self.recipe) / self.recipe.learning_rate

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _reset(self, stage: str) -> None:
        # Lightning does so too, but after `validate` under inference mode: `fit` could not add to what that leaves.
        for name in (*_MEANS, "calibration_error"):
            score: Any = self.scores[f"{stage}_{name}"]
            score.reset()

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
            # Not every device has double precision.
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
    """Targets of any leading shape as those of rows: ids [n] or lists; beside ids class probabilities [n, K], if so."""
    if targets.ids is not None:
        return targets.ids.reshape(-1), None
    if targets.dense is None:
        assert targets.lists is not None
        return targets.lists, None
    dense = targets.dense.reshape(-1, targets.dense.shape[-1])
    if link == "softmax":
        return dense.argmax(-1), dense
    return LabelLists.from_sparse(dense.to_sparse()), None
