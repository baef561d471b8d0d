"""Splits of images: read, decoded and transformed on demand."""

from collections.abc import Sequence

import numpy as np
import torch

from hetxl_train.data.dataset import Fetched, Shown, Split, Unreadable
from hetxl_train.data.image_files import ImageSource, Paths, read_image
from hetxl_train.data.labels import Labels, printable
from hetxl_train.data.transforms import PLAIN, ImageTransform


class ImageSplit(Split):
    """Images, decoded on demand and brought to pixels [C, size, size] by a transform, at random by each row's seed.

    `rows` are the images of this split, None for all.
    """

    workers = True

    def __init__(
        self,
        images: Sequence[str] | ImageSource,
        labels: Labels,
        rows: np.ndarray | None = None,
        *,
        transform: ImageTransform = PLAIN,
    ) -> None:
        self.images: ImageSource = images if hasattr(images, "read") else Paths(images)  # pyright: ignore
        self.labels, self.rows, self.transform = labels, rows, transform

    def show(self, row: int) -> Shown:
        """Return an example: the path of its image, or the image itself."""
        return self.images.show(int(self._indices(np.array([row]))[0]))

    def name(self, row: int) -> str:
        """Return the path of an image, or its place in a file of many."""
        return self.images.name(int(self._indices(np.array([row]))[0]))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b], cropped at random by seeds [b]; those that cannot be read are left out and listed."""
        rows = np.asarray(rows, dtype=np.int64)
        indices = self._indices(rows).tolist()
        inputs, readable, unreadable = [], [], []
        for number, encoded in enumerate(self.images.read(indices)):
            try:
                inputs.append(self.transform(read_image(encoded), None if seeds is None else int(seeds[number])))
                readable.append(rows[number])
            except (OSError, ValueError) as error:
                system = error.strerror if isinstance(error, OSError) else None
                reason = system.lower() if system else printable(str(error)) or type(error).__name__
                unreadable.append(Unreadable(self.images.name(indices[number]), reason))
        empty = np.empty((0, *self.transform.shape), dtype=np.float32)
        stacked = np.stack(inputs) if inputs else empty
        return Fetched(torch.from_numpy(stacked), np.array(readable, dtype=np.int64), tuple(unreadable))

    def _indices(self, rows: np.ndarray) -> np.ndarray:
        """Return where the images of rows [b] are in their source, [b]."""
        return rows if self.rows is None else self.rows[rows]
