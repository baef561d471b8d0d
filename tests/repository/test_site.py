"""The site that `make docs` builds: whole, linked rightly, with nothing from elsewhere, and readable from disk."""

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support.browser import Browser, needs_browser

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
"""What a page fetches by itself, beside <link>."""
ELSEWHERE = re.compile(r"(?:https?:)?//")
pytestmark = pytest.mark.slow
SHOWN = ("index", "start", "paper", "choosing", "benchmarks", "guides/production", "studies/index", "api/heads")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet: it would leave out the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", directory)
    assert built.returncode == 0, built.stderr
    return directory


class Page(HTMLParser):
    """What a page loads, where it links to, and which anchors it has."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") != "canonical":
            self.loads.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])


def test_every_page_is_built(site: Path):
    folders = (ROOT / "docs", ROOT / "lab" / "docs")
    pages = [page.relative_to(folder).with_suffix(".html") for folder in folders for page in folder.rglob("*.md")]
    assert [str(page) for page in pages if not (site / page).exists()] == []


def test_examples_of_docstrings_are_code(site: Path):
    text = (site / "api" / "heads.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span><span class="n">HetXLHead</span>' in text
    assert "<blockquote>" not in text


def test_nothing_is_loaded_from_elsewhere(site: Path):
    loads_by_page = {
        page.name: [load for load in Page(page).loads if ELSEWHERE.match(load)] for page in site.rglob("*.html")
    }
    assert {page: loads for page, loads in loads_by_page.items() if loads} == {}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert re.findall(r"""url\(\s*["']?((?:https?:)?//[^)]*)""", text) + re.findall("@import[^;]*", text) == []


def test_links_and_anchors_lead_somewhere(site: Path):
    pages = {page: Page(page) for page in site.rglob("*.html") if page.name != "404.html"}
    wrong = []
    for page, content in pages.items():
        for link in [*content.links, *content.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "names"), [("[a](nowhere.md)", "nowhere.md"), ("[a](#nowhere)", "#nowhere"), ("[a](b/)", "b/")]
)
def test_a_wrong_link_fails_the_build(text: str, names: str, tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{text}\n")
    config = tmp_path / "mkdocs.yml"
    own = "docs_dir: docs\nnav: [index.md]\nhooks: []\nplugins: []\nextra_css: []\nextra: {polyfills: []}\n"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\n{own}theme: {{name: mkdocs}}\n")
    built = build(config, tmp_path / "site")
    assert built.returncode != 0
    assert names in built.stderr


@needs_browser
def test_pages_open_from_disk_on_a_phone(site: Path):
    with Browser() as browser:
        for name in SHOWN:
            tab = browser.open(site / f"{name}.html", width=390)
            assert tab.problems() == []
            # Tables and code scroll by themselves; the page does not.
            assert tab.evaluate("document.scrollingElement.scrollWidth") == 390, name


@needs_browser
def test_the_search_works_from_disk(site: Path):
    with Browser() as browser:
        tab = browser.open(site / "index.html")
        tab.evaluate(
            "{const field = document.querySelector('input.md-search__input'); field.focus(); "
            "field.value = 'orthogonal'; field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); 0}"
        )
        deadline = time.monotonic() + 20
        links = ""
        while "methods.html" not in links and time.monotonic() < deadline:
            time.sleep(0.1)
            links = str(
                tab.evaluate("[...document.querySelectorAll('a.md-search-result__link')].map(a => a.href).join()")
            )
        assert "methods.html" in links
        assert tab.problems() == []
