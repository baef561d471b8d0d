"""Looks, and the colours behind them: told apart on light and dark pages, also by colour-blind eyes."""

import itertools
import re
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from hetxl_train.report.charts import COLOURS, MARKERS, Style, marker, styles

STYLE_SHEET = (files("hetxl_train.report") / "templates" / "charts.css").read_text(encoding="utf-8")
# Machado, Oliveira and Fernandes (2009), full strength, for linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def variables(scheme):
    """The colours of a scheme by name."""
    light, dark = STYLE_SHEET.split("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light if scheme == "light" else dark.split(".plot")[0]))


def linear(colour):
    values = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(first, second):
    weights = (0.2126, 0.7152, 0.0722)
    bright, dim = sorted(
        (sum(w * v for w, v in zip(weights, linear(c), strict=True)) for c in (first, second)), reverse=True
    )
    return (bright + 0.05) / (dim + 0.05)


def lab(rgb):
    """CIE L*a*b* of linear RGB."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * min(max(v, 0), 1) for m, v in zip(row, rgb, strict=True)) for row in matrix]
    x, y, z = (
        (value / white) ** (1 / 3) if value / white > 0.008856 else 7.787 * value / white + 16 / 116
        for value, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_page(scheme):
    colours = variables(scheme)
    for index in range(COLOURS):
        assert contrast(colours[f"series-{index}"], colours["page"]) >= 3, index
    for name in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
        assert contrast(colours[name], colours["panel"]) >= 4.5, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_of_the_four_heads_are_distinguishable(scheme, blindness):
    colours = variables(scheme)
    seen = []
    for index in range(4):
        rgb = linear(colours[f"series-{index}"])
        seen.append(lab([sum(m * v for m, v in zip(row, rgb, strict=True)) for row in BLINDNESS[blindness]]))
    for first, second in itertools.combinations(seen, 2):
        assert sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5 > 12


def test_both_schemes_have_the_same_colours():
    assert variables("light").keys() == variables("dark").keys()


def test_the_heads_of_the_paper_always_look_the_same():
    alone, among = styles(["HET-XL"]), styles(["own", "DET", "HET-XL", "other"])
    assert alone["HET-XL"] == among["HET-XL"]
    assert len(set(among.values())) == 4


def test_many_labels_all_look_different():
    styles_by_label = styles([f"head {number}" for number in range(24)])
    assert len(set(styles_by_label.values())) == 24


@pytest.mark.parametrize("shape", MARKERS)
def test_every_marker_is_drawn(shape):
    element = ElementTree.fromstring(marker(Style("red", None, shape), 5, 5, title="<a>"))
    assert element.tag == "path"
    assert element[0].text == "<a>"
