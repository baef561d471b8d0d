"""What a finished run writes, and that a reader finds it."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from hetxl.data import open_dataset
from hetxl.data.synthetic import load_synthetic
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.records import Records
from hetxl.training.model import build_model
from hetxl.training.results import count, evaluate_split, parameters_of, result_of, write_evaluation
from support.training import small, write_pictures


@pytest.fixture(scope="module")
def dataset():
    return load_synthetic(rows=400, classes=8, features=4)


def model_for(dataset, link="softmax", **options):
    return build_model(small(**options), dataset.input, dataset.num_classes, link)


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_files_are_written_and_readable(tmp_path, dataset, head):
    model = model_for(dataset, head=head)
    evaluation = evaluate_split(
        model, dataset.splits["test"], class_names=dataset.class_names, confusions=True, quiet=True
    )
    counts = dataset.splits["train"].labels.counts(8)
    metrics = write_evaluation(tmp_path, evaluation, dataset, "test", counts)
    assert metrics == summarise(evaluation.records, counts)
    records = Records.load(tmp_path / "records" / "test.safetensors")
    assert len(records) == len(dataset.splits["test"])
    assert metrics["nll"] == pytest.approx(-records.log_prob.mean())
    content = {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("curves", "confusions", "examples")
    }
    assert content["curves"]["split"] == "test"
    assert all(len(point) == 3 for point in content["curves"]["reliability"])
    assert content["curves"]["risk_coverage"][-1][0] == 1.0
    assert content["confusions"] == evaluation.pairs
    assert content["confusions"]
    assert (content["confusions"][0]["correlation"] is None) == (head == "det")
    assert set(content["examples"]) == {"most_certain", "least_certain", "most_wrong"}
    result = result_of("NAME", model, dataset, {"test": metrics}, evaluation, seed=3)
    assert json.loads(json.dumps(result)) == result
    assert (result["label"], result["seed"], result["best_nll"]) == ("NAME", 3, dataset.best_nll)
    assert result["predict_seconds_per_1000"] > 0
    assert result["temperature"] == pytest.approx(float(torch.as_tensor(model.head.temperature()).detach()))


def test_an_evaluation_depends_on_its_seed_alone(dataset):
    model, split = model_for(dataset).train(), dataset.splits["test"]
    one, two, other = (evaluate_split(model, split, seed=seed, quiet=True).records for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.log_prob, two.log_prob)
    assert not np.array_equal(one.log_prob, other.log_prob)
    assert model.training
    limited = evaluate_split(model, split, limit=5, quiet=True).records
    assert len(limited) == 5
    sampled = evaluate_split(model, split, num_samples=64, quiet=True, seed=1).records
    assert not np.array_equal(one.log_prob, sampled.log_prob)


def test_lists_of_labels(tmp_path):
    dataset = load_synthetic(rows=200, classes=6, features=3, multi_label=True)
    model = model_for(dataset, "sigmoid", bias_init=-1.0)
    evaluation = evaluate_split(model, dataset.splits["test"], confusions=True, quiet=True)
    metrics = write_evaluation(tmp_path, evaluation, dataset, "test", None)
    assert json.dumps(metrics, allow_nan=False)


def test_pictures_by_workers_and_a_path_of_another_encoding(tmp_path):
    root = write_pictures(tmp_path / "pictures", each=10)
    (root / "red" / "000.png").rename(root / "red" / b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    dataset = open_dataset(str(root), image_size=16, whole=True, classes=["blue", "red"])
    model = model_for(dataset, backbone="cnn", width=8, depth=1, features=4)
    split = dataset.splits["test"]
    alone, read = (evaluate_split(model, split, workers=workers, quiet=True).records for workers in (0, 2))
    np.testing.assert_array_equal(alone.log_prob, read.log_prob)
    (tmp_path / "run").mkdir()
    evaluation = evaluate_split(model, split, quiet=True)
    write_evaluation(tmp_path / "run", evaluation, dataset, "test", None)
    examples = json.loads((tmp_path / "run" / "examples.json").read_text())
    for entry in examples["most_certain"] + examples["least_certain"]:
        assert entry["path"] == split.path(entry["row"])
        assert entry["image"].startswith("data:image/jpeg")


def test_parameters(dataset):
    model = model_for(dataset, head="det", backbone="mlp", width=8, features=5, depth=1)
    found = parameters_of(model)
    assert found["head"] == 5 * 8 + 8
    assert found["backbone"] == (4 * 8 + 8) + 2 * 8 + (8 * 5 + 5) + 2 * 5
    assert found["total"] == found["head"] + found["backbone"]
    layer = nn.Linear(3, 3)
    assert count(nn.Sequential(layer, layer)) == 12
    assert count(nn.Identity()) == 0
    assert torch.is_grad_enabled()
