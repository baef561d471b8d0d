"""What the site needs beyond mkdocs.yml: the studies' pages in the navigation, and examples of docstrings as code."""

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


def on_config(config: Any) -> Any:
    """Complete the configuration; mkdocs calls it.

    Args:
        config: of the site.
    """
    # The studies write docs/studies/index.md: what has a page is linked there, with its title.
    folder = Path(config.docs_dir) / "studies"
    listed = re.findall(r"\[[\w-]+\]\(([\w-]+\.md)\): ([^|]+?) *\|", (folder / "index.md").read_text())
    section = next(entry["Studies"] for entry in config.nav if "Studies" in entry)
    section += [{title: f"studies/{page}"} for page, title in listed if (folder / page).exists()]
    config.markdown_extensions.append(Doctests())
    return config


class Doctests(Extension):
    """Examples that begin with >>> as code; Markdown takes them for quotations of quotations."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Put the examples into fences before anything looks for those."""
        md.preprocessors.register(_Fences(md), "doctests", 30)


class _Fences(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        return re.sub(r"(?:^|(?<=\n\n))(>>> .+(?:\n.+)*)", r"```pycon\n\1\n```", text).split("\n")
