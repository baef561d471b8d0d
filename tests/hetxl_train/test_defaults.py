"""Defaults by what is trained: the scale of features, the prior, the start of the bias, noise that is taken back."""

import json
import shutil

import numpy as np
import pytest
import torch

from hetxl.optim import DEFAULTS, PRIOR, start_bias
from hetxl_train.data.dataset import InputSpec
from hetxl_train.defaults import has_prior, with_defaults
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.log import read_log
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support.training import QUIET, small

VECTORS, IMAGES = InputSpec("features", (4,)), InputSpec("image", (3, 32, 32))


@pytest.mark.parametrize(
    ("options", "spec", "part", "standardize"),
    [
        ({}, VECTORS, "head", True),
        ({"backbone": "mlp"}, VECTORS, "network", True),
        ({"backbone": "cnn"}, IMAGES, "network", False),
        ({"backbone": "timm:resnet18"}, IMAGES, "backbone", False),
        ({"backbone": "timm:resnet18", "pretrained": False}, IMAGES, "network", False),
        ({"backbone": "timm:resnet18", "frozen": True}, IMAGES, "head", True),
        ({"normalize_features": True}, VECTORS, "head", False),
    ],
)
def test_defaults_depend_on_what_is_trained(options, spec, part, standardize):
    config = with_defaults(small(**options), spec)
    rule = DEFAULTS[part]
    assert (config.learning_rate, config.noise_start) == (rule.learning_rate, rule.noise_start)
    assert config.noise_learning_rate == rule.noise_learning_rate
    assert config.weight_decay == (rule.weight_decay or 0.0)
    assert config.standardize == standardize
    assert has_prior(small(**options), spec) == (part == "head")
    assert with_defaults(config, spec) == config


def test_options_that_are_set_are_not_changed():
    options = {"learning_rate": 0.3, "noise_learning_rate": 2.0, "noise_start": 0.5, "weight_decay": 0.2}
    config = small(**options, standardize=False)
    assert with_defaults(config, VECTORS) == config
    assert not has_prior(config, VECTORS)
    with pytest.raises(ValueError, match=r"prior is 3 and weight_decay 0\.2; give one of them"):
        small(prior=3.0, weight_decay=0.2)


def test_a_head_without_noise_has_no_steps_before_it():
    assert with_defaults(small(head="det"), VECTORS).noise_start == 0
    assert with_defaults(small(temperature="learned", temperature_method="gradient"), VECTORS).noise_start == 0


def write_rows(path, scale, offset):
    generator = np.random.default_rng(0)
    features = generator.normal(size=(600, 5))
    labels = (features @ generator.normal(size=(5, 3))).argmax(1)
    np.savez(path, features=(scale * features + offset).astype("float32"), labels=labels)
    return str(path)


@pytest.mark.parametrize("options", [{}, {"backbone": "mlp", "width": 16, "features": 8}])
def test_a_run_does_not_depend_on_the_scale_of_features(tmp_path, options):
    losses = []
    for number, (scale, offset) in enumerate([(1, 0), (1000, 5e4), (1e-3, 0.1)]):
        data = write_rows(tmp_path / f"{number}.npz", scale, offset)
        run = train(small(tmp_path / str(number), data=data, steps=60, **options), console=QUIET)
        losses.append(json.loads((run.path / "result.json").read_text())["metrics"]["test"]["nll"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=5e-3)


def test_the_prior_is_chosen_once_and_stored(tmp_path):
    run = train(small(tmp_path / "run", steps=150, learning_rate=0.05), console=QUIET)
    prior = json.loads((run.path / "model.json").read_text())["prior"]
    assert prior > 0
    given_prior = train(small(tmp_path / "same", steps=150, learning_rate=0.05, prior=prior), console=QUIET)
    for name, value in load_run(run.path).model.state_dict().items():
        assert torch.equal(value, load_run(given_prior.path).model.state_dict()[name])


def test_features_keep_their_proportions_where_that_suits_validation_rows(tmp_path):
    generator = np.random.default_rng(0)
    features = generator.normal(size=(600, 30)) * np.repeat([10.0, 0.5], [3, 27])
    labels = (features[:, :3] @ generator.normal(size=(3, 4)) / 5 + generator.gumbel(size=(600, 4))).argmax(1)
    np.savez(tmp_path / "rows.npz", features=features.astype("float32"), labels=labels)
    data = str(tmp_path / "rows.npz")
    run = train(small(tmp_path / "run", data=data, steps=200, learning_rate=0.05), console=QUIET)
    stored = json.loads((run.path / "model.json").read_text())["deviation"]
    deviation = load_run(run.path).model.head.standardize.deviation
    assert stored == pytest.approx(np.sqrt((3 * 100 + 27 * 0.25) / 30), rel=0.1)
    torch.testing.assert_close(deviation, torch.full((30,), stored))
    # A run that resumes from its directory, without a checkpoint yet, takes what was chosen.
    (run.path / "result.json").unlink()
    shutil.rmtree(run.path / "checkpoints")
    again = train(small(tmp_path / "run", data=data, steps=200, learning_rate=0.05), console=QUIET)
    torch.testing.assert_close(load_run(again.path).model.head.standardize.deviation, deviation)


def test_noise_that_makes_validation_worse_is_taken_back(tmp_path):
    options = {"noise_init": 30.0, "noise_learning_rate": 0.0, "steps": 40, "noise_start": 0.5}
    run = train(small(tmp_path / "run", **options), console=QUIET)
    result = json.loads((run.path / "result.json").read_text())
    before = json.loads((run.path / "noise_free.json").read_text())
    with_noise = [line for line in read_log(run.path / "log.jsonl") if line["kind"] == "evaluation"][-1]
    assert before["step"] == 20
    assert before["nll"] < with_noise["nll"]
    assert not result["noise_kept"]
    assert result["metrics"]["validation"]["nll"] == pytest.approx(before["nll"], abs=1e-4)
    model = load_run(run.path).model
    features = torch.randn(5, 4)
    noisy, plain = model.head.predict(features), model.head.predict(features, method="deterministic")
    torch.testing.assert_close(noisy.probs, plain.probs, atol=1e-4, rtol=0)


def test_noise_that_helps_is_kept(tmp_path):
    data = "synthetic:rows=4000,classes=8,features=4,noise=3"
    run = train(small(tmp_path / "run", data=data, steps=300), console=QUIET)
    assert json.loads((run.path / "result.json").read_text())["noise_kept"]


def test_a_network_that_goes_on_training_keeps_its_noise(tmp_path):
    options = {"backbone": "mlp", "width": 8, "features": 5, "noise_init": 30.0, "noise_start": 0.5, "steps": 10}
    run = train(small(tmp_path / "run", **options), console=QUIET)
    assert json.loads((run.path / "result.json").read_text())["noise_kept"]
    assert not (run.path / "noise_free.safetensors").exists()


def test_the_bias_of_several_labels_starts_at_their_log_odds():
    bias = torch.nn.Parameter(torch.zeros(3))
    start_bias(bias, torch.tensor([0, 50, 99]), rows=99)
    probabilities = torch.sigmoid(bias.detach())
    torch.testing.assert_close(probabilities, torch.tensor([0.005, 0.505, 0.995]))


def test_a_batch_of_too_many_logits_takes_the_usual_prior(tmp_path, monkeypatch):
    monkeypatch.setattr("hetxl_train.defaults.PRIOR_ENTRIES", 64 * 8 - 1)
    run = train(small(tmp_path / "run", steps=150), console=QUIET)
    assert json.loads((run.path / "model.json").read_text())["prior"] == PRIOR


def write_flipped(directory, rate, rows=1500, classes=4):
    """Write separable rows with a share of the labels drawn from all classes, and others with right labels."""
    generator = np.random.default_rng(3)
    labels = generator.integers(classes, size=rows + 300)
    features = (4 * np.eye(classes)[labels] + generator.normal(size=(len(labels), classes))).astype("float32")
    wrong = generator.random(rows) < rate
    given_labels = np.where(wrong, generator.integers(classes, size=rows), labels[:rows])
    np.savez(directory / "train.npz", features=features[:rows], labels=given_labels)
    np.savez(directory / "clean.npz", features=features[rows:], labels=labels[rows:])
    return str(directory / "train.npz"), str(directory / "clean.npz")


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_the_share_of_flipped_labels_is_estimated_and_left_out_for_clean_ones(tmp_path, head):
    data, clean = write_flipped(tmp_path, 0.4)
    run = train(small(tmp_path / "run", data=data, test=clean, steps=150, head=head), console=QUIET)
    about = json.loads((run.path / "model.json").read_text())
    assert about["flip_rate"] == pytest.approx(0.4, abs=0.12)  # 135 held-out rows: a standard error of 0.04
    loaded = load_run(run.path).model.head
    assert loaded.flip_rate == about["flip_rate"]
    observed, right = (evaluate_run(run.path, target=target)["nll"] for target in ("observed", "clean"))
    assert right < 0.7 * observed


def test_validation_rows_decide_whether_predictions_have_flipped_labels(tmp_path):
    data, clean = write_flipped(tmp_path, 0.4)
    run = train(small(tmp_path / "run", data=data, validation=clean, test=clean, steps=150), console=QUIET)
    assert json.loads((run.path / "model.json").read_text())["flip_rate"] > 0.2
    assert load_run(run.path).model.head.flip_rate == 0
    fixed = train(small(tmp_path / "fixed", data=data, test=clean, steps=20, flip_rate=0.3), console=QUIET)
    assert load_run(fixed.path).model.head.flip_rate == 0.3


def test_a_network_has_as_much_of_its_noise_as_validation_rows_like(tmp_path):
    options = {"backbone": "mlp", "width": 8, "features": 4, "steps": 4, "noise_init": 20.0}
    run = train(small(tmp_path / "run", **options), console=QUIET)
    result = json.loads((run.path / "result.json").read_text())
    assert result["noise_scale"] < 1  # noise that four steps have not reduced
    assert load_run(run.path).model.head.noise_scale == result["noise_scale"]
    whole = train(small(tmp_path / "whole", **options, noise_scale=1.0), console=QUIET)
    losses = [
        json.loads((path / "result.json").read_text())["metrics"]["validation"]["nll"]
        for path in (run.path, whole.path)
    ]
    assert losses[0] < losses[1]
    assert load_run(whole.path).model.head.noise_scale == 1
