"""What a finished run writes, and that a reader finds it."""

import json
import time

import numpy as np
import pytest
import torch
from torch import nn

from hetxl._files import read_json
from hetxl.functional import LabelLists
from hetxl.metrics.records import Records
from hetxl.metrics.summary import summarise
from hetxl_train.backbones import Backbone, Mlp
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.estimate import Estimate
from hetxl_train.evaluate import evaluate_split
from hetxl_train.model import Model, build_model, parameter_counts
from hetxl_train.tasks.classification import estimate, result_of, write_evaluation
from support.training import small, write_images


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
    content = {name: read_json(tmp_path / f"{name}.json") for name in ("curves", "confusions", "examples")}
    assert content["curves"]["split"] == "test"
    assert all(len(point) == 3 for point in content["curves"]["reliability"])
    assert content["curves"]["risk_coverage"][-1][0] == 1.0
    pairs = content["confusions"]["pairs"]
    assert pairs == evaluation.pairs
    assert pairs
    assert (pairs[0]["correlation"] is None) == (head == "det")
    assert set(content["examples"]) == {"most_certain", "least_certain", "most_wrong", "confused"}
    result = result_of(model, dataset, {"test": metrics}, evaluation)
    assert json.loads(json.dumps(result)) == result
    assert result["best_nll"] == dataset.best_nll
    assert result["predict_seconds_per_1000"] > 0
    assert result["temperature"] == pytest.approx(float(torch.as_tensor(model.head.temperature()).detach()))


def test_an_evaluation_depends_on_its_seed_alone(dataset):
    model, split = model_for(dataset).train(), dataset.splits["test"]
    first, same, other = (evaluate_split(model, split, seed=seed, quiet=True).records for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.log_prob, same.log_prob)
    assert not np.array_equal(first.log_prob, other.log_prob)
    assert model.training
    limited = evaluate_split(model, split, limit=5, quiet=True).records
    assert len(limited) == 5
    sampled = evaluate_split(model, split, num_samples=64, quiet=True, seed=1).records
    assert not np.array_equal(first.log_prob, sampled.log_prob)


def test_metrics_of_multi_label_data_are_valid_json(tmp_path):
    dataset = load_synthetic(rows=200, classes=6, features=3, multi_label=True)
    model = model_for(dataset, "sigmoid", bias_init=-1.0)
    evaluation = evaluate_split(model, dataset.splits["test"], confusions=True, quiet=True)
    metrics = write_evaluation(tmp_path, evaluation, dataset, "test", None)
    assert json.dumps(metrics, allow_nan=False)


def test_images_are_read_by_workers_from_undecodable_paths(tmp_path):
    root = write_images(tmp_path / "images", each=10)
    (root / "red" / "000.png").rename(root / "red" / b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    dataset = open_dataset(str(root), transform=ImageTransform(16), whole=True, classes=["blue", "red"])
    model = model_for(dataset, backbone="cnn", width=8, depth=1, features=4)
    split = dataset.splits["test"]
    alone, read = (evaluate_split(model, split, workers=workers, quiet=True).records for workers in (0, 2))
    np.testing.assert_array_equal(alone.log_prob, read.log_prob)
    (tmp_path / "run").mkdir()
    evaluation = evaluate_split(model, split, quiet=True)
    write_evaluation(tmp_path / "run", evaluation, dataset, "test", None)
    examples = json.loads((tmp_path / "run" / "examples.json").read_text())
    for entry in examples["most_certain"] + examples["least_certain"]:
        assert entry["path"] == split.show(entry["row"]).image
        assert entry["image"].startswith("data:image/jpeg")


def test_parameters_are_counted_by_part(dataset):
    model = model_for(dataset, head="det", backbone="mlp", width=8, features=5, depth=1)
    counts = parameter_counts(model, "head", "backbone")
    assert counts["head"] == 5 * 8 + 8
    assert counts["backbone"] == (4 * 8 + 8) + 2 * 8 + (8 * 5 + 5) + 2 * 5
    assert counts["total"] == counts["head"] + counts["backbone"]
    layer = nn.Linear(3, 3)
    assert parameter_counts(nn.Sequential(layer, layer)) == {"total": 12}
    assert parameter_counts(nn.Identity()) == {"total": 0}
    assert torch.is_grad_enabled()


def mlp_model(batch=16, frozen=False, **options):
    config = small(backbone="mlp", **options)
    with torch.random.fork_rng():
        model = build_model(config, InputSpec("features", (5,)), 8, "softmax")
    model.backbone = Backbone(Mlp(6, 7, 1, 5), 5, frozen)
    return config, model, torch.randn(batch, 6), torch.randint(8, (batch,))


def test_memory_of_a_known_model():
    config, model, inputs, targets = mlp_model(head="det", features=5)
    memory = estimate(config, model, inputs, targets, 10).memory
    weights = 4 * ((6 * 7 + 7) + 2 * 7 + (7 * 5 + 5) + 2 * 5 + (5 * 8 + 8))
    assert memory["weights"] == memory["their gradients"] == weights
    assert memory["the optimiser's moments"] == 2 * weights
    assert memory["the moving average"] == 0
    # Inputs of the first layer [6], of the norm [7] with its mean and deviation, of GELU [7], of the last layer [7], of
    # the last norm [5] with its mean and deviation.
    assert memory["the backbone's activations"] == 4 * 16 * (6 + 7 + 2 + 7 + 7 + 5 + 2)
    assert memory["the head's blocks"] > 0


def test_activations_grow_with_the_batch_and_weights_do_not():
    small_batch = estimate(*mlp_model(16, features=5, ema=0.9), 10).memory
    large_batch = estimate(*mlp_model(160, features=5, ema=0.9), 10).memory
    assert large_batch["the backbone's activations"] == 10 * small_batch["the backbone's activations"]
    assert large_batch["weights"] == small_batch["weights"] == small_batch["the moving average"]


def test_a_frozen_backbone_keeps_nothing_and_has_no_gradients():
    config, model, inputs, targets = mlp_model(features=5, frozen=True)
    memory = estimate(config, model, inputs, targets, 10).memory
    head = 4 * sum(parameter.numel() for parameter in model.head.parameters())
    assert memory["the backbone's activations"] == 0
    assert memory["their gradients"] == head
    assert memory["weights"] > head
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_no_trace_in_a_model_with_batch_statistics(head):
    config = small(head=head, backbone="timm:test_resnet", pretrained=False)
    model = build_model(config, InputSpec("image", (3, 32, 32)), 8, "softmax").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(config, model, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4), 10)
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_dropout_does_not_move_the_generator():
    config, model, inputs, targets = mlp_model(features=5)
    model.backbone = Backbone(Mlp(6, 7, 2, 5, dropout=0.5), 5)
    state = torch.get_rng_state()
    estimate(config, model, inputs, targets, 10)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_estimate_with_lists_of_labels():
    config = small()
    model = build_model(config, InputSpec("features", (4,)), 8, "sigmoid")
    lists = LabelLists(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 3]), None, 3)
    assert estimate(config, model, torch.randn(3, 4), lists, 10).seconds_per_step > 0


class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(0.05)
        return inputs


def test_time_is_that_of_a_step_and_its_parts():
    config = small()
    head = build_model(config, InputSpec("features", (4,)), 8, "softmax").head
    model = Model(Backbone(Slow(), 4), head)
    cost = estimate(config, model, torch.randn(8, 4), torch.arange(8), steps=100, parts=3)
    assert cost.seconds_per_step >= 3 * 0.05
    assert cost.head_share < 0.9
    assert (cost.steps, cost.total) == (100, sum(cost.memory.values()))


def test_estimate_prints_time_and_memory():
    text = str(Estimate({"weights": 10**6, "the head's blocks": 3 * 10**9}, 2.0, 1000, 0.75))
    assert text.startswith("about 33 min for 1,000 steps, 75% of it in the head; 3.0 GB of memory, ")
    assert text.endswith("most of it the head's blocks (3.0 GB)")
    text = str(Estimate({"weights": 10**6}, 0.01, 100, 0.25))
    assert text == "about 1 s for 100 steps, 75% of it in the backbone; 1 MB of memory, most of it weights (1 MB)"
