"""Comparisons of heads, and the options of those on built-in data."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from hetxl_train.baselines import ENSEMBLE, LAPLACE
from hetxl_train.comparison import HEADS, compare
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.open import BUILT_IN
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.export_run import export_run
from hetxl_train.log import read_log
from hetxl_train.presets import PRESETS, preset_for
from hetxl_train.report import compare_table, find_runs
from hetxl_train.rescale import CLEAN, CLEAN_XL, SCALED, SCALED_XL, rescale_run
from hetxl_train.runs import load_run
from support.training import DATA, QUIET, small

SMALL = TrainConfig(
    data="synthetic:rows=1200,classes=10,features=5",
    backbone="mlp",
    width=8,
    features=6,
    rank=3,
    steps=8,
    batch_size=16,
    train_samples=2,
    eval_samples=8,
    log_every=1,
    evaluation_examples=60,
    test_examples=60,
    device="cpu",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    config = TrainConfig.from_dict(SMALL.to_dict() | {"output": SMALL.to_dict()["output"] | {"out": str(out)}})
    return compare(config, seeds=(0, 3), console=Console(quiet=True))


def test_every_head_with_every_seed(directory):
    summary = json.loads((directory / "compare.json").read_text())
    assert summary["heads"] == ["DET", SCALED, "DET + label smoothing", "HET", "HET-H", "HET-XL", SCALED_XL]
    assert summary["seeds"] == [0, 3]
    runs = find_runs([directory])
    assert len(runs) == 14
    table = compare_table(runs)
    assert [row.label for row in table.heads] == summary["heads"]


def test_the_same_steps_on_the_same_examples(directory):
    configs = [load_run(directory / "runs" / f"{name}-seed3").run.config for name in HEADS]
    shared = ("data", "data_seed", "seed", "steps", "batch_size", "learning_rate", "backbone", "width", "features")
    assert len({tuple(getattr(config, name) for name in shared) for config in configs}) == 1
    logs = [read_log(directory / "runs" / f"{name}-seed3" / "log.jsonl") for name in HEADS]
    assert len({tuple((line["step"], line.get("learning_rate")) for line in log) for log in logs}) == 1


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_temperature_scaling_changes_the_temperature_alone(directory, head):
    before, after = (load_run(directory / "runs" / f"{name}-seed3") for name in (head, f"{head}-scaled"))
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, after.model.state_dict()[name])
    assert float(before.model.head.temperature()) == 1
    result = json.loads((directory / "runs" / f"{head}-scaled-seed3" / "result.json").read_text())
    assert float(after.model.head.temperature()) == pytest.approx(result["temperature"])
    plain = json.loads((directory / "runs" / f"{head}-seed3" / "result.json").read_text())
    assert result["derived_from"] == f"{head}-seed3"
    # With noise τ is known to half a percent, and the mean of softmaxes may order other classes first.
    slack = 1e-6 if head == "det" else 1e-3
    assert result["metrics"]["validation"]["nll"] <= plain["metrics"]["validation"]["nll"] + slack
    assert abs(result["metrics"]["test"]["precision@1"] - plain["metrics"]["test"]["precision@1"]) <= 100 * slack


def test_with_label_noise_het_xl_is_also_shown_for_clean_labels(tmp_path):
    options = {"label_noise": "confusable", "label_noise_rate": 0.3, "noise_init": 2.0, "noise_scale": 1.0}
    options["out"] = str(tmp_path / "out")
    config = dataclasses.replace(SMALL, **options)
    out = compare(config, heads=("det", "het-xl"), console=Console(quiet=True))
    assert json.loads((out / "compare.json").read_text())["heads"] == ["DET", SCALED, "HET-XL", CLEAN_XL, SCALED_XL]
    plain, clean = (load_run(out / "runs" / f"het-xl{kind}-seed0").model.head for kind in ("", "-clean"))
    assert clean.noise_scale == 0.25
    features, noise = torch.randn(4, 6), torch.randn(16, plain.covariance.size)
    expected = plain.predict(features, noise=noise, target="clean")
    torch.testing.assert_close(clean.predict(features, noise=noise).probs, expected.probs)
    table = compare_table(find_runs([out]))
    assert table.row(CLEAN_XL) is not None
    assert f"{CLEAN_XL} is not trained by itself but derived from HET-XL." in table.notes


def test_both_heads_are_shown_for_clean_labels_where_wrong_ones_are_estimated(tmp_path):
    generator = np.random.default_rng(3)
    labels = generator.integers(4, size=1500)
    features = (4 * np.eye(4)[labels] + generator.normal(size=(1500, 4))).astype("float32")
    wrong = generator.random(1500) < 0.4
    np.savez(tmp_path / "x.npz", features=features, labels=np.where(wrong, generator.integers(4, size=1500), labels))
    config = small(tmp_path / "out", data=str(tmp_path / "x.npz"), steps=150, noise_start=0.0)
    out = compare(config, heads=("det", "het-xl"), console=QUIET)
    expected = ["DET", CLEAN, SCALED, "HET-XL", CLEAN_XL, SCALED_XL]
    assert json.loads((out / "compare.json").read_text())["heads"] == expected
    assert load_run(out / "runs" / "det-seed0").model.head.flip_rate > 0.2
    assert load_run(out / "runs" / "det-clean-seed0").model.head.flip_rate == 0


BASELINE_LABELS = ["DET", SCALED, "DET + label smoothing", "DET + MC dropout", ENSEMBLE, LAPLACE]


@pytest.fixture(scope="module")
def baselines(tmp_path_factory):
    config = dataclasses.replace(SMALL, out=str(tmp_path_factory.mktemp("baselines") / "out"))
    return config, compare(config, heads=("het-xl",), members=3, console=QUIET)


def test_baselines_are_rows_of_the_comparison(baselines):
    _, out = baselines
    content = json.loads((out / "compare.json").read_text())
    assert content["heads"] == [*BASELINE_LABELS, "HET-XL", SCALED_XL]
    table = {row["label"]: row for row in content["table"]["rows"] if row["label"] != "true model"}
    assert list(table) == content["heads"]
    for row in table.values():
        assert all(row[key]["mean"] > 0 for key in ("nll", "parameters", "train_seconds", "predict_ratio"))
    assert table[ENSEMBLE]["parameters"]["mean"] == 3 * table["DET"]["parameters"]["mean"]
    members = [out / "runs" / "det-seed0", out / "members" / "det-seed1001", out / "members" / "det-seed1002"]
    seconds = [json.loads((path / "result.json").read_text())["train_seconds"] for path in members]
    assert table[ENSEMBLE]["train_seconds"]["mean"] == pytest.approx(sum(seconds))
    assert content["advice"].startswith("Take ")


def test_an_ensemble_averages_its_members_and_can_be_loaded(baselines):
    _, out = baselines
    inputs = torch.randn(7, 5)
    paths = [out / "runs" / "det-seed0", *sorted((out / "members").iterdir())]
    models = [load_run(path).model for path in paths]
    expected = torch.stack([model.head.predict(model.backbone(inputs)).probs for model in models]).mean(0)
    ensemble = load_run(out / "runs" / "det-ensemble-seed0").model
    torch.testing.assert_close(ensemble.head.predict(ensemble.backbone(inputs)).probs, expected)
    assert not torch.allclose(models[0].head.predict(models[0].backbone(inputs)).probs, expected)


def test_derived_baselines_give_their_metrics_again(baselines):
    _, out = baselines
    for name, method in (("ensemble", "mc"), ("laplace", "probit"), ("dropout", "mc")):
        run = out / "runs" / f"det-{name}-seed0"
        stored = json.loads((run / "result.json").read_text())["metrics"]["test"]
        again = evaluate_run(run, method=method, limit=SMALL.test_examples, device="cpu")
        assert again["nll"] == pytest.approx(stored["nll"], abs=1e-6)


def test_laplace_shares_the_weights_of_det(baselines):
    _, out = baselines
    det, laplace = (load_run(out / "runs" / f"{name}-seed0").model for name in ("det", "det-laplace"))
    for name, value in det.state_dict().items():
        assert torch.equal(value, laplace.state_dict()[name])
    result = json.loads((out / "runs" / "det-laplace-seed0" / "result.json").read_text())
    assert laplace.head.prior == pytest.approx(result["laplace_prior"])
    assert result["derived_from"] == "det-seed0"


@pytest.mark.parametrize("name", ["det-ensemble", "det-laplace", "det-dropout"])
def test_what_averages_is_neither_rescaled_nor_exported(baselines, name):
    run = baselines[1] / "runs" / f"{name}-seed0"
    with pytest.raises(ValueError, match="averages several predictions and cannot be rescaled"):
        rescale_run(run, run.with_name("other"), console=QUIET)
    with pytest.raises(ValueError, match="cannot be exported; pass a run of DET"):
        export_run(run, "torch", out=run / "other.pt2", console=QUIET)


def test_baselines_resume_where_they_were_stopped(baselines, capsys):
    config, out = baselines
    options = {"heads": ("het-xl",), "members": 3}
    lost = [out / "members" / "det-seed1002", out / "runs" / "det-ensemble-seed0", out / "runs" / "det-laplace-seed0"]
    before = [json.loads((path / "result.json").read_text())["metrics"]["test"] for path in lost]
    shutil.rmtree(lost[0])
    (lost[1] / "result.json").unlink()
    shutil.rmtree(lost[2])
    compare(config, **options, console=QUIET)
    after = [json.loads((path / "result.json").read_text())["metrics"]["test"] for path in lost]
    assert [metrics["nll"] for metrics in after] == pytest.approx([metrics["nll"] for metrics in before], abs=1e-6)
    compare(config, **options)
    assert "is done already" in capsys.readouterr().err


def test_baselines_of_several_labels_on_fixed_features(tmp_path):
    config = small(tmp_path / "out", data=f"{DATA},multi_label=true")
    out = compare(config, heads=("det",), members=2, console=QUIET)
    heads = json.loads((out / "compare.json").read_text())["heads"]
    assert heads == [label for label in BASELINE_LABELS if label != "DET + label smoothing"]
    assert load_run(out / "runs" / "det-laplace-seed0").model.head.link == "sigmoid"


def test_a_finished_comparison_is_not_run_again(directory, capsys):
    config = TrainConfig.from_dict(SMALL.to_dict() | {"output": SMALL.to_dict()["output"] | {"out": str(directory)}})
    assert compare(config, seeds=(0, 3)) == directory
    assert "is done already" in capsys.readouterr().err


def test_a_finished_comparison_of_several_labels_is_not_run_again(tmp_path, capsys):
    config = small(data=f"{DATA},multi_label=true", out=str(tmp_path / "out"))
    skipped = []
    for _ in range(2):
        compare(config, heads=("det", "det-smoothed"), seeds=(0,))
        skipped.append("is done already" in capsys.readouterr().err)
    assert skipped == [False, True]


def test_invalid_heads_seeds_and_jobs_are_errors(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'het-xl'"):
        compare(SMALL, heads=("het-lx",))
    with pytest.raises(ValueError, match="seeds must be different"):
        compare(SMALL, seeds=(1, 1))
    with pytest.raises(ValueError, match=r"heads must name at least one of det, det-smoothed, .*, found none"):
        compare(SMALL, heads=())


@pytest.mark.parametrize("options", [{"link": "sigmoid"}, {"data": f"{DATA},multi_label=true"}])
def test_labels_are_not_smoothed_for_the_sigmoid_link(tmp_path, options):
    config, quiet = small(tmp_path / "out", **options), Console(quiet=True)
    with pytest.raises(ValueError, match="more than det-smoothed: label smoothing does not support the sigmoid link"):
        compare(config, heads=("det-smoothed",), console=quiet)
    assert not (tmp_path / "out").exists()
    compare(config, heads=("det", "det-smoothed"), console=quiet)
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["heads"] == ["DET", SCALED]


def test_a_temperature_that_followed_the_validation_loss_can_be_fitted_too(tmp_path):
    config = small(tmp_path / "out", temperature="learned", temperature_method="gradient", temperature_held_out=0.25)
    directory = compare(config, heads=("det",), console=Console(quiet=True))
    scaled = load_run(directory / "runs" / "det-scaled-seed0").run.config
    assert (scaled.temperature_method, scaled.temperature_held_out) == ("train", 0.0)
    assert float(scaled.temperature) > 0


@pytest.mark.parametrize("data", BUILT_IN)
@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_presets_are_valid(data, head):
    values = preset_for(data)
    config = TrainConfig(data=data, head=head, **values)
    for name, value in values.items():
        assert getattr(config, name) == value


def test_presets_are_found_by_name():
    assert preset_for("synthetic:rows=50,noise=2") is PRESETS["synthetic"]
    assert preset_for("pycode") is PRESETS["pycode"]
    assert preset_for("images/") == {}
    assert preset_for(None) == {}
