"""The log: lines that a resumed run takes up, and TensorBoard's files."""

import json
import os

import pytest

from hetxl.training.log import Log, read_log


def write(path, steps, **options):
    log = Log(path, **options)
    for step in steps:
        log.write("step", step=step, loss=1 / step)
    log.close()


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    log = Log(path)
    log.write("step", step=1, loss=0.5)
    assert read_log(path) == [{"kind": "step", "step": 1, "loss": 0.5}]
    log.write("evaluation", step=1, split="validation", nll=2.0)
    assert [line["kind"] for line in read_log(path)] == ["step", "evaluation"]
    log.close()
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 11))
    write(path, (7, 8), after=6)
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    write(path, (1,))
    assert [line["step"] for line in read_log(path)] == [1]


@pytest.mark.parametrize("tail", ['{"kind": "step", "ste', '{"kind": "step", "step": 4', "\x00\x00", "\udcff", "7\n"])
def test_a_half_written_last_line_is_dropped(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    with open(path, "ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    write(path, (4,), after=3)
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_opening_replaces_the_file_in_one_move(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    before = os.stat(path).st_ino
    reader = open(path)  # noqa: SIM115
    log = Log(path, after=2)
    # The old lines are still whole for whoever has the file open: they were never cut short.
    assert len(reader.readlines()) == 3
    assert os.stat(path).st_ino != before
    reader.close()
    log.close()
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_no_log(tmp_path):
    assert read_log(tmp_path / "log.jsonl") == []


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path / "log.jsonl", tensorboard=tmp_path / "events")
    log.write("step", step=3, loss=0.5)
    log.write("evaluation", step=3, split="validation", **{"precision@1": 0.25, "nll": None})
    log.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "evaluation/precision_at_1"}
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(3, 0.5)]
    assert "precision@1" in read_log(tmp_path / "log.jsonl")[1]
