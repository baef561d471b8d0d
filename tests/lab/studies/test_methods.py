import json

import pytest

from hetxl_lab.studies.methods import (
    DET,
    METHODS,
    WIDE,
    XL,
    matching_width,
    parameters_of,
    settings,
    tuned,
    widened,
)
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.runs import RunCache
from hetxl_lab.studies.study import Lab, values_of
from hetxl_train.data.dataset import InputSpec

MAIN_TABLE = load_study("main")

PROFILE = PROFILES["miniature"]


def test_main_table_has_every_method_and_backbone(studied):
    text, summary = studied("main")
    groups = ["synthetic, MLP", "synthetic, linear"]
    assert list(summary["temperatures"]) == groups
    assert [(line["label"], line["group"]) for line in summary["lines"]] == [(m, g) for g in groups for m in METHODS]
    rows = [line for line in text.partition("## In the paper")[0].splitlines() if line.startswith("|")]
    assert [row.split("|")[2].strip() for row in rows[2:]] == list(METHODS)
    assert all(row.count("|") == 9 for row in rows)  # two backbones with three columns each


def test_the_best_tau_is_that_of_the_lowest_validation_loss(studied):
    _, summary = studied("main")
    cache = RunCache(studied.cache)
    for bench, backbone in settings(PROFILE):
        losses = {}
        for temperature in (1.0, *PROFILE.temperatures):
            result = cache.result(tuned(bench, backbone, PROFILE).line(temperature).run(0))
            losses[temperature] = result["metrics"]["validation"]["nll"]
        best = min(losses, key=losses.get)
        assert summary["temperatures"][f"{bench.name}, {backbone}"] == best
        trained = cache.result(tuned(bench, backbone, PROFILE).line(best).run(1))
        assert values_of(summary, "HET τ*", f"{bench.name}, {backbone}")["nll"][1] == trained["metrics"]["test"]["nll"]


def test_a_tau_that_diverges_is_not_the_best(tmp_path):
    bench, backbone = settings(PROFILE)[0]
    cache = RunCache(tmp_path)
    for temperature in (1.0, *PROFILE.temperatures):
        directory = cache.directory(tuned(bench, backbone, PROFILE).line(temperature).run(0))
        directory.mkdir()
        if temperature != 1.0:
            (directory / "diverged.json").write_text("{}")
        else:
            (directory / "result.json").write_text(json.dumps({"metrics": {"validation": {"nll": 5.0}}}))
    assert tuned(bench, backbone, PROFILE).best(Lab(PROFILE, (0,), cache)) == 1.0


def test_sigmoid_table_trains_every_method_on_several_labels(studied):
    _, summary = studied("main-sigmoid")
    assert [line["label"] for line in summary["lines"]] == list(METHODS)
    assert {line["data"] for line in summary["lines"]} == {"synthetic, any number of labels"}
    profile = load_study("main-sigmoid").adapt(PROFILE, {"backbone": None})
    assert {run.config.link for run in load_study("main-sigmoid").runs(profile, (0,))} == {"sigmoid"}


def test_methods_differ_as_the_papers_do():
    runs = {run.config.head: run.config for run in MAIN_TABLE.runs(PROFILE, (0,))}
    assert {name: config.temperature for name, config in runs.items() if name != "het"} == {
        "det": "1.0",
        "het-h": "learned",
        "het-xl": "learned",
    }


@pytest.mark.parametrize(
    ("xl", "het", "word"),
    [(2.0, 2.2, "holds here"), (2.4, 2.2, "does not hold here"), (2.3, 2.3, "do not decide")],
)
def test_main_table_the_conclusion_follows_the_numbers(lines, xl, het, word):
    values = {(method, "g"): het for method in METHODS[1:4]} | {("DET", "g"): 2.3, ("HET-XL", "g"): xl}
    summary = lines(values, temperatures={"g": 1.0})
    if word == "do not decide":  # differences that point both ways
        summary["lines"][-1]["values"]["nll"] = [2.4, 2.2, 2.31]
    assert word in MAIN_TABLE.conclusion(summary)


EQUAL_PARAMS = load_study("equal-params")

SPEC = InputSpec("tokens", (16,), 8195)


def test_the_nearest_number_of_parameters():
    config = PROFILES["full"].base.config("det")
    target = parameters_of(PROFILES["full"].base.config("het-xl"), SPEC, 8192)
    width = matching_width(config, target, SPEC, 8192)
    sizes = {}
    for features in (width - 1, width, width + 1):
        sizes[features] = abs(
            parameters_of(PROFILES["full"].base.config("det", features=features), SPEC, 8192) - target
        )
    assert min(sizes, key=sizes.get) == width
    assert width > 128


def test_equal_params_study_matches_parameters(studied):
    _, summary = studied("equal-params")
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert [line["label"] for line in summary["lines"]] == [DET, WIDE, XL]
    assert summary["widths"][0] == summary["widths"][2] == 8
    step = 8 + 1 + 2 + 20  # what one more feature adds: a row of the layer before, its norm, a column of W
    assert abs(parameters[1] - parameters[2]) <= step
    assert parameters[1] > parameters[0]


@pytest.mark.parametrize(("xl", "word"), [(1.8, "holds here"), (2.2, "does not hold here")])
def test_equal_params_the_conclusion_follows_the_numbers(lines, xl, word):
    summary = lines({(DET, None): 2.01, (WIDE, None): 2.0, (XL, None): xl}, widths=[128, 132, 128])
    text = EQUAL_PARAMS.conclusion(summary)
    assert word in text
    assert "With 132 features instead of 128" in text


DATA_SCALE = load_study("data-scale")


def test_data_scale_study_multiplies_steps(studied):
    text, summary = studied("data-scale")
    steps = {line["group"]: line["values"]["steps"] for line in summary["lines"]}
    assert steps == {"1×": 3, "2×": 6, "4×": 12}
    assert "1× is 3 steps" in text
    assert len(DATA_SCALE.runs(PROFILES["full"], (0,))) == 9


@pytest.mark.parametrize(
    ("xl", "long", "word"),
    [(1.8, 1.5, "holds here"), (2.2, 1.5, "does not hold here"), (1.8, 2.5, "does not hold here")],
)
def test_data_scale_the_conclusion_follows_the_numbers(lines, xl, long, word):
    values = {}
    for scale, shift in (("1×", 0.0), ("2×", long - 2.0), ("4×", long - 2.0)):
        values |= {("DET", scale): 2.0 + shift, ("HET", scale): 1.9 + shift, ("HET-XL", scale): xl + shift}
    text = DATA_SCALE.conclusion(lines(values))
    assert word in text
    assert f"{3 if long < 2 else 0} of 3 methods" in text


MODEL_SCALE = load_study("model-scale")


def test_model_scale_study_increases_parameters(studied):
    _, summary = studied("model-scale")
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert parameters[2] > 1.5 * parameters[0]
    assert parameters[3] > 1.5 * parameters[1]


def test_model_scale_doubles_width_and_features():
    config = PROFILES["full"].base.config("det")
    assert widened(config, 2) == {"width": 1024, "features": 256}
    wide = MODEL_SCALE.runs(PROFILES["full"], (0,))[-1].config
    assert (wide.width, wide.features, wide.temperature) == (1024, 256, "learned")


@pytest.mark.parametrize(("xl", "word"), [(1.8, "holds here"), (2.2, "does not hold here")])
def test_model_scale_the_conclusion_follows_the_numbers(lines, xl, word):
    values = {
        ("DET", "1× width"): 2.0,
        ("HET-XL", "1× width"): xl,
        ("DET", "2× width"): 1.9,
        ("HET-XL", "2× width"): xl,
    }
    assert word in MODEL_SCALE.conclusion(lines(values))
