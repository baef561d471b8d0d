"""The log of a run, `log.jsonl`: losses and evaluations as JSON objects, one a line, each with a checksum."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl._files import CHECKSUM, json_checksum, naming_full, parse_json, write_bytes
from hetxl_train.loggers import Logger, numbers

DIGITS = 8
"""Digits of a line's checksum."""


class Log:
    """Append to `log.jsonl`, and hand the numbers to loggers.

    Lines after the step `after`, and evaluations after `evaluated` (None for the same step), which will be done again,
    are dropped, and so are damaged ones.

    Attributes:
        damaged: how many lines were damaged, beside a last one that a killed process left half-written.
        lines: how many it has.
    """

    def __init__(self, path: Path, after: int = 0, loggers: Sequence[Logger] = (), evaluated: int | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        last = {"evaluation": after if evaluated is None else evaluated}
        stored = list(log_lines(path)) if path.exists() else []
        self.damaged = stored[:-1].count(None)
        lines = [line for line in stored if line and line.get("step", 0) <= last.get(line.get("kind", ""), after)]
        write_bytes(path, "".join(map(_text, lines)).encode())
        self.lines = len(lines)
        self._path = path
        # Open as long as the run is; without a buffer, whose rest would fail again at the end if the disk is full.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._loggers = loggers

    def write(self, kind: str, **values: Any) -> None:
        """Add a line; numbers also go to the loggers."""
        text = _text({"kind": kind, **values}).encode()
        with naming_full(self._path):
            while text := text[self._file.write(text) :]:  # a part is written where the disk has room for a part
                pass
        self.lines += 1
        for logger in self._loggers:
            logger.write(values["step"], numbers(kind, values))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand the result of the run to the loggers."""
        for logger in self._loggers:
            logger.finish({name: value for name, value in result.items() if isinstance(value, int | float)})

    def close(self) -> None:
        """Close all files and connections."""
        self._file.close()
        for logger in self._loggers:
            logger.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without a last one that a killed process left half-written.

    The error of another damaged line names the file.
    """
    lines = list(log_lines(path)) if path.exists() else []
    if None in lines[:-1]:
        raise ValueError(f"{path}: line {lines.index(None) + 1} of {len(lines)} was changed or damaged")
    return [line for line in lines if line is not None]


def log_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a log, without their checksums; None for one that is damaged.

    Logs of older versions have no checksums; where one line has it, all have.
    """
    texts = [text for text in path.read_bytes().splitlines() if text.strip()]
    checked = any(CHECKSUM.encode() in text for text in texts)
    for text in texts:
        try:
            line = parse_json(text, path.name, dict, finite=False)
            if checked and line.pop(CHECKSUM, None) != _checksum(line):
                line = None
        except ValueError:
            line = None
        yield line


def _text(line: dict[str, Any]) -> str:
    line = json.loads(json.dumps(line))  # as it is read
    return json.dumps(line | {CHECKSUM: _checksum(line)}) + "\n"


def _checksum(line: dict[str, Any]) -> str:
    return json_checksum(line)[:DIGITS]
