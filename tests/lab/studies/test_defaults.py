import copy
import json
import math

import pytest

from hetxl._files import read_json
from hetxl.registry import HEAD_NAMES
from hetxl_lab.studies import defaults, runs
from hetxl_lab.studies.defaults import ENSEMBLE, LONGER, RATE, SETTINGS, Setting, order_text, pace, settings_text
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.run import run_study
from hetxl_lab.studies.runs import RunCache
from hetxl_lab.studies.study import Lab, head_run
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.open import open_data
from hetxl_train.presets import preset_for
from hetxl_train.rescale import SCALED, SCALED_XL


def test_every_benchmark_with_clean_and_with_noisy_labels():
    assert len(SETTINGS["full"]) == 8
    for name, setting in SETTINGS["full"].items():
        config = setting.config(seed=3)
        assert config.seed == 3
        assert config.data == setting.data
        assert (config.label_noise, config.label_noise_rate) == (("confusable", RATE) if setting.noisy else ("none", 0))
        assert setting.noisy == name.endswith("-noisy")
        assert config.learning_rate == preset_for(setting.data)["learning_rate"]


def test_clean_and_noisy_differ_in_the_labels_alone():
    for name in ("pycode", "words", "glyphs", "wordnet"):
        clean, noisy = SETTINGS["full"][name], SETTINGS["full"][f"{name}-noisy"]
        assert (clean.data, clean.options) == (noisy.data, noisy.options)


def test_the_quick_ones_need_nothing_that_must_be_built():
    assert all(
        setting.data.startswith("synthetic") for name in ("quick", "miniature") for setting in SETTINGS[name].values()
    )


def test_search_extends_beyond_its_range_and_keeps_the_best(tmp_path, monkeypatch):
    # So few steps that a larger learning rate is always better: the search must leave its first three values.
    options = {"steps": 3, "batch_size": 64, "evaluation_examples": 100, "evaluate_every": 3}
    options |= {"learning_rate": 1e-4, "weight_decay": 0.01}
    config = Setting("tiny", "synthetic:rows=400,classes=8,features=6", options=options).config()
    monkeypatch.setattr(defaults, "WEIGHT_DECAYS", (0.01, 0.1))
    tuned, trials = defaults.tune_det(
        Lab(PROFILES["miniature"], (0,), RunCache(tmp_path), jobs=1, console=Console(quiet=True)), config
    )
    rates = sorted({trial.learning_rate for trial in trials})
    assert rates[0] == 0.5e-4
    assert rates[-1] > 2e-4
    assert tuned.learning_rate == min(trials, key=lambda trial: trial.nll).learning_rate
    decays = {trial.weight_decay for trial in trials if trial.learning_rate == tuned.learning_rate}
    assert decays >= {0.01, 0.1}


def test_search_extends_until_the_best_is_inside():
    def asked(best, values, both):
        seen = []

        def costs(some):
            seen.extend(some)
            return [abs(math.log(value / best)) for value in some]

        return defaults.lowest(costs, values, both), seen

    assert asked(2.0, [0.01, 0.1, 0.5], False) == (2.0, [0.01, 0.1, 0.5, 1.0, 2.0, 4.0])
    assert asked(0.1, [0.01, 0.1, 0.5], False) == (0.1, [0.01, 0.1, 0.5])
    assert asked(0.001, [0.01, 0.1], False) == (0.01, [0.01, 0.1])
    assert asked(0.3, [0.5, 1.0, 2.0], True) == (0.25, [0.5, 1.0, 2.0, 0.25, 0.125])
    # it ends at eight times the last value, however far the best is
    assert asked(1e9, [1.0, 2.0], True) == (16.0, [1.0, 2.0, 4.0, 8.0, 16.0])


CONFIG = TrainConfig(data="synthetic:rows=300,classes=40,features=6", batch_size=32, rank=2, train_samples=64)


@pytest.fixture(scope="module")
def dataset():
    return open_data(CONFIG)


def test_steps_of_every_head_are_timed_in_turns(dataset, tmp_path):
    ratios = pace(CONFIG, dataset, tmp_path / "new" / "pace.json", rounds=3)
    assert list(ratios) == list(HEAD_NAMES)
    assert ratios["det"] == 1
    assert all(ratio > 0 for ratio in ratios.values())
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "pace.json"]  # no checkpoint, no log


def test_pace_is_measured_once(dataset, tmp_path):
    path = tmp_path / "pace.json"
    first = pace(CONFIG, dataset, path, heads=("det", "het-xl"), rounds=2)
    assert json.loads(path.read_text()) == first
    assert pace(CONFIG, dataset, path, heads=("det", "het-xl"), rounds=2) == first


def test_samples_cost_something(dataset, tmp_path):
    # 4,000 draws an example take many times DET's step on any machine, however busy.
    config = CONFIG.__class__(**{**vars(CONFIG), "train_samples": 4000})
    assert pace(config, dataset, tmp_path / "pace.json", heads=("det", "het-xl"), rounds=3)["het-xl"] > 2


NLL = {"DET": [2.0, 2.1, 2.05], "HET": [1.9, 2.01, 1.94], "HET-H": [2.0, 2.09, 2.06], "HET-XL": [1.8, 1.9, 1.86]}


def summary(**nll):
    more = {"precision@1": [0.5] * 3, "calibration_error": [0.02] * 3, "brier": [0.6] * 3, "steps": 10}
    heads = {head: {"nll": values, "seeds": [0, 1, 2], **more} for head, values in {**NLL, **nll}.items()}
    return copy.deepcopy({"setting": "words", "num_classes": 100, "seeds": [0, 1, 2], "heads": heads})


def test_order_marks_significant_differences():
    assert order_text(summary()) == "HET-XL < HET < HET-H ≈ DET"
    assert order_text(summary(HET=NLL["DET"])).startswith("HET-XL < HET-H ≈ ")


def test_page_has_the_order_of_heads():
    text = settings_text([summary()])
    assert "HET-XL against DET in 1 settings" in text
    assert "counts (p < 0.05) and ≈ where it does not:\n" in text
    assert "| words | HET-XL < HET < HET-H ≈ DET |\n" in text
    assert "## words" in text
    few = summary()
    del few["heads"]["HET"]
    assert "The paper's order" not in settings_text([few])
    del few["heads"]["HET-XL"]
    assert "HET-XL against DET" not in settings_text([few])
    assert "30 % of the training labels" in text
    assert "over 3 seeds" in text
    assert "Equal time" not in text
    assert "words: behind in other runs.\n" in settings_text([summary() | {"note": "behind in other runs."}])


def test_the_page_has_the_heads_for_equal_time():
    first = summary()
    first["heads"][LONGER] = first["heads"]["DET"] | {"nll": [1.5, 1.6, 1.55]}
    text = settings_text([first, summary()])
    assert "## Equal time" in text
    assert "| words | 100 | 1.550 ± 0.029 | 1.853 ± 0.029 | +0.303 ± 0.003 |" in text
    assert "HET-XL against DET in 1 settings: NLL significantly better (p < 0.01) in 0, significantly worse" in text


def test_the_page_has_the_heads_as_validation_labels_scale_them():
    first = summary()
    first["heads"][SCALED] = first["heads"]["DET"] | {"nll": [1.5, 1.6, 1.55]}
    scaled = {"nll": [1.4, 1.49, 1.46], "temperature": [0.9] * 3, "noise_scale": [0.0, 0.25, 0.5]}
    first["heads"][SCALED_XL] = first["heads"]["HET-XL"] | scaled
    text = settings_text([first, summary()])
    assert "## Rescaled on the validation split" in text
    assert "| setting | K | DET's NLL | HET-XL's NLL |" in text
    assert "| words | 100 | 1.550 ± 0.029 | 1.450 ± 0.026 | −0.100 ± 0.006 | 0.003 |" in text
    assert f"{SCALED_XL} against {SCALED} in 1 settings: NLL significantly better (p < 0.01) in 1" in text
    assert "| 0.90, noise × 0.25 |" in text
    assert "Rescaled" not in settings_text([summary()])


def test_the_image_shows_the_heads_that_took_part(tmp_path):
    text = load_study("defaults").plot({"settings": [summary()]}, tmp_path / "x.svg").read_text()
    assert ">HET-H</text>" in text
    assert "equal time" not in text


@pytest.fixture
def results(studied):
    """The summary of a setting in miniature."""
    return studied("defaults")[1]["settings"][0]


def test_results_have_all_heads_and_baselines(results):
    assert set(results["heads"]) == {"DET", SCALED, LONGER, "HET-XL", SCALED_XL, ENSEMBLE}
    for label in ("DET", SCALED, LONGER, "HET-XL"):
        assert results["heads"][label]["seeds"] == [0, 1]
        assert len(results["heads"][label]["nll"]) == 2
    assert len(results["heads"][ENSEMBLE]["nll"]) == 1
    assert results["heads"][LONGER]["steps"] >= results["heads"]["DET"]["steps"]


def test_an_ensemble_is_no_worse_than_its_members_on_average(results):
    members = results["heads"]["DET"]["nll"]
    assert results["heads"][ENSEMBLE]["nll"][0] <= sum(members) / len(members)


def test_tuning_does_not_see_the_test_split_and_all_heads_take_over_the_best(results, studied):
    stored = [path.with_name("config.json") for path in studied.cache.glob("synthetic-det-seed1000-*/result.json")]
    assert len(stored) >= len(results["tuning"]) >= 4
    for path in stored:
        assert set(read_json(path.with_name("result.json"))["metrics"]) == {"validation"}
    best = min(results["tuning"], key=lambda trial: trial["nll"])
    assert (results["learning_rate"], results["weight_decay"]) == (best["learning_rate"], best["weight_decay"])
    config = SETTINGS["miniature"]["synthetic"].config(
        learning_rate=results["learning_rate"], weight_decay=results["weight_decay"]
    )
    stored = RunCache(studied.cache).finite_result(head_run(config, "het-xl", 1))
    assert stored["metrics"]["test"]["nll"] == results["heads"]["HET-XL"]["nll"][1]


def test_settings_of_earlier_calls_stay_on_the_page_and_nothing_is_trained_again(studied, tmp_path, monkeypatch):
    text, summary = studied("defaults")
    monkeypatch.setattr(runs, "train", None)
    more = {"options": {"heads": "det,het-xl", "settings": "synthetic-noisy"}}
    page = studied.run("defaults", studied.root / "defaults", **more)
    assert read_json(page.with_suffix(".json"))["settings"] == summary["settings"]
    assert page.read_text().partition("## How")[0] == text.partition("## How")[0]


@pytest.mark.parametrize("options", [{"settings": "pycodes"}, {"heads": "hetxl"}])
def test_unknown_names_are_refused_before_anything_is_trained(options, tmp_path):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be one of .*{value}"):
        run_study("defaults", options=options, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
