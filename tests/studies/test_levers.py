"""The levers: a whole study that trains in seconds, and what its tables say."""

import json

import pytest

from hetxl.studies import levers
from hetxl.studies.levers import difference, page, run_name, study
from hetxl.studies.variants import LEVERS, REFERENCES, Variant
from hetxl.training import tasks
from hetxl.training.config import TrainConfig
from hetxl.training.train import train
from support.training import QUIET

DATA = "synthetic:rows=800,classes=8,features=5"
TINY = {"steps": 4, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 8, "evaluate_every": 4}
CHOSEN = ("residual", "temperature-hold", "temperature-held-out", "features", "link")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A study, run twice."""
    out = tmp_path_factory.mktemp("levers")
    options = {"levers": CHOSEN, "seeds": (0, 1), "out": out, "options": TINY, "jobs": 1, "narrator": QUIET}
    first = study(DATA, **options).read_text()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert study(DATA, **options).read_text() == first
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    return out, json.loads(first)


def test_every_distinct_training_once(results):
    out, summary = results
    runs = {place.name for place in (out / "runs").iterdir()}
    assert {name.rpartition("-seed")[0] for name in runs} == {
        "det",
        "het-xl",
        "het-xl,residual=diagonal",
        "het-xl,temperature=learned,temperature_learning_rate=1.0",
        *(f"het-xl,temperature=learned,temperature_learning_rate=1.0,temperature_hold={x}" for x in (0.05, 0.5)),
        "det,normalize_features=True",
        "het-xl,normalize_features=True",
        "det,link=sigmoid",
        "het-xl,link=sigmoid",
    }
    assert len(runs) == 2 * len({name.rpartition("-seed")[0] for name in runs})
    assert len(summary["runs"]) == len(runs) // 2 + 1  # one is derived
    place = out / "runs" / "het-xl,residual=diagonal-seed1"
    config = TrainConfig.from_dict(json.loads((place / "config.json").read_text()))
    assert (config.residual, config.seed, config.steps) == ("diagonal", 1, 4)


def test_the_test_split_is_not_touched(results):
    out, summary = results
    for path in out.rglob("result.json"):
        assert set(json.loads(path.read_text())["metrics"]) == {"validation"}
    assert summary["validation_rows"] == 40


def test_values_are_those_of_the_runs(results):
    out, summary = results
    stored = [json.loads((out / "runs" / f"det-seed{seed}" / "result.json").read_text()) for seed in (0, 1)]
    nll = [one["metrics"]["validation"]["nll"] for one in stored]
    assert summary["runs"]["det"]["nll"] == nll
    test = difference(summary, "det", "het-xl")
    assert test.difference == pytest.approx(sum(nll) / 2 - sum(summary["runs"]["het-xl"]["nll"]) / 2)
    assert test.pairs == 2
    held = summary["runs"]["het-xl,held-out"]
    assert held["train_seconds"] == summary["runs"]["het-xl"]["train_seconds"]
    assert held["nll"] != summary["runs"]["het-xl"]["nll"]
    assert held["temperature"] != summary["runs"]["het-xl"]["temperature"]


def test_tables(results):
    out, summary = results
    text = (out / "study.md").read_text()
    assert text == page(summary)
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert tuple(sections) == CHOSEN
    residual = sections["residual"]
    assert "What the covariance has beside its factors. Defaults: residual rank1.\n" in residual
    labels = [line.split("|")[1].strip() for line in residual.splitlines() if line.startswith("| ")]
    assert labels == ["", "---", "DET", "HET-XL, defaults", "diagonal"]
    default = next(line for line in residual.splitlines() if line.startswith("| HET-XL, defaults"))
    assert [cell.strip() for cell in default.split("|")][3] == "–"
    # The sigmoid's losses are another measure: nothing of the softmax's stands beside them.
    link = sections["link"]
    assert "differences are to DET, sigmoid" in link
    assert "defaults |" not in link
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_picture_leaves_out_what_stands_apart(results, monkeypatch, tmp_path):
    out, _ = results
    assert (out / "levers.png").stat().st_size > 1000
    seen = []
    monkeypatch.setattr(levers, "plot_groups", lambda groups, path, axis: seen.append([title for title, _ in groups]))
    options = {"levers": ("noise-weight-decay", "link"), "seeds": (0,), "options": TINY, "jobs": 1, "narrator": QUIET}
    study(DATA, out=tmp_path, **options)
    assert seen == [["references", "noise-weight-decay"]]


def test_a_setting_that_diverges_does_not_stop_the_others(monkeypatch, tmp_path):
    def fragile(config, **options):
        if config.noise_weight_decay == 1.0 and config.seed == 1:
            raise FloatingPointError("the loss is nan after step 3")
        return train(config, **options)

    monkeypatch.setattr(tasks, "train", fragile)
    options = {"levers": ("noise-weight-decay",), "seeds": (0, 1), "options": TINY, "jobs": 1, "narrator": QUIET}
    summary = json.loads(study(DATA, out=tmp_path, **options).read_text())
    assert "het-xl,noise_weight_decay=1.0" not in summary["runs"]
    assert len(summary["runs"]["het-xl,noise_weight_decay=0.1"]["nll"]) == 2
    assert "| 1.0 | not finite | – | – | – |" in (tmp_path / "study.md").read_text()
    monkeypatch.setattr(levers, "REFERENCES", (*REFERENCES, LEVERS["noise-weight-decay"].variants[-1]))
    with pytest.raises(FloatingPointError):  # without something to compare with there is no study
        study(DATA, out=tmp_path, **options)


def test_names_say_what_differs_from_the_base():
    base = TrainConfig(rank=10, train_samples=4)
    assert run_name(Variant("a"), base) == run_name(Variant("b", {"rank": 10}), base) == "het-xl"
    assert run_name(Variant("c", {"rank": 5, "train_samples": 4}), base) == "het-xl,rank=5"
    assert run_name(REFERENCES[0], base) == "det"
    assert run_name(Variant("d", held_out=True), base) == "het-xl,held-out"
    learned = [
        run_name(one, base)
        for name in ("temperature-init", "temperature-learning-rate")
        for one in LEVERS[name].variants
    ]
    assert learned.count("het-xl,temperature=learned") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levers": ("ranks",)}, "levers must be one of .*found 'ranks'"),
        ({"levers": ()}, "levers must name at least one of noise-init"),
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"seeds": ()}, "seeds must be different numbers, at least one"),
        ({"jobs": 0}, "jobs must be at least 1, found 0"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        study(DATA, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
