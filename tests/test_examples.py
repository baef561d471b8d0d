"""Every example runs as its reader would run it."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@cache
def run(path, attempt=1):
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_runs(path):
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


def test_four_heads_shows_all_four_with_their_parameters():
    path = next(path for path in EXAMPLES if path.name == "four_heads.py")
    text = run(path).stdout
    noise = 2 * (64 * 64 + 64) + 50 * 64 + 1
    for words in ("DET", "HET-H", "HET-XL", "65,000", f"{65_000 + noise:,}", "correlation", "hetxl params", "docs/"):
        assert words in text
    assert run(path, attempt=2).stdout == text  # seeded
    assert len(path.read_text().splitlines()) < 80
