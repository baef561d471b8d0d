import pytest

from hetxl.tuning import recommend

LARGE = {"rows": 10**6, "num_classes": 1000, "steps": 2000, "batch_size": 256, "validation_rows": 10_000}


def method(**options) -> str:
    return recommend(**(LARGE | options)).method


def test_much_data_seen_once_learns_it():
    found = recommend(**LARGE)
    assert found.method == "train"
    assert found.learned
    assert "0.51 passes" in found.reason


def test_the_papers_setting_learns_it():
    # ImageNet-21k: 12.8 million pictures, 21,843 classes, 7 passes.
    assert method(rows=12_800_000, num_classes=21_843, steps=21_875, batch_size=4096) == "train"


def test_many_passes_over_few_examples_do_not():
    # WordNet's hypernyms, on which a learned τ cost 0.17 nats.
    small = {"rows": 46_739, "num_classes": 4123, "steps": 550, "batch_size": 512, "validation_rows": 5749}
    assert method(**small) == "posthoc"
    assert method(**small | {"steps": 1100, "batch_size": 256}) == "posthoc"
    assert method(**small | {"validation_rows": 0}) == "fixed"
    assert method(**small | {"trainings": 8}) == "grid"
    assert method(**small | {"trainings": 29}) == "grid"
    assert method(**small | {"trainings": 30}) == "bayes"


@pytest.mark.parametrize("change", [{"steps": 300}, {"label_noise": True}, {"steps": 50_000}])
def test_when_in_doubt_it_is_left_at_one_and_fitted_afterwards(change):
    found = recommend(**(LARGE | change))
    assert found.method == "posthoc"
    assert not found.learned


def test_the_thresholds_are_where_they_are_said_to_be():
    one_pass = {"rows": 256_000, "num_classes": 1000, "steps": 1000, "batch_size": 256}
    assert method(**one_pass) == "train"
    assert method(**one_pass | {"steps": 1001}) == "posthoc"
    assert method(**one_pass | {"steps": 999}) == "posthoc"
    several = {"rows": 500_000, "num_classes": 1000, "steps": 5000, "batch_size": 1000}
    assert method(**several) == "train"
    assert method(**several | {"num_classes": 1001}) == "posthoc"
    assert method(**several | {"steps": 5001}) == "posthoc"


@pytest.mark.parametrize("name", ["rows", "num_classes", "steps", "batch_size", "trainings"])
def test_bad_numbers_are_named(name):
    with pytest.raises(ValueError, match=name):
        recommend(**(LARGE | {name: 0}))
