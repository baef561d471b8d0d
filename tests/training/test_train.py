"""Whole trainings: what is in a run's directory, resuming, and every kind of data."""

import importlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hetxl.data.label_noise import LabelNoise
from hetxl.training.config import TrainConfig
from hetxl.training.log import read_log
from hetxl.training.progress import Narrator
from hetxl.training.results import evaluate_split
from hetxl.training.run import load_run
from hetxl.training.train import open_data, train

QUIET = Narrator(quiet=True)
SMALL = {
    "data": "synthetic:rows=1000,classes=10,features=5",
    "rank": 3,
    "steps": 6,
    "batch_size": 16,
    "train_samples": 2,
    "eval_samples": 8,
    "evaluation_examples": 40,
    "test_examples": 40,
    "device": "cpu",
}


def run_of(path, **options):
    return train(TrainConfig(**SMALL | options, out=str(path)), narrator=QUIET)


def result_of(run):
    return json.loads((run.path / "result.json").read_text())


def test_a_run_leaves_everything_a_report_needs(tmp_path):
    run = run_of(tmp_path / "run")
    result = result_of(run)
    assert result["label"] == "HET-XL"
    assert result["metrics"]["test"]["nll"] > 0
    assert result["metrics"]["test"]["examples"] == 40
    assert result["best_nll"] > 0
    assert result["parameters"]["total"] == result["parameters"]["head"] > 0
    assert result["data"]["rows"] == {"train": 900, "validation": 50, "test": 50}
    assert {line["kind"] for line in read_log(run.path / "log.jsonl")} == {"step", "evaluation"}
    for name in ("config", "model", "curves", "confusions", "examples"):
        assert json.loads((run.path / f"{name}.json").read_text())
    trained = load_run(run.path)
    assert trained.class_names == [str(number) for number in range(10)]
    assert trained.model.head.num_classes == 10


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    run = run_of(tmp_path / "run")
    before = (run.path / "model.safetensors").stat().st_mtime_ns
    train(TrainConfig(**SMALL, out=str(run.path)))
    assert "is done" in capsys.readouterr().err
    assert (run.path / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys):
    options = {"checkpoint_every": 2, "evaluate_every": 2}
    whole = run_of(tmp_path / "whole", **options)
    cut = run_of(tmp_path / "cut", **options)
    (cut.path / "result.json").unlink()
    tensors = cut.path / "checkpoints" / "step-00000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    train(TrainConfig(**SMALL | options, out=str(cut.path)))
    said = " ".join(capsys.readouterr().err.split())
    assert "Not used: checkpoint" in said
    assert "cut short" in said
    assert "Going on from step 4 of 6" in said
    first, second = load_file(whole.path / "model.safetensors"), load_file(cut.path / "model.safetensors")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_other_options_do_not_go_into_the_same_directory(tmp_path):
    run_of(tmp_path / "run")
    with pytest.raises(ValueError, match=r"learning_rate 0\.001 there, 0\.5 here"):
        run_of(tmp_path / "run", learning_rate=0.5)


@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_every_head_under_the_sigmoid_link_with_lists_of_labels(tmp_path, head):
    run = run_of(tmp_path / "run", head=head, data="synthetic:rows=600,classes=10,features=5,multi_label=true")
    head = load_run(run.path).model.head
    assert head.link == "sigmoid"
    # The paper's recipe: at first nothing is predicted.
    assert float(head.classifier.bias.detach().mean()) == pytest.approx(-10, abs=0.2)
    assert np.isfinite(result_of(run)["metrics"]["test"]["nll"])


def test_early_stopping_evaluates_the_best_weights(tmp_path):
    run = run_of(tmp_path / "run", steps=40, evaluate_every=2, patience=3, learning_rate=5.0, warmup=0, clip=0)
    result = result_of(run)
    assert result["stopped_early"]
    evaluations = [line for line in read_log(run.path / "log.jsonl") if line["kind"] == "evaluation"]
    best = min(evaluations, key=lambda line: line["nll"])
    assert result["steps"] == best["step"]
    assert result["metrics"]["validation"]["nll"] == pytest.approx(best["nll"], rel=1e-6)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_last_validation_is_not_made_twice(tmp_path, monkeypatch, ema):
    sizes = []

    def counted(model, split, **options):
        sizes.append(len(split))
        return evaluate_split(model, split, **options)

    # By its path: the package has a function of the same name.
    monkeypatch.setattr(importlib.import_module("hetxl.training.train"), "evaluate_split", counted)
    run = run_of(tmp_path / "run", ema=ema, test_examples=0)
    evaluations = [line for line in read_log(run.path / "log.jsonl") if line["kind"] == "evaluation"]
    assert len(sizes) == len(evaluations) + 1  # and the test split
    assert result_of(run)["metrics"]["validation"]["nll"] == evaluations[-1]["nll"]


def test_steps_follow_from_epochs(tmp_path):
    run = run_of(tmp_path / "run", steps=None, epochs=0.1)
    assert result_of(run)["steps"] == round(0.1 * 900 / 16)


def test_arrays_of_a_user(tmp_path):
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", features=generator.normal(size=(200, 6)).astype("float32"),
             labels=generator.choice(["cat", "dog", "<b>"], 200))  # fmt: skip
    run = run_of(tmp_path / "run", data=str(tmp_path / "data.npz"))
    assert load_run(run.path).class_names == ["<b>", "cat", "dog"]


def pictures(folder):
    generator = np.random.default_rng(0)
    for name in ("red", "blue"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            values = generator.integers(0, 80, (24, 24, 3)).astype("uint8")
            values[..., 0 if name == "red" else 2] += 150
            Image.fromarray(values).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("frozen", [False, True])
def test_pictures(tmp_path, frozen):
    pictures(tmp_path / "pictures")
    options = {"data": str(tmp_path / "pictures"), "image_size": 24, "backbone": "cnn", "width": 8, "depth": 1}
    options |= {"features": 8, "workers": 1, "frozen": frozen}
    run = run_of(tmp_path / "run", **options)
    assert result_of(run)["metrics"]["test"]["examples"] == 4
    assert (run.path / "features" / "train.npy").exists() == frozen
    examples = json.loads((run.path / "examples.json").read_text())
    assert examples["most_certain"][0]["image"].startswith("data:image/")


def test_too_many_broken_pictures_stop_the_run_with_their_list(tmp_path):
    pictures(tmp_path / "pictures")
    for number in range(10):
        (tmp_path / "pictures" / "red" / f"{number}.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"could not be read[\s\S]*red/"):
        run_of(tmp_path / "run", data=str(tmp_path / "pictures"), image_size=24, width=8, depth=1, workers=0)


@pytest.mark.parametrize("kind", ["symmetric", "confusable", "feature-dependent"])
def test_label_noise_is_kept_with_the_run(tmp_path, kind):
    run = run_of(tmp_path / "run", label_noise=kind, label_noise_rate=0.3)
    noise = LabelNoise.load(run.path / "label_noise.npz")
    clean, noisy = open_data(TrainConfig(**SMALL)), open_data(run.config)
    ids = clean.splits["train"].labels.ids.copy()
    assert ids[noise.rows].tolist() == noise.old.tolist()
    ids[noise.rows] = noise.new
    assert noisy.splits["train"].labels.ids.tolist() == ids.tolist()
    assert len(noise) == pytest.approx(0.3 * 900, abs=60)
    # What was trained on is what the run says: its counts of the classes, and the note.
    counts = json.loads((run.path / "model.json").read_text())["class_counts"]
    assert counts == np.bincount(ids, minlength=10).tolist()
    assert any(f"label noise: {kind}, rate 0.3" in note for note in result_of(run)["data"]["notes"])
    for name in ("validation", "test"):
        assert noisy.splits[name].labels.ids.tolist() == clean.splits[name].labels.ids.tolist()


def test_without_label_noise_there_is_no_list_of_it(tmp_path):
    assert not (run_of(tmp_path / "run", steps=1).path / "label_noise.npz").exists()


@pytest.mark.parametrize("data", ["icons", "icons:held_out=phosphor", "icons:labels=names"])
def test_names_of_icons_are_no_classes(tmp_path, data):
    with pytest.raises(ValueError, match=r"take icons:labels=categories, or the pairs: hetxl contrastive train icons$"):
        run_of(tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="no classes"):
        open_data(TrainConfig(data=data))


def test_options_of_built_in_data():
    dataset = open_data(TrainConfig(data="synthetic:rows=400,classes=7,features=3,noise=0.5"))
    assert dataset.num_classes == 7
    assert dataset.input.shape == (3,)


def test_an_automatic_temperature_is_decided_by_the_data(tmp_path, monkeypatch):
    few = run_of(tmp_path / "few")
    assert result_of(few)["temperature"] == 1.0
    monkeypatch.setattr("hetxl.training.recommend.STEPS", 5)
    enough = run_of(tmp_path / "enough", learning_rate=0.1)
    assert result_of(enough)["temperature"] != 1.0
    # It is built again as it was decided, whatever would be decided now.
    monkeypatch.undo()
    found = load_run(enough.path)
    assert found.run.config.temperature == "auto"
    assert float(found.model.head.temperature().detach()) == pytest.approx(result_of(enough)["temperature"])
    monkeypatch.setattr("hetxl.training.recommend.STEPS", 5)
    noisy = run_of(tmp_path / "noisy", label_noise="symmetric", label_noise_rate=0.2)
    assert result_of(noisy)["temperature"] == 1.0
    many = run_of(tmp_path / "many", steps=70)  # more than one pass over 90 examples a class
    assert result_of(many)["temperature"] == 1.0


def test_a_temperature_that_follows_the_validation_loss(tmp_path):
    options = {"temperature": "learned", "temperature_method": "bilevel", "learning_rate": 0.1}
    run = run_of(tmp_path / "run", **options)
    assert result_of(run)["temperature"] != 1.0
    assert load_run(run.path).run.config.temperature_method == "bilevel"
    frozen = run_of(tmp_path / "frozen", **options, backbone="mlp", width=8, features=4, frozen=True)
    assert result_of(frozen)["temperature"] != 1.0


def test_data_that_cannot_be_opened_leaves_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        run_of(tmp_path / "run", data=str(tmp_path / "nothing.npz"))
    assert not (tmp_path / "run").exists()
