"""Whole runs: what is in a run's directory, resuming, and every kind of data."""

import dataclasses
import json
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hetxl._files import write_checked
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data.label_noise import LabelNoise
from hetxl_train.data.open import open_data
from hetxl_train.data.pairs import Swaps
from hetxl_train.evaluate import evaluate_split
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.log import read_log
from hetxl_train.runs import load_run, open_run
from hetxl_train.tasks.contrastive import ContrastiveTask
from hetxl_train.training import train
from support.distributed import run as run_processes
from support.pairs import image_folder, small_pairs, train_on_rank, vectors_file
from support.training import Listening

QUIET = Console(quiet=True)
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
    return train(TrainConfig(**SMALL | options, out=str(path)), console=QUIET)


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


def test_finished_run_is_left_unchanged(tmp_path, capsys):
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
    assert "Resuming from step 4 of 6" in said
    first, second = load_file(whole.path / "model.safetensors"), load_file(cut.path / "model.safetensors")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_other_options_do_not_go_into_the_same_directory(tmp_path):
    run_of(tmp_path / "run")
    with pytest.raises(ValueError, match=r"learning_rate None there, 0\.5 here"):
        run_of(tmp_path / "run", learning_rate=0.5)


@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_every_head_under_the_sigmoid_link_with_lists_of_labels(tmp_path, head):
    run = run_of(tmp_path / "run", head=head, data="synthetic:rows=600,classes=10,features=5,multi_label=true")
    head = load_run(run.path).model.head
    assert head.link == "sigmoid"
    # The bias starts at the log-odds of each class's frequency, and few steps have not moved it far.
    counts = np.array(load_run(run.path).class_counts)
    share = (counts + 0.5) / (0.9 * 0.9 * 600 + 1)  # rows without the test split and the validation split
    expected = np.log(share / (1 - share))
    assert np.abs(head.classifier.bias.detach().numpy() - expected).max() < 0.5
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

    monkeypatch.setattr("hetxl_train.tasks.classification.evaluate_split", counted)
    run = run_of(tmp_path / "run", ema=ema, test_examples=0)
    evaluations = [line for line in read_log(run.path / "log.jsonl") if line["kind"] == "evaluation"]
    assert len(sizes) == len(evaluations) + 2  # one before the noise is switched on, and the test split
    assert result_of(run)["metrics"]["validation"]["nll"] == evaluations[-1]["nll"]


def test_times_of_the_phases_add_up_to_the_wall_clock(tmp_path):
    begin = time.perf_counter()
    run = run_of(tmp_path / "run", steps=20, evaluate_every=5)
    wall = time.perf_counter() - begin
    phases = ("train", "validation", "checkpoint", "evaluate", "other")
    seconds = [result_of(run)[f"{phase}_seconds"] for phase in phases]
    assert min(seconds) > 0
    assert 0 <= wall - sum(seconds) < 0.5


def test_steps_follow_from_epochs(tmp_path):
    run = run_of(tmp_path / "run", steps=None, epochs=0.1)
    assert result_of(run)["steps"] == round(0.1 * 900 / 16)


def test_run_on_arrays_keeps_the_class_names(tmp_path):
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", features=generator.normal(size=(200, 6)).astype("float32"),
             labels=generator.choice(["cat", "dog", "<b>"], 200))  # fmt: skip
    run = run_of(tmp_path / "run", data=str(tmp_path / "data.npz"))
    assert load_run(run.path).class_names == ["<b>", "cat", "dog"]


def write_colour_images(folder):
    generator = np.random.default_rng(0)
    for name in ("red", "blue"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            values = generator.integers(0, 80, (24, 24, 3)).astype("uint8")
            values[..., 0 if name == "red" else 2] += 150
            Image.fromarray(values).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("frozen", [False, True])
def test_run_on_images_stores_examples(tmp_path, frozen):
    write_colour_images(tmp_path / "images")
    options = {"data": str(tmp_path / "images"), "image_size": 24, "backbone": "cnn", "width": 8, "depth": 1}
    options |= {"features": 8, "workers": 1, "frozen": frozen}
    run = run_of(tmp_path / "run", **options)
    assert result_of(run)["metrics"]["test"]["examples"] == 4
    assert (run.path / "features" / "train.npy").exists() == frozen
    examples = json.loads((run.path / "examples.json").read_text())
    assert examples["most_certain"][0]["image"].startswith("data:image/")


def test_too_many_unreadable_images_stop_the_run_with_their_list(tmp_path):
    write_colour_images(tmp_path / "images")
    for number in range(10):
        (tmp_path / "images" / "red" / f"{number}.png").write_bytes(b"not an image")
    for _ in range(3):  # also where the run had come to its last checkpoint before it was stopped
        with pytest.raises(ValueError, match=r"could not be read[\s\S]*red/"):
            run_of(tmp_path / "run", data=str(tmp_path / "images"), image_size=24, width=8, depth=1, workers=0)


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


def test_run_without_label_noise_writes_no_noise_file(tmp_path):
    assert not (run_of(tmp_path / "run", steps=1).path / "label_noise.npz").exists()


def test_data_that_is_not_for_training_is_refused(tmp_path, monkeypatch):
    dataset = dataclasses.replace(open_data(TrainConfig(**SMALL)), not_for_training="use something else")
    monkeypatch.setattr("hetxl_train.data.open.open_dataset", lambda name, **options: dataset)
    with pytest.raises(ValueError, match=r"data '.*': use something else$"):
        run_of(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_of_built_in_data():
    dataset = open_data(TrainConfig(data="synthetic:rows=400,classes=7,features=3,noise=0.5"))
    assert dataset.num_classes == 7
    assert dataset.input.shape == (3,)


def test_an_automatic_temperature_is_decided_by_the_data(tmp_path, monkeypatch):
    few = run_of(tmp_path / "few", temperature="auto")
    assert result_of(few)["temperature"] == 1.0
    monkeypatch.setattr("hetxl_train.temperature.policy.STEPS", 5)
    enough = run_of(tmp_path / "enough", temperature="auto", learning_rate=0.1)
    assert result_of(enough)["temperature"] != 1.0
    # It is built again as it was decided, whatever would be decided now.
    monkeypatch.undo()
    trained = load_run(enough.path)
    assert trained.run.config.temperature == "auto"
    assert float(trained.model.head.temperature().detach()) == pytest.approx(result_of(enough)["temperature"])
    monkeypatch.setattr("hetxl_train.temperature.policy.STEPS", 5)
    noisy = run_of(tmp_path / "noisy", temperature="auto", label_noise="symmetric", label_noise_rate=0.2)
    assert result_of(noisy)["temperature"] == 1.0
    many = run_of(tmp_path / "many", temperature="auto", steps=70)  # more than one pass over 90 examples a class
    assert result_of(many)["temperature"] == 1.0


def test_a_temperature_that_follows_the_validation_loss(tmp_path):
    options = {"temperature": "learned", "temperature_method": "bilevel", "learning_rate": 0.1}
    run = run_of(tmp_path / "run", **options)
    assert result_of(run)["temperature"] != 1.0
    assert load_run(run.path).run.config.temperature_method == "bilevel"
    frozen = run_of(tmp_path / "frozen", **options, backbone="mlp", width=8, features=4, frozen=True)
    assert result_of(frozen)["temperature"] != 1.0


def test_data_that_cannot_be_opened_leaves_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="nor an existing path"):
        run_of(tmp_path / "run", data=str(tmp_path / "nothing.npz"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_run_on_images_and_captions_stores_results(tmp_path, head):
    data = image_folder(tmp_path / "shapes", each=6)
    run = train(small_pairs(data, tmp_path / "run", head=head, swap=0.5, eval_samples=4), console=QUIET)
    result = result_of(run)
    assert result["kind"] == "contrastive"
    assert result["label"] == {"det": "DET", "het-xl": "HET-XL"}[head]
    assert result["steps"] == 4
    assert result["metrics"]["test"]["zero_shot"]["classes"] == result["data"]["rows"]["test"]
    assert ("zero_shot_sampled" in result["metrics"]["test"]) == (head == "het-xl")
    assert ("noise_auroc" in result["swaps"]) == (head == "het-xl")
    assert 0 <= result["metrics"]["validation"]["image_to_text@1"] <= 1
    assert sum(result["parameters"][part] for part in ("image", "text", "loss")) == result["parameters"]["total"]
    swaps = Swaps.load(run.path / "swaps.npz")
    assert len(swaps) == pytest.approx(0.5 * result["data"]["rows"]["train"], abs=1)
    kinds = [json.loads(line)["kind"] for line in (run.path / "log.jsonl").read_text().splitlines()]
    assert set(kinds) == {"step", "evaluation"}
    examples = json.loads((run.path / "examples.json").read_text())
    assert examples["zero_shot"][0]["image"].startswith("data:image/jpeg;base64,")
    assert ("noisiest" in examples) == (head == "het-xl")
    assert load_contrastive_run(run.path).model.loss.image_noise is None or head == "het-xl"


def test_locked_towers_learn(tmp_path):
    data = vectors_file(tmp_path / "x.npz", count=600)
    config = small_pairs(
        data, tmp_path / "run", features=6, steps=150, learning_rate=0.03, batch_size=64, noise_init=0.05
    )
    metrics = result_of(train(config, console=QUIET))["metrics"]["test"]
    assert metrics["zero_shot"]["classes"] == 60
    assert metrics["zero_shot"]["top1"] > 0.8
    assert metrics["text_to_image@1"] > 0.8
    assert "unseen_top1" not in metrics["zero_shot"]  # vectors have no names


def test_a_contrastive_run_repeats_exactly_and_a_finished_run_stays(tmp_path):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    first, again = (train(small_pairs(data, tmp_path / name), console=QUIET) for name in ("a", "b"))
    ours, theirs = (load_file(run.path / "model.safetensors") for run in (first, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result_of(first)["metrics"] == result_of(again)["metrics"]
    before = (first.path / "result.json").stat().st_mtime_ns
    assert train(small_pairs(data, tmp_path / "a"), console=QUIET).finished
    assert (first.path / "result.json").stat().st_mtime_ns == before


def test_a_stopped_contrastive_run_resumes(tmp_path, monkeypatch):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    whole = train(small_pairs(data, tmp_path / "whole", checkpoint_every=2), console=QUIET)

    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hetxl_train.tasks.contrastive.validation_metrics", stopped)
    config = small_pairs(data, tmp_path / "parts", checkpoint_every=2, evaluate_every=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, console=QUIET)
    monkeypatch.undo()
    parts = train(config, console=QUIET)
    ours, theirs = (load_file(run.path / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_two_processes_train_the_same_model(tmp_path):
    data = vectors_file(tmp_path / "x.npz")
    single = train(small_pairs(data, tmp_path / "one", log_every=1), console=QUIET)
    lines = [json.loads(line) for line in (single.path / "log.jsonl").read_text().splitlines()]
    expected = [line["loss"] for line in lines if line["kind"] == "step"]
    results = run_processes(partial(train_on_rank, str(tmp_path), str(data)), tmp_path)
    assert results[0]["losses"] == pytest.approx(expected, abs=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "run"))
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-4), name
    assert (tmp_path / "run" / "result.json").exists()


def test_swaps_are_noted(tmp_path):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    pairs = ContrastiveTask.open(small_pairs(data, swap=0.25))
    assert "swapped texts: 16 of 64 training pairs (25.0%); validation and test are clean" in pairs.notes
    assert pairs.splits["test"].swaps is None


def test_invalid_pairs_raise(tmp_path):
    data = vectors_file(tmp_path / "x.npz", split=["test"] * 80)
    with pytest.raises(ValueError, match="has no training split"):
        train(small_pairs(data, tmp_path / "a"), console=QUIET)
    with pytest.raises(ValueError, match="has no training split to swap texts in"):
        train(small_pairs(data, tmp_path / "b", swap=0.2), console=QUIET)
    with pytest.raises(ValueError, match="batch_size must be at most 64, the training pairs, found 65"):
        train(small_pairs(vectors_file(tmp_path / "y.npz"), tmp_path / "c", batch_size=65), console=QUIET)


def test_pairs_that_cannot_be_opened_leave_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="nor an existing path"):
        train(small_pairs(str(tmp_path / "nothing.npz"), out=str(tmp_path / "run")), console=QUIET)
    assert not (tmp_path / "run").exists()


# ---- checkpoints and data that are not the run's own


EVERY_TWO = {"checkpoint_every": 2, "evaluate_every": 2, "keep": 5}


def stopped_run(path, **options):
    """A run whose last steps are still to be done."""
    run = run_of(path, **EVERY_TWO, **options)
    (run.path / "result.json").unlink()
    shutil.rmtree(run.path / "checkpoints" / "step-00000006")
    return run


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "lion"])
def test_every_optimizer_resumes_to_the_bit(tmp_path, optimizer):
    network = {"backbone": "mlp", "width": 8, "features": 4, "depth": 1, "optimizer": optimizer}
    stopped = stopped_run(tmp_path, **network)
    expected = load_file(stopped.path / "model.safetensors")
    (stopped.path / "model.safetensors").unlink()
    resumed = load_file(run_of(tmp_path, **EVERY_TWO, **network).path / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


def test_checkpoint_of_another_run_is_refused(tmp_path):
    whole = run_of(tmp_path / "whole", **EVERY_TWO)
    other = run_of(tmp_path / "other", **EVERY_TWO, seed=7)
    run = stopped_run(tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints" / "step-00000004")
    shutil.copytree(other.path / "checkpoints" / "step-00000004", run.path / "checkpoints" / "step-00000004")
    console = Listening()
    train(TrainConfig(**SMALL | EVERY_TWO, out=str(run.path)), console=console)
    said = "\n".join(console.said)
    assert "is of another run: seed 7 there, 0 here" in said
    assert "Resuming from step 2 of 6" in said
    assert (run.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_a_finished_run_with_a_damaged_result_is_refused(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    config, result = open_run(run).config, (run / "result.json").read_text()
    (run / "result.json").write_text(result.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match=r"result\.json was changed or damaged.*; remove it and rerun the command"):
        train(dataclasses.replace(config, out=str(run)), console=QUIET)
    (run / "result.json").unlink()
    train(dataclasses.replace(config, out=str(run)), console=QUIET)
    assert json.loads((run / "result.json").read_text())["metrics"] == json.loads(result)["metrics"]


def forge(run, change):
    """Change the state of the newest checkpoint and make its checksum match."""
    path = run.path / "checkpoints" / "step-00000004" / "state.json"
    state = json.loads(path.read_text())
    state.pop("checksum")
    change(state)
    write_checked(path, state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["progress"].update(step=10**9),
        lambda state: state["progress"].update(step=3),
        lambda state: state.pop("scaler"),
        lambda state: state.pop("progress"),
        lambda state: state.update(run=[]),
        lambda state: state["progress"].update(seconds="x"),
        lambda state: state.update(loss_sums=["x"]),
        lambda state: state.update(parts=["a", "b"]),
        lambda state: state.update(unreadable={"seen": "x"}),
        lambda state: state.update(parts_checksums=[1]),
        lambda state: state.update(parts_checksums={"../state.json": "x"}),
    ],
)
def test_state_that_is_not_of_its_step_is_never_used(tmp_path, change):
    run = stopped_run(tmp_path / "run")
    forge(run, change)
    whole = run_of(tmp_path / "whole", **EVERY_TWO)
    try:
        run_of(tmp_path / "run", **EVERY_TWO)
    except ValueError as error:
        assert "step 4" in str(error)  # noqa: PT017, one of two right outcomes
    else:
        assert (run.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_changed_features_are_noticed_when_a_run_resumes_or_is_evaluated(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "data.npz"
    features, labels = rng.normal(size=(400, 5)).astype(np.float32), rng.integers(0, 4, 400)
    np.savez(path, features=features, labels=labels)
    run = stopped_run(tmp_path / "run", data=str(path))
    np.savez(path, features=-3 * features, labels=labels)
    with pytest.raises(ValueError, match="the inputs of train have changed"):
        run_of(tmp_path / "run", data=str(path), **EVERY_TWO)
    with pytest.raises(ValueError, match="the inputs of test have changed"):
        evaluate_run(run.path)
    edited = features.copy()
    edited[200] = features[201]  # of few rows every one counts
    np.savez(path, features=edited, labels=labels)
    with pytest.raises(ValueError, match=r"inputs of .* have changed"):
        run_of(tmp_path / "run", data=str(path), **EVERY_TWO)
    np.savez(path, features=features, labels=labels)
    run_of(tmp_path / "run", data=str(path), **EVERY_TWO)
    assert evaluate_run(run.path)["examples"] == 40


def test_changed_captions_are_noticed(tmp_path):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    config = small_pairs(data, tmp_path / "run", **EVERY_TWO)
    run = train(config, console=QUIET)
    (run.path / "result.json").unlink()
    arrays = dict(np.load(data))
    np.savez(data, **arrays | {"captions": arrays["captions"][::-1]})
    with pytest.raises(ValueError, match=r"labels of .* have changed"):
        train(config, console=QUIET)
