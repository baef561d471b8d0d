"""The examples that tell most about a model: those it is most and least sure of, and the errors it is surest of."""

import base64
import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetxl.data.dataset import Shown, Split
from hetxl.evaluation.records import Records
from hetxl.functional._checks import integer_at_least

THUMBNAIL = 96
"""Pixels of the longer side of a picture."""

PILLOW = "pip install pillow"


def extreme_examples(
    records: Records, split: Split, class_names: Sequence[str], k: int = 8
) -> dict[str, list[dict[str, Any]]]:
    """Examples to show, ready for JSON.

    Args:
        records: of the split.
        split: whose rows the records are of.
        class_names: K of them.
        k: at most this many of each kind.

    Returns:
        most_certain: those with the lowest entropy, lowest first.
        least_certain: those with the highest, highest first.
        most_wrong: errors whose label the model finds least likely (lowest `log_prob`), which may be errors of the
            label.

        Each is a dict of "row", "text", "image" (a small picture as a data: address), "path" (of the picture), "label"
        (its name, or a list of names), "top" (pairs of name and probability), "entropy" and "hit"; what the data has
        not is None.
    """
    integer_at_least("k", k, 1)
    errors = np.flatnonzero(~records.hit)
    orders = {
        "most_certain": np.lexsort((records.rows, records.entropy)),
        "least_certain": np.lexsort((records.rows, -records.entropy)),
        "most_wrong": errors[np.lexsort((records.rows[errors], records.log_prob[errors]))],
    }
    return {
        name: [_entry(records, int(place), split, class_names) for place in order[:k]] for name, order in orders.items()
    }


def thumbnail(path: str, size: int = THUMBNAIL) -> str | None:
    """A small JPEG of a picture as a data: address; None when it cannot be read.

    Args:
        path: of the picture.
        size: pixels of the longer side, at most.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(f"{path} needs Pillow: {PILLOW}") from error
    try:
        with warnings.catch_warnings():
            # A picture so large that Pillow warns of it is not worth decoding for a thumbnail.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            with Image.open(path) as opened:
                opened.draft("RGB", (2 * size, 2 * size))
                upright = ImageOps.exif_transpose(opened)
                upright.thumbnail((size, size))
                layered = upright.convert("RGBA")
        flat = Image.new("RGB", layered.size, "white")
        flat.paste(layered, mask=layered.getchannel("A"))
        stream = io.BytesIO()
        flat.save(stream, "JPEG", quality=80)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()


def embedded(pixels: np.ndarray, size: int = THUMBNAIL) -> str:
    """A PNG of a picture without a file, as a data: address. Small ones are enlarged, each pixel to a square.

    Args:
        pixels: [H, W] or [H, W, 3] uint8
        size: pixels of the longer side, about.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"pictures of examples need Pillow: {PILLOW}") from error
    picture = Image.fromarray(pixels)
    factor = size // max(picture.size)
    if factor > 1:
        picture = picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)
    picture.thumbnail((size, size))
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _picture(shown: Shown) -> str | None:
    """What can be seen of an example, as a data: address."""
    if shown.pixels is not None:
        return embedded(shown.pixels)
    return None if shown.image is None else thumbnail(shown.image)


def _entry(records: Records, place: int, split: Split, class_names: Sequence[str]) -> dict[str, Any]:
    row = int(records.rows[place])
    shown = split.show(row)
    return {
        "row": row,
        "text": shown.text,
        "image": _picture(shown),
        "path": shown.image,
        "label": _label(int(records.label[place]), row, split, class_names),
        "top": [
            [class_names[int(found)], float(prob)]
            for found, prob in zip(records.top_ids[place], records.top_probs[place], strict=True)
        ],
        "entropy": float(records.entropy[place]),
        "hit": bool(records.hit[place]),
    }


def _label(label: int, row: int, split: Split, class_names: Sequence[str]) -> str | list[str]:
    if label >= 0:
        return class_names[label]
    lists = split.labels.subset(np.array([row]))
    return [class_names[int(found)] for found in lists.ids]
