"""Short runs with Lightning, without files or output."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

D, K = 8, 6

QUIET = [
    # Lightning's own use of torch's pytrees; nothing of ours.
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning"),
    # Workers cost more than they bring on data in memory.
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers:UserWarning"),
]


def examples(count: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [n, D] around the centres of their classes, and the classes [n]."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(K, D, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(K, (count,), generator=generator)
    return centres[labels] + 0.7 * torch.randn(count, D, generator=generator), labels


def loader(*tensors: Tensor, batch_size: int = 16, **options: Any) -> DataLoader:
    """Batches of examples, in order unless stated."""
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, **options)


def whole(*batches: Any) -> DataLoader:
    """The batches as they are."""
    return DataLoader(list(batches), batch_size=None)  # pyright: ignore[reportArgumentType]


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    """One epoch on the CPU."""
    usual = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**(usual | options))


def logged(run: pl.Trainer) -> dict[str, float]:
    """The last value of everything that was logged."""
    return {name: float(value) for name, value in run.callback_metrics.items()}


def backbone() -> nn.Module:
    """A layer with a norm, so that all kinds of parameters are there."""
    return nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))
