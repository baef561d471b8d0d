"""What the study of the defaults trains on: every benchmark, with clean labels and with noisy ones."""

from dataclasses import dataclass, field
from typing import Any

from hetxl.training.config import TrainConfig
from hetxl.training.presets import preset_for

SAMPLES = 4
"""S in training, the same in all settings: one set of defaults, and what `hetxl train` takes for data of one's own."""
RATE = 0.3
"""Share of the training labels that are flipped to a near class in the noisy settings."""


@dataclass(frozen=True)
class Setting:
    """Data, and whether its training labels are flipped.

    Attributes:
        name: how tables call it, and its directory.
        data: as for `hetxl train`.
        noisy: whether `RATE` of the training labels are flipped to a near class; validation and test stay clean.
        options: of the training, beyond the preset of the data.
    """

    name: str
    data: str
    noisy: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> TrainConfig:
        """The options of its runs: those of the data's preset, its own, then `more`."""
        noise = {"label_noise": "confusable", "label_noise_rate": RATE} if self.noisy else {}
        return TrainConfig(**{**preset_for(self.data), **self.options, **noise, **more, "data": self.data})


def _clean_and_noisy(name: str, data: str, **options: Any) -> list[Setting]:
    return [Setting(name, data, options=options), Setting(f"{name}-noisy", data, noisy=True, options=options)]


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        *_clean_and_noisy("pycode", "pycode", train_samples=SAMPLES),
        *_clean_and_noisy("words", "words", train_samples=SAMPLES),
        *_clean_and_noisy("glyphs", "glyphs", train_samples=SAMPLES),
        *_clean_and_noisy("wordnet", "wordnet", train_samples=SAMPLES),
    )
}
"""By name, in the order of the tables."""

QUICK: dict[str, Setting] = {
    setting.name: setting
    for setting in _clean_and_noisy(
        "synthetic",
        "synthetic:rows=4000,classes=30",
        epochs=2.0,
        batch_size=128,
        train_samples=16,
        eval_samples=32,
        evaluation_examples=500,
        test_examples=500,
    )
}
"""Small ones that need nothing built: the whole study in a minute or two."""
