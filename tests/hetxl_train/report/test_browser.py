"""The report in a real browser: nothing fails, nothing is missing, nothing sticks out."""

import os
from pathlib import Path

import pytest

from hetxl_train.report import find_runs, write_report
from support.browser import Browser, needs_browser
from support.runs import SCRIPT, write_comparison

pytestmark = needs_browser
PLOTS = (
    *("nll-steps", "nll-time", "temperature", "parameters-nll", "risk-coverage", "bands", "frequencies"),
    *(f"reliability-{index}" for index in range(6)),
)
WIDTHS = {"desktop": 1200, "phone": 360}

SIZES = """
Object.fromEntries([...document.querySelectorAll("svg[role=img]")].map(plot => {
    const box = plot.getBoundingClientRect();
    return [plot.id, [box.width, box.height, box.left, box.right]];
}))
"""
# The contrast of each colour of text with each background that it is on. SVG text is filled, other text coloured.
CONTRASTS = """
(() => {
    const parse = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.5) return colour;
        }
        return [255, 255, 255];
    };
    const found = {};
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        if (!own || ["title", "desc"].includes(element.tagName)) continue;
        const style = getComputedStyle(element);
        const ink = parse(element instanceof SVGElement ? style.fill : style.color);
        const [high, low] = [light(ink), light(behind(element))].sort((a, b) => b - a);
        found[`${ink} on ${behind(element)}`] = (high + 0.05) / (low + 0.05);
    }
    return found;
})()
"""
# What reaches over the right edge of the window, outside of boxes that scroll by themselves.
OVERFLOWING = """
[...document.querySelectorAll("body *")].filter(element =>
    element.getBoundingClientRect().right > innerWidth + 1 && !element.closest(".scroll"))
    .map(element => element.outerHTML)
"""


def screenshots() -> Path:
    """Return where screenshots of the page are written."""
    return Path(os.environ.get("HETXL_SCREENSHOTS") or Path(__file__).parents[3] / "build" / "screenshots")


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("out"), steps=600, best_nll=4.05)
    return write_report(find_runs(folder), folder)


@pytest.fixture(scope="module")
def tabs(browser, report):
    opened = {name: browser.open(report, width) for name, width in WIDTHS.items()}
    return opened | {"dark": browser.open(report, WIDTHS["desktop"], dark=True)}


@pytest.mark.parametrize("name", ["desktop", "phone", "dark"])
def test_screenshots_are_written(tabs, name):
    image = tabs[name].screenshot(screenshots() / f"report-{name}.png")
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["desktop", "phone", "dark"])
def test_the_console_stays_empty(tabs, name):
    assert tabs[name].problems() == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<script>null.x</script>", "Uncaught"),
        ("<script>console.error('bad')</script>", "bad"),
        (
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'"><script>1</script>',
            "Content Security Policy",
        ),
    ],
)
def test_a_page_with_an_error_is_noticed(browser, tmp_path, page, words):
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html>{page}<p>text")
    assert any(words in problem for problem in browser.open(tmp_path / "page.html").problems())


@pytest.mark.parametrize("name", ["desktop", "phone"])
def test_every_plot_is_there_and_inside_the_window(tabs, name):
    sizes = tabs[name].evaluate(SIZES)
    assert set(sizes) == set(PLOTS)
    for plot, (width, height, left, right) in sizes.items():
        assert width > 120, plot
        assert height > 120, plot
        assert left >= 0, plot
        assert right <= WIDTHS[name], plot


def test_nothing_sticks_out_on_a_phone(tabs):
    assert tabs["phone"].evaluate("document.documentElement.scrollWidth") <= 361
    assert tabs["phone"].evaluate(OVERFLOWING) == []


def test_the_comparison_fits_a_desktop(tabs):
    box = "document.querySelector('#result .scroll')"
    assert tabs["desktop"].evaluate(f"{box}.scrollWidth <= {box}.clientWidth")


def test_open_details_do_not_stick_out_either(browser, report):
    tab = browser.open(report, 360)
    tab.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 361
    assert tab.evaluate(OVERFLOWING) == []


def test_text_in_plots_can_be_read_on_a_phone(tabs):
    smallest = """Math.min(...[...document.querySelectorAll("svg[role=img] text")].map(text =>
        parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a))"""
    assert tabs["phone"].evaluate(smallest) >= 9


@pytest.mark.parametrize("name", ["desktop", "dark"])
def test_text_stands_out_from_its_background(tabs, name):
    contrasts = tabs[name].evaluate(CONTRASTS)
    assert len(contrasts) >= 4
    assert min(contrasts.values()) >= 4.5, contrasts


def test_dark_mode_is_dark(tabs):
    background = "getComputedStyle(document.body).backgroundColor"
    assert tabs["desktop"].evaluate(background) == "rgb(255, 255, 255)"
    assert tabs["dark"].evaluate(background) == "rgb(20, 23, 26)"
    stroke = "getComputedStyle(document.querySelector('#nll-steps .line')).stroke"
    assert tabs["desktop"].evaluate(stroke) != tabs["dark"].evaluate(stroke)


def test_a_script_as_a_class_name_stays_text(tabs):
    assert tabs["desktop"].evaluate("document.scripts.length") == 0
    assert SCRIPT in tabs["desktop"].evaluate("document.querySelector('#pairs').innerText")
    assert SCRIPT in tabs["desktop"].evaluate("document.querySelector('#examples').innerText")


def test_images_of_examples_are_shown(tabs):
    loaded = tabs["desktop"].evaluate("[...document.images].map(image => image.complete && image.naturalWidth)")
    assert len(loaded) > 0
    assert set(loaded) == {24}


def test_texts_of_an_axis_do_not_cover_each_other(tabs):
    covering = """
    [...document.querySelectorAll("svg[role=img]")].flatMap(plot => {
        const boxes = [...plot.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
        return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
            .map(([other]) => `${plot.id}: ${one} / ${other}`));
    })
    """
    for name in WIDTHS:
        assert tabs[name].evaluate(covering) == []
