"""Draw characters of fonts as small images, damage them as poor copies do, and load them. Needs Pillow.

Half of the damaged images are nearly clean. In about a tenth so much is lost that other characters fit what is left
equally well: label noise as a reader sees it, one image with more than one right answer.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np
import torch

from hetxl._seeds import GOLDEN, splitmix64
from hetxl_train.data.dataset import Fetched, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.transforms import GREY_MEAN, GREY_STD

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

SIZE = 32  # height and width of an image
# Characters are drawn this many times larger, then reduced: each pixel is the mean of a square of this side.
OVERSAMPLING = 3
EM = 28  # size of the font in pixels of the image. Most characters fill 90–95 % of it, which leaves a margin of 2 to 3
# Side of the canvas relative to the image, large enough that no stroke is cut off before centring.
CANVAS = 2
# A code point that is not a character: a font draws its sign for missing characters, a box or nothing.
MISSING = "\uffff"
POWER = 3  # severity is a uniform number to this power: below 0.125 for half of the images, above 0.73 for a tenth
KINDS = 3  # one of occlusion, blur and noise has the full severity of an image, the others up to `LESSER` times as much
LESSER = 0.6
# Occlusion at severity 1: a block of this share of the image, or a stroke of this half width in pixels.
AREA, STROKE = 0.7, 7.0
# At severity 1: standard deviation and offset in pixels, share of the ink lost, ink on the paper, and standard
# deviation of a pixel, where ink is 1.
BLUR, SHIFT, FADE, STAIN, NOISE = 2.6, 4.0, 0.6, 0.2, 0.5
MAX_OFFSET = 2  # largest shift of training images, in pixels

_DRAWS = 16


class SmallImageSplit(Split):
    """Images [1, 32, 32] from one array on disk.

    With seeds, each image is shifted by up to 2 pixels in either direction.

    Args:
        images: [n, 32, 32] uint8 of the whole dataset, black on white; may be memory-mapped.
        rows: [m] indices of the images of this split.
        labels: labels of these rows.
    """

    def __init__(self, images: np.ndarray, rows: np.ndarray, labels: Labels):
        self.images, self.rows, self.labels = images, rows, labels

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, 1, 32, 32] float32, white is 1 and black −1."""
        rows = np.asarray(rows, dtype=np.int64)
        images = np.array(self.images[self.rows[rows]])
        if seeds is not None:
            images = shifted(images, offsets(np.asarray(seeds)), None)
        inputs = torch.from_numpy(images).unsqueeze(1).float().div_(255)
        return Fetched(inputs.sub_(GREY_MEAN).div_(GREY_STD), rows)

    def pixels(self, row: int) -> np.ndarray:
        """Return the image of a row, [32, 32] uint8."""
        return np.array(self.images[self.rows[row]])


def offsets(seeds: np.ndarray) -> np.ndarray:
    """Return offsets of training images, [b, 2] in −2 to 2, by a hash of each seed [b]."""
    mixed = splitmix64(seeds.astype(np.uint64) - np.uint64(GOLDEN))  # the hash without its increment
    width = np.uint64(2 * MAX_OFFSET + 1)
    return np.stack((mixed % width, mixed // width % width), axis=1).astype(np.int64) - MAX_OFFSET


class Rendered(NamedTuple):
    """The characters that a font draws, and their images in the same order."""

    images: np.ndarray  # [m, 32, 32] uint8, ink: 0 for paper, 255 for black
    drawn: np.ndarray  # [n] bool, whether each character is drawn


def render(
    path: Path, characters: Sequence[str], index: int = 0, advance: Callable[[int], None] | None = None
) -> Rendered:
    """Draw characters with a font, each centred by its ink; the scale is that of the font.

    A font's character map lists more characters than the font can draw. Left out are characters whose canvas
    stays blank, those that the font's program fails on, and drawings that are not unique: the box for missing
    characters, other placeholders, and characters that look the same in the font.

    Args:
        characters: n, each one code point.
        index: index of the font in a collection (.ttc).
        advance: called with the number of characters done since the last call.
    """
    font = open_font(path, index)
    counts: Counter[bytes] = Counter()
    missing = draw(font, MISSING)
    if missing is not None:
        counts[_digest(missing)] = 2  # counted twice, so that it is never unique
    images: dict[bytes, np.ndarray] = {}
    digests: list[bytes | None] = []
    for character in characters:
        ink = draw(font, character)
        digest = None if ink is None else _digest(ink)
        digests.append(digest)
        if ink is not None and digest is not None:
            counts[digest] += 1
            if counts[digest] == 1:
                images[digest] = reduced(ink)
        if advance is not None:
            advance(1)
    unique = [digest if digest is not None and counts[digest] == 1 else None for digest in digests]
    stacked = np.array([images[digest] for digest in unique if digest is not None], dtype=np.uint8)
    return Rendered(stacked.reshape(-1, SIZE, SIZE), np.array([digest is not None for digest in unique], dtype=bool))


def open_font(path: Path, index: int = 0) -> "FreeTypeFont":
    """Open a font file, or one of the fonts of a collection, at the size that characters are drawn in."""
    from PIL import ImageFont

    try:
        # Use the basic layout, because the library for text shaping is not installed everywhere.
        return ImageFont.truetype(path, EM * OVERSAMPLING, index=index, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a font: {error}") from None


def draw(font: "FreeTypeFont", character: str, canvas: int = CANVAS) -> "Image | None":
    """Draw a character with a font from `open_font` and crop it to its ink; None for a blank drawing."""
    from PIL import Image, ImageDraw

    side = SIZE * OVERSAMPLING * canvas
    sheet = Image.new("L", (side, side))
    try:
        ImageDraw.Draw(sheet).text((side / 2, side / 2), character, fill=255, font=font, anchor="mm")
    except OSError:  # the small programs inside some fonts fail
        return None
    box = sheet.getbbox()
    return None if box is None else sheet.crop(box)


def reduced(ink: "Image") -> np.ndarray:
    """Centre a drawing, cropped to its ink, in an image, [32, 32] uint8."""
    from PIL import Image

    side = SIZE * OVERSAMPLING
    sheet = Image.new("L", (side, side))
    # Rounded up for odd sizes. A drawing larger than the image is cropped equally on both sides.
    sheet.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return np.asarray(sheet.reduce(OVERSAMPLING))


def engine() -> str:
    """Return the versions of the drawing libraries, which determine the pixels."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__} with FreeType {features.version('freetype2')}"


def _digest(ink: "Image") -> bytes:
    return blake2b(ink.tobytes(), digest_size=16, person=f"{ink.width}x{ink.height}".encode()).digest()


class DamagedImages(NamedTuple):
    """Damaged images with the severity of each."""

    images: np.ndarray  # [n, H, W] uint8, black on white: 0 is ink, 255 is paper
    severity: np.ndarray  # [n] float32, from 0 to 1


def image_generator(seed: int, face: str, character: str, variant: int) -> np.random.Generator:
    """Return the random generator of one image; `variant` numbers the images of one face and character."""
    return np.random.default_rng([seed, crc32(face.encode()), ord(character), variant])


def damage(ink: np.ndarray, generators: Sequence[np.random.Generator]) -> DamagedImages:
    """Occlude, blur, shift, fade and add noise, in this order, by different amounts for each image.

    Args:
        ink: [n, H, W] uint8, 0 for paper and 255 for black.
        generators: n, one for each image.
    """
    height, width = ink.shape[1:]
    draws = np.array([generator.random(_DRAWS) for generator in generators]).reshape(len(ink), _DRAWS)
    normals = [generator.standard_normal((height, width), dtype=np.float32) for generator in generators]
    severity = draws[:, 0] ** POWER
    leading = (draws[:, 1, None] * KINDS).astype(np.int64) == np.arange(KINDS)
    occlusion, blur, noise = (severity[:, None] * np.where(leading, 1.0, LESSER * draws[:, 2:5])).T
    shift, fade = severity * draws[:, 5], severity * draws[:, 6]
    images = ink.astype(np.float32) / 255
    covered = coverage(occlusion, draws[:, 7:12], (height, width))
    colour = (draws[:, 12] < 0.5).astype(np.float32)[:, None, None]  # black or white
    images += covered * (colour - images)
    images = blurred(images, BLUR * blur)
    images = shifted(images, np.rint(SHIFT * shift[:, None] * (2 * draws[:, 13:15] - 1)).astype(np.int64), 0.0)
    images *= (1 - FADE * fade).astype(np.float32)[:, None, None]
    images += (STAIN * fade * draws[:, 15]).astype(np.float32)[:, None, None]
    images += (NOISE * noise).astype(np.float32)[:, None, None] * np.array(normals).reshape(images.shape)
    return DamagedImages(np.rint(255 * (1 - images.clip(0, 1))).astype(np.uint8), severity.astype(np.float32))


def coverage(amount: np.ndarray, draws: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the share of each pixel that a block or a stroke hides, [n, H, W] float32 in [0, 1].

    Args:
        amount: [n] in [0, 1], amount of occlusion.
        draws: [n, 5] in [0, 1): block or stroke, its centre, and its proportions or direction.
        shape: H and W.
    """
    height, width = shape
    # Centred in the inner three quarters, so that it hides ink and not the margin.
    down = np.arange(height)[None, :, None] - (height * (0.125 + 0.75 * draws[:, 1]) - 0.5)[:, None, None]
    across = np.arange(width)[None, None, :] - (width * (0.125 + 0.75 * draws[:, 2]) - 0.5)[:, None, None]
    area = AREA * amount * height * width
    ratio = 2 ** (2 * draws[:, 3] - 1)  # from 1/2 to 2
    block = _within(np.abs(down), np.sqrt(area * ratio) / 2) * _within(np.abs(across), np.sqrt(area / ratio) / 2)
    angle = np.pi * draws[:, 4][:, None, None]
    stroke = _within(np.abs(across * np.sin(angle) - down * np.cos(angle)), STROKE * amount)
    return np.where((draws[:, 0] < 0.5)[:, None, None], block, stroke).astype(np.float32)


def blurred(images: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Blur each image [n, H, W] by a Gaussian with its deviation [n] in pixels; pixels beyond the edges are 0."""
    down, across = (_kernel(size, deviation) for size in images.shape[1:])
    return down @ images @ across


def shifted(images: np.ndarray, offsets: np.ndarray, fill: float | None) -> np.ndarray:
    """Move each image by whole pixels.

    Args:
        images: [n, H, W]
        offsets: [n, 2] integers, down and to the right.
        fill: value of the pixels that come in from outside; None for the pixel at the edge.
    """
    count, height, width = images.shape
    rows = np.arange(height) - offsets[:, :1]  # [n, H], where each pixel comes from
    columns = np.arange(width) - offsets[:, 1:]
    moved = images[
        np.arange(count)[:, None, None], rows.clip(0, height - 1)[:, :, None], columns.clip(0, width - 1)[:, None, :]
    ]
    if fill is not None:
        outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None, :]
        moved[outside] = fill
    return moved


def _within(distance: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Return 1 below the reach and 0 beyond, with an edge of one pixel; shapes thinner than that are pale."""
    reach = reach[:, None, None]
    return (reach - distance + 0.5).clip(0, 1) * np.minimum(1, 2 * reach)


def _kernel(size: int, deviation: np.ndarray) -> np.ndarray:
    """Return the symmetric weights of a blur, [n, size, size] float32."""
    distance = np.arange(-size, size + 1)
    weights = np.exp(-0.5 * (distance / np.maximum(deviation, 1e-3)[:, None]) ** 2)  # [n, 2 size + 1]
    weights /= weights.sum(1, keepdims=True)
    differences = np.arange(size)[:, None] - np.arange(size) + size
    return weights[:, differences].astype(np.float32)
