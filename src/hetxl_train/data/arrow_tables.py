"""Tables with Arrow types: parquet and Arrow files, pandas DataFrames and Hugging Face datasets."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetxl_train.data.cache import HELD, announce_copy, fingerprint_of, is_whole, make_cache_directory, write_checksum
from hetxl_train.data.dataset import Shown
from hetxl_train.data.image_files import Encoded, ImageSource
from hetxl_train.data.mapped_arrays import MappedArray, check_unchanged, stamp
from hetxl_train.data.remote import is_remote, join, open_address
from hetxl_train.data.strings import Strings
from hetxl_train.data.tables import Table, check_distinct
from hetxl_train.data.vectors import stored_vectors

if TYPE_CHECKING:
    import datasets

BATCH = 4096  # rows that are read at a time


class Cells:
    """A column of a Hugging Face dataset whose values, texts or images, are read on demand."""

    def __init__(
        self, dataset: "datasets.Dataset", column: str, source: str, directory: str | Path = Path(),
        mapped: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.data = dataset.select_columns([column]).with_format("arrow")
        self.source, self.directory = source, directory
        # Mapped files, which are checked because reading a truncated one would kill the process.
        self.stamps = {path: stamp(path) for path in (*mapped, *(file["filename"] for file in dataset.cache_files))}

    def __len__(self) -> int:
        return len(self.data)

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Return some of the values."""
        for path, before in self.stamps.items():
            check_unchanged(path, before)
        return self.data[list(indices)].column(0).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, indices: Sequence[int]) -> Sequence[Encoded]:
        """Return some images as stored."""
        return [self._encoded(value) for value in self.take(indices)]

    def _encoded(self, value: Any) -> Encoded:
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
        if content is None and path:
            return join(self.directory, path)
        return OSError("no image in this row") if content is None else content

    def name(self, index: int) -> str:
        """Return the table and the number of a row."""
        return f"{self.source}, row {index}"

    def show(self, index: int) -> Shown:
        """Return a text or an image for a reader."""
        value = self.take([index])[0]
        if isinstance(value, str):
            return Shown(text=value)
        encoded = self._encoded(value)
        return Shown(text=self.name(index), encoded=encoded if isinstance(encoded, bytes) else None)


class ArrowTable(Table):
    """A table with an Arrow schema: a Hugging Face dataset."""

    paths: Sequence[str] = ()  # of the files that it is read from; none if it is in memory
    mapped: Sequence[str] = ()  # files that `datasets` does not know to be mapped

    def __init__(
        self, dataset: "datasets.Dataset", source: str, directory: str | Path = Path(), mapped: Sequence[str] = ()
    ) -> None:
        self.data, self.source, self.directory, self.mapped = dataset, source, directory, mapped
        self.paths = [file["filename"] for file in dataset.cache_files]

    @cached_property
    def schema(self) -> Any:
        """The types of the columns."""
        return self.data.features.arrow_schema

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield some columns as Arrow tables of at most `BATCH` rows."""
        return self.data.select_columns(list(columns)).with_format("arrow").iter(BATCH)  # pyright: ignore

    def dataset(self, column: str, cache: Path | None) -> "datasets.Dataset":
        """Return a column whose rows can be read in any order."""
        return self.data

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kinds of the columns, by their types."""
        check_distinct(self.source, self.schema.names)
        return {field.name: _kind_of_type(field.type) for field in self.schema}

    def rows(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Yield the values of some columns, row by row."""
        for batch in self.batches(columns):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)

    def integers(self, column: str) -> np.ndarray | None:
        """Return a column of whole numbers as [n] int64; None if it is of another kind, or has gaps."""
        if self.kinds[column] != "integer":
            return None
        blocks = [batch.column(column) for batch in self.batches([column])]
        if any(block.null_count for block in blocks):
            return None
        return np.concatenate([block.to_numpy().astype(np.int64) for block in blocks] or [np.empty(0, np.int64)])

    def texts(self, column: str, cache: Path | None = None) -> Strings | Cells:
        """Return a column of texts, read on demand."""
        return Cells(self.dataset(column, cache), column, self.source, mapped=self.mapped)

    def images(self, column: str, cache: Path | None = None) -> ImageSource:
        """Return a column of images, read on demand, or of their paths."""
        if self.kinds[column] == "text":
            return super().images(column, cache)
        return Cells(self.dataset(column, cache), column, self.source, self.directory, self.mapped)

    def vectors(self, column: str, cache: Path | None = None) -> MappedArray:
        """Return a column of equally long lists of numbers as an array [n, D], in memory or in a file of the cache."""
        return stored_vectors(lambda: self.batches([column]), len(self), self.source, column, self.paths, cache)

    def names(self, column: str) -> Sequence[str] | None:
        """Return the class names of a column of type ClassLabel."""
        return getattr(self.data.features[column], "names", None)


class ParquetTable(ArrowTable):
    """Parquet files. They have no random access, so columns that need it are copied to the cache, with a message."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        self.source = self.paths[0] if len(paths) == 1 else f"{self.paths[0]} and {len(paths) - 1} more"
        self.directory = self.paths[0].rpartition("/")[0] if is_remote(paths[0]) else Path(paths[0]).parent

    @cached_property
    def schema(self) -> Any:
        """The types of the columns."""
        with _open_parquet(self.paths[0]) as file:
            return file.schema_arrow

    def __len__(self) -> int:
        return sum(count for _, count in self._sizes(None))

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield some columns as Arrow tables of at most `BATCH` rows."""
        for path in self.paths:
            with _open_parquet(path) as file:
                yield from file.iter_batches(BATCH, columns=list(columns))

    def dataset(self, column: str, cache: Path | None) -> "datasets.Dataset":
        """Return a column in memory, or, if it is large, in an Arrow file of the cache that is mapped."""
        import datasets

        size = sum(size for size, _ in self._sizes(column))
        if size <= HELD:
            import pyarrow as pa

            schema = pa.schema([self.schema.field(column)])
            batches = list(self.batches([column]))
            return datasets.Dataset(pa.Table.from_batches(batches, schema))  # pyright: ignore[reportArgumentType]
        parent = make_cache_directory(cache)
        directory = parent / f"{Path(self.paths[0]).stem[:40]}-{fingerprint_of(self.paths, column)}"
        whole = is_whole(directory)
        if whole is False:  # None is left alone: another process may be writing it
            shutil.rmtree(directory)
        if not directory.exists():
            announce_copy(self.source, column, size, parent)
        copy: Any = datasets.Dataset.from_parquet(list(self.paths), cache_dir=str(directory), columns=[column])
        if not whole:
            write_checksum(directory)
        return copy

    def names(self, column: str) -> Sequence[str] | None:
        """Return the class names that `datasets` wrote into the file's metadata."""
        import datasets

        with suppress(Exception):
            feature = datasets.Features.from_arrow_schema(self.schema)[column]
            return getattr(feature, "names", None)
        return None

    def _sizes(self, column: str | None) -> Iterator[tuple[int, int]]:
        """Yield the bytes of a column in memory, and the rows, of each file."""
        for path in self.paths:
            with _open_parquet(path) as file:
                groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
                size = 0
                for group in groups:
                    parts = (group.column(number) for number in range(group.num_columns))
                    size += sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] == column)
                yield size, file.metadata.num_rows


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs, inside = open_address(path)
    if not fs.isfile(inside):
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with fs.open(inside, "rb") as stream, pq.ParquetFile(stream) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # of the file system; Arrow's own for damaged pages has no number
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable parquet file ({reason}): it was truncated or damaged") from error


def open_arrow(path: str | Path) -> ArrowTable:
    """Return the table in a .parquet file, or in an .arrow file, which is mapped: a stream, as `datasets` writes it, or
    with an index of its parts."""
    if str(path).lower().endswith(".parquet"):
        return ParquetTable([path])
    import datasets
    import pyarrow as pa

    try:
        # pyarrow does not check offsets, and a wrong one would kill the process, so they are checked first.
        try:
            table, mapped = pa.ipc.open_file(pa.memory_map(str(path))).read_all(), [str(path)]
        except pa.ArrowInvalid:
            dataset, mapped = datasets.Dataset.from_file(str(path)), []
            dataset.data.table.validate(full=True)
        else:
            table.validate(full=True)
            dataset = datasets.Dataset(table)  # pyright: ignore
        return ArrowTable(dataset, str(path), Path(path).parent, mapped)
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is not a readable Arrow file ({reason}): it was truncated or damaged") from error


def _kind_of_type(kind: Any) -> str:
    """Return the kind of an Arrow type."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _kind_of_type(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "vector" if types.is_floating(kind.value_type) else "list"
    if types.is_struct(kind):
        return "image" if kind.get_field_index("bytes") >= 0 else "other"
    for name in ("binary", "large_binary"):
        if getattr(types, f"is_{name}")(kind):
            return "image"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    return "integer" if types.is_integer(kind) else "number" if types.is_floating(kind) else "other"
