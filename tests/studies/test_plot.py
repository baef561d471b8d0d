import sys

import pytest

from hetxl.report.statistics import PairedTest, paired_test
from hetxl.studies.plot import half_width, plot_differences, plot_groups, t_quantile


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
    panels = {"steps": [("HET-XL", "DET"), ("HET", "DET")], "turned round": [("DET", "HET-XL")]}
    text = plot_differences([summary("a", 0.1)], tmp_path / "b.svg", panels).read_text()
    for label in ("steps", "turned round", "HET", "a"):
        assert f"<!-- {label} -->" in text


def test_half_an_interval():
    assert half_width(PairedTest(1.0, None, None, 1)) == 0
    test = paired_test([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    assert half_width(test) == pytest.approx(4.303 * test.error, rel=1e-3)


def test_groups_of_differences(tmp_path):
    test = paired_test([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    groups = [("references", [("DET", test)]), ("rank", [("2", test), ("5", PairedTest(0.1, None, None, 1))])]
    text = plot_groups(groups, tmp_path / "groups.svg", "less is better").read_text()
    for label in ("references", "DET", "rank", "2", "5", "less is better"):
        assert f"<!-- {label} -->" in text


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib: pip install matplotlib"):
        plot_groups([], tmp_path / "none.svg", "")
