"""Checkpoints: complete, or replaced by the previous one."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetxl.optim import Recipe, build_optimizer
from hetxl_train.checkpoint import (
    STATE,
    TENSORS,
    Checkpoint,
    CheckpointError,
    Checkpoints,
    load_moments,
    load_weights,
    tensors_of,
)


def checkpoint(step):
    tensors = {"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step), "half": torch.ones(2).bfloat16()}
    return Checkpoint(step, tensors, {"progress": {"best": 0.1 + step}, "name": "é"})


@pytest.fixture
def stored(tmp_path):
    """Checkpoints of the steps 10, 20 and 30."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        checkpoints.save(checkpoint(step))
    return checkpoints


def path_of(checkpoints, step):
    return checkpoints.directory / f"step-{step:08d}"


def test_checkpoint_round_trips(stored):
    loaded = stored.load(20)
    expected = checkpoint(20)
    assert (loaded.step, loaded.state) == (20, expected.state)
    assert set(loaded.tensors) == set(expected.tensors)
    for name, value in loaded.tensors.items():
        assert value.dtype == expected.tensors[name].dtype
        assert torch.equal(value, expected.tensors[name])
    latest, refused = stored.latest()
    assert (latest.step, refused) == (30, [])


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "missing")
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best(), checkpoints.best_step()) == (
        [],
        (None, []),
        (None, []),
        None,
    )
    checkpoints.discard_after(0)
    assert not (tmp_path / "missing").exists()


def test_tensors_that_share_memory_or_are_views(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    base = torch.arange(12.0).reshape(3, 4)
    checkpoints.save(Checkpoint(1, {"a": base, "b": base, "t": base.T, "grad": base.clone().requires_grad_()}, {}))
    tensors = checkpoints.load(1).tensors
    assert torch.equal(tensors["a"], tensors["b"])
    assert torch.equal(tensors["t"], base.T)


def test_the_last_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(checkpoint(step))
        checkpoints.update(step, {"evaluated": step}, best=step in (1, 3))
    assert checkpoints.steps() == [3, 5, 6]
    assert checkpoints.best_step() == 3
    assert checkpoints.best()[0].step == 3
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-00000003", "step-00000005", "step-00000006"]
    checkpoints.save(checkpoint(7))
    assert checkpoints.steps() == [3, 6, 7]
    checkpoints.update(7, {"evaluated": 7}, best=True)
    assert checkpoints.steps() == [6, 7]
    assert checkpoints.load(7).state["evaluated"] == 7


def test_saving_a_step_again_replaces_its_checkpoint(stored):
    stored.save(Checkpoint(30, {"weight": torch.zeros(1)}, {"again": True}))
    assert stored.load(30).state == {"again": True}
    assert stored.steps() == [10, 20, 30]


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
        (edit_state, "state.json was changed or damaged: its content does not match its checksum"),
        (cut_state, "is not valid JSON"),
        (no_state, "state.json cannot be read"),
        (other_state, "state.json must hold a JSON object, found a list"),
        (other_format, "state.json has no format 1"),
        (no_folder, "state.json cannot be read"),
        (rename, "was renamed: it is of another step"),
    ],
)
def test_a_damaged_one_is_refused_and_the_one_before_is_used(stored, damage, message):
    damage(path_of(stored, 30))
    newest = stored.steps()[-1]
    with pytest.raises(CheckpointError, match=message) as error:
        stored.load(newest)
    assert str(path_of(stored, newest)) in str(error.value)
    checkpoints, refused = stored.latest()
    assert checkpoints.step == 20
    assert refused == [str(error.value)]


def test_all_damaged_checkpoints_are_refused(stored):
    for step in stored.steps():
        cut_tensors(path_of(stored, step))
    checkpoints, refused = stored.latest()
    assert checkpoints is None
    assert len(refused) == 3


def test_a_damaged_best_gives_way_to_the_newest(stored):
    stored.save(checkpoint(40))
    stored.update(40, {}, best=True)
    stored.save(checkpoint(50))
    cut_tensors(path_of(stored, 40))
    checkpoints, refused = stored.best()
    assert checkpoints.step == 50
    assert "step-00000040" in refused[0]


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_refused_and_not_executed(stored, tmp_path):
    trace = tmp_path / "trace"
    for content in (pickle.dumps(Trap(trace)), None):
        if content is None:
            torch.save({"weight": Trap(trace)}, path_of(stored, 30) / TENSORS)
        else:
            (path_of(stored, 30) / TENSORS).write_bytes(content)
        with pytest.raises(CheckpointError, match="its checksum does not match"):
            stored.load(30)
        resign(path_of(stored, 30))  # even one whose checksums were made to match
        with pytest.raises(CheckpointError, match=r"tensors.safetensors cannot be read"):
            stored.load(30)
    assert stored.latest()[0].step == 20
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace))).close()
    assert trace.exists()  # the trap works


def test_leftovers_of_a_killed_process_are_ignored_and_removed(stored):
    shutil.copytree(path_of(stored, 30), stored.directory / ".step-00000040.123")
    assert stored.latest()[0].step == 30
    stored.save(checkpoint(40))
    assert sorted(os.listdir(stored.directory)) == ["step-00000020", "step-00000030", "step-00000040"]


def test_an_error_while_writing_leaves_no_checkpoint(stored):
    with pytest.raises(ValueError, match="JSON compliant"):
        stored.save(Checkpoint(40, {"weight": torch.zeros(1)}, {"loss": float("nan")}))
    assert stored.steps() == [10, 20, 30]
    stored.save(checkpoint(50))
    assert not list(stored.directory.glob(".*"))


def test_other_names_are_left_alone(stored):
    for name in ("step-5", "step-old", "step-00000010-copy", "notes"):
        (stored.directory / name).mkdir()
    assert stored.steps() == [10, 20, 30]
    stored.keep = 1
    stored.save(checkpoint(40))
    assert stored.steps() == [40]
    assert (stored.directory / "step-5").exists()


def test_newer_ones_are_discarded(stored):
    stored.discard_after(10)
    assert stored.steps() == [10]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": 7}', '{"step": null}'])
def test_missing_best_checkpoint_gives_the_newest(stored, content):
    (stored.directory / "best.json").write_text(content)
    assert stored.best_step() is None
    assert stored.best()[0].step == 30


def trained(seed, steps=3):
    """A model and its optimiser after a few steps."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "names": names}], lr=0.1)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "lamb", "lion"])
def test_every_optimizer_continues_identically(name):
    def begun(seed, steps):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = build_optimizer(model, Recipe(0.1, optimizer=name))
        step(model, optimizer, steps)
        return model, optimizer

    model, optimizer = begun(0, 3)
    checkpoint = Checkpoint(3, {key: value.clone() for key, value in tensors_of(model, optimizer).items()}, {})
    other, its = begun(1, 1)
    load_weights(other, checkpoint)
    load_moments(its, checkpoint)
    for network, its_optimizer in ((model, optimizer), (other, its)):
        step(network, its_optimizer, 3)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_restored_training_continues_identically():
    model, optimizer = trained(0)
    checkpoint = Checkpoint(3, {name: value.clone() for name, value in tensors_of(model, optimizer).items()}, {})
    other, its = trained(1, steps=1)
    load_weights(other, checkpoint)
    load_moments(its, checkpoint)
    for network, its_optimizer in ((model, optimizer), (other, its)):
        step(network, its_optimizer, 2)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_before_the_first_step_there_are_no_moments():
    names = tensors_of(*trained(0, steps=0))
    assert sorted(names) == ["model.bias", "model.weight"]


def test_averaged_weights_are_loaded_on_request():
    model, optimizer = trained(0)
    tensors = {**tensors_of(model, optimizer), "average.weight": torch.full((2, 3), 7.0, dtype=torch.float64)}
    load_weights(model, Checkpoint(3, tensors, {}), averaged=True)
    assert torch.equal(model.weight.detach(), torch.full((2, 3), 7.0))
    load_weights(model, Checkpoint(3, {**tensors, "model.weight": torch.zeros(2, 3)}, {}))
    assert not model.weight.any()
