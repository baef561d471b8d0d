"""Metrics of a trained run, on its own data and on others."""

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hetxl.data import open_dataset
from hetxl.data.synthetic import load_synthetic
from hetxl.training.config import TrainConfig
from hetxl.training.evaluation import evaluate_run
from hetxl.training.progress import Narrator
from hetxl.training.rescale import rescale_run
from hetxl.training.train import train
from support.training import DATA


@pytest.mark.parametrize("split", ["test", "validation"])
def test_metrics_are_those_of_the_result(finished, split):
    stored = json.loads((finished / "result.json").read_text())["metrics"][split]
    assert evaluate_run(finished, split=split, device="cpu") == stored


def test_options_of_prediction(finished):
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
    found = evaluate_run(finished, str(tmp_path / "features.npy"), labels=str(tmp_path / "labels.npy"), device="cpu")
    # All of it, in the same order: the metrics of the run's own test split.
    assert found == evaluate_run(finished, device="cpu")


def test_labels_without_data_are_refused(finished, tmp_path):
    with pytest.raises(ValueError, match=r"labels is for other data.*give DATA"):
        evaluate_run(finished, labels=str(tmp_path / "labels.npy"), device="cpu")


def test_a_model_of_grey_pictures_takes_a_folder_of_them(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("dark", "light"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            values = generator.integers(0, 60, (16, 16)) + (190 if name == "light" else 0)
            Image.fromarray(values.astype(np.uint8)).save(tmp_path / "pictures" / name / f"{number}.png")
    folder = str(tmp_path / "pictures")
    dataset = open_dataset(folder, image_size=8, grey=True)
    assert dataset.input.shape == (1, 8, 8)
    options: dict[str, Any] = {"width": 8, "features": 8, "depth": 1, "rank": 2, "eval_samples": 4, "batch_size": 4}
    config = TrainConfig(data=folder, steps=2, out=str(tmp_path / "run"), device="cpu", **options)
    train(config, dataset=dataset, narrator=Narrator(quiet=True))
    found = evaluate_run(tmp_path / "run", folder, device="cpu")
    assert found["examples"] == 24


def test_what_does_not_fit(finished, tmp_path):
    with pytest.raises(ValueError, match="split must be one of"):
        evaluate_run(finished, split="tset")
    with pytest.raises(ValueError, match="is no run"):
        evaluate_run(tmp_path)
    with pytest.raises(ValueError, match="was trained on other classes than this data has"):
        evaluate_run(finished, "synthetic:rows=200,classes=9,features=4", device="cpu")
    with pytest.raises(ValueError, match=r"takes features of shape \[4\], but this data has features of shape \[5\]"):
        evaluate_run(finished, "synthetic:rows=200,classes=8,features=5", device="cpu")
    with pytest.raises(ValueError, match="goes with files; 'synthetic' is built in and has its own"):
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
    """Rows that are added draw the split anew: tested would be what was trained on."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(310, 8)).astype("f4"), np.arange(310) % 4
    path = tmp_path / "data.npz"
    np.savez(path, features=features[:300], labels=labels[:300])
    config = TrainConfig(data=str(path), out=str(tmp_path / "run"), steps=4, evaluate_every=2, device="cpu")
    train(config, narrator=Narrator(quiet=True))
    evaluate_run(tmp_path / "run", device="cpu")
    np.savez(path, features=features, labels=labels)
    with pytest.raises(ValueError, match=r"test had 30 rows and has 31.*name data of its own"):
        evaluate_run(tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match=r"is not what .* was trained on"):
        rescale_run(tmp_path / "run", narrator=Narrator(quiet=True))
    assert evaluate_run(tmp_path / "run", str(path), device="cpu")["examples"] == 310
    (tmp_path / "run" / "result.json").unlink()  # not ended: it would go on with other rows
    with pytest.raises(ValueError, match=r"train had 240 rows and has 248.*train again in another --out"):
        train(config, narrator=Narrator(quiet=True))
