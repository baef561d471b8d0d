"""Small configurations and data for the tests of training."""

from pathlib import Path

import numpy as np
from PIL import Image

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console

DATA = "synthetic:rows=2000,classes=8,features=4"
QUIET = Console(quiet=True)


class Listening(Console):
    """One that shows nothing, and remembers what it said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Remember a line."""
        self.said.append(text)


def small(out: Path | str | None = None, **options: object) -> TrainConfig:
    """A configuration that trains in a second."""
    usual = {"data": DATA, "steps": 4, "batch_size": 64, "rank": 3, "eval_samples": 16, "device": "cpu"}
    return TrainConfig(**(usual | {"out": None if out is None else str(out)} | options))


def write_images(folder: Path, each: int = 6, classes: tuple[str, ...] = ("blue", "red"), size: int = 24) -> Path:
    """A folder of noisy images for each class, `FOLDER/CLASS/NUMBER.png`."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = rng.integers(0, 200, (size, size + 4, 3), dtype=np.uint8)
            pixels[:, :, channel % 3] += 50
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.png")
    return folder
