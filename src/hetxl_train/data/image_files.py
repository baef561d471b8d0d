"""Sources of encoded images, and their decoding."""

import io
import os
import stat
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hetxl_train.data.dataset import Shown
from hetxl_train.data.mapped_arrays import MappedArray
from hetxl_train.data.remote import is_remote, read_remote
from hetxl_train.data.strings import Strings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""The formats that are decoded. Pillow knows more, some of which start other programs."""

CHANNELS = (1, 3, 4)
MAX_PIXELS = 178_956_970  # an image with more is taken for a decompression bomb: Pillow's own limit

Encoded = str | bytes | np.ndarray | OSError
"""An image as stored: the path of its file, the content of one, pixels [H, W] or [H, W, C] uint8, or why it cannot be
read."""


class ImageSource(Protocol):
    """Many images, read on demand in any order, from this process or a worker."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Sequence[Encoded]:
        """Return some images as stored, for `read_image`; many at a time, since a remote store answers them at once."""
        ...

    def name(self, index: int) -> str:
        """Return a name of an image for people: its path, or its position in a file of many."""
        ...

    def show(self, index: int) -> Shown:
        """Return an image for a reader."""
        ...


class Paths(Strings):
    """Images in files, by their paths or by addresses that fsspec opens."""

    def read(self, indices: Sequence[int]) -> Sequence[Encoded]:
        """Return the paths of some images, or their content if it is not on this machine."""
        paths = self.take(indices)
        return read_remote(paths) if any(map(is_remote, paths)) else paths

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self[index]

    def show(self, index: int) -> Shown:
        """Return the path of an image."""
        return Shown(image=self[index])


class EncodedImages:
    """Images in memory, as the contents of their files."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Return the contents of some images."""
        return [self.contents[index] for index in indices]

    def name(self, index: int) -> str:
        """Return the number of an image."""
        return f"image {index}"

    def show(self, index: int) -> Shown:
        """Return nothing, because the caller has the image."""
        return Shown()


class PixelArray:
    """Images [n, H, W] or [n, H, W, C] uint8 in an array; [n, C, H, W] is turned. C is 1, 3 or 4."""

    def __init__(self, array: MappedArray) -> None:
        self.array = array
        last, second = array.shape[-1], array.shape[1]
        self.channels_first = len(array.shape) == 4 and last not in CHANNELS and second in CHANNELS
        if len(array.shape) == 4 and not self.channels_first and last not in CHANNELS:
            raise ValueError(
                f"{array} must hold images [n, H, W] or [n, H, W, C] with 1, 3 or 4 channels, found {list(array.shape)}"
            )

    @property
    def grey(self) -> bool:
        """Whether the images have one channel."""
        shape = self.array.shape
        return len(shape) == 3 or shape[1 if self.channels_first else -1] == 1

    @property
    def size(self) -> int:
        """The longer side."""
        return max(self.array.shape[2:] if self.channels_first else self.array.shape[1:3])

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Return the pixels of some images, [b, H, W] or [b, H, W, C]."""
        pixels = self.array.gather(np.asarray(indices, dtype=np.int64))
        pixels = pixels.transpose(0, 2, 3, 1) if self.channels_first else pixels
        return pixels[..., 0] if pixels.ndim == 4 and pixels.shape[-1] == 1 else pixels

    def name(self, index: int) -> str:
        """Return the file and the number of an image."""
        return f"{self.array.path}, row {index}"

    def show(self, index: int) -> Shown:
        """Return the pixels of an image."""
        pixels = self.read([index])[0]
        return Shown(pixels=pixels if pixels.ndim == 2 else pixels[..., :3])  # without transparency


def is_image_array(array: MappedArray) -> bool:
    """Whether an array can be one of images: uint8 [n, H, W] or [n, H, W, C]."""
    return array.dtype == np.uint8 and len(array.shape) in (3, 4)


def read_image(encoded: Encoded) -> "Image":
    """Decode an image as RGB, upright; a ValueError or OSError says why it cannot be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(encoded, OSError):
        raise encoded
    if isinstance(encoded, np.ndarray):
        return to_rgb(Image.fromarray(encoded))
    if isinstance(encoded, str):
        state = os.stat(encoded)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("not a file")
        file, size = encoded, state.st_size
    else:
        file, size = io.BytesIO(encoded), len(encoded)
    if size == 0:
        raise ValueError("empty file")
    with warnings.catch_warnings():
        # About sizes that are checked below, and about details of a format that do not stop decoding.
        warnings.simplefilter("ignore")
        try:
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                with suppress(Exception):  # damaged EXIF data does not make the image unreadable
                    ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image)
        except UnidentifiedImageError as error:
            raise ValueError("not an image") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"more than {MAX_PIXELS:,} pixels") from error
        except (MemoryError, OSError):
            raise
        except Exception as error:  # decoders raise all kinds of errors for damaged files
            raise ValueError(f"damaged image: {error or type(error).__name__}") from error


def to_rgb(image: "Image") -> "Image":
    """Convert any mode to RGB: transparency is laid on white, 16 bits become 8."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        # Integers have 16 bits. The range of floating-point values is unknown: up to 1 or up to 255.
        scale = 255 / 65535 if image.mode != "F" else (255 if values.max() <= 1 else 1)
        return Image.fromarray(np.rint(np.nan_to_num(values * scale)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
