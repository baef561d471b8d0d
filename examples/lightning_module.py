"""PyTorch Lightning: a backbone with a head as a LightningModule, and a callback that logs the head's state."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetxl
from hetxl.integrations.lightning import HeadMonitor, HetXLModule
from hetxl_train.data.synthetic import load_synthetic

D = 16

# Hide Lightning's hints about loader workers and its own use of torch, which do not matter here.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def loader_of(split: Any, shuffle: bool = False) -> DataLoader:
    """Return batches of inputs [B, D] and class ids [B]."""
    rows = TensorDataset(split.features, torch.from_numpy(split.labels.ids))
    return DataLoader(rows, batch_size=256, shuffle=shuffle)


def main() -> None:
    """Train with validation after each epoch, test, and predict."""
    pl.seed_everything(0, verbose=False)
    data = load_synthetic(features=D, classes=30, rows=20_000)
    train, validation, test = (data.splits[name] for name in ("train", "validation", "test"))
    backbone = nn.Linear(D, D)
    nn.init.eye_(backbone.weight)
    head = hetxl.HetXLHead(in_features=D, num_classes=data.num_classes, rank=8)

    module = HetXLModule(backbone, head, learning_rate=0.03, top_k=3)
    # HeadMonitor logs temperature, noise_scale and calibration_error to the logger in logger=: W&B, MLflow, CSV, ...
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    monitor = HeadMonitor()
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[monitor], enable_checkpointing=False, **quiet)
    trainer.fit(module, loader_of(train, shuffle=True), loader_of(validation))
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:<22} {float(value):.3f}")

    (tested,) = trainer.test(module, loader_of(test), verbose=False)
    print(f"test NLL {tested['test_nll']:.3f}; at best it could be {data.best_nll:.3f}")
    predictions: Any = trainer.predict(module, loader_of(test))
    classes, probs = (torch.cat([part[name] for part in predictions]) for name in ("classes", "probs"))
    top = ", ".join(f"{label} {prob:.1%}" for label, prob in zip(classes[0].tolist(), probs[0].tolist(), strict=True))
    print(f"the first test example: {top}")


if __name__ == "__main__":
    main()
