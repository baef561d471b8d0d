"""The page of an audit at its full size, in a real browser."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hetxl_train.data.dataset import Fetched, Shown, Split
from hetxl_train.data.labels import Labels
from hetxl_train.report.audit import SHOWN, write_audit_page
from support.browser import Browser, needs_browser


class Images(Split):
    """Rows that are shown as images."""

    def __init__(self, paths: list[str]):
        self.paths, self.labels = paths, Labels(np.zeros(SHOWN, dtype=np.int64))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        raise AssertionError("a page shows rows and reads none")

    def show(self, row: int) -> Shown:
        return Shown(image=self.paths[row % len(self.paths)])


@needs_browser
@pytest.mark.slow
def test_page_with_a_thousand_images_opens(tmp_path: Path):
    generator, paths = np.random.default_rng(0), []
    for number in range(20):
        path = tmp_path / f"{number}.png"
        Image.fromarray(generator.integers(256, size=(224, 224, 3), dtype=np.uint8)).save(path)
        paths.append(str(path))
    suspects = [
        {"row": row, "label": f"class {row % 7}", "suggestion": f"class {row % 5}", "reason": "a reason", "suspect": 1}
        for row in range(SHOWN)
    ]
    about = {"suspects": SHOWN, "audited": 10 * SHOWN, "pairs": [], "classes": []}
    page = write_audit_page(suspects, about, Images(paths), tmp_path / "audit.html")
    with Browser() as browser:
        tab = browser.open(page)
        assert tab.evaluate("document.querySelectorAll('.suspect').length") == SHOWN
        assert tab.problems() == []
        milliseconds = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert isinstance(milliseconds, int | float)
    print(f"{page.stat().st_size / 1e6:.1f} MB, {milliseconds:.0f} ms")
    assert milliseconds < 20_000  # 0.2 to 0.3 s on a machine that does nothing else
