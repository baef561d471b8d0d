"""Options for comparisons on built-in data, so that a first comparison takes minutes on two cores."""

from typing import Any

from hetxl_train import plugins

PYCODE: dict[str, Any] = {
    "steps": 300,
    "batch_size": 256,
    "learning_rate": 6e-3,  # the best value for DET among 1, 2, 4, 6 and 8e-3
    "rank": 10,
    "train_samples": 8,
    "eval_samples": 64,
    "evaluate_every": 60,
    "evaluation_examples": 500,
    "test_examples": 5000,
}

SYNTHETIC: dict[str, Any] = {
    "epochs": 3.0,
    "batch_size": 1024,
    "learning_rate": 0.1,  # the true weights are large, and the labels noisy enough for large batches
    "weight_decay": 0.0,  # weight decay would keep weights and noise too small
    "rank": 8,
    "train_samples": 64,  # the true noise is large: with 16 samples, the loss of the true model is 0.3 higher
    "eval_samples": 512,
    "evaluation_examples": 1000,
    "test_examples": 5000,
}

PRESETS = {"pycode": PYCODE, "synthetic": SYNTHETIC}


def preset_for(data: str | None) -> dict[str, Any]:
    """Return the options for a dataset by name; none for a user's data."""
    name = (data or "").partition(":")[0]
    if name in plugins.entries("presets"):
        return plugins.load("presets", name)
    return PRESETS.get(name, {})
