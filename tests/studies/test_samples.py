import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.samples import STUDY


def test_miniature(studied):
    text, summary = studied("samples")
    assert [(line["group"], line["label"]) for line in summary["lines"]] == [
        ("HET", "1"),
        ("HET", "4"),
        ("HET-XL", "1"),
        ("HET-XL", "4"),
    ]
    for label in ("HET", "HET-XL"):
        for way in ("engine", "paper"):
            assert all(value > 0 for value in summary["milliseconds"][label][way].values())
    assert "The head's part of a step" in text


def test_the_same_samples_in_training_and_evaluation():
    configs = [one.config for one in STUDY.trainings(FORMS["full"], (0,))]
    assert {config.train_samples for config in configs} == {1, 4, 16, 64, 256, 512, 1000}
    assert all(config.train_samples == config.eval_samples for config in configs)


def made(lines, one):
    times = {"engine": {"1": 1.0, "1000": 2.0}, "paper": {"1": 1.0, "1000": None}}
    values = {("1", "HET"): 2.3, ("1000", "HET"): 2.2, ("1", "HET-XL"): one, ("1000", "HET-XL"): 2.0}
    return lines(values, milliseconds={"HET": times, "HET-XL": times})


@pytest.mark.parametrize(("one", "word"), [(2.1, "holds here"), (2.5, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, one, word):
    text = STUDY.conclusion(made(lines, one))
    assert word in text
    assert "At S = 1 the paper's evaluation takes 1.0 times" in text  # the largest that fits


def test_what_does_not_fit_is_told(lines, tmp_path):
    summary = made(lines, 2.1)
    _, steps = STUDY.tables(summary)
    assert steps.rows[1].cells == [2.0, "out of memory budget", 2.0, "out of memory budget"]
    assert STUDY.plot(summary, tmp_path / "samples.svg").exists()
