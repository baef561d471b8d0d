"""The page around the parts: one file that opens anywhere, loads nothing and runs no script."""

from importlib.resources import files

from hetxl.report.markup import Child, Markup, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing but its own style and pictures."""


def page(title: str, *content: Child) -> str:
    """A whole HTML document.

    Args:
        title: of the window; plain text.
        content: of the body.
    """
    style = Markup((files("hetxl.report") / "style.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *content)), lang='en')}\n"


def section(ident: str, title: str, *content: Child, plots: bool = False, lead: Markup | None = None) -> Markup:
    """A part of the page with its heading.

    Args:
        ident: unlike any other on the page.
        title: of the part.
        content: below it.
        plots: whether the content goes side by side where there is room.
        lead: what goes before it, over the whole width.
    """
    body = tag("div", *content, class_="plots" if plots else None)
    return tag("section", tag("h2", title), lead, body, id=ident)
