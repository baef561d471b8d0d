"""Images as a model takes them: resized, cropped and normalised; in training cropped at random, flipped and augmented.
Augmentation needs timm, whose transforms it applies."""

import contextlib
import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetxl._checks import needing, one_of

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours of ImageNet, for networks that do not say what they take."""
GREY_MEAN, GREY_STD = 0.5, 0.5  # of greyscale images: black becomes −1 and white 1
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # random crops: the share of the image's area, and width over height
LONG = 16  # images this many times as long as wide are cropped before they are resized
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
RESIZES = ("shorter", "squash", "border")


@dataclass(frozen=True)
class Preprocessing:
    """How the images of a model are resized and normalised; saved with a run, so that every use of it is the same.

    Attributes:
        mean: of each channel, of values from 0 to 1: three, or one for greyscale images.
        std: of each channel.
        interpolation: of the resizing, of `INTERPOLATIONS`.
        crop: side of the centre crop, as a share of the resized image (timm's crop_pct).
        resize: how the image is resized before the centre crop: "shorter", its shorter side; "squash", both sides;
            "border", its longer side, with borders of the mean colour. timm's crop_mode, "shorter" being its "center".
    """

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    interpolation: str = "bilinear"
    crop: float = 0.875
    resize: str = "shorter"

    def __post_init__(self):
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or min(self.std) <= 0:
            values = f"{self.mean} and {self.std}"
            raise ValueError(f"mean and std must be three numbers, or one (greyscale), std above 0; found {values}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, found {self.crop}")
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        one_of("resize", self.resize, RESIZES)

    @property
    def grey(self) -> bool:
        """Whether images become greyscale."""
        return len(self.mean) == 1


# Signs reach to the edges: the largest centred square.
GREY = Preprocessing((GREY_MEAN,), (GREY_STD,), crop=1.0)


@dataclass(frozen=True)
class Augmentation:
    """What training images go through beside random crops and flips, by timm.

    Attributes:
        rand_augment: timm's description of RandAugment, such as "rand-m9-mstd0.5"; empty for none.
        erasing: probability that a rectangle of an image is erased.
    """

    rand_augment: str = ""
    erasing: float = 0.0


@functools.lru_cache
def _normalisation(preprocessing: Preprocessing) -> np.ndarray:
    """Return what the 256 values of each channel become, [C, 256]."""
    mean, std = (np.array(values, dtype=np.float32) for values in (preprocessing.mean, preprocessing.std))
    return np.ascontiguousarray(((np.arange(256, dtype=np.float32)[:, None] / 255 - mean) / std).T)


@dataclass(frozen=True)
class ImageTransform:
    """An image of any size to pixels [C, size, size] in float32, by the preprocessing of a model.

    Without a seed: the centre crop. With one: a random crop, flipped half of the time, then the augmentation; the
    result depends on the image and the seed alone.
    """

    size: int = 224
    preprocessing: Preprocessing = Preprocessing()
    augmentation: Augmentation = Augmentation()

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"image_size must be at least 1, found {self.size}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W] of a result."""
        return len(self.preprocessing.mean), self.size, self.size

    def __call__(self, image: "Image", seed: int | None = None) -> np.ndarray:
        """Return pixels [C, size, size] of an RGB image."""
        if self.preprocessing.grey:
            image = image.convert("L")
        if seed is None:
            return self._normalised(self._centre(image))
        return self._augmented(image, seed % 2**64)

    def _centre(self, image: "Image") -> "Image":
        """Resize, then cut the centre, as timm's and torchvision's transforms do."""
        resized = resized_size(*image.size, self.size, self.preprocessing)
        if self.preprocessing.resize == "shorter" and max(image.size) > LONG * min(image.size):
            # Cropped first, a very long image never becomes a very large one.
            return image.resize((self.size, self.size), self._filter, centre_box(*image.size, self.size / min(resized)))
        image = image.resize(resized, self._filter)
        if min(image.size) < self.size:
            image = self._bordered(image)
        left, top = (round((side - self.size) / 2) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))

    def _bordered(self, image: "Image") -> "Image":
        """Put the image into the middle of a larger one of the mean colour."""
        from PIL import Image

        colour: Any = mean_colour(self.preprocessing)
        width, height = (max(side, self.size) for side in image.size)
        out = Image.new(image.mode, (width, height), colour)
        out.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        return out

    def _augmented(self, image: "Image", seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        box, flip = random_box(*image.size, rng), rng.random() < 0.5
        image = image.resize((self.size, self.size), self._filter, box=box)
        if flip:
            from PIL.Image import Transpose

            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        if self.augmentation == Augmentation():
            return self._normalised(image)
        rand_augment, erase = _timm_transforms(self.augmentation, self.size, self.preprocessing)
        with seeded(int(rng.integers(2**63))):
            return erase(self._normalised(rand_augment(image)))

    def _normalised(self, image: "Image") -> np.ndarray:
        """Return pixels [C, size, size], by a table of the 256 results: three times as fast, and equal to the bit.

        naive: ((pixels / 255 - mean) / std).transpose(2, 0, 1)
        """
        pixels = np.asarray(image).reshape(self.size, self.size, -1)
        out = np.empty(self.shape, dtype=np.float32)
        for channel, table in enumerate(_normalisation(self.preprocessing)):
            np.take(table, pixels[..., channel], out=out[channel], mode="clip")  # without the copy that "raise" needs
        return out

    @property
    def _filter(self) -> Any:
        from PIL.Image import Resampling

        return Resampling[self.preprocessing.interpolation.upper()]


PLAIN = ImageTransform()
"""For networks that do not say what they take."""


def resized_size(width: int, height: int, size: int, preprocessing: Preprocessing) -> tuple[int, int]:
    """Return width and height that an image is resized to before the centre crop of a size."""
    side = math.floor(size / preprocessing.crop)
    if preprocessing.resize == "squash":
        return side, side
    if preprocessing.resize == "border":
        ratio = max(width, height) / side
        return max(1, round(width / ratio)), max(1, round(height / ratio))
    shorter, longer = side, int(side * max(width, height) / min(width, height))
    return (shorter, longer) if width <= height else (longer, shorter)


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Draw a random part of an image by area (`SCALE`) and proportions (`RATIO`): left, top, right, bottom."""
    for _ in range(10):  # most proportions do not fit a long image
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
            return float(left), float(top), float(left + across), float(top + down)
    across, down = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


def centre_box(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    """Return the centred square of an image whose side is a share of the shorter side: left, top, right, bottom."""
    half = min(width, height) * share / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def mean_colour(preprocessing: Preprocessing) -> tuple[int, ...]:
    """Return the mean of each channel, from 0 to 255."""
    return tuple(round(255 * value) for value in preprocessing.mean)


# ---- augmentation by timm


@functools.cache
def _timm_transforms(augmentation: Augmentation, size: int, preprocessing: Preprocessing) -> tuple[Any, Any]:
    """Return RandAugment, of an image, and random erasing, of pixels [C, H, W]; what is off returns its argument."""
    import torch

    with needing("augmentation needs timm", "'hetxl[timm]'"):
        from timm.data.auto_augment import rand_augment_transform
        from timm.data.random_erasing import RandomErasing
    # As timm's own factory has them: how far an image is moved, and the colour of what comes in at its edges.
    options = {"translate_const": int(size * 0.45), "img_mean": mean_colour(preprocessing)}
    rand_augment: Any = _unchanged
    erase: Any = _unchanged
    if augmentation.rand_augment:
        rand_augment = rand_augment_transform(augmentation.rand_augment, options)
    if augmentation.erasing:
        erasing = RandomErasing(augmentation.erasing, mode="pixel", device="cpu")
        erase = lambda pixels: erasing(torch.from_numpy(pixels)).numpy()  # noqa: E731
    return rand_augment, erase


def _unchanged(value: Any) -> Any:
    return value


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators of Python, NumPy and torch draw by a seed; afterwards they are as they were."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, what timm draws from
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
