"""Tokens of Python back to text that reads like code, for showing examples."""

import keyword
from collections.abc import Sequence

from hetxl.data.corpus import DEDENT, INDENT, NEWLINE

_TIGHT_BEFORE = frozenset(")]}.,:;")
_TIGHT_AFTER = frozenset("([{.~@")
_PREFIXES = frozenset({"*", "**", "+", "-"})
_WORDS_BEFORE_VALUES = frozenset(keyword.kwlist) - {"None", "True", "False"}


def code_text(tokens: Sequence[str]) -> str:
    """Tokens as lines of code, spaced and indented nearly as people write it.

    Args:
        tokens: texts as in `hetxl.data.corpus.Corpus`; a part of a file. The first line may be a part of a line; the
            others are indented relative to the lowest of them.

    Returns:
        Lines joined by line ends. After an end of line as the last token comes the indentation of the next line.
    """
    # Every DEDENT without its INDENT says that the part starts that much deeper.
    depth = lowest = 0
    for token in tokens:
        depth += (token == INDENT) - (token == DEDENT)
        lowest = min(lowest, depth)
    depth = -lowest
    lines = [""]
    previous = ""  # the token before in the same line
    tight = True  # whether the next token follows without a space
    for token in tokens:
        if token == NEWLINE:
            lines.append("    " * depth)
            previous, tight = "", True
        elif token in (INDENT, DEDENT):
            depth += 1 if token == INDENT else -1
            if not previous:  # it comes before the first token of its line
                lines[-1] = "    " * depth
        else:
            if not (tight or _touch(previous, token)) or (previous == "." and token == "import"):
                lines[-1] += " "
            lines[-1] += token
            tight = token in _TIGHT_AFTER or (token in _PREFIXES and not _ends_value(previous))
            previous = token
    return "\n".join(lines)


def _touch(left: str, right: str) -> bool:
    """Whether two tokens of a line stand without a space between them."""
    if right == ".":
        return left not in _WORDS_BEFORE_VALUES  # from . import
    return right in _TIGHT_BEFORE or (right in ("(", "[") and _ends_value(left))


def _ends_value(token: str) -> bool:
    """Whether what comes before an operator, a call or an index can end here."""
    if token in _WORDS_BEFORE_VALUES:
        return False
    name = len(token) > 2 and token.startswith("<") and token.endswith(">")  # such as <other>
    return name or token[-1:].isalnum() or token[-1:] in tuple("_)]}\"'")
