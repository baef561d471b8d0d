import re

import numpy as np
import pytest

from hetxl_lab.studies.charts import (
    head_of,
    line_styles,
    plot_differences,
    plot_dots,
    plot_groups,
    plot_lines,
    plot_recovery,
)
from hetxl_lab.studies.verdicts import half_width, t_quantile
from hetxl_train.report.statistics import PairedTest, paired_test


def shown(path):
    """Return the texts of a drawing."""
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def summary(name, difference):
    base = {"nll": [2.0, 2.1, 2.2], "precision@1": [0.5, 0.5, 0.5], "seeds": [0, 1, 2]}
    other = {**base, "nll": [value + difference + 0.01 * seed for seed, value in enumerate(base["nll"])]}
    return {"setting": name, "heads": {"DET": base, "HET-XL": other}}


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (4, 2.776), (30, 2.042)])
def test_t_quantiles_match_published_tables(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-3)


def test_half_width_is_half_the_confidence_interval():
    assert half_width(PairedTest(1.0, None, None, 1)) == 0
    test = paired_test([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    assert half_width(test) == pytest.approx(4.303 * test.error, rel=1e-3)


def test_dots_in_groups_leave_gaps_for_missing_values(tmp_path):
    groups = [("data", [("DET", [1.0, 2.0]), ("HET", [])]), ("", [("HET-XL", [1.5])])]
    path = plot_dots({"test NLL": groups, "precision@1": groups}, tmp_path / "new" / "dots.svg")
    assert {"data", "DET", "HET", "HET-XL", "test NLL", "precision@1"} <= shown(path)
    assert path.read_text().count("whisker") == 2 + 1  # and the style


def test_lines_with_levels_and_gaps(tmp_path):
    panels = {
        "NLL": {"DET": [(1.0, [2.0, 2.1]), (10.0, []), (100.0, [1.0, 1.1])], "none": [(1.0, [])]},
        "ms": {"DET": [(1.0, [3.0]), (100.0, [30.0])]},
    }
    levels = {"NLL": {"shared": 1.5}}
    path = plot_lines(panels, tmp_path / "lines.svg", "samples", log_x=True, log_y=("ms",), levels=levels)
    assert {"DET", "shared", "NLL", "ms", "samples", "1", "100"} <= shown(path)
    assert "none" not in shown(path)


def test_lines_of_a_head_share_a_colour_and_differ_in_their_dash():
    labels = ("HET", "HET, the paper's", "HET-XL", "HET-XL, the paper's")
    looks = line_styles(labels)
    colours = [looks[label].colour for label in labels]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert [looks[label].dash is None for label in labels] == [True, False, True, False]


@pytest.mark.parametrize(
    ("label", "head"),
    [("HET", "HET"), ("HET τ*", "HET"), ("HET-XL, own W′", "HET-XL"), ("DET, widened", "DET"), ("rank 5", "HET-XL")],
)
def test_labels_have_the_colour_of_their_head(label, head):
    assert head_of(label) == head


def test_differences_in_all_settings(tmp_path):
    path = plot_differences([summary("clean", -0.1), summary("noisy", 0.2)], tmp_path / "differences.svg")
    assert {"clean", "noisy"} <= shown(path)
    # A setting that lacks a head has no mark for it, and the others are drawn.
    panels = {"steps": [("HET-XL", "DET"), ("HET", "DET")], "reversed": [("DET", "HET-XL")]}
    assert {"steps", "reversed", "a"} <= shown(plot_differences([summary("a", 0.1)], tmp_path / "b.svg", panels))


def test_groups_of_differences(tmp_path):
    test = paired_test([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    groups = [("references", [("DET", test)]), ("rank", [("2", test), ("5", PairedTest(0.1, None, None, 1))])]
    path = plot_groups(groups, tmp_path / "groups.svg", "less is better")
    assert {"references", "DET", "rank", "2", "5", "less is better"} <= shown(path)


def test_recovery_has_a_panel_for_each_head_and_bars_for_all(tmp_path):
    rng = np.random.default_rng(0)
    heads = {
        "DET": {"gap_closed": [0.0, 0.0]},
        "DET + temperature scaling": {"gap_closed": [0.01, 0.02]},
        "HET": {"gap_closed": [0.3, 0.35], "agreement": {"pearson": [-0.11, -0.13]}},
        "HET-XL": {"gap_closed": [0.9, 0.92], "agreement": {"pearson": [0.95, 0.97]}},
    }
    points = {label: (rng.uniform(-1, 1, 50), rng.uniform(-1, 1, 50)) for label in ("HET", "HET-XL")}
    path = plot_recovery({"heads": heads}, points, tmp_path / "recovery.svg")
    assert {"HET: r = −0.12", "HET-XL: r = 0.96", "gap closed", "DET + temperature scaling"} <= shown(path)
    assert path.read_text().count("h0") == 100
