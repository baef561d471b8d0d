"""Tables in text files: CSV and JSON lines."""

import csv
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hetxl._files import parse_json
from hetxl_train.data.labels import SEPARATOR
from hetxl_train.data.mapped_arrays import MappedArray
from hetxl_train.data.remote import is_remote, open_address
from hetxl_train.data.tables import Table, check_distinct
from hetxl_train.data.vectors import uneven

SNIFFED = 100  # rows whose values tell the kinds of the columns


class TextTable(Table):
    """A .csv or .jsonl file, here or at an address."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.source = path, str(path)
        self.directory = str(path).rpartition("/")[0] if is_remote(path) else Path(path).parent
        self.is_csv = str(path).lower().endswith(".csv")
        # CSV has no lists; JSON has, and names may hold a `|` there.
        self.separator = SEPARATOR if self.is_csv else None

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kinds of the columns, by the first rows; those of CSV are texts."""
        if self.is_csv:
            with self._open() as file:
                header = next(_csv_reader(file), [])
                check_distinct(self.source, header)
                return dict.fromkeys(header, "text")
        kinds: dict[str, str] = {}
        with closing(self._json_rows()) as rows:
            for row in islice(rows, SNIFFED):
                for name, value in row.items():
                    known = kinds.setdefault(name, "other")
                    kinds[name] = _kind_of_value(value) if known in ("other", "list") else known
        return kinds

    def rows(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Yield the values of some columns, row by row."""
        return self._csv_rows(columns) if self.is_csv else ([row.get(c) for c in columns] for row in self._json_rows())

    def vectors(self, column: str, cache: Path | None = None) -> MappedArray:
        """Return a column of lists, or of lists as text, as an array [n, D] in memory."""
        values = [self._vector(value, column, row) for row, (value,) in enumerate(self.rows([column]))]
        width = len(values[0]) if values else 0
        for row, value in enumerate(values):
            if len(value) != width:
                raise ValueError(uneven(self.source, column, 0, width, row, len(value)))
        array = np.stack(values) if values else np.empty((0, 1), dtype=np.float32)
        return MappedArray.in_memory(array, self.source, column)

    def _vector(self, value: Any, column: str, row: int) -> np.ndarray:
        with suppress(ValueError, TypeError):
            vector = np.asarray(parse_json(value, column) if isinstance(value, str) else value, dtype=np.float32)
            if vector.ndim == 1:
                return vector
        raise ValueError(f"{self.source}: column {column!r} must hold lists of numbers, found {value!r} in row {row:,}")

    @contextmanager
    def _open(self) -> Iterator[Iterable[str]]:
        fs, path = open_address(self.path)
        if not fs.isfile(path):
            raise FileNotFoundError(f"{self.source} is not a file")
        with fs.open(path, "rt", encoding="utf-8-sig", newline="") as file, text_errors(self.source):
            yield file

    def _csv_rows(self, columns: Sequence[str]) -> Iterator[list[str]]:
        with self._open() as file:
            reader = _csv_reader(file)
            header = next(reader, [])
            indices = [header.index(column) for column in columns]
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    raise ValueError(
                        f"{self.source}, line {reader.line_num}: {len(row)} fields where the header has {len(header)}; "
                        "quote fields that hold a comma"
                    )
                yield [row[index] for index in indices]

    def _json_rows(self) -> Generator[dict[str, Any], None, None]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = parse_json(line, f"{self.source}, line {number}")
                if not isinstance(row, dict):
                    example = f'an object such as {{"path": …}}, found {line[:40]!r}'
                    raise ValueError(f"{self.source}, line {number} must be {example}")
                yield row


def _csv_reader(file: Iterable[str]) -> Any:
    return csv.reader(file, skipinitialspace=True)  # "cat, a.png", and quotes after the space


@contextmanager
def text_errors(source: str | Path) -> Iterator[None]:
    """Name the file that cannot be read as text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{source} is not a readable CSV file ({error})") from error


def _kind_of_value(value: Any) -> str:
    if isinstance(value, list):
        return "vector" if any(isinstance(item, float) for item in value) else "list"
    kinds = {bool: "other", int: "integer", float: "number", str: "text"}
    return kinds.get(type(value), "other")
