"""Fill in the templates of pages and drawings."""

import base64
import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING

from hetxl_train import formatting

if TYPE_CHECKING:
    from jinja2 import Environment

# Control characters are not allowed in HTML, and U+FFFE, U+FFFF and half surrogates cannot be written as UTF-8.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render(template: str, **context: object) -> str:
    """Return a filled template as text; everything but markup is escaped."""
    text = _environment().get_template(template).render(context)
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def read_template(name: str) -> str:
    """Return a file of the templates as it is."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def read_script(name: str) -> dict[str, str]:
    """Return a script of the templates, and its hash: a page allows it by that, and nothing else that it holds."""
    script = read_template(name)
    return {"script": script, "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hetxl_train.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals["f"] = formatting
    return environment
