import base64
import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image

from hetxl_train.data.dataset import Shown
from hetxl_train.examples import confused_examples, embedded, extreme_examples, thumbnail
from support.records import ArraySplit, with_confidence

NAMES = ["<script>", "dog"]


def case(**options):
    """Six examples, of rows 10 to 15."""
    records = dataclasses.replace(
        with_confidence([0.9, 0.8, 0.99, 0.6, 0.7, 0.5], [True, False, False, True, True, False]),
        entropy=np.array([0.3, 0.5, 0.1, 0.9, 0.7, 0.7]),
        rows=np.arange(10, 16),
    )
    labels = np.zeros(16)
    labels[10:] = records.label
    return records, ArraySplit(np.zeros((16, 1)), labels, **options)


def opened(address, kind="jpeg"):
    head, data = address.split(",")
    assert head == f"data:image/{kind};base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def rows(entries):
    return [entry["row"] for entry in entries]


def test_examples_are_ordered_by_certainty_and_error():
    examples = extreme_examples(*case(), NAMES, k=3)
    assert rows(examples["most_certain"]) == [12, 10, 11]
    assert rows(examples["least_certain"]) == [13, 14, 15]  # equal entropies by row
    assert rows(examples["most_wrong"]) == [12, 11, 15]
    assert set(examples) == {"most_certain", "least_certain", "most_wrong"}
    assert len(extreme_examples(*case(), NAMES)["most_wrong"]) == 3
    json.dumps(examples, allow_nan=False)


def test_confusions_list_their_rows_by_confidence():
    records, split = case()
    pairs = [{"first": "dog", "second": "<script>", "confused": 3}]
    (entry,) = confused_examples(records, split, NAMES, pairs, k=1)
    assert entry["rows"] == [12, 11, 15]
    assert [example["row"] for example in entry["examples"]] == [12]
    assert confused_examples(records, split, [*NAMES, "cat"], [{"first": "dog", "second": "cat"}]) == []


def test_entry_has_all_fields():
    records, split = case(texts=[f"text {row}" for row in range(16)])
    entry = extreme_examples(records, split, NAMES, k=1)["most_wrong"][0]
    assert entry == {
        "row": 12,
        "text": "text 12",
        "image": None,
        "path": None,
        "label": "dog",
        "top": [["<script>", pytest.approx(0.99)], ["dog", pytest.approx(0.01)]],
        "entropy": pytest.approx(0.1),
        "hit": False,
    }


def test_lists_of_labels_are_named():
    records, split = case()
    records = dataclasses.replace(records, label=np.full(6, -1))
    offsets = np.concatenate((np.zeros(13, dtype=int), [2, 2, 2, 2]))
    split = ArraySplit(np.zeros((16, 1)), [0, 1], offsets)
    examples = extreme_examples(records, split, NAMES, k=2)["most_certain"]
    assert [entry["label"] for entry in examples] == [["<script>", "dog"], []]


def test_images_become_thumbnails(tmp_path):
    path = str(tmp_path / "wide.png")
    Image.new("RGB", (400, 200), "red").save(path)
    records, split = case(images=[path] * 16)
    entry = extreme_examples(records, split, NAMES, k=1)["most_certain"][0]
    assert entry["path"] == path
    image = opened(entry["image"])
    assert image.size == (96, 48)
    np.testing.assert_allclose(np.asarray(image)[20, 50], [255, 0, 0], atol=10)


class PixelSplit(ArraySplit):
    """Images that are in no file."""

    def show(self, row):
        return Shown(text=f"text {row}", pixels=np.full((32, 32), row, dtype=np.uint8))


def test_images_without_a_file_are_embedded():
    records, split = case()
    entry = extreme_examples(records, PixelSplit(np.zeros((16, 1)), split.labels.ids), NAMES, k=1)["most_certain"][0]
    assert (entry["text"], entry["path"]) == ("text 12", None)
    image = opened(entry["image"], "png")
    assert (image.mode, image.size) == ("L", (96, 96))
    assert (np.asarray(image) == 12).all()


@pytest.mark.parametrize(
    ("shape", "size"),
    [((32, 32), (96, 96)), ((20, 40), (80, 40)), ((96, 10, 3), (10, 96)), ((60, 300, 3), (96, 19)), ((1, 1), (96, 96))],
)
def test_small_pixels_are_enlarged_without_smoothing(shape, size):
    pixels = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    image = opened(embedded(pixels), "png")
    assert image.size == size
    if max(shape[:2]) < 96:  # enlarged without a trace of smoothing
        factor = size[0] // shape[1]
        np.testing.assert_array_equal(np.asarray(image)[::factor, ::factor], pixels)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I;16", "F"])
def test_images_of_any_mode_become_thumbnails(mode, tmp_path):
    path = tmp_path / ("image.tiff" if mode in ("CMYK", "F") else "image.png")
    Image.new(mode, (30, 200)).save(path)
    image = opened(thumbnail(str(path)))
    assert image.mode == "RGB"
    assert image.size == (14, 96)
    if mode in ("RGBA", "LA"):
        assert image.getpixel((5, 5)) == (255, 255, 255)  # transparent is white


def test_rotated_image_becomes_upright(tmp_path):
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 40)).save(path, exif=exif)
    assert opened(thumbnail(str(path))).size == (40, 80)


def test_unreadable_file_has_no_image(tmp_path):
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)).save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:5000])
    text = tmp_path / "text.jpg"
    text.write_text("not an image")
    huge = tmp_path / "huge.png"
    Image.new("1", (20_000, 10_000)).save(huge)
    for path in (cut, text, huge, tmp_path / "absent.png", tmp_path):
        assert thumbnail(str(path)) is None
    assert thumbnail(str(whole)) is not None


def test_k_must_be_positive():
    with pytest.raises(ValueError, match="k must be at least 1"):
        extreme_examples(*case(), NAMES, k=0)
