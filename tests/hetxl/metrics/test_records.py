import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hetxl.metrics import Records, summarise
from support.records import records_of, same


def some(n=7, classes=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return records_of(torch.randn(n, classes, generator=generator), torch.randint(classes, (n,), generator=generator))


def test_a_file_gives_back_what_was_saved(tmp_path):
    records = some()
    path = tmp_path / "new" / "records.safetensors"
    records.save(path)
    loaded = Records.load(path)
    assert same(loaded, records)
    assert [getattr(loaded, name).dtype for name in Records.TYPES] == list(Records.TYPES.values())
    some(3).save(path)
    assert len(Records.load(path)) == 3
    assert [file.name for file in path.parent.iterdir()] == ["records.safetensors"]


def test_no_examples_can_be_saved(tmp_path):
    Records.empty(3).save(tmp_path / "none")
    assert Records.load(tmp_path / "none").top_ids.shape == (0, 3)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "records.safetensors"
    some(3).save(path)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        some(7).save(path)
    assert len(Records.load(path)) == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        Records.load(tmp_path / "absent")
    path = tmp_path / "records.safetensors"
    some().save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"records\.safetensors is not a complete .*; evaluate again"):
        Records.load(path)
    path.write_bytes(b"label,row\n1,2\n")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Records.load(path)
    save_file({"weight": np.ones(3)}, path)
    with pytest.raises(ValueError, match="its format is None"):
        Records.load(path)


def test_columns_must_fit():
    with pytest.raises(ValueError, match=r"rank must have shape \[7\] as label has, found \[2\]"):
        dataclasses.replace(some(), rank=np.zeros(2))
    with pytest.raises(ValueError, match=r"top_probs must have shape \[7, 5\]"):
        dataclasses.replace(some(), top_probs=np.zeros((7, 4)))


def test_only_records_of_equal_shape_are_concatenated():
    with pytest.raises(ValueError, match=r"Records with \[2, 5\] top classes"):
        Records.concatenate([some(classes=9), some(classes=2)])
    with pytest.raises(ValueError, match="found none"):
        Records.concatenate([])


@given(st.integers(1, 30), st.data())
def test_parts_joined_are_the_whole(n, data):
    records = some(n)
    cut = data.draw(st.integers(0, n))
    parts = [records.take(np.arange(cut)), records.take(np.arange(n) >= cut)]
    assert [len(part) for part in parts] == [cut, n - cut]
    joined = Records.concatenate(parts)
    assert same(joined, records)
    assert summarise(joined) == summarise(records)


def test_confidence_is_the_highest_probability():
    records = some()
    assert records.confidence.dtype == np.float64
    assert (records.confidence == records.top_probs.max(-1)).all()
