"""Options of a built-in dataset written behind its name: `synthetic:noise=2,rows=50000`."""

from hetxl.data.open import BUILT_IN

Value = int | float | bool | str


def split_spec(data: str) -> tuple[str, dict[str, Value]]:
    """The name and the options of a dataset; a path has no options, whatever is in its name.

    >>> split_spec("synthetic:noise=2,rows=50000")
    ('synthetic', {'noise': 2, 'rows': 50000})
    """
    name, colon, rest = data.partition(":")
    if name not in BUILT_IN or not colon:
        return data, {}
    options: dict[str, Value] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"data {data!r}: write options as {name}:option=value,option=value, found {part!r}")
        option = key.strip().replace("-", "_")
        if option in options:
            raise ValueError(f"data {data!r}: {option} is given twice; keep one")
        options[option] = _value(text.strip())
    return name, options


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
