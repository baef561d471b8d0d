"""Damage to pictures of characters: what a poor copy does to them, from nothing at all to past recognition.

Half of the pictures are nearly clean. In about a tenth so much is gone that other characters fit what is left as well,
which is noise in the labels as a reader sees it: the same picture, and more than one answer.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

POWER = 3
"""Severity is a uniform number to this power: below 0.125 for half of the pictures, above 0.73 for a tenth."""

LEADING = 3
"""One of occlusion, blur and noise has the full severity of a picture, the others up to `LESSER` of it."""

LESSER = 0.6

AREA, STROKE = 0.7, 7.0
"""Occlusion at its worst: a block of this share of the picture, or a stroke of this half width in pixels."""

BLUR, SHIFT, FADE, STAIN, NOISE = 2.6, 4.0, 0.6, 0.2, 0.5
"""Each at its worst: standard deviation and offset in pixels, share of the ink lost, ink on the paper, and standard
deviation of a pixel, ink being 1."""

_DRAWS = 16


class Damaged(NamedTuple):
    """Pictures as data has them.

    Attributes:
        pictures: [n, H, W] uint8, black on white: 0 is ink, 255 is paper.
        severity: [n] float32, from 0 to 1.
    """

    pictures: np.ndarray
    severity: np.ndarray


def source_of(seed: int, face: str, character: str, variant: int) -> np.random.Generator:
    """The random numbers of one picture, which depend on nothing but these four.

    Args:
        seed: of the dataset.
        face: name of the typeface.
        character: one code point.
        variant: which of the pictures of that face and character.
    """
    return np.random.default_rng([seed, crc32(face.encode()), ord(character), variant])


def damage(ink: np.ndarray, sources: Sequence[np.random.Generator]) -> Damaged:
    """Occlude, blur, shift, fade and add noise, in this order, each by an amount of the picture's own.

    Args:
        ink: [n, H, W] uint8, 0 for paper and 255 for black.
        sources: n, of the random numbers of each picture.

    Returns:
        The damaged pictures, and how severely each was.
    """
    height, width = ink.shape[1:]
    draws = np.array([source.random(_DRAWS) for source in sources]).reshape(len(ink), _DRAWS)
    normals = [source.standard_normal((height, width), dtype=np.float32) for source in sources]
    severity = draws[:, 0] ** POWER
    leading = (draws[:, 1, None] * LEADING).astype(np.int64) == np.arange(LEADING)
    occlusion, blur, noise = (severity[:, None] * np.where(leading, 1.0, LESSER * draws[:, 2:5])).T
    shift, fade = severity * draws[:, 5], severity * draws[:, 6]
    found = ink.astype(np.float32) / 255
    covered = coverage(occlusion, draws[:, 7:12], (height, width))
    colour = (draws[:, 12] < 0.5).astype(np.float32)[:, None, None]  # black or white
    found += covered * (colour - found)
    found = blurred(found, BLUR * blur)
    found = shifted(found, np.rint(SHIFT * shift[:, None] * (2 * draws[:, 13:15] - 1)).astype(np.int64), 0.0)
    found *= (1 - FADE * fade).astype(np.float32)[:, None, None]
    found += (STAIN * fade * draws[:, 15]).astype(np.float32)[:, None, None]
    found += (NOISE * noise).astype(np.float32)[:, None, None] * np.array(normals).reshape(found.shape)
    pictures = np.rint(255 * (1 - found.clip(0, 1))).astype(np.uint8)
    return Damaged(pictures, severity.astype(np.float32))


def coverage(amount: np.ndarray, draws: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """How much of each pixel is hidden by a block or a stroke.

    Args:
        amount: [n] in [0, 1], of the occlusion.
        draws: [n, 5] in [0, 1): which of the two, where it is, and its proportions or direction.
        shape: H and W.

    Returns:
        [n, H, W] float32 in [0, 1].
    """
    height, width = shape
    # In the inner three quarters, so that it hides ink and not the margin.
    down = np.arange(height)[None, :, None] - (height * (0.125 + 0.75 * draws[:, 1]) - 0.5)[:, None, None]
    across = np.arange(width)[None, None, :] - (width * (0.125 + 0.75 * draws[:, 2]) - 0.5)[:, None, None]
    area = AREA * amount * height * width
    ratio = 2 ** (2 * draws[:, 3] - 1)  # from 1/2 to 2
    block = _within(np.abs(down), np.sqrt(area * ratio) / 2) * _within(np.abs(across), np.sqrt(area / ratio) / 2)
    angle = np.pi * draws[:, 4][:, None, None]
    stroke = _within(np.abs(across * np.sin(angle) - down * np.cos(angle)), STROKE * amount)
    return np.where((draws[:, 0] < 0.5)[:, None, None], block, stroke).astype(np.float32)


def blurred(pictures: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Gaussian blur, each picture with its own standard deviation; beyond the edges there is nothing.

    Args:
        pictures: [n, H, W]
        deviation: [n] in pixels; 0 leaves a picture as it is.
    """
    down, across = (_kernel(size, deviation) for size in pictures.shape[1:])
    return down @ pictures @ across


def shifted(pictures: np.ndarray, offsets: np.ndarray, fill: float | None) -> np.ndarray:
    """Move each picture by whole pixels.

    Args:
        pictures: [n, H, W]
        offsets: [n, 2] integers, down and to the right.
        fill: what comes in from outside; None for the pixel at the edge.
    """
    count, height, width = pictures.shape
    rows = np.arange(height) - offsets[:, :1]  # [n, H], where each pixel comes from
    columns = np.arange(width) - offsets[:, 1:]
    moved = pictures[
        np.arange(count)[:, None, None], rows.clip(0, height - 1)[:, :, None], columns.clip(0, width - 1)[:, None, :]
    ]
    if fill is not None:
        outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None, :]
        moved[outside] = fill
    return moved


def _within(distance: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """1 where a distance is below the reach, 0 beyond, with an edge of one pixel; what is thinner than that is pale."""
    reach = reach[:, None, None]
    return (reach - distance + 0.5).clip(0, 1) * np.minimum(1, 2 * reach)


def _kernel(size: int, deviation: np.ndarray) -> np.ndarray:
    """[n, size, size] float32, symmetric: what each pixel gives to each."""
    distance = np.arange(-size, size + 1)
    weights = np.exp(-0.5 * (distance / np.maximum(deviation, 1e-3)[:, None]) ** 2)  # [n, 2 size + 1]
    weights /= weights.sum(1, keepdims=True)
    places = np.arange(size)[:, None] - np.arange(size) + size
    return weights[:, places].astype(np.float32)
