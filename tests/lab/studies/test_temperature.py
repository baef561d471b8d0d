import pytest

from hetxl_lab.studies.paper import paper_table
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.runs import RunCache
from hetxl_lab.studies.study import Lab
from hetxl_lab.studies.temperature import FIXED_LABEL, MOVING, PAPER, RANGES, SETTINGS, STARTS, fixed_run, learned_line

LEARN_TAU = load_study("learn-tau")


def test_learn_tau_study_moves_learned_temperatures_only(studied):
    _, summary = studied("learn-tau")
    for line in summary["lines"]:
        learned = "learned" in line["label"]
        assert all((tau != 1.0) == learned for tau in line["values"]["temperature"])


def test_learn_tau_searches_with_the_first_seed_alone():
    profile = LEARN_TAU.adapt(PROFILES["full"], {"grid": True})
    runs = LEARN_TAU.runs(profile, (0, 1))
    searches = [run for run in runs if run.config.temperature != "learned"]
    assert len(searches) == 3 * 3 * 3
    assert {run.config.seed for run in searches} == {0}
    assert len(runs) - len(searches) == 3 * 3 * 2


def test_grid_searches_train_the_best_temperature_with_every_seed(studied):
    _, summary = studied("tau-epochs")
    best = {(entry["label"], entry["group"]): entry["temperature"] for entry in summary["best"]}
    for line in summary["lines"]:
        if "grid" in line["label"]:
            assert line["values"]["temperature"] == [best[line["label"], line["group"]]] * 2
            assert best[line["label"], line["group"]] in PROFILES["miniature"].grid


@pytest.mark.parametrize(
    ("gain", "ahead", "helps", "part"),
    [
        (-0.1, 0.01, "holds here", "holds here"),
        (-0.1, -0.01, "holds here", "does not hold here"),
        (0.1, 0.01, "does not hold here", "holds here"),
    ],
)
def test_learn_tau_the_conclusion_follows_the_numbers(lines, gain, ahead, helps, part):
    values = {}
    for index, head in enumerate(("DET", "HET", "HET-XL")):
        values |= {(f"{head}, τ = 1", "d"): 2.0, (f"{head}, learned τ", "d"): 2.0 + gain - ahead * index}
    text = LEARN_TAU.conclusion(lines(values, grid=[1.0]))
    assert f"that learning τ helps all methods, {helps}." in text
    assert f"that learning τ explains only part of its gains, {part}." in text
    assert f"compared with DET's is {'lower' if ahead > 0 else 'higher'} by 0.020" in text
    assert f"HET-XL on {1 if gain < 0 else 0} of 1 datasets" in text


TAU_EPOCHS = load_study("tau-epochs")


def test_tau_epochs_sees_the_same_rows_more_often(studied):
    _, summary = studied("tau-epochs")
    steps = PROFILES["miniature"].repeated.steps
    assert [line["values"]["steps"] for line in summary["lines"]] == [steps, steps, 2 * steps, 2 * steps]
    full = PROFILES["full"].repeated  # one epoch of its rows
    assert full.steps == round(1000 / full.config("det").batch_size)


def test_tau_epochs_takes_other_epochs_and_refuses_one():
    profile = TAU_EPOCHS.adapt(PROFILES["miniature"], {"epochs": "5,1", "backbone": None})
    assert [setting.group for setting in TAU_EPOCHS.settings(profile)] == ["1 epoch", "5 epochs"]
    with pytest.raises(ValueError, match="--epochs must be at least two different whole numbers, found '3'"):
        TAU_EPOCHS.adapt(PROFILES["miniature"], {"epochs": "3", "backbone": None})


@pytest.mark.parametrize(
    ("few", "many", "word"), [(-0.3, -0.1, "holds here"), (-0.1, -0.3, "does not hold here"), (0, 0, "do not decide")]
)
def test_tau_epochs_the_conclusion_follows_the_numbers(lines, few, many, word):
    groups = {"1 epoch": few, "7 epochs": -0.1, "90 epochs": many}
    values = {(f"HET-XL, {how}", g): 2.0 for g in groups for how in ("τ by grid search", "learned τ")}
    values |= {("HET-XL, learned τ", group): 2.0 + gain for group, gain in groups.items()}
    summary = lines(values, grid=[0.5, 1.0])
    if not few:
        for line in summary["lines"]:
            line["values"]["nll"] = [2.0, 2.1, 2.2] if "grid" in line["label"] else [2.1, 2.0, 2.2]
    assert word in TAU_EPOCHS.conclusion(summary)


TEMPERATURE_PATH = load_study("tau-dynamics")

PROFILE = PROFILES["miniature"]


def test_temperature_path_study_ends_at_the_fixed_value(studied):
    _, summary = studied("tau-dynamics")
    moving, fixed = (line["values"]["temperature"] for line in summary["lines"])
    assert fixed == pytest.approx(moving, abs=1e-5)
    for seed, temperature in zip(("0", "1"), moving, strict=True):
        step, last = summary["paths"][seed][-1]
        assert step == PROFILE.base.steps
        assert last == pytest.approx(temperature, abs=1e-6)


def test_each_seed_is_fixed_where_it_ended(studied):
    studied("tau-dynamics")
    lab = Lab(PROFILE, (0, 1), RunCache(studied.cache))
    for seed in lab.seeds:
        end = lab.cache.result(learned_line(PROFILE).run(seed))["temperature"]
        config = fixed_run(lab, seed).config
        assert float(config.temperature) == pytest.approx(end, abs=1e-5)
        assert config.seed == seed


def test_tau_is_fixed_at_1_if_its_run_diverged(tmp_path):
    lab = Lab(PROFILE, (0,), RunCache(tmp_path))
    directory = lab.cache.directory(learned_line(PROFILE).run(0))
    directory.mkdir()
    (directory / "diverged.json").write_text("{}")
    assert fixed_run(lab, 0).config.temperature == "1.0"


@pytest.mark.parametrize(("nll", "word"), [(2.001, "holds here"), (2.5, "does not hold here")])
def test_temperature_path_the_conclusion_follows_the_numbers(lines, nll, word):
    paths = {"0": [[1, 1.0], [2, 0.5], [3, 0.8]], "1": [[1, 1.0], [3, 0.9]]}
    text = TEMPERATURE_PATH.conclusion(lines({(MOVING, None): 2.0, (FIXED_LABEL, None): nll}, paths=paths))
    assert word in text
    assert "ends at 0.800 to 0.900; in 1 of 2 runs it goes beyond both" in text


TEMPERATURE_RANGE = load_study("tau-range")


def test_the_settings_are_the_papers():
    for label, settings in (("tab:tau_start_point", STARTS), ("tab:tau_range", RANGES)):
        assert [setting.label for setting in settings] == [row.label for row in paper_table(label).rows]
    assert len(SETTINGS) == 8


def test_temperature_range_study_starts_at_init(studied):
    text, summary = studied("tau-range")
    assert [line["label"] for line in summary["lines"]] == [setting.label for setting in SETTINGS]
    ends = [line["values"]["temperature"][0] for line in summary["lines"]]
    for setting, end in zip(SETTINGS, ends, strict=True):
        assert abs(end - setting.init) < 0.2  # three steps do not go far
    assert "The range of τ" in text


def test_bounds_are_options_of_the_run():
    lines = {line.label: line.options for line in TEMPERATURE_RANGE.lines(PROFILES["full"])}
    narrow = lines["2.525 in 0.05 … 3"]
    assert (narrow["temperature_low"], narrow["temperature_high"], narrow["temperature_init"]) == (0.05, 3.0, 2.525)


@pytest.mark.parametrize(("other", "word"), [(2.005, "holds here"), (2.3, "does not hold here")])
def test_temperature_range_the_conclusion_follows_the_numbers(lines, other, word):
    summary = lines({(setting.label, None): 2.0 if setting == PAPER else other for setting in STARTS})
    text = TEMPERATURE_RANGE.conclusion(summary)
    assert word in text
    assert "Over 4 settings" in text
