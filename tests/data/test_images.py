"""Pictures: every mode decoded to the right colours, crops by seed, and files that cannot be read."""

import os
import pickle
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl.data.images import ImageSplit, Paths, centre_box, random_box, read_image
from hetxl.data.labels import Labels

RED, SIZE = (200, 30, 40), (48, 32)


def split_of(*paths, **options):
    options = {"size": 16, "mean": (0, 0, 0), "std": (1, 1, 1), **options}
    return ImageSplit(Paths(map(str, paths)), Labels(np.zeros(len(paths), dtype=np.int64)), **options)


def claim_size(source, target, width, height):
    """A PNG that says it is larger than it is."""
    text = source.read_bytes()
    header = b"IHDR" + struct.pack(">II", width, height) + text[24:29]
    target.write_bytes(text[:12] + header + struct.pack(">I", zlib.crc32(header)) + text[33:])


def colour(path):
    """The mean colour of a picture as it is read."""
    return np.asarray(read_image(str(path))).reshape(-1, 3).mean(axis=0)


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("rgb.jpg", Image.new("RGB", SIZE, RED), RED),
        ("rgb.png", Image.new("RGB", SIZE, RED), RED),
        ("rgb.webp", Image.new("RGB", SIZE, RED), RED),
        ("rgb.gif", Image.new("RGB", SIZE, RED), RED),
        ("rgb.tiff", Image.new("RGB", SIZE, RED), RED),
        ("palette.png", Image.new("RGB", SIZE, RED).convert("P", palette=Image.Palette.ADAPTIVE), RED),
        ("clear.png", Image.new("RGBA", SIZE, (*RED, 0)), (255, 255, 255)),
        ("half.png", Image.new("RGBA", SIZE, (0, 0, 0, 128)), (127, 127, 127)),
        ("greyalpha.png", Image.new("LA", SIZE, (0, 0)), (255, 255, 255)),
        ("grey.png", Image.new("L", SIZE, 77), (77, 77, 77)),
        ("bits.png", Image.new("1", SIZE, 1), (255, 255, 255)),
        ("cmyk.jpg", Image.new("CMYK", SIZE, (0, 255, 255, 0)), (255, 0, 0)),
        ("16bit.png", Image.fromarray(np.full(SIZE, 0x8080, np.uint16)), (128, 128, 128)),
        ("32bit.tiff", Image.fromarray(np.full(SIZE, 0x8080, np.int32)), (128, 128, 128)),
        ("float.tiff", Image.fromarray(np.full(SIZE, 0.5, np.float32)), (128, 128, 128)),
    ],
)
def test_modes(tmp_path, name, image, expected):
    image.save(tmp_path / name)
    np.testing.assert_allclose(colour(tmp_path / name), expected, atol=4)


def test_transparency_of_a_palette(tmp_path):
    image = Image.new("P", SIZE, 0)
    image.putpalette([0, 0, 0] * 256)
    image.save(tmp_path / "a.png", transparency=0)
    np.testing.assert_array_equal(colour(tmp_path / "a.png"), (255, 255, 255))


def test_the_camera_says_which_way_is_up(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:10] = 255  # bright at the top of the sensor
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the top becomes the right
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    found = np.asarray(read_image(str(tmp_path / "a.png")))
    assert found.shape == (60, 40, 3)
    assert (found[:, -10:] == 255).all()
    assert (found[:, :-10] == 0).all()


def test_evaluation_takes_the_centre(tmp_path):
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[:, 32:96] = RED  # the centre is 56 wide
    Image.fromarray(pixels).save(tmp_path / "a.png")
    fetched = split_of(tmp_path / "a.png").fetch(np.array([0]))
    assert (fetched.inputs.shape, fetched.inputs.dtype) == ((1, 3, 16, 16), torch.float32)
    expected = torch.tensor(RED)[None, :, None, None].expand(1, 3, 16, 16) / 255
    torch.testing.assert_close(fetched.inputs, expected)
    normalised = split_of(tmp_path / "a.png", mean=(0.5, 0.5, 0.5), std=(0.1, 0.2, 0.4)).fetch(np.array([0])).inputs
    torch.testing.assert_close(normalised, (expected - 0.5) / torch.tensor([0.1, 0.2, 0.4])[None, :, None, None])


def test_crops_depend_on_the_seed_and_on_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / name)
    split = split_of(tmp_path / "a.png", tmp_path / "b.png")
    both = split.fetch(np.array([0, 1]), np.array([5, 6])).inputs
    assert torch.equal(split.fetch(np.array([1, 0]), np.array([6, 5])).inputs.flip(0), both)
    assert not torch.equal(split.fetch(np.array([0]), np.array([7])).inputs, both[:1])
    assert split.fetch(np.array([0]), np.array([-1])).inputs.shape == (1, 3, 16, 16)
    copy = pickle.loads(pickle.dumps(split))
    assert torch.equal(copy.fetch(np.array([0, 1]), np.array([5, 6])).inputs, both)


def test_random_boxes_lie_inside_and_have_the_drawn_shares():
    rng = np.random.default_rng(0)
    areas, ratios = [], []
    for _ in range(500):
        left, top, right, bottom = random_box(250, 200, rng)
        assert 0 <= left < right <= 250
        assert 0 <= top < bottom <= 200
        areas.append((right - left) * (bottom - top) / 50_000)
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(areas) < 0.12
    assert 0.9 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.35


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
def test_pictures_of_odd_sizes(tmp_path, size):
    Image.new("RGB", size, RED).save(tmp_path / "a.png")
    split = split_of(tmp_path / "a.png")
    for seeds in (None, np.array([3])):
        inputs = split.fetch(np.array([0]), seeds).inputs
        torch.testing.assert_close(inputs, (torch.tensor(RED) / 255)[None, :, None, None].expand_as(inputs))
    for box in (centre_box(*size), random_box(*size, np.random.default_rng(0))):
        assert 0 <= box[0] < box[2] <= size[0]
        assert 0 <= box[1] < box[3] <= size[1]


def test_a_half_is_turned_left_to_right(tmp_path):
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[:] = np.linspace(0, 255, 32).astype(np.uint8)[None, :, None]
    Image.fromarray(pixels).save(tmp_path / "a.png")
    inputs = split_of(tmp_path / "a.png").fetch(np.zeros(200, dtype=int), np.arange(200)).inputs
    turned = (inputs[:, 0, 8, 0] > inputs[:, 0, 8, -1]).float().mean()
    assert 0.4 < turned < 0.6


def test_files_that_cannot_be_read_are_left_out_and_named(tmp_path):
    Image.new("RGB", SIZE, RED).save(tmp_path / "good.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:1000])
    Image.fromarray(noise).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:3000])
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "script.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"
    )  # would start a program
    claim_size(tmp_path / "good.png", tmp_path / "huge.png", 20_000, 20_000)
    Image.new("1", (9_500, 9_500)).save(tmp_path / "large.png", compress_level=1)  # Pillow only warns of it
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ["cut.jpg", "good.png", "cut.png", "text.jpg", "empty.jpg", "script.jpg", "huge.png", "large.png"]
    names += ["folder.jpg", "pipe.jpg", "gone.jpg"]
    fetched = split_of(*(tmp_path / name for name in names)).fetch(np.arange(len(names)))
    assert fetched.rows.tolist() == [1, 7]
    assert fetched.inputs.shape == (2, 3, 16, 16)
    reasons = {os.path.basename(broken.path): broken.reason for broken in fetched.broken}
    assert "truncated" in reasons.pop("cut.jpg")
    assert reasons.pop("cut.png")
    assert reasons == {
        "text.jpg": "not an image",
        "empty.jpg": "empty file",
        "script.jpg": "not an image",
        "huge.png": "more than 178,956,970 pixels",
        "folder.jpg": "not a file",
        "pipe.jpg": "not a file",
        "gone.jpg": "no such file or directory",
    }


def test_bytes_changed_at_random_never_raise(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for suffix in ("png", "jpg", "gif", "tiff", "webp", "bmp"):
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(tmp_path / f"a.{suffix}")
        whole = np.frombuffer((tmp_path / f"a.{suffix}").read_bytes(), dtype=np.uint8)
        for number in range(40):
            damaged = whole.copy()
            damaged[rng.integers(0, min(200, len(whole)), 4)] = rng.integers(0, 256, 4)
            paths.append(tmp_path / f"{number}.{suffix}")
            paths[-1].write_bytes(damaged.tobytes())
    fetched = split_of(*paths).fetch(np.arange(len(paths)))
    assert len(fetched.rows) + len(fetched.broken) == len(paths)
    assert fetched.broken
    assert torch.isfinite(fetched.inputs).all()


def test_nothing_that_can_be_read(tmp_path):
    fetched = split_of(tmp_path / "gone.jpg").fetch(np.array([0]))
    assert (fetched.inputs.shape, fetched.rows.shape) == ((0, 3, 16, 16), (0,))


def test_show_and_rows(tmp_path):
    split = ImageSplit(Paths(["a", "b", "c"]), Labels(np.array([0])), np.array([2], dtype=np.uint32))
    assert (split.show(0).image, split.workers, len(split)) == ("c", True, 1)


def test_paths():
    names = ["a/b.jpg", "", "ü\n.png", "bad\udcff.gif"]
    paths = Paths(names)
    assert (list(paths), len(paths)) == (names, 4)
    assert list(Paths([])) == []
    with pytest.raises(IndexError, match="path 4 of 4"):
        paths[4]
    assert len(pickle.dumps(Paths(["some/file.jpg"] * 1000))) < 1000 * 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "image_size must be at least 1, found 0"),
        ({"std": (1, 0, 1)}, "mean and std"),
        ({"mean": (1,)}, "mean"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        split_of("a", **options)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pictures need Pillow: pip install pillow"):
        split_of("a")


def test_grey_pictures_are_whole(tmp_path):
    columns = np.linspace(0, 255, 48).astype(np.uint8)
    Image.fromarray(np.tile(columns, (32, 1))).save(tmp_path / "grey.png")
    Image.new("RGB", SIZE, (255, 0, 0)).save(tmp_path / "red.png")
    split = split_of(tmp_path / "grey.png", tmp_path / "red.png", grey=True, size=32)
    grey, red = split.fetch(np.arange(2)).inputs
    assert grey.shape == (1, 32, 32)
    np.testing.assert_allclose(grey[0, 5], columns[8:40] / 127.5 - 1, atol=1e-6)  # the square in the middle
    np.testing.assert_allclose(red, 0.299 * 2 - 1, atol=0.01)  # as bright as red is
    assert split.fetch(np.arange(2), np.array([3, 4])).inputs.shape == (2, 1, 32, 32)
    assert split.fetch(np.empty(0, dtype=np.int64)).inputs.shape == (0, 1, 32, 32)
