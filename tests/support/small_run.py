"""A run that takes a second."""

from pathlib import Path

from hetxl.training.config import TrainConfig
from hetxl.training.progress import Narrator
from hetxl.training.train import train


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
    return train(TrainConfig(**defaults | options, out=str(path)), narrator=Narrator(quiet=True)).path
