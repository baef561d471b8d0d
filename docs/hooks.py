"""What the site needs beyond mkdocs.yml: the pages of the lab, and examples of docstrings as code."""

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

LAB = Path(__file__).resolve().parents[1] / "lab" / "docs"
"""Pages of the studies, and the log of experiments."""


def on_config(config: Any) -> Any:
    """Add the pages of the studies to the navigation."""
    # The studies write the index: what has a page is linked there, with its title.
    folder = LAB / "studies"
    listed = re.findall(r"\[[\w-]+\]\(([\w-]+\.md)\): ([^|]+?) *\|", (folder / "index.md").read_text())
    section = next(entry["Lab"] for entry in config.nav if "Lab" in entry)
    section += [{title: f"studies/{page}"} for page, title in listed if (folder / page).exists()]
    config.markdown_extensions.append(Doctests())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the lab's pages to the site: lab/docs/studies/tau.md is studies/tau.html there."""
    for path in sorted(LAB.rglob("*")):
        if path.is_file():
            files.append(File(path.relative_to(LAB).as_posix(), str(LAB), config.site_dir, config.use_directory_urls))
    return files


class Doctests(Extension):
    """Examples that begin with >>> as code; Markdown takes them for quotations of quotations."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Put the examples into fences before anything looks for those."""
        md.preprocessors.register(_Fences(md), "doctests", 30)


class _Fences(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        return re.sub(r"(?:^|(?<=\n\n))(>>> .+(?:\n.+)*)", r"```pycon\n\1\n```", text).split("\n")
