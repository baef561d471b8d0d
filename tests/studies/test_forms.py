import pytest

from hetxl.studies.forms import FORMS, LEARNED, Bench

BENCH = Bench("b", "synthetic:rows=100", 40, {"rank": 3}, {"linear": {}, "MLP": {"backbone": "mlp", "rank": 4}})


def test_options_go_over_one_another():
    config = BENCH.config("het-xl", scale=0.5, train_samples=7)
    assert (config.data, config.head, config.steps, config.rank) == ("synthetic:rows=100", "het-xl", 20, 3)
    assert (config.train_samples, config.temperature, config.evaluate_every) == (7, "1.0", 20)
    assert BENCH.config("det", backbone="MLP").rank == 4
    assert BENCH.config("het-xl", **LEARNED).temperature == "learned"
    assert BENCH.config("det", scale=0.001).steps == 1


def test_a_training_has_its_seed_and_its_view():
    training = BENCH.training("det", 5, view="known:5", rank=2)
    assert (training.config.seed, training.config.rank, training.view) == (5, 2, "known:5")


def test_a_backbone_that_does_not_exist():
    with pytest.raises(ValueError, match="backbone must be one of 'linear', 'MLP', found 'CNN'"):
        BENCH.config("det", backbone="CNN")


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_forms(form):
    assert form.base is form.benches[0]
    assert all(len(bench.backbones) == 2 for bench in form.benches)
    assert 1.0 not in form.temperatures
    assert list(form.samples) == sorted(form.samples)
    assert form.samples[0] == form.sizes.samples[0] == 1


def test_only_the_full_form_needs_data_that_is_built():
    for name in ("quick", "miniature"):
        form = FORMS[name]
        for bench in (*form.benches, form.sampling, *form.few_shot):
            assert bench.data.partition(":")[0] in ("pycode", "synthetic")
    assert [bench.name for bench in FORMS["full"].benches] == ["pycode", "glyphs", "wordnet"]
    assert [bench.name for bench in FORMS["full"].few_shot] == ["glyphs", "icons", "pycode"]
