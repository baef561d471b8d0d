import pytest

from hetxl_train.temperature import recommend

LARGE = {"rows": 10**6, "num_classes": 1000, "steps": 2000, "batch_size": 256, "validation_rows": 10_000}


def method(**options) -> str:
    return recommend(**(LARGE | options)).method


def test_large_data_seen_once_learns_the_temperature():
    recommendation = recommend(**LARGE)
    assert recommendation.method == "train"
    assert recommendation.learned
    assert "0.51 epochs" in recommendation.reason


def test_the_setting_of_the_paper_learns_the_temperature():
    # ImageNet-21k: 12.8 million images, 21,843 classes, 7 epochs.
    assert method(rows=12_800_000, num_classes=21_843, steps=21_875, batch_size=4096) == "train"


def test_many_epochs_over_few_examples_do_not_learn_the_temperature():
    # WordNet's hypernyms, on which a learned τ cost 0.17 nats.
    small = {"rows": 46_739, "num_classes": 4123, "steps": 550, "batch_size": 512, "validation_rows": 5749}
    assert method(**small) == "posthoc"
    assert method(**small | {"steps": 1100, "batch_size": 256}) == "posthoc"
    assert method(**small | {"validation_rows": 0}) == "fixed"
    assert method(**small | {"max_runs": 8}) == "grid"
    assert method(**small | {"max_runs": 29}) == "grid"
    assert method(**small | {"max_runs": 30}) == "bayes"


@pytest.mark.parametrize("change", [{"steps": 300}, {"label_noise": True}, {"steps": 50_000}])
def test_risky_settings_fit_the_temperature_afterwards(change):
    recommendation = recommend(**(LARGE | change))
    assert recommendation.method == "posthoc"
    assert not recommendation.learned


def test_method_changes_at_its_thresholds():
    one_epoch = {"rows": 256_000, "num_classes": 1000, "steps": 1000, "batch_size": 256}
    assert method(**one_epoch) == "train"
    assert method(**one_epoch | {"steps": 1001}) == "posthoc"
    assert method(**one_epoch | {"steps": 999}) == "posthoc"
    several = {"rows": 500_000, "num_classes": 1000, "steps": 5000, "batch_size": 1000}
    assert method(**several) == "train"
    assert method(**several | {"num_classes": 1001}) == "posthoc"
    assert method(**several | {"steps": 5001}) == "posthoc"


@pytest.mark.parametrize("name", ["rows", "num_classes", "steps", "batch_size", "max_runs"])
def test_an_error_names_a_number_out_of_range(name):
    with pytest.raises(ValueError, match=name):
        recommend(**(LARGE | {name: 0}))
