"""Options of comparisons on built-in data, chosen so that a first comparison takes minutes on two cores."""

from typing import Any

from hetxl_train import plugins

PYCODE: dict[str, Any] = {
    "steps": 300,
    "batch_size": 256,
    "learning_rate": 6e-3,  # the best of 1, 2, 4, 6 and 8e-3 for DET
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
    "weight_decay": 0.0,  # likewise: weight decay would keep weights and noise small
    "rank": 8,
    "train_samples": 64,  # the true noise is large: with 16 samples the loss of the true model is higher by 0.3
    "eval_samples": 512,
    "evaluation_examples": 1000,
    "test_examples": 5000,
}

PRESETS = {"pycode": PYCODE, "synthetic": SYNTHETIC}


def preset_for(data: str | None) -> dict[str, Any]:
    """Return the options for a dataset that is known by name; none for a user's own."""
    name = (data or "").partition(":")[0]
    if name in plugins.entries("presets"):
        return plugins.load("presets", name)
    return PRESETS.get(name, {})
