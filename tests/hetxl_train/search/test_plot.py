from hetxl_train.search.plot import path_chart, tried_chart, write_plot

RESULT = {
    "label": "Grid search",
    "head": "het-xl",
    "seed": 0,
    "temperature": 0.8,
    "chosen_on": "validation",
    "trainings": 3,
    "seconds": 12.0,
    "single_training": False,
    "path": [[10, 0.8], [20, 0.8]],
    "trials": [
        {"temperature": 0.4, "nll": 2.0},
        {"temperature": 0.8, "nll": 1.5},
        {"temperature": 3.0, "nll": None},
    ],
}


def test_a_search_shows_what_each_value_gave(tmp_path):
    text = write_plot(RESULT, tmp_path / "tune.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "NLL over τ" in text
    assert "τ over training" in text
    assert "τ = 0.800, chosen on the validation split, after 3 runs" in text


def test_single_run_plots_its_path_only(tmp_path):
    result = RESULT | {"single_training": True, "label": "Simple training", "trials": [{"name": "train", "nll": 1.0}]}
    text = write_plot(result, tmp_path / "tune.html").read_text()
    assert "NLL over τ" not in text
    assert "τ over training" in text


def test_charts_without_values_are_left_out():
    assert path_chart({"train": [(0, [])]}, "path") is None
    assert tried_chart("grid", [{"temperature": 1.0, "nll": None}], "validation") is None
