"""Arrays in files: mapped in place, equal to what was saved, and damaged files told apart."""

import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetxl.data import stored as module
from hetxl.data.stored import open_arrays, safetensors_metadata

MATRIX = np.random.default_rng(0).normal(size=(50, 7))


def save(path, array, compressed=False):
    if path.suffix == ".npy":
        np.save(path, array)
        return ""
    if path.suffix == ".npz":
        (np.savez_compressed if compressed else np.savez)(path, other=np.arange(3), a=array)
        return "a"
    save_file({"other": torch.arange(3, dtype=torch.int8), "a": torch.from_numpy(array)}, path)
    return "a"


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_in_any_order_arrive_as_float32(tmp_path, suffix, dtype):
    array = MATRIX.astype(dtype)
    path = tmp_path / f"data{suffix}"
    name = save(path, array)
    found = open_arrays(path)[name]
    assert isinstance(found.array, np.memmap)
    rows = np.array([49, 0, 3, 3, 17])
    assert found.gather(rows).dtype == np.float32
    np.testing.assert_array_equal(found.gather(rows), array[rows].astype(np.float32))
    np.testing.assert_array_equal(found.block(10, 12), array[10:12].astype(np.float32))


def test_bfloat16(tmp_path):
    tensor = torch.from_numpy(MATRIX).bfloat16()
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    found = open_arrays(tmp_path / "x.safetensors")["x"]
    assert found.is_float
    rows = np.array([5, 1])
    np.testing.assert_array_equal(found.gather(rows), tensor.float().numpy()[rows])


def test_columns_first_and_big_endian(tmp_path):
    for name, array in (("f", np.asfortranarray(MATRIX)), ("b", MATRIX.astype(">f4"))):
        np.save(tmp_path / f"{name}.npy", array)
        found = open_arrays(tmp_path / f"{name}.npy")[""]
        np.testing.assert_array_equal(found.gather(np.array([2, 1])), array[[2, 1]].astype(np.float32))


def test_compressed_is_loaded_when_small_and_refused_when_large(tmp_path, monkeypatch):
    path = tmp_path / "data.npz"
    save(path, np.asfortranarray(MATRIX), compressed=True)
    np.testing.assert_array_equal(open_arrays(path)["a"].array, MATRIX)
    monkeypatch.setattr(module, "COMPRESSED_LIMIT", 100)
    with pytest.raises(ValueError, match=r"compressed arrays, which cannot be mapped .* numpy\.savez"):
        open_arrays(path)


def test_blocks_cover_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * 8 * 16)
    np.save(tmp_path / "a.npy", MATRIX)
    blocks = list(open_arrays(tmp_path / "a.npy")[""].blocks())
    assert [start for start, _ in blocks] == [0, 16, 32, 48]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), MATRIX.astype(np.float32))


def test_pickled_it_is_a_place_and_not_the_numbers(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((10_000, 10)))
    found = open_arrays(tmp_path / "a.npy")[""]
    assert found.array.shape == (10_000, 10)
    text = pickle.dumps(found)
    assert len(text) < 2000
    assert pickle.loads(text).gather(np.array([9_999])).shape == (1, 10)


def test_float64_beyond_float32_becomes_infinite_without_a_warning(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1e300]]))
    assert np.isinf(open_arrays(tmp_path / "a.npy")[""].block(0, 1)).all()


def test_metadata(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", {"class_names": "[]"})
    assert safetensors_metadata(tmp_path / "x.safetensors") == {"class_names": "[]"}


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 5, 60, -8])
def test_files_that_were_cut_off(tmp_path, suffix, keep):
    path = tmp_path / f"data{suffix}"
    save(path, MATRIX)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"data\\{suffix}.*(cut off|write it again)"):
        open_arrays(path)


def test_a_member_whose_header_says_more_than_there_is(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4))
    text = (tmp_path / "a.npy").read_bytes().replace(b"(4,)", b"(9,)")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("a.npy", text)
        with pytest.raises(ValueError, match=r"array 'a' of .*cut off"):
            open_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit its bytes"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, "does not fit its bytes"),
        ({"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}, "cut off"),
        ({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "type F8_E4M3; store it as"),
        ({"dtype": "F32"}, "no readable entry"),
        (7, "no readable entry"),
    ],
)
def test_headers_of_safetensors_that_lie(tmp_path, entry, message):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=message):
        open_arrays(tmp_path / "x.safetensors")


def test_pickles_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1], [2, 3]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array(["a", None], dtype=object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match=r"holds Python objects .a pickle., which are never loaded"):
            open_arrays(tmp_path / name)


def test_what_is_no_array_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.npy is not a file"):
        open_arrays(tmp_path / "no.npy")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"must end in .npy, .npz or .safetensors, found '.txt'"):
        open_arrays(tmp_path / "a.txt")
    np.save(tmp_path / "a.npy", np.zeros(3, dtype=[("x", "f4"), ("y", "i4")]))
    with pytest.raises(ValueError, match="structured array; save one plain array for each of x, y"):
        open_arrays(tmp_path / "a.npy")
