"""The ONNX graph of preprocessing gives the pixels that the app's own transform gives, within stated tolerances."""

from dataclasses import asdict

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from hetxl.integrations.export.preprocess import INTERPOLATIONS, preprocessing_onnx
from hetxl_train.data.transforms import RESIZES, ImageTransform, Preprocessing

SIZES = [(60, 45), (45, 60), (20, 25), (32, 32), (101, 64), (200, 9), (9, 200), (1, 1)]  # width, height


def images(noise):
    """Random images, of independent pixels or smooth as photographs are."""
    rng = np.random.default_rng(0)
    for width, height in SIZES:
        if noise:
            yield rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        else:
            small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            yield np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def differences(preprocessing, path, noise):
    """Return how far the graph's pixels are from the transform's, in levels of 255, of every image."""
    preprocessing_onnx(path, {"size": 32, **asdict(preprocessing)})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    transform, std = ImageTransform(32, preprocessing), np.array(preprocessing.std).reshape(-1, 1, 1)
    for image in images(noise):
        pixels = np.asarray(session.run(["pixels"], {"image": image})[0])
        assert pixels.dtype == np.float32
        assert pixels.shape == (1, len(std), 32, 32)
        yield np.abs(pixels[0] - transform(Image.fromarray(image))) * std * 255


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("resize", RESIZES)
def test_pixels_are_those_of_the_transform(interpolation, resize, tmp_path):
    for crop in (0.875, 1.0):
        for channels in (1, 3):
            preprocessing = Preprocessing((0.4,) * channels, (0.25,) * channels, interpolation, crop, resize)
            levels = list(differences(preprocessing, tmp_path / "a.onnx", noise=False))
            assert max(values.max() for values in levels) <= 2.01
            assert np.mean([values.mean() for values in levels]) < 0.1
            # Negative weights of independent pixels are cut at black and white, in an order that Pillow chooses.
            levels = list(differences(preprocessing, tmp_path / "a.onnx", noise=True))
            assert np.mean([values.mean() for values in levels]) < 0.25
            if interpolation in ("bilinear", "hamming"):
                assert max(values.max() for values in levels) <= 2.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolation": "nearest"}, "interpolation must be one of"),
        ({"resize": "stretch"}, "resize must be one of"),
        ({"size": 0}, "size must be at least 1"),
    ],
)
def test_preprocessing_that_a_graph_cannot_express_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        preprocessing_onnx(tmp_path / "a.onnx", {"size": 32, **asdict(Preprocessing())} | change)
    assert list(tmp_path.iterdir()) == []
