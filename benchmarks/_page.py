"""Writing measurements into a page of the documentation: tables, the part between two markers, and figures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def markers(script: str) -> tuple[str, str]:
    """The two comments between which a page holds what a script of benchmarks/ measured."""
    return f"<!-- measured by benchmarks/{script}: start -->", f"<!-- measured by benchmarks/{script}: end -->"


def replace_between(text: str, new: str, script: str) -> str:
    """`text` with the part between the two markers of a script replaced."""
    start, end = markers(script)
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"The page must hold each of these markers once: {start} {end}")
    return f"{text.split(start)[0]}{start}\n\n{new}\n\n{end}{text.split(end)[1]}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of text under a header; the first `left` columns are words, the others numbers."""
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rules, *rows))


@contextmanager
def panels(path: Path, count: int) -> Iterator[list[Any]]:
    """The axes of `count` panels side by side, written to an SVG file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and the same numbers give the same file.
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "hetxl",
        "font.size": 13,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, count, figsize=(12, 4.4), sharey=True, layout="constrained")
        yield list(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
        plt.close(figure)
