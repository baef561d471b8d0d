import pytest

from hetxl.studies.plot import plot_differences, t_quantile


def summary(name, difference):
    base = {"nll": [2.0, 2.1, 2.2], "precision@1": [0.5, 0.5, 0.5], "seeds": [0, 1, 2]}
    other = {**base, "nll": [value + difference + 0.01 * place for place, value in enumerate(base["nll"])]}
    return {"setting": name, "heads": {"DET": base, "HET-XL": other}}


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (4, 2.776), (30, 2.042)])
def test_quantiles_of_t(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-3)


def test_a_picture_of_all_settings(tmp_path):
    path = plot_differences([summary("clean", -0.1), summary("noisy", 0.2)], tmp_path / "made" / "differences.svg")
    text = path.read_text()
    assert "<svg" in text
    # A setting that lacks a head has no mark for it, and the others are drawn.
    assert plot_differences([summary("a", 0.1)], tmp_path / "b.svg", ("HET-XL", "HET")).exists()
