"""Every ```python block of the README and of docs/ runs, the blocks of a page one after the other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # some write files
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback names the line of the page.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


def test_pages_with_code_are_found():
    assert {"README.md", "index.md", "heads.md", "samplers.md", "parameters.md", "training.md"} <= {
        page.name for page in PAGES
    }
