"""Files of tensors carry a checksum of their content, and what does not match it is refused."""

import random
import resource

import pytest
import torch
from safetensors.torch import save_file

from hetxl._tensors import check_finite, content_checksum, read_tensors, write_tensors

TENSORS = {
    "weight": torch.randn(3, 4),
    "half": torch.ones(2).bfloat16(),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 5),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, {"about": "é"})
    return path


def test_tensors_and_texts_round_trip(path):
    stored = read_tensors(path)
    assert stored.checked
    assert stored.about == {"about": "é"}
    assert all(torch.equal(stored.tensors[name], value) for name, value in TENSORS.items())
    assert stored.tensors["half"].dtype == torch.bfloat16
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_file_without_a_checksum_is_read_and_says_so(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "a")
    assert not read_tensors(tmp_path / "a").checked


def test_flipped_bits_never_pass_as_the_content(path):
    content, draw = path.read_bytes(), random.Random(1)
    for _ in range(300):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            stored = read_tensors(path)
        except ValueError:
            pass
        else:  # the name of the checksum's own entry
            assert not stored.checked


def test_checksum_covers_names_types_shapes_and_texts():
    base = content_checksum({"a": torch.zeros(2, 3)}, {"x": "y"})
    assert base == content_checksum({"a": torch.zeros(2, 3)}, {"x": "y"})
    for tensors, texts in (
        ({"b": torch.zeros(2, 3)}, {"x": "y"}),
        ({"a": torch.zeros(3, 2)}, {"x": "y"}),
        ({"a": torch.zeros(2, 3).int()}, {"x": "y"}),
        ({"a": torch.zeros(2, 3)}, {"x": "z"}),
        ({"a": -torch.zeros(2, 3)}, {"x": "y"}),
    ):
        assert content_checksum(tensors, texts) != base


def test_values_that_are_not_finite_are_named(path):
    tensors = {"weight": torch.tensor([1.0, torch.nan]), "mask": torch.tensor([-torch.inf]), "ids": torch.tensor([1])}
    with pytest.raises(ValueError, match="1 of the 2 numbers of weight are NaN or infinite"):
        check_finite(path, tensors, tensors)
    check_finite(path, tensors, ["ids", "absent"])


def test_full_disk_is_an_os_error_that_leaves_the_old_file(path):
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large; free some space and rerun the command: .*a\.safetensors"):
            write_tensors(path, {"large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_equal_content_gives_equal_bytes(path):
    before = path.read_bytes()
    write_tensors(path, dict(reversed(TENSORS.items())), {"about": "é"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", [b"hetxl", b"sha256"])
def test_a_checksum_whose_name_is_damaged_is_refused(path, name):
    path.write_bytes(path.read_bytes().replace(name, b"x" + name[1:], 1))
    with pytest.raises(ValueError, match="changed or damaged"):
        read_tensors(path)
