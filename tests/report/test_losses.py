from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hetxl.report.losses import example_test, read_losses
from hetxl.report.read import Run
from hetxl.report.statistics import paired_test


def run(folder, rows, losses):
    (folder / "records").mkdir(parents=True)
    tensors = {"rows": np.array(rows), "log_prob": -np.array(losses, dtype=np.float64)}
    save_file(tensors, folder / "records" / "test.safetensors")
    return Run(folder)


def test_losses_come_in_the_order_of_their_rows(tmp_path):
    found = read_losses(run(tmp_path / "a", [5, 2, 9], [0.5, 0.2, 0.9]), "test")
    assert found is not None
    rows, losses = found
    assert rows.tolist() == [2, 5, 9]
    assert losses.tolist() == [0.2, 0.5, 0.9]


def test_it_is_the_paired_test_over_examples(tmp_path):
    first, second = run(tmp_path / "a", [0, 1, 2], [1.0, 2.0, 4.0]), run(tmp_path / "b", [2, 1, 0], [3.5, 2.5, 0.1])
    expected = paired_test([1.0, 2.0, 4.0], [0.1, 2.5, 3.5])
    test = example_test(first, second, "test")
    assert test == pytest.approx(expected)
    assert example_test(first, first, "test").p == 1


def test_other_examples_or_none_give_no_test(tmp_path):
    first = run(tmp_path / "a", [0, 1, 2], [1.0, 2.0, 4.0])
    assert example_test(first, run(tmp_path / "b", [0, 1, 3], [1.0, 2.0, 4.0]), "test") is None
    assert example_test(first, run(tmp_path / "c", [0], [1.0]), "test") is None
    assert example_test(first, first, "validation") is None
    assert example_test(first, Run(Path("nowhere")), "test") is None
    assert read_losses(run(tmp_path / "d", [0, 1], [1.0, np.inf]), "test") is None


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00", b"text" * 100])
def test_a_broken_file_gives_none(tmp_path, content):
    broken = run(tmp_path / "a", [0, 1], [1.0, 2.0])
    (tmp_path / "a" / "records" / "test.safetensors").write_bytes(content)
    assert read_losses(broken, "test") is None


def test_a_file_without_losses_gives_none(tmp_path):
    (tmp_path / "records").mkdir()
    save_file({"rows": np.arange(3)}, tmp_path / "records" / "test.safetensors")
    assert read_losses(Run(tmp_path), "test") is None
