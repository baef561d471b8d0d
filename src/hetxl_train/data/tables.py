"""Tables with one example in each row: CSV, JSON lines, parquet, Arrow, pandas DataFrames and Hugging Face datasets.

Columns are detected by their usual names and types, unless they are named (`Columns`). Python reads CSV and JSON lines,
because a CSV reader that guesses types converts "007" to class 7, and Arrow columns cannot mix labels and lists. All
others are Arrow tables with random access through `datasets`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hetxl_train.console import counted
from hetxl_train.data.build_dataset import UNSPLIT, Part, Parts, split_name, split_parts
from hetxl_train.data.image_files import IMAGE_SUFFIXES, ImageSource, Paths
from hetxl_train.data.labels import LabelBuilder, RawLabels, printable, some
from hetxl_train.data.mapped_arrays import MappedArray
from hetxl_train.data.remote import is_remote, join
from hetxl_train.data.strings import Strings

if TYPE_CHECKING:
    from hetxl_train.data.arrow_tables import Cells

TEXT_SUFFIXES = (".csv", ".jsonl")
ARROW_SUFFIXES = (".parquet", ".arrow")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, *ARROW_SUFFIXES)

FEATURES = ("features", "embeddings", "x", "feature", "embedding", "vector", "vectors", "emb")
IMAGES = ("path", "image", "file", "filename", "file_name", "image_path", "image_file", "img_path", "filepath")
IMAGES += ("file_path", "images", "img", "jpg", "png")
TEXTS = ("text", "texts", "sentence", "content", "document", "review", "question", "description", "title")
LABELS = ("label", "labels", "class", "target", "targets", "y", "category", "categories", "class_name", "classes")
LABELS += ("label_name", "fine_label")
SPLIT = ("split",)
"""Usual names of columns, the more usual first."""

CHECKED_PATHS = 100  # files of a table whose existence is checked when it is opened


class Columns(NamedTuple):
    """The names of columns; None for those that are to be found."""

    features: str | None = None  # of embeddings, images or their paths
    label: str | None = None
    split: str | None = None
    text: str | None = None


AUTO = Columns()


class Table(ABC):
    """Rows of named columns."""

    source: str  # the file or the name, for messages
    directory: str | Path = Path()  # where the relative paths of images begin
    separator: str | None = None  # between the labels of one row

    kinds: Any  # dict[str, str], the kind of every column: vector, image, text, integer, number, list or other

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Yield the values of some columns, row by row."""

    @abstractmethod
    def vectors(self, column: str, cache: Path | None = None) -> MappedArray:
        """Return a column of equally long lists of numbers as an array [n, D]."""

    def texts(self, column: str, cache: Path | None = None) -> "Strings | Cells":
        """Return a column of texts."""
        values = (_text_of(self, value, number) for number, (value,) in enumerate(self.rows([column]), 1))
        return Strings(values)

    def images(self, column: str, cache: Path | None = None) -> ImageSource:
        """Return a column of images, or of their paths."""
        paths = Paths(self._address(value, number) for number, (value,) in enumerate(self.rows([column]), 1))
        first = paths.take(range(min(len(paths), CHECKED_PATHS)))
        if first and not any(is_remote(path) or os.path.isfile(path) for path in first):
            raise FileNotFoundError(
                f"{self.source} names files that do not exist, first {printable(first[0])}; paths are relative to the "
                "directory of the table"
            )
        return paths

    def integers(self, column: str) -> np.ndarray | None:
        """Return a column of whole numbers as [n] int64 at once; None if it is of another kind, or has gaps."""
        return None

    def names(self, column: str) -> Sequence[str] | None:
        """Return the class names that the ids of a column stand for, if the table knows them."""
        return None

    def listed(self) -> str:
        """Return the columns and their kinds, for a message."""
        return ", ".join(f"{printable(name)!r} ({kind})" for name, kind in self.kinds.items()) or "none"

    def _address(self, file: Any, number: int) -> str:
        if not isinstance(file, str) or not file or "\0" in file:
            raise ValueError(f"{self.source}, row {number} (counted from 1) must have a path, found {file!r}")
        return join(self.directory, file)


def _text_of(table: Table, value: Any, number: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{table.source}, row {number} (counted from 1) must have a text, found {value!r}")
    return value


# ---- which column is what


def find_column(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of the names that a table has, ignoring case; None if it has none of them."""
    by_name = {column.strip().lower(): column for column in reversed(list(columns))}
    return next((by_name[name] for name in names if name in by_name), None)


def named_column(table: Table, name: str | None, option: str) -> str | None:
    """Return the column that an option names; a ValueError lists those that exist."""
    if name is None or name in table.kinds:
        return name
    column = find_column(table.kinds, [name.strip().lower()])
    if column is None:
        raise ValueError(f"{table.source} has no column {name!r} (--{option}-column); its columns: {table.listed()}")
    return column


class Roles(NamedTuple):
    """What the columns of a table are."""

    input: str
    kind: Literal["features", "image", "text"]  # of the inputs
    label: str | None
    split: str | None


def find_roles(table: Table, columns: Columns, labelled: bool = True) -> Roles:
    """Find the columns of inputs, labels and splits, by the names asked for, usual names, then by types.

    Labels may be missing unless `labelled`.
    """
    split = named_column(table, columns.split, "split") or find_column(table.kinds, SPLIT)
    label = named_column(table, columns.label, "label")
    others = [name for name in table.kinds if name not in (split, label)]
    text, features = (named_column(table, getattr(columns, name), name) for name in ("text", "features"))
    if text is not None and features is not None:
        raise ValueError(f"give --text-column or --features-column, not both; found {text!r} and {features!r}")
    if label is None:
        label = find_column([name for name in others if name not in (text, features)], LABELS)
        others = [name for name in others if name != label]
    if text is not None:
        column, kind = text, "text"
    elif features is not None:
        column, kind = features, _input_kind(table, features)
    else:
        column, kind = find_input(table, others)
    if label is None:
        # By type: the only column left that can hold labels.
        left = [name for name in others if name != column and table.kinds[name] in ("integer", "text", "list")]
        label = left[0] if len(left) == 1 else None
    if label is None and labelled:
        raise _no_labels(table)
    return Roles(column, kind, label, split)


def check_distinct(source: str, columns: Sequence[str]) -> None:
    """Raise if a table has several columns of a name: which one is meant would be a guess."""
    if twice := sorted({name for name in columns if list(columns).count(name) > 1}):
        raise ValueError(f"{source} has several columns called {some(twice)}; rename or remove one")


def find_label(table: Table) -> str:
    """Return the column of labels, by its name."""
    label = find_column(table.kinds, LABELS)
    if label is None:
        raise _no_labels(table)
    return label


def _no_labels(table: Table) -> ValueError:
    return ValueError(
        f"{table.source} must have a column of labels ({', '.join(LABELS[:7])}, …); name it with --label-column; its "
        f"columns: {table.listed()}"
    )


def _input_kind(table: Table, column: str) -> Literal["features", "image"]:
    """Return what the inputs in a column are: features, or images as bytes or paths."""
    kind = table.kinds[column]
    if kind == "text":  # a path, or a list of numbers as CSV has it
        first = next((value for (value,) in table.rows([column]) if value), "")
        return "features" if first.lstrip().startswith("[") else "image"
    if kind not in ("vector", "list", "image"):
        raise ValueError(
            f"{table.source}: column {column!r} ({kind}) must hold embeddings, images or paths of images; its columns: "
            f"{table.listed()}"
        )
    return "image" if kind == "image" else "features"


def find_input(table: Table, columns: Sequence[str]) -> tuple[str, Literal["features", "image", "text"]]:
    """Return the column of the inputs and what these are."""
    kinds = table.kinds
    usual = ((FEATURES, ("vector", "text")), (IMAGES, ("image", "text")), (TEXTS, ("text",)))
    for names, suiting in usual:
        column = find_column([name for name in columns if kinds[name] in suiting], names)
        if column is not None:
            return column, "text" if names is TEXTS else _input_kind(table, column)
    for kind in ("vector", "image", "text"):
        suiting = [name for name in columns if kinds[name] == kind]
        if len(suiting) == 1 and kind != "text":
            return suiting[0], _input_kind(table, suiting[0])
        paths = [name for name in suiting if _holds_paths(table, name)] if kind == "text" else []
        if len(paths) == 1:
            return paths[0], "image"
        if len(suiting) == 1:
            return suiting[0], "text"
    raise ValueError(
        f"{table.source} must have a column of inputs: embeddings ({FEATURES[0]}, embedding, …), images or their paths "
        f"({', '.join(IMAGES[:3])}, …) or texts ({TEXTS[0]}, …); name it with --features-column or --text-column; its "
        f"columns: {table.listed()}"
    )


def _holds_paths(table: Table, column: str) -> bool:
    first = next((value for (value,) in table.rows([column])), None)
    return isinstance(first, str) and PurePosixPath(first).suffix.lower() in IMAGE_SUFFIXES


# ---- from a table to the parts of a dataset


def read_table(
    table: Table, columns: Columns = AUTO, *, cache: Path | None = None, labelled: bool = True, splits: bool = True
) -> Parts:
    """Read a table: its inputs, labels and splits. `splits=False` takes all rows as one part, whatever their split."""
    roles = find_roles(table, columns, labelled)
    read = {"features": table.vectors, "image": table.images, "text": table.texts}[roles.kind]
    inputs = read(roles.input, cache)
    if not len(inputs):
        raise ValueError(f"{table.source} has no rows")
    names = None if roles.label is None else table.names(roles.label)
    labels = None if roles.label is None else read_column_labels(table, roles.label)
    whole = Part(inputs, labels)
    if roles.split is None or not splits:
        return Parts(roles.kind, {UNSPLIT: whole}, names)
    with closing(counted(table.rows([roles.split]), f"Reading {table.source}")) as rows:
        numbered = (split_name(table.source, value, number) for number, (value,) in enumerate(rows, 1))
        return Parts(roles.kind, split_parts(whole, numbered), names)


def read_column_labels(table: Table, column: str) -> RawLabels:
    """Read the labels in a column of a table."""
    ids = table.integers(column)
    if ids is not None:
        return RawLabels(ids, table.source)
    return build_labels((row[0] for row in table.rows([column])), table.source, table.separator)


def build_labels(labels: Iterable[object], source: str, separator: str | None) -> RawLabels:
    """Return labels, one row each, as they are stored; texts are split by the separator, if any."""
    builder = LabelBuilder(source, separator)
    with closing(counted(labels, f"Reading {source}")) as rows:
        for label in rows:
            builder.add(label)
    return builder.build()


def open_table(path: str | Path) -> Table:
    """Return the table in a .csv, .jsonl, .parquet or .arrow file."""
    if PurePosixPath(str(path)).suffix.lower() in TEXT_SUFFIXES:
        from hetxl_train.data.text_tables import TextTable

        return TextTable(path)
    from hetxl_train.data.arrow_tables import open_arrow

    return open_arrow(path)
