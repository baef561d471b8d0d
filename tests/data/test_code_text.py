"""Tokens back to readable code."""

import ast
import bisect
import colorsys
import heapq
from pathlib import Path

import pytest

from hetxl.data.code_text import code_text
from hetxl.data.corpus import DEDENT, INDENT, NEWLINE, file_tokens

SNIPPET = """\
from . import a
@wrap
class A(B):
    def f(self, *args, **options):
        x = -1 * y - 2
        if x not in (1, 2) and not [3]:
            return a.b[0](c)[1:]

        return {'k': None}
while True:
    pass
"""


def written_out(path):
    return code_text(list(file_tokens(path)))


def test_code_is_written_as_people_write_it(tmp_path):
    (tmp_path / "a.py").write_text(SNIPPET)
    assert written_out(tmp_path / "a.py") == SNIPPET.replace("\n\n", "\n")


@pytest.mark.parametrize("module", [bisect, colorsys, heapq])
def test_whole_modules_mean_the_same(module):
    path = Path(module.__file__)
    assert ast.dump(ast.parse(written_out(path))) == ast.dump(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], ""),
        (["self", "."], "self."),
        ([")", NEWLINE], ")\n"),
        (["if", "a", ":", NEWLINE, INDENT], "if a:\n    "),
        # The window starts two levels deep; its first line is a part of a line.
        (["+", "b", NEWLINE, "c", NEWLINE, DEDENT, DEDENT, "d"], "+b\n        c\nd"),
        ([DEDENT, "else", ":", NEWLINE, INDENT, "x"], "else:\n    x"),
        (["a", "=", "<other>", "(", "<other>", ")"], "a = <other>(<other>)"),
        (["return", "(", "a", ">", "(", "b", ")", ")"], "return (a > (b))"),
    ],
)
def test_windows(tokens, text):
    assert code_text(tokens) == text
