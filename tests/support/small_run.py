"""A run that takes a second."""

from pathlib import Path

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.training import train


def small_run(path: Path, **options) -> Path:
    """Train a HET-XL head for a few steps on data with 4 features and 6 classes; gives the run's directory."""
    defaults = {
        "data": "synthetic:rows=800,classes=6,features=4",
        "rank": 2,
        "steps": 4,
        "batch_size": 16,
        "train_samples": 2,
        "eval_samples": 8,
        "evaluation_examples": 40,
        "test_examples": 40,
        "device": "cpu",
    }
    return train(TrainConfig(**defaults | options, out=str(path)), console=Console(quiet=True)).path
