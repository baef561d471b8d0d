"""Pictures: decoding, the crops of training and evaluation, and a split of them. Needs Pillow."""

import math
import os
import stat
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hetxl.data.classes import printable
from hetxl.data.dataset import Broken, Fetched, Shown, Split
from hetxl.data.labels import Labels

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""What is decoded. Pillow knows more, some of which start other programs."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours of ImageNet, which most backbones were trained with."""

GREY_MEAN, GREY_STD = 0.5, 0.5
"""Of pictures without colours: black becomes −1 and white 1."""

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Random crops: the share of the picture's area, and width over height."""

SHORTER_SIDE = 256 / 224
"""Evaluation: the shorter side over the side of the crop from its centre."""

MAX_PIXELS = 178_956_970
"""A picture with more is taken for an attack on memory: Pillow's own limit."""

ORIENTATION = 0x0112  # the EXIF tag


class Paths:
    """Many paths as one block of bytes: worker processes share it, and it has no object for each path.

    Args:
        paths: as text.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        lengths = np.fromiter((len(path) for path in encoded), dtype=np.int64, count=len(encoded))
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> str:
        if not 0 <= place < len(self):
            raise IndexError(f"path {place} of {len(self)}")
        start = int(self._ends[place - 1]) if place else 0
        return os.fsdecode(self._bytes[start : int(self._ends[place])].tobytes())


class ImageSplit(Split):
    """Pictures [3, size, size], or grey ones [1, size, size], decoded when they are asked for.

    With seeds: a random crop, resized, and turned left to right half of the time. Without: the centre, and of grey
    pictures, where signs reach to the edges, as much of it as a square can hold.

    Args:
        paths: of all pictures.
        labels: of the rows of this split.
        rows: which of the paths they are; None for all.
        size: height and width that a backbone gets.
        mean: of red, green and blue, taken off.
        std: of red, green and blue, divided by.
        grey: whether colours are left out; `mean` and `std` are then `GREY_MEAN` and `GREY_STD`.
    """

    workers = True

    def __init__(
        self,
        paths: Sequence[str] | Paths,
        labels: Labels,
        rows: np.ndarray | None = None,
        *,
        size: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        grey: bool = False,
    ) -> None:
        require_pillow()
        if size < 1:
            raise ValueError(f"image_size must be at least 1, found {size}")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(f"mean and std must be three numbers, std above 0; found {tuple(mean)} and {tuple(std)}")
        self.paths, self.labels, self.rows, self.size, self.grey = paths, labels, rows, size, grey
        if grey:
            mean, std = (GREY_MEAN,), (GREY_STD,)
        self.mean, self.std = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)

    def path(self, row: int) -> str:
        """Where the picture of a row is."""
        return self.paths[int(row if self.rows is None else self.rows[row])]

    def show(self, row: int) -> Shown:
        """The path of a picture."""
        return Shown(image=self.path(row))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b]; those that cannot be read are left out and named.

        Args:
            rows: [b]
            seeds: [b], for the random crops of training; None for the centre.
        """
        inputs, good, broken = [], [], []
        for number, row in enumerate(np.asarray(rows).tolist()):
            path = self.path(row)
            try:
                image = read_image(path)
                inputs.append(self._crop(image, None if seeds is None else int(seeds[number])))
                good.append(row)
            except (OSError, ValueError) as error:
                broken.append(Broken(path, _reason(error)))
        empty = np.empty((0, len(self.mean), self.size, self.size), dtype=np.float32)
        stacked = np.stack(inputs) if inputs else empty
        return Fetched(torch.from_numpy(stacked), np.array(good, dtype=np.int64), tuple(broken))

    def _crop(self, image: "Image", seed: int | None) -> np.ndarray:
        """[3, size, size], or [1, size, size]"""
        from PIL.Image import Resampling

        flip = False
        if self.grey:
            image = image.convert("L")
        if seed is None:
            box = centre_box(*image.size, 1.0 if self.grey else SHORTER_SIDE)
        else:
            rng = np.random.default_rng(seed % 2**64)
            box, flip = random_box(*image.size, rng), rng.random() < 0.5
        pixels = np.asarray(image.resize((self.size, self.size), Resampling.BILINEAR, box=box), dtype=np.float32)
        pixels = (pixels.reshape(self.size, self.size, -1) / 255 - self.mean) / self.std
        return np.ascontiguousarray((pixels[:, ::-1] if flip else pixels).transpose(2, 0, 1))


def require_pillow() -> None:
    """Say what to install where Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("pictures need Pillow: pip install pillow") from error


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A random part of a picture: left, top, right, bottom. Its area and proportions are drawn (`SCALE`, `RATIO`)."""
    for _ in range(10):  # long pictures refuse most proportions
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
            return float(left), float(top), float(left + across), float(top + down)
    across, down = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


def centre_box(width: int, height: int, shorter: float = SHORTER_SIDE) -> tuple[float, float, float, float]:
    """The centre of a picture: left, top, right, bottom.

    It is the part that is left when the shorter side is resized to 256/224 of the crop's side and the centre is cut
    out. Cut first, a very long picture never becomes a very large one.

    Args:
        width: of the picture.
        height: of the picture.
        shorter: the shorter side over that of the crop.
    """
    half = min(width, height) / shorter / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def read_image(path: str) -> "Image":
    """A picture as red, green and blue, upright.

    A ValueError or OSError says what is wrong with a file that cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise ValueError("not a file")
    if state.st_size == 0:
        raise ValueError("empty file")
    with warnings.catch_warnings():
        # Of sizes that are checked below, and of details of a format that do not stop decoding.
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                return _upright(to_rgb(image), image)
        except UnidentifiedImageError as error:
            raise ValueError("not an image") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"more than {MAX_PIXELS:,} pixels") from error
        except (MemoryError, OSError):
            raise
        except Exception as error:  # decoders of damaged files raise whatever they stumble over
            raise ValueError(f"damaged image: {error or type(error).__name__}") from error


def to_rgb(image: "Image") -> "Image":
    """Red, green and blue whatever the mode; what is transparent is laid on white, 16 bits become 8."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        # Whole numbers have 16 bits. Of others the range is not known: up to 1, or up to 255.
        scale = 255 / 65535 if image.mode != "F" else (255 if values.max() <= 1 else 1)
        return Image.fromarray(np.rint(np.nan_to_num(values * scale)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _upright(rgb: "Image", image: "Image") -> "Image":
    """Turned as the camera says."""
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # a damaged remark of the camera does not make the picture unreadable
        orientation = None
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return rgb.transpose(turns[orientation]) if orientation in turns else rgb


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return printable(str(error)) or type(error).__name__
