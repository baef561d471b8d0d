"""The options of comparisons on built-in data."""

import pytest

from hetxl.data.open import BUILT_IN
from hetxl.training.config import TrainConfig
from hetxl.training.presets import PRESETS, preset_for


@pytest.mark.parametrize("data", BUILT_IN)
@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_presets_are_valid(data, head):
    values = preset_for(data)
    config = TrainConfig(data=data, head=head, **values)
    for name, value in values.items():
        assert getattr(config, name) == value


def test_by_name():
    assert preset_for("synthetic:rows=50,noise=2") is PRESETS["synthetic"]
    assert preset_for("pycode") is PRESETS["pycode"]
    assert preset_for("pictures/") == {}
    assert preset_for(None) == {}
