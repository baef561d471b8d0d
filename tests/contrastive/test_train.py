import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from hetxl.contrastive.run import load_run
from hetxl.contrastive.train import open_data, train
from hetxl.data.pairs_noise import Swaps
from support.distributed import run as run_processes
from support.pairs import QUIET, picture_folder, small, train_on_rank, vectors_file


def result_of(run):
    return json.loads((run.path / "result.json").read_text())


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_pictures_and_captions(tmp_path, head):
    data = picture_folder(tmp_path / "shapes", each=6)
    run = train(small(data, tmp_path / "run", head=head, swap=0.5, eval_samples=4), narrator=QUIET)
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
    assert load_run(run.path).model.loss.image_noise is None or head == "het-xl"


def test_locked_towers_learn(tmp_path):
    data = vectors_file(tmp_path / "x.npz", count=600)
    config = small(data, tmp_path / "run", features=6, steps=150, learning_rate=0.03, batch_size=64, noise_init=0.05)
    found = result_of(train(config, narrator=QUIET))["metrics"]["test"]
    assert found["zero_shot"]["classes"] == 60
    assert found["zero_shot"]["top1"] > 0.8
    assert found["text_to_image@1"] > 0.8
    assert "unseen_top1" not in found["zero_shot"]  # vectors have no names


def test_again_is_the_same_and_a_finished_run_stays(tmp_path):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    first, again = (train(small(data, tmp_path / name), narrator=QUIET) for name in ("a", "b"))
    ours, theirs = (load_file(run.path / "model.safetensors") for run in (first, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result_of(first)["metrics"] == result_of(again)["metrics"]
    before = (first.path / "result.json").stat().st_mtime_ns
    assert train(small(data, tmp_path / "a"), narrator=QUIET).finished
    assert (first.path / "result.json").stat().st_mtime_ns == before


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    whole = train(small(data, tmp_path / "whole", checkpoint_every=2), narrator=QUIET)

    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hetxl.contrastive.train.validate", stopped)
    config = small(data, tmp_path / "parts", checkpoint_every=2, evaluate_every=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, narrator=QUIET)
    monkeypatch.undo()
    parts = train(config, narrator=QUIET)
    ours, theirs = (load_file(run.path / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_two_processes_train_the_same_model(tmp_path):
    data = vectors_file(tmp_path / "x.npz")
    one = train(small(data, tmp_path / "one", log_every=1), narrator=QUIET)
    lines = [json.loads(line) for line in (one.path / "log.jsonl").read_text().splitlines()]
    expected = [line["loss"] for line in lines if line["kind"] == "step"]
    found = run_processes(partial(train_on_rank, str(tmp_path), str(data)), tmp_path)
    assert found[0]["losses"] == pytest.approx(expected, abs=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "run"))
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-4), name
    assert (tmp_path / "run" / "result.json").exists()


def test_swaps_are_noted(tmp_path):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    pairs = open_data(small(data, swap=0.25))
    assert "swapped texts: 16 of 64 training pairs (25.0%); validation and test are clean" in pairs.notes
    assert pairs.splits["test"].swaps is None


def test_bad_data(tmp_path):
    data = vectors_file(tmp_path / "x.npz", split=["test"] * 80)
    with pytest.raises(ValueError, match="has no training split"):
        train(small(data, tmp_path / "a"), narrator=QUIET)
    with pytest.raises(ValueError, match="has no training split to swap texts in"):
        train(small(data, tmp_path / "b", swap=0.2), narrator=QUIET)
    with pytest.raises(ValueError, match="batch_size must be at most 64, the training pairs, found 65"):
        train(small(vectors_file(tmp_path / "y.npz"), tmp_path / "c", batch_size=65), narrator=QUIET)


def test_data_that_cannot_be_opened_leaves_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        train(small(str(tmp_path / "nothing.npz"), out=str(tmp_path / "run")), narrator=QUIET)
    assert not (tmp_path / "run").exists()
