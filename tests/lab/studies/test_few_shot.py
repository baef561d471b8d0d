import json

import numpy as np
import pytest
import torch

from hetxl_lab.studies.class_subsets import apply_view
from hetxl_lab.studies.few_shot import accuracies, accuracy, make_task, run_of, values_at
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.runs import RunCache
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.runs import load_run

STUDY = load_study("few-shot")

PROFILE = PROFILES["miniature"]


def test_a_linear_classifier_finds_classes_that_are_apart():
    torch.manual_seed(0)
    centres, ids = 5 * torch.randn(6, 20), torch.arange(6).repeat(3)
    support, query = (centres[ids] + 0.3 * torch.randn(18, 20) for _ in range(2))
    assert accuracy(support, ids, query, ids, 6) == 1.0
    assert accuracy(torch.randn(18, 20), ids, query, ids, 6) < 0.6


def test_tasks_have_enough_examples_of_every_class():
    dataset = apply_view(load_synthetic(rows=3000, classes=30, features=4), "unknown:5")
    task = make_task(dataset, (1, 5, 10_000))
    assert task.shots == 5
    classes = task.support_ids.max() + 1
    assert np.bincount(task.support_ids, minlength=classes).min() >= 5
    assert np.bincount(task.support_ids).max() <= 4 * 5
    assert set(task.query_ids) <= set(range(classes))
    # Ids are those of the same classes in both splits.
    old = {
        int(new): int(dataset.splits["train"].labels.ids[row])
        for row, new in zip(task.support, task.support_ids, strict=True)
    }
    for row, new in zip(task.query, task.query_ids, strict=True):
        assert int(dataset.splits["test"].labels.ids[row]) == old[int(new)]


def test_too_many_shots_raise():
    dataset = apply_view(load_synthetic(rows=100, classes=10, features=2), "unknown:5")
    with pytest.raises(ValueError, match="has no 90 training examples for half of its unknown classes"):
        make_task(dataset, (90,))


def test_few_shot_study_measures_every_shot_count(studied):
    text, summary = studied("few-shot")
    bench = summary["benches"]["synthetic"]
    assert bench["shots"] == [1, 2]
    assert bench["classes"] <= 4
    for label in ("DET", "HET-XL"):
        assert np.shape(bench["accuracy"][label]) == (2, 2)
    assert "1-shot accuracy" in text


def test_the_known_classes_are_trained_on_alone_and_draws_are_repeatable(studied):
    studied("few-shot")
    run = run_of(PROFILE.base, "DET", 0)
    assert run.view == "known:5"
    assert [run_of(bench, "DET", 0).view for bench in PROFILES["full"].few_shot] == ["known:5", "known:3", "known:5"]
    assert run.open().num_classes == 16
    dataset = apply_view(load_synthetic(rows=400, classes=20, features=8), "unknown:5")
    task = make_task(dataset, (1, 2))
    backbone = load_run(RunCache(studied.cache).directory(run)).model.backbone
    first, second = (accuracies(backbone, 0, dataset, task, (1, 2)) for _ in range(2))
    assert first == second


def few_shot(studied, tmp_path, run, data):
    options = {"run": run, "data": data}
    page = studied.run("few-shot", tmp_path / "out", options=options)
    return json.loads(page.with_suffix(".json").read_text())


def test_features_of_a_run_are_evaluated_on_any_labelled_data(studied, tmp_path):
    studied("few-shot")
    directory = RunCache(studied.cache).directory(run_of(PROFILE.base, "DET", 0))
    rng = np.random.default_rng(0)
    ids = np.arange(300) % 3
    features = np.eye(8)[ids] * 9 + rng.normal(size=(300, 8))  # classes that any linear map keeps apart
    np.savez(tmp_path / "mine.npz", features=features.astype(np.float32), labels=ids)
    summary = few_shot(studied, tmp_path, str(directory), str(tmp_path / "mine.npz"))
    assert list(summary["benches"]["mine"]["accuracy"]) == ["DET"]
    assert summary["benches"]["mine"]["classes"] == 3
    assert summary["trainings"] == 0
    (accuracy_of_shots,) = summary["benches"]["mine"]["accuracy"]["DET"]
    assert max(accuracy_of_shots) > 0.6


def test_data_of_another_shape_is_refused(studied, tmp_path):
    studied("few-shot")
    directory = RunCache(studied.cache).directory(run_of(PROFILE.base, "DET", 0))
    np.savez(tmp_path / "wide.npz", features=np.ones((60, 9), np.float32), labels=np.arange(60) % 3)
    message = r"wide has features \[9\] as inputs, but the run takes features \[8\]"
    with pytest.raises(ValueError, match=message):
        few_shot(studied, tmp_path, str(directory), str(tmp_path / "wide.npz"))
    with pytest.raises(ValueError, match="is a run; give the data to evaluate it on: few-shot RUN DATA"):
        few_shot(studied, tmp_path, str(directory), None)


def summary_with(xl):
    return {
        "benches": {"data": {"shots": [1, 5], "accuracy": {"DET": [[0.1, 0.5], [0.2, 0.6], [0.1, 0.5]], "HET-XL": xl}}}
    }


@pytest.mark.parametrize(
    ("xl", "word"),
    [
        ([[0.3, 0.71], [0.4, 0.8], [0.31, 0.7]], "holds here"),
        ([[0.01, 0.3], [0.1, 0.41], [0.0, 0.3]], "does not hold here"),
        ([[0.1, 0.55], [0.2, 0.5], [0.1, 0.5]], "do not decide"),
        ([[0.3, 0.49], [0.4, 0.6], [0.31, 0.5]], "do not decide"),  # better with one shot, but not with five
    ],
)
def test_the_conclusion_follows_the_numbers(xl, word):
    assert word in STUDY.conclusion(summary_with(xl))
    assert values_at(summary_with(xl)["benches"]["data"], "DET", 25) == []
