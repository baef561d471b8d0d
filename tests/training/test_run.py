"""A run's directory: taken up, read back, and refused where it is not what it should be."""

import dataclasses
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetxl.data.dataset import InputSpec
from hetxl.data.synthetic import load_synthetic
from hetxl.training.model import build_model
from hetxl.training.run import (
    Run,
    default_directory,
    describe_model,
    load_run,
    open_run,
    save_model,
    start_run,
)
from hetxl.training.train import train
from support.training import QUIET, small, write_pictures


def test_a_new_run(tmp_path):
    config = small(tmp_path / "run")
    run = start_run(config, tmp_path / "run")
    assert run == Run(tmp_path / "run", config)
    assert open_run(tmp_path / "run").config == config
    assert not run.finished
    assert run.checkpoints.keep == config.keep
    assert start_run(config, tmp_path / "run") == run


def test_an_empty_directory_is_taken(tmp_path):
    assert start_run(small(), tmp_path).path == tmp_path


def test_another_configuration_is_refused_and_the_options_named(tmp_path):
    start_run(small(rank=3, seed=0), tmp_path)
    (tmp_path / "log.jsonl").touch()
    message = "other options (rank 3 there, 4 here; seed 0 there, 1 here); choose another --out, or remove it"
    with pytest.raises(ValueError, match=re.escape(message)):
        start_run(small(rank=4, seed=1), tmp_path)
    with pytest.raises(ValueError, match=re.escape("; …)")):
        start_run(small(rank=4, seed=1, beta1=0.5, beta2=0.5, ema=0.5), tmp_path)
    assert open_run(tmp_path).config.rank == 3


def test_a_run_that_ended_before_its_first_step_is_none(tmp_path):
    with pytest.raises(ValueError, match="backbone 'cnn' is for pictures"):
        train(small(tmp_path / "run", backbone="cnn"), narrator=QUIET)
    assert train(small(tmp_path / "run"), narrator=QUIET).finished
    with pytest.raises(ValueError, match="backbone 'auto' there, 'cnn' here"):
        train(small(tmp_path / "run", backbone="cnn"), narrator=QUIET)


def test_beside_steps_epochs_say_nothing(tmp_path):
    start_run(small(steps=4, epochs=1.0), tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert start_run(small(steps=4), tmp_path).config.epochs is None


def test_what_changes_nothing_may_differ(tmp_path):
    start_run(small(tmp_path), tmp_path)
    other = small("elsewhere", workers=0, device="auto", tensorboard=True, keep=5, log_every=3)
    assert start_run(other, tmp_path).config == other
    assert open_run(tmp_path).config == other


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files but no run in it; choose another --out"):
        start_run(small(), tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("pycode", "pycode-det"),
        ("synthetic:rows=5,noise=2", "synthetic-det"),
        ("a/b/features.npy", "features-det"),
        ("a/pictures/", "pictures-det"),
        (".", "data-det"),
    ],
)
def test_default_directory(data, expected):
    assert str(default_directory(small(data=data, head="det"))) == os.path.join("runs", expected)


@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_predictions_are_those_before_saving(tmp_path, head):
    config = small(head=head, backbone="mlp", width=8, features=5, dropout=0.5)
    dataset = load_synthetic(rows=100, classes=8, features=4)
    model = build_model(config, dataset.input, 8, "softmax")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    run = start_run(config, tmp_path)
    describe_model(run, dataset, "softmax")
    save_model(run, model)
    found = load_run(tmp_path)
    assert (found.spec, found.link, found.class_names) == (dataset.input, "softmax", dataset.class_names)
    assert found.class_counts == dataset.splits["train"].labels.counts(8).tolist()
    assert not any(module.training for module in found.model.modules())
    inputs = dataset.splits["test"].features
    one, two = (
        part.head.predict(part.backbone(inputs), generator=torch.Generator().manual_seed(3))
        for part in (model.eval(), found.model)
    )
    assert torch.equal(one.log_probs, two.log_probs)


def test_a_trained_run_has_its_averaged_weights(finished):
    found = load_run(finished)
    checkpoint, refused = found.run.checkpoints.latest()
    assert found.run.finished
    assert not refused
    weight = found.model.head.classifier.weight
    assert torch.equal(weight, checkpoint.tensors["average.head.classifier.weight"])
    assert not torch.equal(weight, checkpoint.tensors["model.head.classifier.weight"])


def test_a_run_that_has_not_ended_gives_its_best_checkpoint(copied):
    (copied / "result.json").unlink()
    expected = load_run(copied).run.checkpoints.best()[0].tensors["average.head.classifier.weight"]
    (copied / "model.safetensors").unlink()
    assert torch.equal(load_run(copied).model.head.classifier.weight, expected)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="has no weights yet: no checkpoint was written"):
        load_run(copied)


def test_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"is no run: it has no config\.json; give the directory that hetxl train"):
            load_run(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"head": {"rnak": 3}}', '{"head": {"rank": "3"}}'])
def test_a_damaged_configuration(copied, content):
    (copied / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json|rank must be"):
        load_run(copied)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{", '{"input": {"kind": "features"}}'])
def test_a_damaged_description_of_the_model(copied, content):
    (copied / "model.json").unlink()
    if content is not None:
        (copied / "model.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.json"):
        load_run(copied)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def replaced(path):
    path.write_text("no weights")


def other_shape(path):
    save_file(load_file(path) | {"head.classifier.weight": torch.zeros(3, 4)}, path)


def incomplete(path):
    tensors = load_file(path)
    tensors.pop("head.classifier.weight")
    save_file(tensors, path)


@pytest.mark.parametrize("damage", [cut, replaced, other_shape, incomplete])
def test_damaged_weights(copied, damage):
    damage(copied / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used: \S+") as error:
        load_run(copied)
    if damage in (other_shape, incomplete):
        assert "head.classifier.weight" in str(error.value)


def test_a_frozen_run_that_has_not_ended_says_so(tmp_path):
    pictures = write_pictures(tmp_path / "pictures", each=12)
    config = small(
        tmp_path / "run", data=str(pictures), backbone="cnn", width=8, depth=1, features=6, image_size=16, frozen=True,
        steps=1, batch_size=4, workers=0,
    )  # fmt: skip
    run = train(config, narrator=QUIET)
    assert load_run(run.path).model.backbone.frozen
    (run.path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has not ended, and its checkpoints do not hold the whole model"):
        load_run(run.path)


def test_published_weights_are_not_fetched_again(tmp_path):
    config = small(backbone="timm:test_resnet", image_size=32)
    assert config.pretrained
    dataset = dataclasses.replace(load_synthetic(rows=40, classes=8, features=4), input=InputSpec("image", (3, 32, 32)))
    model = build_model(dataclasses.replace(config, pretrained=False, seed=5), dataset.input, 8, "softmax")
    run = start_run(config, tmp_path)
    describe_model(run, dataset, "softmax")
    save_model(run, model)
    found = load_run(tmp_path)
    assert all(torch.equal(value, found.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert found.run.config.pretrained
