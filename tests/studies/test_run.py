import json

import pytest

from hetxl.studies import pool
from hetxl.studies.run import command, run_study
from hetxl.training.progress import Narrator

QUIET = Narrator(quiet=True)


def test_a_study_again_trains_nothing(studied, tmp_path, monkeypatch):
    text, summary = studied("residual")

    def never(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(pool, "train", never)
    options = {"form": "miniature", "cache": studied.cache, "jobs": 1, "narrator": QUIET}
    page = run_study("residual", out=tmp_path / "again", write=tmp_path / "docs", **options)
    again = json.loads(page.with_suffix(".json").read_text())
    changing = ("measuring_seconds",)
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in summary.items() if k not in changing
    }
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {
        "residual.md",
        "residual.svg",
        "residual.json",
        "index.md",
    }
    assert (tmp_path / "docs" / "residual.md").read_text() == text
    # Another study finds trainings of this one.
    monkeypatch.undo()
    assert summary["trainings"] == 8


def test_the_cost_is_that_of_the_trainings(studied):
    _, summary = studied("residual")
    results = [json.loads(path.read_text()) for path in studied.cache.glob("*/result.json")]
    spent = [one["train_seconds"] + one["evaluate_seconds"] for one in results]
    assert 0 < summary["training_seconds"] <= sum(spent) + 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"seeds": ()}, "seeds must be different numbers, at least one"),
        ({"data": "icons"}, "data='icons' is for studies on pairs; residual has its own"),
        ({"form": "small"}, "form must be one of 'full', 'quick', 'miniature', found 'small'"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(options, message, tmp_path):
    given = {"out": tmp_path / "out", "cache": tmp_path / "cache", "narrator": QUIET, **options}
    with pytest.raises(ValueError, match=message):
        run_study("residual", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("form", "seeds", "text"),
    [
        ("full", (0, 1, 2), "hetxl study main"),
        ("full", (0, 1), "hetxl study main --seeds 2"),
        ("quick", (0, 1), "hetxl study main --quick"),
        ("full", (4, 5), "hetxl study main --seeds 4,5"),
        ("full", (3,), "hetxl study main --seeds 3,"),
    ],
)
def test_commands(form, seeds, text):
    assert command("main", form, seeds) == text


def test_commands_of_studies_on_pairs():
    assert command("normalisation", "full", (1, 2, 3, 4, 5)) == "hetxl study normalisation"
    assert command("test-noise", "quick", (0, 1), "mine.npz") == "hetxl study test-noise mine.npz --quick"
    assert command("contrastive", "full", (0, 1, 2)) == "hetxl study contrastive --seeds 3"
