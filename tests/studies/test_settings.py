from hetxl.studies.settings import QUICK, RATE, SETTINGS
from hetxl.training.presets import preset_for


def test_every_benchmark_with_clean_and_with_noisy_labels():
    assert len(SETTINGS) == 8
    for name, setting in SETTINGS.items():
        config = setting.config(seed=3)
        assert config.seed == 3
        assert config.data == setting.data
        assert (config.label_noise, config.label_noise_rate) == (("confusable", RATE) if setting.noisy else ("none", 0))
        assert setting.noisy == name.endswith("-noisy")
        assert config.learning_rate == preset_for(setting.data)["learning_rate"]


def test_clean_and_noisy_differ_in_the_labels_alone():
    for name in ("pycode", "words", "glyphs", "wordnet"):
        clean, noisy = SETTINGS[name], SETTINGS[f"{name}-noisy"]
        assert (clean.data, clean.options) == (noisy.data, noisy.options)


def test_the_quick_ones_need_nothing_that_must_be_built():
    assert all(setting.data.startswith("synthetic") for setting in QUICK.values())
