import pytest
import torch

from hetxl.nn.inputs import check_features, check_normals, under_autocast


def test_features_must_fit():
    check_features(torch.zeros(2, 3, 4), 4, torch.float32)
    check_features(torch.zeros(4, dtype=torch.float64), 4, None)
    with pytest.raises(TypeError, match=r"floating-point tensor \[..., 4\], found list"):
        check_features([1.0], 4, None)
    with pytest.raises(TypeError, match=r"found dtype torch.int64"):
        check_features(torch.zeros(2, 4, dtype=torch.int64), 4, None)
    with pytest.raises(ValueError, match=r"shape \[..., 4\] \(in_features\), found \[2, 3\]"):
        check_features(torch.zeros(2, 3), 4, None)
    with pytest.raises(TypeError, match=r"features have dtype torch.float64 and the head torch.float32"):
        check_features(torch.zeros(2, 4, dtype=torch.float64), 4, torch.float32)


def test_autocast_takes_any_precision():
    features = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert not under_autocast(features)
    with torch.autocast("cpu"):
        assert under_autocast(features)
        check_features(features, 4, torch.float32)


@pytest.mark.parametrize("shape", [(2, 5, 3), (5, 3)])
def test_normals_of_each_example_or_of_all(shape):
    check_normals(torch.zeros(shape), (2,), 3, None)
    check_normals(torch.zeros(shape), (2,), 3, 5)
    with pytest.raises(ValueError, match="num_samples is 4 but noise holds 5 samples"):
        check_normals(torch.zeros(shape), (2,), 3, 4)


@pytest.mark.parametrize("shape", [(3,), (5, 4), (3, 5, 3), (2, 0, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"noise must have shape \[2, S, 3\], or \[S, 3\] shared by all examples"):
        check_normals(torch.zeros(shape), (2,), 3, None)
