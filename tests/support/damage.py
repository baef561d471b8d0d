"""Damage for files, as strategies of hypothesis: changes of bytes, and of values inside JSON."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SEED = int(os.environ.get("HETXL_FUZZ_SEED", "1000"))
ERRORS = (ValueError, OSError, TypeError)
"""What the command shows in one line."""

SHARE = st.floats(0, 1, exclude_max=True)
BYTE_CHANGES = st.lists(
    st.tuples(st.sampled_from(("flip", "cut", "remove", "repeat", "overwrite", "insert")), SHARE,
              st.sampled_from((1, 1, 4, 16, 64)), st.binary(min_size=1, max_size=64)),
    min_size=1, max_size=3,
)  # fmt: skip
SPECIAL = (b"\xff" * 8, b"\0" * 8, b"-1", b"9" * 30, b"[" * 2000, b"1e999")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 1e300, 10**30, 2**63, "", "x", "\x1b[31m\n", [], [[]], [-1], ["x"], {}, {"x": {}},
)  # fmt: skip
VALUE_CHANGES = st.lists(st.tuples(SHARE, st.one_of(st.just(...), st.sampled_from(ODD))), min_size=1, max_size=2)
"""Where in the content, and the new value; ... removes it."""


def changed_bytes(content: bytes, changes: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    """The content with some changes."""
    changed = bytearray(content)
    for kind, share, length, data in changes:
        position = int(share * len(changed))
        if kind == "flip" and changed:
            changed[position] ^= 1 << data[0] % 8
        elif kind == "cut":
            del changed[position:]
        elif kind == "remove":
            del changed[position : position + length]
        elif kind == "repeat":
            changed[position:position] = changed[:length]
        elif kind == "overwrite":
            changed[position : position + len(data)] = data
        else:
            changed[position : position + 1] = SPECIAL[data[0] % len(SPECIAL)]
    return bytes(changed)


def changed_values(content: Any, changes: Sequence[tuple[float, Any]]) -> Any:
    """A copy of JSON content with some values replaced or removed."""
    content = json.loads(json.dumps(content))
    for share, value in changes:
        places = list(_places(content))
        if not places:
            break
        container, key = places[int(share * len(places))]
        if value is ...:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(value))
    return content


def _places(content: Any):
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _places(value)


def for_all(strategy: Any, examples: int, check: Callable[[Any], None]) -> None:
    """Call a function for a number of values, which the seed decides, and show the simplest that fails."""
    print(f"{examples} examples from seed {SEED} (HETXL_FUZZ_SEED)")

    @seed(SEED)
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=False, print_blob=False,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def run(value: Any) -> None:
        check(value)

    run()
