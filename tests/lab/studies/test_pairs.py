import dataclasses
import json
from pathlib import Path

import pytest

from hetxl._files import read_json
from hetxl_lab.studies import runs
from hetxl_lab.studies.pairs import MARGIN, percent, percents, share_text, welch_p
from hetxl_lab.studies.paper import paper_table, value_in
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.runs import DIVERGED, RunCache
from hetxl_lab.studies.study import Lab
from hetxl_train.config import ContrastiveConfig

PAIR_STUDY = load_study("test-noise")

FULL = PROFILES["full"]


def on(profile, data):
    return dataclasses.replace(profile, pairs=dataclasses.replace(profile.pairs, data=data))


def test_directories_depend_on_profile_and_data():
    assert PAIR_STUDY.home(FULL) == Path("runs/study-contrastive/runs")
    assert PAIR_STUDY.home(PROFILES["quick"]) == Path("runs/study-contrastive-quick/runs")
    assert PAIR_STUDY.home(on(FULL, "some/where/mine.npz")) == Path("runs/study-contrastive-mine/runs")


def test_seeds_are_others_than_that_of_the_options():
    assert PAIR_STUDY.seeds(FULL) == (1, 2, 3, 4, 5)
    assert PAIR_STUDY.seeds(PROFILES["quick"]) == (0, 1)


def test_runs_are_shared_between_the_studies():
    keys = {
        name: {run.key for run in load_study(name).runs(FULL, (1,))}
        for name in ("contrastive", "normalisation", "test-noise")
    }
    assert {name: len(run_keys) for name, run_keys in keys.items()} == {
        "contrastive": 6,
        "normalisation": 4,
        "test-noise": 3,
    }
    assert keys["test-noise"] < keys["contrastive"]
    assert keys["normalisation"] & keys["contrastive"] == {"het-xl-swap0-seed1"}


def test_seeds_are_paired_and_values_are_those_of_the_runs(studied):
    _, summary = studied("test-noise")
    directories = [studied.cache / f"het-xl-swap40-seed{seed}" for seed in (0, 1)]
    swaps = [(directory / "swaps.npz").read_bytes() for directory in directories]
    assert swaps[0] != swaps[1]
    studied("contrastive")
    assert (studied.cache / "det-swap40-seed1" / "swaps.npz").read_bytes() == swaps[1]
    config = ContrastiveConfig.from_dict(read_json(directories[1] / "config.json"))
    assert (config.seed, config.data_seed, config.swap, config.eval_samples) == (1, 1, 0.4, 3)
    stored = json.loads((directories[1] / "result.json").read_text())
    assert summary["runs"]["het-xl-swap40"]["sampled_top1"][1] == stored["metrics"]["test"]["zero_shot_sampled"]["top1"]
    assert summary["samples"] == 3


def test_a_loss_that_was_not_finite(studied, tmp_path):
    studied("test-noise")
    profile = on(PROFILES["miniature"], str(studied.pairs))
    for setting in PAIR_STUDY.settings:
        directory = tmp_path / profile.pairs.run(setting, 0).key
        directory.mkdir()
        (directory / DIVERGED).write_text("{}")
    lab = Lab(profile, (0,), RunCache(tmp_path))
    with pytest.raises(FloatingPointError, match="nothing to measure"):
        PAIR_STUDY.measure(lab)
    finished = PAIR_STUDY.settings[0]
    result = (studied.cache / f"{finished}-seed0" / "result.json").read_text()
    (tmp_path / f"{finished}-seed0" / "result.json").write_text(result)
    measured = PAIR_STUDY.measure(lab)["runs"]
    assert [run is None for run in measured.values()] == [False, True, True]


def test_percent_cells_show_means_and_missing_values():
    assert percent({"a": [0.1, 0.3]}, "a") == pytest.approx((20, 10))
    assert percent({"a": [0.1]}, "b") is None
    assert percent(None, "a") == "not finite"
    assert percents({"a": [0.5]}, "a") == [50]
    assert percents(None, "a") == []
    assert share_text(0.2) == "20 %"


CONTRASTIVE = load_study("contrastive")


def test_contrastive_study_page_has_all_tables(studied):
    text, summary = studied("contrastive")
    assert text.startswith("# Contrastive learning\n")
    assert len(summary["runs"]) == 6
    assert "noise_auroc" in summary["runs"]["het-xl-swap20"]
    assert "noise_auroc" not in summary["runs"]["det-swap20"]
    assert "| HET-XL | **85.56 ± 0.03** |" in text  # the paper's
    assert f"hetxl study contrastive {studied.pairs}" in text
    for part in ("40 % swapped", "recall@10", "Finding swapped pairs", "HET-XL less DET", "p, Welch"):
        assert part in text


def test_no_run_of_another_study_is_done_again(studied, tmp_path, monkeypatch):
    studied("contrastive")
    before = {path: path.stat().st_mtime_ns for path in studied.cache.rglob("het-xl-swap*/result.json")}
    monkeypatch.setattr(runs, "train", None)
    page = studied.run("test-noise", tmp_path)
    assert read_json(page.with_suffix(".json"))["trainings"] == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before


def summary_of(make, gain, **more):
    accuracies = {}
    for index, swap in enumerate((0, 20, 40)):
        accuracies |= {f"det-swap{swap}": 0.5 - 0.1 * index, f"het-xl-swap{swap}": 0.5 - 0.1 * index + gain}
    return make(accuracies, **more)


@pytest.mark.parametrize(
    ("gain", "word", "counts"),
    [
        (0.05, ", holds here", "higher in 3 and significantly lower in 0"),
        (-0.05, "does not hold here", "higher in 0 and significantly lower in 3"),
        (1e-5, "do not decide", "higher in 0 and significantly lower in 0"),
    ],
)
def test_contrastive_the_conclusion_follows_the_numbers(pair_runs, gain, word, counts):
    text = CONTRASTIVE.conclusion(summary_of(pair_runs, gain))
    assert word in text
    assert counts in text


def test_contrastive_tables_have_differences(pair_runs):
    summary = summary_of(pair_runs, 0.05)
    zero_shot, differences, audit = CONTRASTIVE.tables(summary)
    assert value_in(zero_shot, "HET-XL", "top-1", "20 % swapped") == pytest.approx(45, abs=0.1)
    assert "1,000 training pairs, 7 steps; zero-shot among 50 names (chance 2.000 %)" in zero_shot.note
    row = differences.rows[0]
    assert (row.label, row.group) == ("zero-shot top-1", "0 % swapped")
    assert row.cells[2].startswith("+5.0")
    assert row.cells[3] != row.cells[4]
    assert [row.label for row in audit.rows] == ["20 %", "40 %"]


def test_one_seed_has_no_tests_and_a_loss_may_not_be_finite(pair_runs):
    summary = summary_of(pair_runs, 0.05)
    for run in summary["runs"].values():
        run.update({key: values[:1] for key, values in run.items()})
    assert CONTRASTIVE.tables(summary)[1].rows[0].cells[3:] == ["–", "–"]
    assert "do not decide" in CONTRASTIVE.conclusion(summary)
    summary["runs"]["het-xl-swap40"] = None
    assert "not known, as a loss did not stay finite with 40 %" in CONTRASTIVE.conclusion(summary)
    assert CONTRASTIVE.tables(summary)[0].rows[-1].cells[0] == "not finite"


def test_welch_p_has_known_values():
    # By hand: t = −2 / √(1/3 + 4/3), 2.94 degrees of freedom.
    assert welch_p([1, 2, 3], [2, 4, 6]) == pytest.approx(0.2208, abs=2e-3)
    assert welch_p([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert welch_p([1, 1], [2, 2]) == 0
    assert welch_p([1, 1], [1, 1]) == 1
    assert welch_p([1], [1, 2]) is None
    # One degree of freedom, of which rounding leaves a little less.
    assert welch_p([0, 2.1], [0, 0]) == pytest.approx(0.5)


NORMALISATION = load_study("normalisation")


def test_normalisation_study_has_four_runs(studied):
    text, summary = studied("normalisation")
    assert list(summary["runs"]) == [
        "het-xl-normalize-none",
        "het-xl-normalize-after",
        "het-xl-swap0",
        "het-xl-normalize-both",
    ]
    assert "| before the noise | 84.37 |" in text  # the paper's


def test_table_has_the_rows_of_the_papers_table(pair_runs):
    table = NORMALISATION.tables(pair_runs(dict.fromkeys(NORMALISATION.settings, 0.5)))[0]
    paper = paper_table("tab:contrastive_normalization")
    assert [row.label for row in table.rows] == [row.label for row in paper.rows]


@pytest.mark.parametrize(
    ("none", "after", "before", "both", "needed", "again"),
    [
        (0.2, 0.3, 0.5, 0.5, "after the normalisation, holds", "consistent effect, holds"),
        (0.2, 0.5, 0.5, 0.5, "1 of the two differences counts", "consistent effect, holds"),
        (0.6, 0.3, 0.5, 0.5, "after the normalisation, does not hold", "consistent effect, holds"),
        (0.2, 0.3, 0.5, 0.6, "after the normalisation, holds", "consistent effect, does not hold"),
        (0.2, None, 0.5, 0.5, "1 of the two differences counts", "consistent effect, holds"),
    ],
)
def test_normalisation_the_conclusion_follows_the_numbers(pair_runs, none, after, before, both, needed, again):
    values = dict(zip(NORMALISATION.settings, (none, after, before, both), strict=True))
    text = NORMALISATION.conclusion(pair_runs(values))
    assert needed in text
    assert again in text


NOISE_AT_TEST_TIME = load_study("test-noise")


def test_noise_at_test_time_study_has_three_runs(studied):
    text, summary = studied("test-noise")
    assert len(summary["runs"]) == 3
    assert "| deterministic | 84.35 |" in text  # the paper's
    assert "3 MC samples" in text


def sampled(summary, less):
    """Accuracies with draws that are lower by some numbers, one for each seed."""
    for run in summary["runs"].values():
        for key in ("top1", "top5"):
            run[f"sampled_{key}"] = [value - shift for value, shift in zip(run[f"zero_shot_{key}"], less, strict=True)]
    return summary


@pytest.mark.parametrize(
    ("less", "word"),
    [
        ((0.0001, 0.0, -0.0001), ", holds here"),
        ((0.02, 0.021, 0.02), "does not hold here"),
        ((0.02, 0.0, -0.02), "do not decide"),
    ],
)
def test_noise_at_test_time_the_conclusion_follows_the_numbers(pair_runs, less, word):
    summary = sampled(pair_runs(dict.fromkeys(NOISE_AT_TEST_TIME.settings, 0.5)), less)
    text = NOISE_AT_TEST_TIME.conclusion(summary)
    assert word in text
    assert "With 22 draws" in text
    assert f"counts from {100 * MARGIN:g} points on" in text
    assert value_in(
        NOISE_AT_TEST_TIME.tables(summary)[0], "22 MC samples", "zero-shot top-1", "40 % swapped"
    ) == pytest.approx(50 - 100 * sum(less) / 3, abs=0.1)
