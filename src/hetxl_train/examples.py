"""Select examples to show: those that a model is most and least certain of, and its most confident errors."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetxl._checks import integer_at_least
from hetxl.metrics.records import Records
from hetxl_train.data.dataset import Shown, Split
from hetxl_train.data.image_files import read_image

CONFUSED_ROWS = 50
"""Maximum number of rows listed for a pair of classes."""
THUMBNAIL = 96
"""Longer side of a thumbnail in pixels."""


def extreme_examples(
    records: Records, split: Split, class_names: Sequence[str], k: int = 8
) -> dict[str, list[dict[str, Any]]]:
    """Return examples of a split to show, at most k of each kind, ready for JSON.

    Returns:
        most_certain: lowest entropy, ascending.
        least_certain: highest entropy, descending.
        most_wrong: errors with the lowest `log_prob` of the label, which may be errors of the label.

        Each is a dict of "row", "text", "image" (a thumbnail as a data: URL), "path" (of the image), "label" (a name or
        a list of names), "top" (pairs of name and probability), "entropy" and "hit"; missing values are None.
    """
    integer_at_least("k", k, 1)
    errors = np.flatnonzero(~records.hit)
    orders = {
        "most_certain": np.lexsort((records.rows, records.entropy)),
        "least_certain": np.lexsort((records.rows, -records.entropy)),
        "most_wrong": errors[np.lexsort((records.rows[errors], records.log_prob[errors]))],
    }
    return {
        name: [_entry(records, int(index), split, class_names) for index in order[:k]] for name, order in orders.items()
    }


def confused_examples(
    records: Records, split: Split, class_names: Sequence[str], pairs: Sequence[Mapping[str, Any]], k: int = 4
) -> list[dict[str, Any]]:
    """Return the errors between pairs of classes, most confident first, ready for JSON.

    Args:
        pairs: pairs of `ConfusionCounter.pairs`, with class names.
        k: number of examples per pair.

    Returns:
        A dict for each pair with errors: "first", "second", at most `CONFUSED_ROWS` "rows", and "examples" as in
        `extreme_examples`.
    """
    ids = {name: number for number, name in enumerate(class_names)}
    wrong = np.flatnonzero(~records.hit & (records.label >= 0))
    wrong = wrong[np.argsort(records.log_prob[wrong], kind="stable")]
    classes = np.sort(np.stack((records.label[wrong], records.top_ids[wrong, 0])), axis=0)
    entries = []
    for pair in pairs:
        both = sorted((ids[pair["first"]], ids[pair["second"]]))
        own = wrong[(classes == np.array(both)[:, None]).all(0)]
        if len(own):
            rows = [int(row) for row in records.rows[own[:CONFUSED_ROWS]]]
            shown = [_entry(records, int(index), split, class_names) for index in own[:k]]
            entries.append({"first": pair["first"], "second": pair["second"], "rows": rows, "examples": shown})
    return entries


def thumbnail(encoded: str | bytes, size: int = THUMBNAIL) -> str | None:
    """Return an image as a JPEG of at most `size` pixels per side, as a data: URL; None if it cannot be read."""
    try:
        image = read_image(encoded)
    except (OSError, ValueError):
        return None
    image.thumbnail((size, size))
    return _address(image, "JPEG", quality=80)


def embedded(pixels: np.ndarray, size: int = THUMBNAIL) -> str:
    """Return uint8 pixels, [H, W] or [H, W, 3], as a PNG in a data: URL. Small images are enlarged to about `size`
    pixels per side without smoothing."""
    from PIL import Image

    image = Image.fromarray(pixels)
    factor = size // max(image.size)
    if factor > 1:
        image = image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    image.thumbnail((size, size))
    return _address(image, "PNG", optimize=True)


def _address(image: Any, format: str, **options: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return f"data:image/{format.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def image_of(shown: Shown) -> str | None:
    """Return the image of an example as a data: URL; None if there is none."""
    if shown.pixels is not None:
        return embedded(shown.pixels)
    encoded = shown.image if shown.encoded is None else shown.encoded
    return None if encoded is None else thumbnail(encoded)


def _entry(records: Records, index: int, split: Split, class_names: Sequence[str]) -> dict[str, Any]:
    row, label = int(records.rows[index]), int(records.label[index])
    shown, top = split.show(row), zip(records.top_ids[index], records.top_probs[index], strict=True)
    labels = [label] if label >= 0 else split.labels.subset(np.array([row])).ids
    names = [class_names[int(number)] for number in labels]
    return {
        "row": row,
        "text": shown.text,
        "image": image_of(shown),
        "path": shown.image,
        "label": names[0] if label >= 0 else names,
        "top": [[class_names[int(number)], float(prob)] for number, prob in top],
        "entropy": float(records.entropy[index]),
        "hit": bool(records.hit[index]),
    }
