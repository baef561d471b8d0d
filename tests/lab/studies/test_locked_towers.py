"""The study of locked pre-trained towers."""

import copy

import pytest

from hetxl_lab.studies.locked_towers import HET_XL, SETS, PairSet, comparison, conclusion, judged, score
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.run import run_study
from hetxl_train.config import ContrastiveConfig
from hetxl_train.runs import open_run


def test_both_heads_train_with_the_learning_rate_that_is_best_for_det(studied):
    page, summary = studied("locked-towers")
    (measured,) = summary["sets"]
    rates = dict(measured["tuning"])
    assert rates[measured["learning_rate"]] == max(rates.values())
    configs = [
        open_run(studied.cache / f"pairs-{head}-seed{seed}", ContrastiveConfig).config
        for head in ("det", "het-xl")
        for seed in (0, 1)
    ]
    assert {config.learning_rate for config in configs} == {measured["learning_rate"]}
    assert [config.noise for config in configs if config.head == "het-xl"] == [HET_XL["noise"]] * 2
    assert "recall@10, text → locked, %" in page
    assert "zero-shot top-1, %" not in page  # its texts are no names of classes


def test_tuning_runs_have_no_test_split(studied):
    studied("locked-towers")
    tuned = [path for path in studied.cache.glob("pairs-det-rate*") if path.is_dir()]
    assert len(tuned) >= 3
    for path in tuned:
        assert "test" not in studied.result(path.name)["metrics"]
    assert "test" in studied.result("pairs-det-seed0")["metrics"]


def test_sets_have_the_same_options_but_for_the_steps():
    options = [dict(pairs.options) for pairs in SETS["full"].values()]
    steps = [own.pop("steps") for own in options]
    assert len(steps) == 3
    assert options[1:] == options[:-1]


def test_own_options_of_het_xl_are_not_those_of_det():
    run = PairSet("some", "vectors.npz", "some").run("het-xl", 3, head="het-xl", **HET_XL)
    assert run.key == "some-het-xl-seed3"
    assert not run.blind
    assert (run.config.samples, run.config.scale_init, run.config.noise_learning_rate) == (8, 10.0, 0.03)


def summary_of(gain, named=True):
    spread = (-0.01, 0.0, 0.011)
    keys = ("zero_shot_top1", "test_image_to_text@1", "test_text_to_image@1")
    det = {key: [0.5 + shift for shift in spread] for key in keys}
    xl = {key: [0.5 + gain + 1.1 * shift for shift in spread] for key in keys}
    return {"sets": [{"set": "icons", "named": named, "heads": {"DET": det, "HET-XL": xl}}]}


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (0.05, "(p < 0.05) in 2 (zero-shot top-1 on icons (+5.0"),
        (-0.05, "in 0, and significantly worse in 2 (zero-shot top-1 on icons (−"),
        (1e-5, "in 0, and significantly worse in 0."),
    ],
)
def test_the_conclusion_follows_the_numbers(gain, expected):
    assert expected in conclusion(summary_of(gain))


def test_accuracy_counts_where_texts_are_names_of_classes():
    (measured,) = summary_of(0.05)["sets"]
    assert list(judged(measured)) == ["zero_shot_top1", "test_text_to_image@1"]
    (measured,) = summary_of(0.05, named=False)["sets"]
    assert list(judged(measured)) == ["test_image_to_text@1", "test_text_to_image@1"]
    assert "Of 2 comparisons" in conclusion({"sets": [measured]})
    without = copy.deepcopy(measured)
    del without["heads"]["DET"]["test_image_to_text@1"]
    assert comparison(without, "test_image_to_text@1") is None


def test_score_is_the_mean_recall_of_the_validation_pairs():
    recalls = {f"{way}@{k}": k / 10 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert score({"metrics": {"validation": recalls, "test": {}}}) == pytest.approx((0.1 + 0.5 + 1.0) / 3)


def test_a_call_without_pairs_and_unknown_sets_are_errors(tmp_path):
    with pytest.raises(ValueError, match="data must be set"):
        run_study("locked-towers", profile="miniature", out=tmp_path, cache=tmp_path)
    with pytest.raises(ValueError, match="sets must be one of 'icons', 'glosses', 'docstrings'"):
        run_study("locked-towers", options={"sets": "gloses"}, out=tmp_path, cache=tmp_path)
    assert load_study("locked-towers").home(PROFILES["quick"]).parts[1] == "study-locked-towers-quick"
