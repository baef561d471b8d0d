"""HTML and SVG as text, escaped by default: only `Markup` goes into the page as it is."""

import html
import re
from collections.abc import Iterable

VOID = frozenset({"br", "col", "hr", "img", "meta"})
"""Elements without content and without a closing tag."""

# Control characters are not allowed in HTML, and U+FFFE, U+FFFF and half surrogates cannot be written as UTF-8.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already. Everything else is escaped when it is put into a tag."""

    __slots__ = ()


Child = Markup | str | int | float | None


def escape(value: object) -> Markup:
    """A value as text of a page: markup stays, all else is escaped, quotes included.

    Args:
        value: anything; None is nothing.
    """
    if isinstance(value, Markup):
        return value
    text = "" if value is None else str(value)
    return Markup(html.escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text), quote=True))


def join(parts: Iterable[Child], between: str = "") -> Markup:
    """Parts one after the other, each escaped unless it is markup."""
    return Markup(escape(between).join(escape(part) for part in parts))


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """One element.

    Args:
        name: of the element.
        children: its content, in turn; plain text is escaped.
        attributes: by name, `_` for `-`, a trailing `_` dropped (`class_`); None leaves one out, True gives no value.
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        if attribute in ("viewbox", "preserveaspectratio"):  # the two of SVG with capitals
            attribute = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}[attribute]
        opening += f" {attribute}" if value is True else f' {attribute}="{escape(value)}"'
    if name in VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def coordinate(value: float) -> str:
    """A length in a drawing: a hundredth of a unit is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"
