import json

import pytest

from hetxl.studies.cache import Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.main_table import METHODS, STUDY, best_temperature, line_of, settings, tuned_line
from hetxl.studies.study import Lab

FORM = FORMS["miniature"]


def test_miniature(studied):
    text, summary = studied("main")
    groups = ["synthetic, MLP", "synthetic, linear"]
    assert list(summary["temperatures"]) == groups
    assert [(line["label"], line["group"]) for line in summary["lines"]] == [(m, g) for g in groups for m in METHODS]
    rows = [line for line in text.partition("## In the paper")[0].splitlines() if line.startswith("|")]
    assert [row.split("|")[2].strip() for row in rows[2:]] == list(METHODS)
    assert all(row.count("|") == 9 for row in rows)  # two backbones with three columns each


def test_the_best_tau_is_that_of_the_lowest_validation_loss(studied):
    _, summary = studied("main")
    cache = Cache(studied.cache)
    for bench, backbone in settings(FORM):
        found = {}
        for temperature in (1.0, *FORM.temperatures):
            result = cache.result(tuned_line(bench, backbone, temperature).training(0))
            found[temperature] = result["metrics"]["validation"]["nll"]
        best = min(found, key=found.get)
        assert summary["temperatures"][f"{bench.name}, {backbone}"] == best
        trained = cache.result(tuned_line(bench, backbone, best).training(1))
        assert line_of(summary, "HET τ*", f"{bench.name}, {backbone}")["nll"][1] == trained["metrics"]["test"]["nll"]


def test_a_tau_that_diverges_is_not_the_best(tmp_path):
    bench, backbone = settings(FORM)[0]
    cache = Cache(tmp_path)
    for temperature in (1.0, *FORM.temperatures):
        place = cache.place(tuned_line(bench, backbone, temperature).training(0))
        place.mkdir()
        if temperature != 1.0:
            (place / "diverged.json").write_text("{}")
        else:
            (place / "result.json").write_text(json.dumps({"metrics": {"validation": {"nll": 5.0}}}))
    assert best_temperature(Lab(FORM, (0,), cache), bench, backbone) == 1.0


def test_methods_differ_as_the_papers_do():
    trainings = {one.config.head: one.config for one in STUDY.trainings(FORM, (0,))}
    assert {name: config.temperature for name, config in trainings.items() if name != "het"} == {
        "det": "1.0",
        "het-h": "learned",
        "het-xl": "learned",
    }


@pytest.mark.parametrize(
    ("xl", "het", "word"),
    [(2.0, 2.2, "holds here"), (2.4, 2.2, "does not hold here"), (2.3, 2.3, "do not decide")],
)
def test_the_conclusion_follows_the_numbers(lines, xl, het, word):
    values = {(method, "g"): het for method in METHODS[1:4]} | {("DET", "g"): 2.3, ("HET-XL", "g"): xl}
    summary = lines(values, temperatures={"g": 1.0})
    if word == "do not decide":  # differences that point both ways
        summary["lines"][-1]["values"]["nll"] = [2.4, 2.2, 2.31]
    assert word in STUDY.conclusion(summary)
