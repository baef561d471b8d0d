import json

import pytest

from hetxl.studies import pool
from hetxl.studies.contrastive import STUDY, welch_p
from hetxl.studies.run import run_study
from hetxl.training.progress import Narrator


def test_miniature(studied):
    text, summary = studied("contrastive")
    assert text.startswith("# Contrastive learning\n")
    assert len(summary["runs"]) == 6
    assert "noise_auroc" in summary["runs"]["het-xl-swap20"]
    assert "noise_auroc" not in summary["runs"]["det-swap20"]
    assert "| HET-XL | **85.56 ± 0.03** |" in text  # the paper's
    assert f"hetxl study contrastive {studied.pairs}" in text
    for part in ("40 % swapped", "recall@10", "Finding swapped pairs", "HET-XL less DET", "p, Welch"):
        assert part in text


def test_no_training_of_another_study_is_done_again(studied, tmp_path, monkeypatch):
    studied("contrastive")
    before = {path: path.stat().st_mtime_ns for path in studied.cache.rglob("het-xl-swap*/result.json")}
    monkeypatch.setattr(pool, "train_pairs", None)
    options = {"data": str(studied.pairs), "cache": studied.cache, "jobs": 1, "narrator": Narrator(quiet=True)}
    page = run_study("test-noise", form="miniature", out=tmp_path, **options)
    assert json.loads(page.with_suffix(".json").read_text())["trainings"] == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before


def summary_of(make, gain, **more):
    accuracies = {}
    for place, swap in enumerate((0, 20, 40)):
        accuracies |= {f"det-swap{swap}": 0.5 - 0.1 * place, f"het-xl-swap{swap}": 0.5 - 0.1 * place + gain}
    return make(accuracies, **more)


@pytest.mark.parametrize(
    ("gain", "word", "counts"),
    [
        (0.05, ", holds here", "higher in 3 and significantly lower in 0"),
        (-0.05, "does not hold here", "higher in 0 and significantly lower in 3"),
        (1e-5, "do not decide", "higher in 0 and significantly lower in 0"),
    ],
)
def test_the_conclusion_follows_the_numbers(pair_runs, gain, word, counts):
    text = STUDY.conclusion(summary_of(pair_runs, gain))
    assert word in text
    assert counts in text


def test_tables(pair_runs):
    summary = summary_of(pair_runs, 0.05)
    zero_shot, differences, audit = STUDY.tables(summary)
    assert zero_shot.value("HET-XL", "top-1", "20 % swapped") == pytest.approx(45, abs=0.1)
    assert "1,000 training pairs, 7 steps; zero-shot among 50 names (chance 2.000 %)" in zero_shot.note
    row = differences.rows[0]
    assert (row.name, row.group) == ("zero-shot top-1", "0 % swapped")
    assert row.cells[2].startswith("+5.0")
    assert row.cells[3] != row.cells[4]
    assert [row.name for row in audit.rows] == ["20 %", "40 %"]


def test_one_seed_has_no_tests_and_a_loss_may_not_be_finite(pair_runs):
    summary = summary_of(pair_runs, 0.05)
    for run in summary["runs"].values():
        run.update({key: values[:1] for key, values in run.items()})
    assert STUDY.tables(summary)[1].rows[0].cells[3:] == ["–", None]
    assert "do not decide" in STUDY.conclusion(summary)
    summary["runs"]["het-xl-swap40"] = None
    assert "not known, as a loss did not stay finite with 40 %" in STUDY.conclusion(summary)
    assert STUDY.tables(summary)[0].rows[-1].cells[0] == "not finite"


def test_welch():
    # By hand: t = −2 / √(1/3 + 4/3), 2.94 degrees of freedom.
    assert welch_p([1, 2, 3], [2, 4, 6]) == pytest.approx(0.2208, abs=2e-3)
    assert welch_p([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert welch_p([1, 1], [2, 2]) == 0
    assert welch_p([1, 1], [1, 1]) == 1
    assert welch_p([1], [1, 2]) is None
