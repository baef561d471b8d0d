"""The ways in which weights of the authors' layer may be handed over."""

import types

import numpy as np
import pytest
import torch

from hetxl.integrations.flax_names import read_params

LAYER = {
    "loc_layer": {"kernel": np.ones((3, 5)), "bias": np.zeros(5)},
    "diag_layer": {"kernel": np.ones((3, 3)), "bias": np.zeros(3)},
    "scale_layer_homoscedastic": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)},
    "scale_layer_heteroscedastic": {"kernel": np.ones((3, 3)), "bias": np.zeros(3)},
    "pre_sigmoid_temperature": np.zeros(1),
}
PLAIN = {"W", "b", "d_kernel", "d_bias", "J", "J_bias", "v_kernel", "v_bias", "raw_tau"}


def flat(params, separator, path=""):
    for key, value in params.items():
        if isinstance(value, dict):
            yield from flat(value, separator, f"{path}{key}{separator}")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize(
    "form",
    [
        lambda: LAYER,
        lambda: {"params": {"head": LAYER}},
        lambda: types.MappingProxyType({"params": types.MappingProxyType(LAYER)}),
        lambda: dict(flat(LAYER, "/")),
        lambda: dict(flat({"params": LAYER}, ".")),
    ],
)
def test_nested_and_flat_forms_are_the_same(form):
    found = read_params(form())
    assert found.keys() == PLAIN
    assert found["W"] is LAYER["loc_layer"]["kernel"]
    assert found["J"].shape == (2, 3)


def test_the_names_of_low_rank_and_the_plain_ones_nested():
    found = read_params({"scale_layer": {"kernel": np.ones((3, 6)), "bias": np.ones(6)}, "tau_min": 0.1})
    assert found.keys() == {"V_kernel", "V_bias", "tau_min"}
    found = read_params({"W": {"kernel": np.ones((3, 5)), "bias": np.ones(5)}, "d": {"kernel": np.ones((3, 3))}})
    assert found.keys() == {"W", "b", "d_kernel"}


def test_a_file_and_what_reference_files_hold_beside(tmp_path):
    beside = {"features": np.ones(2), "z": np.ones(1), "z0": np.ones(1), "grad_W": np.ones(1), "loss": np.ones(())}
    np.savez(tmp_path / "layer.npz", **dict(flat(LAYER, "/")), **beside)
    for path in (tmp_path / "layer.npz", str(tmp_path / "layer.npz")):
        assert read_params(path).keys() == PLAIN


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones(2, np.float16), np.float32),
        (np.ones(2, np.float32), np.float32),
        ([0.5, 1.5], np.float64),
        ([1, 2], np.float32),
        (torch.ones(2), np.float32),
    ],
)
def test_anything_like_an_array(value, dtype):
    found = read_params({"b": value})["b"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(value))


@pytest.mark.parametrize(
    "value", ["text", object(), np.ones(2, complex), torch.ones(2, requires_grad=True), [[1], [1, 2]]]
)
def test_what_is_no_array_is_named(value):
    with pytest.raises(TypeError, match="loc_layer/kernel must be an array of real numbers"):
        read_params({"loc_layer": {"kernel": value}})


def test_unexpected_entries_are_named():
    with pytest.raises(ValueError, match=r"holds encoder/kernel, which the layer .* such as params\['head'\]"):
        read_params({**LAYER, "encoder": {"kernel": np.ones(2)}})
    backbone = {f"block{number}": {"kernel": np.ones(2)} for number in range(20)}
    with pytest.raises(ValueError, match=r"block0/kernel, .* and 23 more") as caught:
        read_params({"params": {"backbone": backbone, "head": LAYER}})
    assert "\n" not in str(caught.value)


def test_an_entry_that_is_there_twice():
    with pytest.raises(ValueError, match="holds W twice, once as W"):
        read_params({**LAYER, "W": np.ones((3, 5))})
    with pytest.raises(ValueError, match="holds d_kernel twice"):
        read_params({"d": {"kernel": np.ones(2)}, "d/kernel": np.ones(2)})


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz: there is no such file"):
        read_params(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "objects.npz", W=np.array([{}], dtype=object))
    for name in ("text.npz", "one.npy", "objects.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not an \.npz file of arrays"):
            read_params(tmp_path / name)
    with pytest.raises(TypeError, match="found list"):
        read_params([1.0])
