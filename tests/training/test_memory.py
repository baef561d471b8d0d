import pytest

from hetxl.training import memory
from hetxl.training.memory import available_memory, jobs_for, needed_memory, peak_memory
from hetxl.training.train import open_data
from support.training import small


def test_what_the_system_tells(tmp_path):
    system, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_memory(system, group) is None
    system.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    assert available_memory(system, group) == 2000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    assert available_memory(system, group) == 2000 * 1024
    (group / "memory.max").write_text("1100\n")
    assert available_memory(system, group) == 1000


def test_jobs_fit_into_memory_and_are_no_more_than_wanted(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    assert jobs_for(8, 100, 20, "cpu") == 8
    assert jobs_for(20, 100, 20, "cpu") == 8  # four fifths of it
    assert jobs_for(8, 100, 3, "cpu") == 3
    assert jobs_for(8, 5000, 3, "cpu") == 1
    assert jobs_for(8, None, 5, "cpu") == 5
    assert jobs_for(8, 1, None, "cpu") >= 1
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert jobs_for(8, 100, 5, "cpu") == 5
    # One at a time where there is an accelerator, unless told otherwise.
    monkeypatch.setattr(memory, "find_device", lambda name: type("Device", (), {"type": "cuda"}))
    assert jobs_for(8, 1, None) == 1
    assert jobs_for(8, 1, 2) == 2


@pytest.mark.parametrize("method", ["train", "bilevel"])
def test_a_training_needs_more_than_its_process_has(tmp_path, method):
    config = small(tmp_path, temperature="learned", temperature_method=method)
    found = needed_memory(config, open_data(config))
    assert peak_memory() <= found < peak_memory() + 2**28
