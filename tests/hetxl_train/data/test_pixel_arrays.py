"""Arrays of images as a reader sees them."""

import numpy as np
import pytest

from hetxl_train.data.image_files import PixelArray
from hetxl_train.data.mapped_arrays import open_arrays


@pytest.mark.parametrize(
    ("shape", "shown"),
    [((2, 8, 9), (8, 9)), ((2, 8, 9, 1), (8, 9)), ((2, 8, 9, 3), (8, 9, 3)), ((2, 8, 9, 4), (8, 9, 3))],
)
def test_images_in_arrays_are_shown_whole_and_without_transparency(shape, shown, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    image = PixelArray(open_arrays(tmp_path / "images.npy")[""]).show(1).pixels
    np.testing.assert_array_equal(image, pixels[1][..., : shown[2]] if len(shown) == 3 else pixels[1].reshape(shown))
