"""Checkpoints: whole or refused, with the one before in their place."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetxl.training.checkpoint import STATE, TENSORS, Checkpoint, CheckpointError, Checkpoints


def checkpoint(step):
    tensors = {"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step), "half": torch.ones(2).bfloat16()}
    return Checkpoint(step, tensors, {"progress": {"best": 0.1 + step}, "name": "é"})


@pytest.fixture
def kept(tmp_path):
    """Checkpoints of the steps 10, 20 and 30."""
    found = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        found.save(checkpoint(step))
    return found


def place(checkpoints, step):
    return checkpoints.directory / f"step-{step:08d}"


def test_what_is_written_reads_back(kept):
    found = kept.load(20)
    expected = checkpoint(20)
    assert (found.step, found.state) == (20, expected.state)
    assert set(found.tensors) == set(expected.tensors)
    for name, value in found.tensors.items():
        assert value.dtype == expected.tensors[name].dtype
        assert torch.equal(value, expected.tensors[name])
    latest, refused = kept.latest()
    assert (latest.step, refused) == (30, [])


def test_nothing_yet(tmp_path):
    found = Checkpoints(tmp_path / "missing")
    assert (found.steps(), found.latest(), found.best(), found.best_step()) == ([], (None, []), (None, []), None)
    found.discard_after(0)
    assert not (tmp_path / "missing").exists()


def test_tensors_that_share_memory_or_are_views(tmp_path):
    found = Checkpoints(tmp_path)
    base = torch.arange(12.0).reshape(3, 4)
    found.save(Checkpoint(1, {"a": base, "b": base, "t": base.T, "grad": base.clone().requires_grad_()}, {}))
    tensors = found.load(1).tensors
    assert torch.equal(tensors["a"], tensors["b"])
    assert torch.equal(tensors["t"], base.T)


def test_the_last_and_the_best_are_kept(tmp_path):
    found = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        found.save(checkpoint(step), best=step in (1, 3))
    assert found.steps() == [3, 5, 6]
    assert found.best_step() == 3
    assert found.best()[0].step == 3
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-00000003", "step-00000005", "step-00000006"]
    found.save(checkpoint(7), best=True)
    assert found.steps() == [6, 7]


def test_the_same_step_again(kept):
    kept.save(Checkpoint(30, {"weight": torch.zeros(1)}, {"again": True}))
    assert kept.load(30).state == {"again": True}
    assert kept.steps() == [10, 20, 30]


def cut_tensors(folder):
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[:-5])


def empty_tensors(folder):
    (folder / TENSORS).write_bytes(b"")


def no_tensors(folder):
    (folder / TENSORS).unlink()


def edit_tensors(folder):
    save_file({name: value + 1 for name, value in load_file(folder / TENSORS).items()}, folder / TENSORS)


def edit_state(folder):
    (folder / STATE).write_text((folder / STATE).read_text().replace("30.1", "29.1"))


def cut_state(folder):
    (folder / STATE).write_text((folder / STATE).read_text()[:-10])


def no_state(folder):
    (folder / STATE).unlink()


def other_state(folder):
    (folder / STATE).write_text("[]")


def other_format(folder):
    resign(folder, format=99)


def no_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("a file")


def rename(folder):
    folder.rename(folder.with_name("step-00000040"))


def resign(folder, **changes):
    """Change the state and make its checksums match again."""
    state = json.loads((folder / STATE).read_text()) | changes
    state.pop("checksum")
    if (folder / TENSORS).exists():
        state["tensors_checksum"] = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    state["checksum"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (folder / STATE).write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_tensors, "tensors.safetensors was changed or cut short; its checksum does not match"),
        (empty_tensors, "tensors.safetensors was changed or cut short"),
        (no_tensors, "tensors.safetensors cannot be read"),
        (edit_tensors, "tensors.safetensors was changed or cut short"),
        (edit_state, "state.json was changed or cut short; its checksum does not match"),
        (cut_state, "is not valid JSON"),
        (no_state, "state.json cannot be read"),
        (other_state, "state.json has no format 1"),
        (other_format, "state.json has no format 1"),
        (no_folder, "state.json cannot be read"),
        (rename, "was renamed: it is of another step"),
    ],
)
def test_a_damaged_one_is_refused_and_the_one_before_is_used(kept, damage, message):
    damage(place(kept, 30))
    newest = kept.steps()[-1]
    with pytest.raises(CheckpointError, match=message) as error:
        kept.load(newest)
    assert str(place(kept, newest)) in str(error.value)
    found, refused = kept.latest()
    assert found.step == 20
    assert refused == [str(error.value)]


def test_all_damaged(kept):
    for step in kept.steps():
        cut_tensors(place(kept, step))
    found, refused = kept.latest()
    assert found is None
    assert len(refused) == 3


def test_a_damaged_best_gives_way_to_the_newest(kept):
    kept.save(checkpoint(40), best=True)
    kept.save(checkpoint(50))
    cut_tensors(place(kept, 40))
    found, refused = kept.best()
    assert found.step == 50
    assert "step-00000040" in refused[0]


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_refused_and_not_executed(kept, tmp_path):
    trace = tmp_path / "trace"
    for content in (pickle.dumps(Trap(trace)), None):
        if content is None:
            torch.save({"weight": Trap(trace)}, place(kept, 30) / TENSORS)
        else:
            (place(kept, 30) / TENSORS).write_bytes(content)
        with pytest.raises(CheckpointError, match="its checksum does not match"):
            kept.load(30)
        resign(place(kept, 30))  # even one whose checksums were made to match
        with pytest.raises(CheckpointError, match=r"tensors.safetensors cannot be read"):
            kept.load(30)
    assert kept.latest()[0].step == 20
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace))).close()
    assert trace.exists()  # the trap works


def test_what_a_killed_process_left_is_never_read_and_removed(kept):
    shutil.copytree(place(kept, 30), kept.directory / ".step-00000040.123")
    assert kept.latest()[0].step == 30
    kept.save(checkpoint(40))
    assert sorted(os.listdir(kept.directory)) == ["step-00000020", "step-00000030", "step-00000040"]


def test_an_error_while_writing_leaves_no_checkpoint(kept):
    with pytest.raises(ValueError, match="JSON compliant"):
        kept.save(Checkpoint(40, {"weight": torch.zeros(1)}, {"loss": float("nan")}))
    assert kept.steps() == [10, 20, 30]
    kept.save(checkpoint(50))
    assert not list(kept.directory.glob(".*"))


def test_other_names_are_left_alone(kept):
    for name in ("step-5", "step-old", "step-00000010-copy", "notes"):
        (kept.directory / name).mkdir()
    assert kept.steps() == [10, 20, 30]
    kept.keep = 1
    kept.save(checkpoint(40))
    assert kept.steps() == [40]
    assert (kept.directory / "step-5").exists()


def test_newer_ones_are_discarded(kept):
    kept.discard_after(10)
    assert kept.steps() == [10]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": 7}', '{"step": null}'])
def test_a_best_that_is_not_there(kept, content):
    (kept.directory / "best.json").write_text(content)
    assert kept.best_step() is None
    assert kept.best()[0].step == 30
