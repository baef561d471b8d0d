"""Characters as small pictures, and which of them a font really draws. Needs Pillow."""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetxl.data.images import require_pillow

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

SIZE = 32
"""Height and width of a picture."""

FINER = 3
"""Characters are drawn this many times larger, then reduced: each pixel is the mean of FINER × FINER."""

EM = 28
"""Size of the font in pixels of the picture. Most characters fill it to 90–95 %, which leaves a margin of 2 to 3."""

ROOM = 2
"""Side of the sheet a character is drawn on over that of the picture: no stroke is cut off before it is centred."""

MISSING = "\uffff"
"""A code point that is no character: a font draws its sign for what it has not, a box or nothing."""


class Rendered(NamedTuple):
    """The characters that a font draws.

    Attributes:
        pictures: [m, 32, 32] uint8, ink: 0 for paper, 255 for black; only of those that are drawn, in their order.
        drawn: [n] bool, which of the characters these are.
    """

    pictures: np.ndarray
    drawn: np.ndarray


def render(
    path: Path, characters: Sequence[str], index: int = 0, advance: Callable[[int], None] | None = None
) -> Rendered:
    """Draw characters with a font, each centred by its ink; the scale is that of the font.

    A font's character map promises more than the font draws. Left out are characters that leave the sheet blank, that
    the font's program fails on, and whose drawing is not theirs alone: the box for missing characters, other
    placeholders, and characters that the font does not tell apart.

    Args:
        path: of the font file.
        characters: n, each one code point.
        index: of the font in a collection (.ttc).
        advance: told how many more characters were done.

    Returns:
        The pictures, and of which characters they are.
    """
    font = open_font(path, index)
    counts: Counter[bytes] = Counter()
    missing = draw(font, MISSING)
    if missing is not None:
        counts[_digest(missing)] = 2  # as if two had it: never one character's own
    pictures: dict[bytes, np.ndarray] = {}
    digests: list[bytes | None] = []
    for character in characters:
        ink = draw(font, character)
        digests.append(None if ink is None else _digest(ink))
        if ink is not None and (digest := digests[-1]) is not None:
            counts[digest] += 1
            if counts[digest] == 1:
                pictures[digest] = reduced(ink)
        if advance is not None:
            advance(1)
    own = [digest if digest is not None and counts[digest] == 1 else None for digest in digests]
    kept = [pictures[digest] for digest in own if digest is not None]
    stacked = np.stack(kept) if kept else np.empty((0, SIZE, SIZE), dtype=np.uint8)
    return Rendered(stacked, np.array([digest is not None for digest in own], dtype=bool))


def open_font(path: Path, index: int = 0) -> "FreeTypeFont":
    """A font at the size that characters are drawn in.

    Args:
        path: of the font file.
        index: of the font in a collection.
    """
    require_pillow()
    from PIL import ImageFont

    try:
        # The plain layout: no shaping by a library that may or may not be there.
        return ImageFont.truetype(path, EM * FINER, index=index, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a font: {error}") from None


def reduced(ink: "Image") -> np.ndarray:
    """A drawing in the middle of a picture, [32, 32] uint8.

    Args:
        ink: a drawing cut out at the edges of its ink.
    """
    from PIL import Image

    side = SIZE * FINER
    sheet = Image.new("L", (side, side))
    # Rounded up for odd sizes. What is larger than the picture loses the same on both sides.
    sheet.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return np.asarray(sheet.reduce(FINER))


def engine() -> str:
    """What draws: it is part of what the pixels depend on."""
    require_pillow()
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__} with FreeType {features.version('freetype2')}"


def draw(font: "FreeTypeFont", character: str, room: int = ROOM) -> "Image | None":
    """A drawing cut out at the edges of its ink; None where there is none.

    Args:
        font: at `FINER` times its size.
        character: one.
        room: side of the sheet, as a multiple of the picture's.
    """
    from PIL import Image, ImageDraw

    side = SIZE * FINER * room
    sheet = Image.new("L", (side, side))
    try:
        ImageDraw.Draw(sheet).text((side / 2, side / 2), character, fill=255, font=font, anchor="mm")
    except OSError:  # the small programs inside some fonts fail
        return None
    box = sheet.getbbox()
    return None if box is None else sheet.crop(box)


def _digest(ink: "Image") -> bytes:
    return blake2b(ink.tobytes(), digest_size=16, person=f"{ink.width}x{ink.height}".encode()).digest()
