"""The study of the defaults on a stranger's data."""

import copy

import pytest

from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.strangers import (
    GRID,
    PARTS,
    SETTINGS,
    STARTED,
    STARTS,
    ablation_table,
    clean_table,
    grid_table,
    starts_table,
)
from hetxl_train.presets import preset_for

pytest.importorskip("sklearn")


def test_the_page_has_every_table(studied):
    page, summary = studied("strangers")
    assert [setting["setting"] for setting in summary["settings"]] == list(SETTINGS["miniature"])
    assert summary["missing"] == []
    for title in (
        "Right labels",
        "scikit-learn",
        "The defaults in a grid",
        "Each part by itself",
        "The start of the bias",
    ):
        assert f"## {title}" in page
    grid = summary["grids"][0]["losses"]["HET-XL"]
    assert len(grid) == 9
    # The middle of the grid is the run with the defaults, not another one.
    own = summary["settings"][0]["heads"]["HET-XL"]["nll"][0]
    assert next(nll for rate, length, nll in grid if rate == length == 1) == own
    assert summary["ablations"][0]["values"].keys() == {"defaults", *PARTS}
    starts = summary["starts"][0]["losses"]["DET"]
    assert [bias for bias, _ in starts] == list(STARTS)
    assert starts[0][1] == summary["settings"][-1]["heads"]["DET"]["nll"][0]
    assert starts[0][1] < starts[-1][1]  # four steps from −10 leave every label improbable


def test_only_what_is_asked_for_runs_and_the_rest_is_named(studied, tmp_path):
    options = {"settings": "wine", "ablations": False}
    page = studied.run("strangers", tmp_path, options=options, seeds=(0,)).read_text()
    assert "Not run yet: wine-symmetric, synthetic, labels." in page
    assert "grid" not in page
    with pytest.raises(ValueError, match="settings must be one of"):
        studied.run("strangers", tmp_path, options={"settings": "vines"})


def test_benchmarks_have_the_options_that_make_them_fast_alone(tmp_path):
    config = SETTINGS["full"]["pycode-noisy"].config(tmp_path, 1)
    assert (config.learning_rate, config.weight_decay) == (None, None)
    assert config.steps == preset_for("pycode")["steps"]
    assert (config.label_noise, config.label_noise_rate) == ("confusable", 0.3)
    assert len(SETTINGS["full"]) == 25
    assert {*GRID["full"], *STARTED["full"]} <= set(SETTINGS["full"])


def test_several_labels_are_drawn_again_with_every_seed(tmp_path):
    setting = SETTINGS["full"]["labels-40"]
    first, second = (setting.config(tmp_path, seed) for seed in (0, 1))
    assert first.data == second.data == "synthetic:rows=6000,features=32,multi_label=true,classes=40"
    assert (first.data_seed, second.data_seed) == (0, 1)
    assert first.learning_rate is None  # the preset of synthetic data is left out


def test_tables_say_how_far_the_defaults_are_behind(made_up):
    losses = [[1 / 3, 1.0, 0.5], [1.0, 1.0, 0.51], [3.0, 1.0, 0.7]]
    assert "| 0.5100 | 0.5000 | rate × 0.33, steps × 1 | 2.0 % |" in grid_table(
        [{"setting": "wine", "losses": {"DET": losses}}]
    )
    starts = [
        {"setting": "labels-20", "losses": {"DET": [[None, 5.1], [-1.0, 5.0], *([bias, 6.0] for bias in STARTS[2:])]}}
    ]
    assert "| labels-20 | DET | 5.100 | 5.000 | 6.000 | 6.000 | 6.000 | 6.000 | +2.0 % |" in starts_table(starts)
    values = {name: made_up(1.0) for name in ("defaults", *PARTS)}
    values["without ε"] = made_up(1.25)
    table = ablation_table([{"setting": "wine", "values": values, "noise_kept": [True, False, True]}])
    assert "1.250 (+0.250 ± 0.000)" in table
    assert "1 of 3" in table


def test_clean_answers_are_shown_where_labels_are_wrong(studied):
    settings = copy.deepcopy(studied("strangers")[1]["settings"])
    assert "wine-symmetric" in clean_table(settings)
    for setting in settings:
        setting["noise"] = "none"
    assert clean_table(settings) == ""


def test_the_study_is_registered():
    assert load_study("strangers").entry.title == "The defaults on a stranger's data"
