import pytest

from hetxl.studies.variants import LEVERS, REFERENCES
from hetxl.training.config import TrainConfig
from hetxl.training.presets import PRESETS


@pytest.mark.parametrize("name", LEVERS)
@pytest.mark.parametrize("data", PRESETS)
def test_every_setting_is_valid_and_changes_something(name, data):
    lever = LEVERS[name]
    assert lever.name == name
    assert lever.what
    base = TrainConfig(data=data, **PRESETS[data])
    made = [(TrainConfig(**{**PRESETS[data], **one.options, "data": data}), one.held_out) for one in lever.variants]
    assert len({one.label for one in lever.variants}) == len(lever.variants)
    assert len(set(made)) == len(made)
    assert (base, False) not in made or len(made) > 1  # a lever at its default is there for completeness alone


def test_what_is_examined():
    varied = {key for lever in LEVERS.values() for one in lever.variants for key in one.options}
    assert varied == {
        "noise_init", "noise_learning_rate", "noise_weight_decay", "temperature", "temperature_init",
        "temperature_learning_rate", "temperature_prior", "temperature_hold", "train_samples", "rank", "sampler",
        "normalize_features", "residual", "link", "head",
    }  # fmt: skip
    assert [one.label for one in REFERENCES] == ["DET", "HET-XL"]


def test_only_another_loss_stands_apart():
    assert [name for name, lever in LEVERS.items() if lever.apart] == ["link"]
    assert all(one.options["link"] == "sigmoid" for one in LEVERS["link"].variants)
