import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetxl._files import read_json
from hetxl.metrics.scaling import HIGH, fit_temperature
from hetxl_lab.studies import ablations, runs
from hetxl_lab.studies.ablations import (
    LEVERS,
    REFERENCES,
    Variant,
    base_config,
    config_of,
    difference,
    fitted_result,
    run_name,
)
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.run import run_study
from hetxl_lab.studies.runs import RunCache, StudyRun
from hetxl_lab.studies.study import Lab
from hetxl_train.config import TrainConfig
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.model import build_model
from hetxl_train.presets import PRESETS
from hetxl_train.runs import Run, Trained
from hetxl_train.training import train
from support.training import QUIET


@pytest.mark.parametrize("name", LEVERS)
@pytest.mark.parametrize("data", PRESETS)
def test_every_setting_is_valid_and_changes_something(name, data):
    lever = LEVERS[name]
    assert lever.name == name
    assert lever.what
    base = TrainConfig(data=data, **PRESETS[data])
    settings = [
        (TrainConfig(**{**PRESETS[data], **variant.options, "data": data}), variant.held_out)
        for variant in lever.variants
    ]
    assert len({variant.label for variant in lever.variants}) == len(lever.variants)
    assert len(set(settings)) == len(settings)
    assert (base, False) not in settings or len(settings) > 1  # a lever at its default is there for completeness alone


def test_levers_vary_the_listed_options():
    varied = {key for lever in LEVERS.values() for variant in lever.variants for key in variant.options}
    assert varied == {
        "noise_init", "noise_learning_rate", "noise_weight_decay", "temperature", "temperature_init",
        "temperature_learning_rate", "temperature_prior", "temperature_hold", "train_samples", "rank", "sampler",
        "normalize_features", "residual", "link", "head",
    }  # fmt: skip
    assert [variant.label for variant in REFERENCES] == ["DET", "HET-XL"]


def test_only_another_loss_stands_apart():
    assert [name for name, lever in LEVERS.items() if lever.apart] == ["link"]
    assert all(variant.options["link"] == "sigmoid" for variant in LEVERS["link"].variants)


DATA = load_synthetic(rows=2000, classes=6, features=4)
SPLIT = DATA.splits["train"]
CONFIG = TrainConfig(head="het-xl", rank=2, eval_samples=16)


@pytest.fixture(scope="module")
def model():
    """A model that was trained for a moment."""
    model = build_model(CONFIG, DATA.input, 6, "softmax").eval()
    inputs, targets = SPLIT.fetch(np.arange(500)).inputs, SPLIT.labels.take(np.arange(500))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(25):
        optimizer.zero_grad()
        model(inputs, targets, generator=torch.Generator().manual_seed(0)).backward()
        optimizer.step()
    return model


def scaled(model, scale):
    """The run of a model whose logits are made larger."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.head.classifier.weight.mul_(scale)
        model.head.classifier.bias.mul_(scale)
    return Trained(
        Run(Path("none"), CONFIG), model, DATA.input, [str(number) for number in range(6)], "softmax", [1] * 6
    )


def test_logits_that_are_too_large_are_put_right(model):
    rows = np.arange(0, 1700, 5)
    usual = fitted_result(scaled(model, 1.0), SPLIT, rows, {"label": "HET-XL", "metrics": {}}, QUIET)
    large = fitted_result(scaled(model, 2.0), SPLIT, rows, {"label": "HET-XL", "metrics": {}}, QUIET)
    assert usual["label"] == "HET-XL"
    assert usual["metrics"]["validation"]["nll"] == pytest.approx(large["metrics"]["validation"]["nll"], abs=0.005)
    assert large["temperature"] == pytest.approx(2 * usual["temperature"], rel=0.03)
    assert usual["metrics"]["validation"]["precision@1"] > 1 / 6
    # Beyond the range it stays at its end.
    assert fitted_result(scaled(model, 300.0), SPLIT, rows, {}, QUIET)["temperature"] == pytest.approx(HIGH, rel=0.02)


def test_no_row_is_measured_with_a_temperature_that_it_was_fitted_to(model):
    run = scaled(model, 1.0)
    run.model.head.covariance = None
    features = SPLIT.fetch(np.arange(400)).inputs
    logits = run.model.head.classifier(run.model.backbone(features)).detach()
    right, wrong = logits.argmax(-1), logits.argmin(-1)
    ids = torch.where(torch.arange(400) % 2 == 0, right, torch.where(torch.arange(400) % 10 == 1, wrong, right))
    split = type(SPLIT)(features, type(SPLIT.labels)(ids.numpy()))
    result = fitted_result(run, split, np.arange(400), {}, QUIET)
    even, odd = (fit_temperature(run.model.head, [features[start::2]], ids[start::2]) for start in (0, 1))
    assert even < 0.3 < odd  # all even rows are right: the surer, the better
    losses = F.cross_entropy(logits[::2] / odd, ids[::2]) + F.cross_entropy(logits[1::2] / even, ids[1::2])
    assert result["metrics"]["validation"]["nll"] == pytest.approx(float(losses) / 2, rel=1e-3)
    assert result["temperature"] == pytest.approx((even + odd) / 2)


CHOSEN = ("residual", "temperature-hold", "temperature-held-out", "features", "link")
SMALL = {"data": "synthetic:rows=800,classes=8,features=5", "levers": "noise-weight-decay"}


@pytest.fixture
def results(studied, tmp_path):
    """The runs of the study with seed 1, by their names in the summary, and its summary."""
    _, summary = studied("levers")
    lab = Lab(PROFILES["miniature"], (0, 1), RunCache(studied.cache), {"data": SMALL["data"]})
    base = base_config(lab)
    variants = [*REFERENCES, *(variant for name in CHOSEN for variant in LEVERS[name].variants)]
    runs = {
        run_name(variant, base): StudyRun(dataclasses.replace(config_of(variant, base), seed=1), blind=True)
        for variant in variants
    }
    return {name: lab.cache.directory(run) for name, run in runs.items()}, summary


def test_every_distinct_run_once(results):
    directories, summary = results
    assert set(summary["runs"]) == set(directories)
    assert len(set(directories.values())) == len(directories) - 1  # one is derived
    assert set(directories) == {
        "det",
        "het-xl",
        "het-xl,held-out",
        "het-xl,residual=diagonal",
        "het-xl,temperature=learned,temperature_learning_rate=1.0",
        *(f"het-xl,temperature=learned,temperature_learning_rate=1.0,temperature_hold={x}" for x in (0.05, 0.5)),
        "det,normalize_features=True",
        "het-xl,normalize_features=True",
        "det,link=sigmoid",
        "het-xl,link=sigmoid",
    }
    config = TrainConfig.from_dict(read_json(directories["het-xl,residual=diagonal"] / "config.json"))
    assert (config.residual, config.seed, config.steps) == ("diagonal", 1, 4)


def test_runs_do_not_see_the_test_split(results):
    directories, summary = results
    for directory in directories.values():
        assert set(read_json(directory / "result.json")["metrics"]) == {"validation"}
    assert summary["validation_rows"] == 40


def test_values_are_those_of_the_runs(results):
    directories, summary = results
    stored = read_json(directories["det"] / "result.json")["metrics"]["validation"]["nll"]
    assert summary["runs"]["det"]["nll"][1] == stored
    test = difference(summary, "det", "het-xl")
    means = [sum(summary["runs"][name]["nll"]) / 2 for name in ("det", "het-xl")]
    assert test.difference == pytest.approx(means[0] - means[1])
    assert test.pairs == 2
    held = summary["runs"]["het-xl,held-out"]
    assert held["train_seconds"] == summary["runs"]["het-xl"]["train_seconds"]
    assert held["nll"] != summary["runs"]["het-xl"]["nll"]
    assert held["temperature"] != summary["runs"]["het-xl"]["temperature"]


def test_tables_have_a_row_for_each_variant(studied):
    text, _ = studied("levers")
    sections = dict(part.split("\n", 1) for part in text.partition("\n## How it")[0].split("\n## ")[1:])
    assert tuple(sections) == CHOSEN
    labels = [line.split("|")[1].strip() for line in sections["residual"].splitlines() if line.startswith("| ")]
    assert labels == ["", "---", "DET", "HET-XL, defaults", "diagonal"]
    # The sigmoid's losses are another measure: nothing of the softmax's stands beside them.
    assert "defaults |" not in sections["link"]
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_image_leaves_out_what_stands_apart(studied, monkeypatch, tmp_path):
    _, summary = studied("levers")
    titles = []
    monkeypatch.setattr(ablations, "plot_groups", lambda groups, path, axis: titles.extend(name for name, _ in groups))
    load_study("levers").plot(summary, tmp_path / "levers.svg")
    assert titles == ["references", *CHOSEN[:-1]]


def test_a_setting_that_diverges_does_not_stop_the_others(monkeypatch, tmp_path):
    def fragile(config, **options):
        if config.noise_weight_decay == 1.0 and config.seed == 1:
            Path(config.out).mkdir(parents=True)
            raise FloatingPointError("the loss is nan after step 3")
        return train(config, **options)

    monkeypatch.setattr(runs, "train", fragile)
    options = {"options": SMALL, "cache": tmp_path / "cache", "out": tmp_path, "jobs": 1, "console": QUIET}
    page = run_study("levers", profile="miniature", **options)
    summary = read_json(page.with_suffix(".json"))
    assert "het-xl,noise_weight_decay=1.0" not in summary["runs"]
    assert len(summary["runs"]["het-xl,noise_weight_decay=0.1"]["nll"]) == 2
    assert "| 1.0 | not finite | – | – | – |" in page.read_text()
    monkeypatch.setattr(ablations, "REFERENCES", (*REFERENCES, LEVERS["noise-weight-decay"].variants[-1]))
    with pytest.raises(FloatingPointError, match="nan after step 3"):  # without a reference there is no study
        run_study("levers", profile="miniature", **options)


def test_names_say_what_differs_from_the_base():
    base = TrainConfig(rank=10, train_samples=4)
    assert run_name(Variant("a"), base) == run_name(Variant("b", {"rank": 10}), base) == "het-xl"
    assert run_name(Variant("c", {"rank": 5, "train_samples": 4}), base) == "het-xl,rank=5"
    assert run_name(REFERENCES[0], base) == "det"
    assert run_name(Variant("d", held_out=True), base) == "het-xl,held-out"
    learned = [
        run_name(variant, base)
        for name in ("temperature-init", "temperature-learning-rate")
        for variant in LEVERS[name].variants
    ]
    assert learned.count("het-xl,temperature=learned") == 2


@pytest.mark.parametrize(
    ("levers", "message"),
    [("ranks", "levers must be one of .*found 'ranks'"), (",", "levers must name at least one of noise-init")],
)
def test_unknown_levers_are_named_before_anything_is_trained(levers, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_study("levers", options={"levers": levers}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
