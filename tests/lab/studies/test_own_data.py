"""Studies on a user's data, backbone and link."""

import json

import numpy as np
import pytest

from hetxl_lab.studies.own_data import adapted, features_of
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import ENTRIES, load_study
from hetxl_train.config import TrainConfig
from hetxl_train.data.open import open_data
from hetxl_train.num_steps import steps_for

MINIATURE = PROFILES["miniature"]
FAST = ("samples", "sharing", "few-shot")  # each asks something else of the data; the others are slow tests
OWN = [entry.name for entry in ENTRIES.values() if "backbone" in {option.name for option in entry.options}]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Features of 6 classes, whose classes are apart."""
    rng, ids = np.random.default_rng(0), np.arange(240) % 6
    path = tmp_path_factory.mktemp("own") / "mine.npz"
    np.savez(path, features=(np.eye(6)[ids] * 3 + rng.normal(size=(240, 6))).astype(np.float32), labels=ids)
    return str(path)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Features with one or two labels each."""
    rng, ids = np.random.default_rng(0), np.arange(240) % 6
    path = tmp_path_factory.mktemp("own") / "several.npz"
    labels, offsets = np.stack([ids, (ids + 1) % 6], 1).ravel(), 2 * np.arange(241)
    features = (np.eye(6)[ids] + rng.normal(size=(240, 6))).astype(np.float32)
    np.savez(path, features=features, labels=labels, label_offsets=offsets)
    return str(path)


def test_every_study_of_the_paper_with_runs_takes_own_data():
    trained = {"main", "data-scale", "model-scale", "learn-tau", "tau-epochs", "tau-dynamics", "tau-range", "samples"}
    assert trained | {"sharing", "alignment", "residual", "few-shot", "equal-params", "main-sigmoid"} == set(OWN)


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OWN if name != "main-sigmoid"],
)
def test_studies_run_on_own_data(studied, tmp_path, mine, name):
    options = {"data": mine, "backbone": "mlp"}
    if name == "tau-epochs":
        options["epochs"] = "1,2"
    page = studied.run(name, tmp_path, options=options)
    summary = json.loads(page.with_suffix(".json").read_text())
    assert f"hetxl study {name} {mine}" in summary["command"]
    assert "--backbone mlp" in summary["command"]


@pytest.mark.parametrize("name", ["main", pytest.param("learn-tau", marks=pytest.mark.slow), "samples"])
def test_several_labels_are_trained_with_the_sigmoid_link(studied, tmp_path, several, name):
    page = studied.run(name, tmp_path, options={"data": several})
    summary = json.loads(page.with_suffix(".json").read_text())
    assert all(line["values"]["nll"] for line in summary["lines"])


def test_own_data_trains_as_hetxl_train_does(mine):
    profile = adapted(PROFILES["full"], {"data": mine})
    config = profile.base.config("het-xl")
    usual = TrainConfig(data=mine)
    assert config.steps == steps_for(usual, open_data(usual))
    for name in ("rank", "train_samples", "eval_samples", "learning_rate", "weight_decay", "batch_size"):
        assert getattr(config, name) == getattr(usual, name)
    assert profile.repeated.steps == round(len(open_data(usual).splits["train"]) / usual.batch_size) or 1


def test_backbone_link_steps_and_file_change_every_bench(tmp_path, mine):
    file = tmp_path / "more.toml"
    file.write_text("rank = 3\n")
    options = {"data": mine, "backbone": "mlp,none", "link": "sigmoid", "steps": 7, "config": str(file)}
    profile = adapted(MINIATURE, options)
    assert list(profile.base.backbones) == ["mlp", "none"]
    config = profile.base.config("det", backbone="none")
    assert (config.link, config.steps, config.rank, config.backbone) == ("sigmoid", 7, 3, "none")
    assert profile.repeated.steps == 6  # an epoch, whatever the steps: 192 rows by 32


def test_data_of_the_page_keeps_its_options():
    glyphs = PROFILES["full"].benches[1]
    assert adapted(PROFILES["full"], {"data": "glyphs"}).benches == (glyphs,)


def test_a_backbone_replaces_the_sizes_of_another():
    profile = adapted(PROFILES["full"], {"backbone": "timm:resnet18"})
    config = profile.benches[1].config("det")  # a preset with a width
    assert (config.backbone, config.width, config.depth) == ("timm:resnet18", None, 2)


@pytest.mark.parametrize("name", ["model-scale", "equal-params"])
def test_a_backbone_of_fixed_width_cannot_be_widened(studied, tmp_path, mine, name):
    with pytest.raises(ValueError, match="this study widens the backbone, and none has a fixed width"):
        studied.run(name, tmp_path, options={"data": mine})


def test_features_are_those_that_the_head_reads(mine):
    assert features_of(TrainConfig(data=mine)) == 6
    assert features_of(TrainConfig(data=mine, backbone="mlp", features=12)) == 12


def test_a_width_of_the_page_is_known_without_opening_data():
    assert load_study("sharing").lines(MINIATURE)[-1].label == "8"
