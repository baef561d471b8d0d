"""Options of comparisons on built-in data, chosen so that a first look takes minutes on two cores."""

from typing import Any

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
    "learning_rate": 0.1,  # the true weights are large, and there is noise enough in the labels to want large batches
    "weight_decay": 0.0,  # likewise: it would keep weights and noise small
    "rank": 8,
    "train_samples": 64,  # the true noise is large: with 16 draws the true model itself has a loss higher by 0.3
    "eval_samples": 512,
    "evaluation_examples": 1000,
    "test_examples": 5000,
}

WORDS: dict[str, Any] = PYCODE | {"steps": 400}

GLYPHS: dict[str, Any] = {
    "steps": 1000,
    "batch_size": 128,
    "learning_rate": 2e-3,
    "width": 16,
    "depth": 1,
    "rank": 10,
    "eval_samples": 64,
    "evaluation_examples": 1000,
    "test_examples": 5000,
}

ICONS: dict[str, Any] = GLYPHS | {"steps": 500}

WORDNET: dict[str, Any] = {
    "epochs": 6.0,
    "batch_size": 512,
    "learning_rate": 3e-3,
    "rank": 10,
    "eval_samples": 64,
    "evaluation_examples": 1000,
    "test_examples": 5000,
}

PRESETS = {
    "pycode": PYCODE,
    "synthetic": SYNTHETIC,
    "words": WORDS,
    "glyphs": GLYPHS,
    "icons": ICONS,
    "wordnet": WORDNET,
}


def preset_for(data: str | None) -> dict[str, Any]:
    """The options for a built-in dataset; none for a user's own."""
    return PRESETS.get((data or "").partition(":")[0], {})
