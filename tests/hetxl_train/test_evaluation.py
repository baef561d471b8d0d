"""Metrics of a trained run, on its own data and on others."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console as RichConsole

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import GREY, ImageTransform
from hetxl_train.evaluate_runs import contrastive_table, evaluate_contrastive_run, evaluate_run
from hetxl_train.report import as_rich
from hetxl_train.rescale import rescale_run
from hetxl_train.training import train
from support.pairs import QUIET, image_folder, small_pairs, vectors_file
from support.training import DATA


@pytest.mark.parametrize("split", ["test", "validation"])
def test_metrics_are_those_of_the_result(finished, split):
    stored = json.loads((finished / "result.json").read_text())["metrics"][split]
    assert evaluate_run(finished, split=split, device="cpu") == stored


def test_options_reach_the_prediction(finished):
    usual = evaluate_run(finished, device="cpu")
    assert evaluate_run(finished, limit=20, device="cpu")["examples"] == 20
    assert evaluate_run(finished, method="deterministic", device="cpu")["nll"] != usual["nll"]
    more = evaluate_run(finished, num_samples=200, device="cpu")["nll"]
    assert more != usual["nll"]
    assert more == pytest.approx(usual["nll"], abs=0.05)


def test_built_in_data_by_name(finished):
    assert evaluate_run(finished, DATA, device="cpu") == evaluate_run(finished, device="cpu")
    other = evaluate_run(finished, DATA.replace("2000", "3000"), device="cpu")
    assert other["examples"] == 150


def test_other_data_of_the_same_classes(finished, tmp_path):
    split = load_synthetic(rows=2000, classes=8, features=4).splits["test"]
    np.save(tmp_path / "features.npy", split.features.numpy())
    np.save(tmp_path / "labels.npy", split.labels.ids)
    metrics = evaluate_run(finished, str(tmp_path / "features.npy"), labels=str(tmp_path / "labels.npy"), device="cpu")
    # All of it, in the same order: the metrics of the run's own test split.
    assert metrics == evaluate_run(finished, device="cpu")


def test_labels_without_data_are_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="is for other data than the run's own; pass DATA"):
        evaluate_run(finished, labels=str(tmp_path / "labels.npy"), device="cpu")


def test_grey_image_model_evaluates_a_directory_of_images(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("dark", "light"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            values = generator.integers(0, 60, (16, 16)) + (190 if name == "light" else 0)
            Image.fromarray(values.astype(np.uint8)).save(tmp_path / "images" / name / f"{number}.png")
    folder = str(tmp_path / "images")
    dataset = open_dataset(folder, transform=ImageTransform(8, GREY))
    assert dataset.input.shape == (1, 8, 8)
    options: dict[str, Any] = {"width": 8, "features": 8, "depth": 1, "rank": 2, "eval_samples": 4, "batch_size": 4}
    config = TrainConfig(data=folder, steps=2, out=str(tmp_path / "run"), device="cpu", **options)
    train(config, dataset=dataset, console=Console(quiet=True))
    metrics = evaluate_run(tmp_path / "run", folder, device="cpu")
    assert metrics["examples"] == 24


def test_mismatched_data_raises(finished, tmp_path):
    with pytest.raises(ValueError, match="split must be one of"):
        evaluate_run(finished, split="tset")
    with pytest.raises(ValueError, match="is not a run directory"):
        evaluate_run(tmp_path)
    with pytest.raises(ValueError, match="was trained on different classes than this data has"):
        evaluate_run(finished, "synthetic:rows=200,classes=9,features=4", device="cpu")
    with pytest.raises(ValueError, match=r"takes features of shape \[4\], but this data has features of shape \[5\]"):
        evaluate_run(finished, "synthetic:rows=200,classes=8,features=5", device="cpu")
    with pytest.raises(ValueError, match="is only for files; 'synthetic' is built in and has its own"):
        evaluate_run(finished, "synthetic:rows=200,classes=8", labels="a.npy", device="cpu")
    with pytest.raises(FileNotFoundError, match="missing"):
        evaluate_run(finished, str(tmp_path / "missing"), device="cpu")
    np.save(tmp_path / "features.npy", np.zeros((3, 4), dtype=np.float32))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 8]))
    options = {"labels": str(tmp_path / "labels.npy"), "device": "cpu"}
    with pytest.raises(ValueError, match="8"):
        evaluate_run(finished, str(tmp_path / "features.npy"), **options)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 7]))
    with pytest.raises(ValueError, match="split 'validation' is not in this data, which has test"):
        evaluate_run(finished, str(tmp_path / "features.npy"), split="validation", **options)


def test_data_that_has_changed_since(tmp_path):
    """Added rows change the split, so that training rows would be tested."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(310, 8)).astype("f4"), np.arange(310) % 4
    path = tmp_path / "data.npz"
    np.savez(path, features=features[:300], labels=labels[:300])
    config = TrainConfig(data=str(path), out=str(tmp_path / "run"), steps=4, evaluate_every=2, device="cpu")
    train(config, console=Console(quiet=True))
    evaluate_run(tmp_path / "run", device="cpu")
    np.savez(path, features=features, labels=labels)
    with pytest.raises(ValueError, match=r"test had 30 rows and has 31.*name data of its own"):
        evaluate_run(tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match=r"is not what .* was trained on"):
        rescale_run(tmp_path / "run", console=Console(quiet=True))
    assert evaluate_run(tmp_path / "run", str(path), device="cpu")["examples"] == 310
    (tmp_path / "run" / "result.json").unlink()  # not ended: it would resume with other rows
    with pytest.raises(ValueError, match=r"train had 240 rows and has 248.*train again in another --out"):
        train(config, console=Console(quiet=True))


@pytest.fixture(scope="module")
def contrastive_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = small_pairs(image_folder(folder / "shapes"), folder / "run", swap=0.3)
    return train(config, console=QUIET).path


def test_metrics_on_its_own_pairs(contrastive_run):
    result = evaluate_contrastive_run(contrastive_run, samples=3)
    stored = json.loads((contrastive_run / "result.json").read_text())
    for name, metrics in stored["metrics"].items():
        for key, value in metrics.items():
            assert result["metrics"][name][key] == value, key
    assert result["swaps"] == stored["swaps"]
    assert result["metrics"]["test"]["zero_shot_sampled"]["samples"] == 3
    console = RichConsole(file=io.StringIO(), width=100)
    console.print(as_rich(contrastive_table(result)))
    text = console.file.getvalue()
    for words in ("HET-XL on shapes", "zero-shot top-1, without noise", "mean over draws", "recall@10", "AUROC"):
        assert words in text


def test_other_pairs_are_evaluated_whole(contrastive_run, tmp_path):
    result = evaluate_contrastive_run(
        contrastive_run, str(image_folder(tmp_path / "others", each=2)), templates="{}|a {}"
    )
    assert set(result["metrics"]) == {"test"}
    assert result["metrics"]["test"]["zero_shot"]["classes"] == 12
    assert result["metrics"]["test"]["zero_shot"]["unseen_classes"] < 12  # most were trained on
    assert "swaps" not in result


def test_pairs_of_another_kind_are_refused(contrastive_run, tmp_path):
    with pytest.raises(ValueError, match=r"has images as features \[6\], and the run's tower takes as image"):
        evaluate_contrastive_run(contrastive_run, str(vectors_file(tmp_path / "x.npz")))
    with pytest.raises(ValueError, match=r"templates must hold \{\} once each"):
        evaluate_contrastive_run(contrastive_run, templates="no place")
    det = train(small_pairs(vectors_file(tmp_path / "x.npz"), tmp_path / "det", head="det"), console=QUIET).path
    with pytest.raises(ValueError, match="samples=3 needs noise on the image side"):
        evaluate_contrastive_run(det, samples=3)
