"""Files that are there whole or not at all."""

import json
from pathlib import Path
from typing import Any

from hetxl.data.build.files import write_whole


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, flushed to the disk before it gets its name."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, content: Any) -> None:
    """Write JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # What UTF-8 has no bytes for, as in a path of another encoding, becomes JSON's own escape, and reads back the same.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> Any:
    """Read JSON; a file that is no JSON is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
