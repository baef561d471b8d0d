"""Read data of any kind as parts: inputs and labels by split.

| data | contents |
| --- | --- |
| arrays | `hetxl_train.data.arrays` |
| a table | `hetxl_train.data.tables`: .csv, .jsonl, .parquet, .arrow, or a directory of them by split |
| tar shards | `hetxl_train.data.shards`: `name-{000000..000123}.tar`, or a directory of them |
| a directory of images | `ROOT/CLASS/….jpg`, at any depth below the class, or `ROOT/train/CLASS/…`, `ROOT/test/…` |
| `hf:NAME`, `hf:NAME:CONFIG` | a dataset of the Hugging Face hub; or a directory that `save_to_disk` wrote |
| in Python | a pandas DataFrame, a `datasets.Dataset` or `DatasetDict`, a pyarrow Table |
"""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hetxl_train.data import arrays, shards
from hetxl_train.data.build_dataset import SPLIT_NAMES, UNSPLIT, Part, Parts, choose_part, split_in_name
from hetxl_train.data.image_files import IMAGE_SUFFIXES, Paths
from hetxl_train.data.image_folders import list_images, read_directory
from hetxl_train.data.label_files import read_names
from hetxl_train.data.labels import printable, some
from hetxl_train.data.remote import is_remote
from hetxl_train.data.tables import AUTO, TABLE_SUFFIXES, TEXT_SUFFIXES, Columns, Table, open_table, read_table

Data = Any
"""A path, an address, `hf:NAME`, or a table in memory."""


def read_data(
    data: Data, columns: Columns = AUTO, *, labels: Path | None = None, cache: Path | None = None,
    labelled: bool = True, splits: bool = True, known: Iterable[str] = (),
) -> Parts:  # fmt: skip
    """Read the inputs of data, their labels and splits.

    Args:
        labels: a file with the labels of a .npy file.
        labelled: whether labels are needed; without, a directory of images need not have classes.
        splits: False takes the rows of a table as one part, whatever their split.
        known: names of data for the hint of an error.
    """
    options: dict[str, Any] = {"cache": cache, "labelled": labelled, "splits": splits}
    if not isinstance(data, str | os.PathLike):
        return _join(_tables_in_memory(data), columns, "the table", options)
    text = os.fspath(data)
    if text.startswith("hf:"):
        return _join(hub_tables(text.removeprefix("hf:")), columns, text, options)
    if shards.is_shards(text):
        return _by_split(shards.expand(text), columns, text, options)
    path: Any = text if is_remote(text) else existing(text, known)
    is_directory = isinstance(path, Path) and path.is_dir()
    suffix = PurePosixPath(str(path)).suffix.lower()
    if (is_directory and arrays.is_array_directory(path)) or suffix in arrays.ARRAY_SUFFIXES:
        return arrays.read_arrays(path, columns, labels=labels, cache=cache, splits=splits)
    if labels is not None:
        raise ValueError(f"labels={labels} is only for .npy files of features; {text} must contain its labels")
    if is_directory:
        return _read_directory(path, columns, options)
    if suffix in TABLE_SUFFIXES:
        return read_table(open_table(path), columns, **options)
    if suffix in IMAGE_SUFFIXES and not labelled:
        return Parts("image", {UNSPLIT: Part(Paths([str(path)]), None)})
    if suffix in IMAGE_SUFFIXES:
        raise ValueError(f"{path} is a single image; give a directory of class directories or a table")
    raise ValueError(
        f"{path} is not a known kind of data: looked for arrays ({', '.join(arrays.ARRAY_SUFFIXES)}), a table "
        f"({', '.join(TABLE_SUFFIXES)}), shards (.tar), or a directory of them or of images"
    )


def existing(data: str, known: Iterable[str] = ()) -> Path:
    """Return the path of data, or raise a FileNotFoundError with a suggestion."""
    path = Path(data).expanduser()
    if data and path.exists():
        return path
    near = difflib.get_close_matches(data, list(known), 1)
    beside = [] if not data or not path.parent.is_dir() else os.listdir(path.parent)
    near += [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, beside, 1)] if path.name else []
    hint = f"; did you mean {printable(near[0])!r}?" if near else ""
    names = f"neither a built-in dataset ({', '.join(known)}) nor" if known else "not"
    raise FileNotFoundError(f"data={printable(data)!r} is {names} an existing path{hint}")


def _read_directory(root: Path, columns: Columns, options: dict[str, Any]) -> Parts:
    """Read a directory of a saved dataset, of shards, of tables or of images."""
    if (root / "state.json").exists() or (root / "dataset_dict.json").exists():
        import datasets

        return _join(_tables_in_memory(datasets.load_from_disk(root)), columns, str(root), options)
    files = [path for folder in (root, root / "data") if folder.is_dir() for path in sorted(folder.iterdir())]
    for suffixes in ((".tar",), *((suffix,) for suffix in TABLE_SUFFIXES)):
        chosen = [str(path) for path in files if path.suffix.lower() in suffixes and path.is_file()]
        if chosen:
            parts = _by_split(chosen, columns, str(root), options)
            names = root / "class_names.txt"
            return parts._replace(class_names=read_names(names)) if names.exists() else parts
    if not options["labelled"]:
        return Parts("image", {UNSPLIT: Part(list_images(root), None)})
    by_split, notes = read_directory(root)
    return Parts("image", {split: Part(*part) for split, part in by_split.items()}, None, notes)


def _by_split(files: list[str], columns: Columns, source: str, options: dict[str, Any]) -> Parts:
    """Read shards or tables, which belong to the split that their names say: train-00000.tar, test.csv."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(split_in_name(file), []).append(file)
    if shards.is_shards(files[0]):
        return _joined(
            {split: shards.read_shards(group, columns, **options) for split, group in groups.items()}, source
        )
    return _join({split: _open_tables(group) for split, group in groups.items()}, columns, source, options)


def _open_tables(files: list[str]) -> Table:
    from hetxl_train.data.arrow_tables import ArrowTable, ParquetTable

    if files[0].lower().endswith(".parquet"):
        return ParquetTable(files)
    if len(files) == 1:
        return open_table(files[0])
    if PurePosixPath(files[0]).suffix.lower() in TEXT_SUFFIXES:
        raise ValueError(f"{some(files)} are of one split; join them, or name the split in each file's name")
    import datasets

    parts = [datasets.Dataset.from_file(file) for file in files]
    return ArrowTable(
        datasets.concatenate_datasets(parts), f"{files[0]} and {len(files) - 1} more", Path(files[0]).parent
    )


def _join(tables: Mapping[str, Table], columns: Columns, source: str, options: dict[str, Any]) -> Parts:
    """Read the table of each split."""
    return _joined({split: read_table(table, columns, **options) for split, table in tables.items()}, source)


def _joined(parts: Mapping[str, Parts], source: str) -> Parts:
    """Join the parts of splits that were read one by one."""
    kinds = {inner.kind for inner in parts.values()}
    if len(kinds) > 1:
        raise ValueError(f"{source} must hold inputs of one kind, found {' and '.join(sorted(kinds))}")
    by_split: dict[str, Part] = {}
    for split, inner in parts.items():
        by_split |= inner.by_split if split == UNSPLIT else {split: choose_part(inner.by_split, Path(source), split)}
    names = next((inner.class_names for inner in parts.values() if inner.class_names is not None), None)
    kind = next(iter(parts.values())).kind
    return Parts(kind, by_split, names, [note for inner in parts.values() for note in inner.notes])


def _tables_in_memory(data: Any) -> dict[str, Table]:
    """Return the tables of a DataFrame, a pyarrow Table, or a Hugging Face dataset or a dict of these, by split."""
    import datasets
    import pyarrow as pa

    from hetxl_train.data.arrow_tables import ArrowTable

    if isinstance(data, Mapping):
        known = {
            SPLIT_NAMES[str(name).lower()]: part for name, part in data.items() if str(name).lower() in SPLIT_NAMES
        }
        if not known:
            raise ValueError(f"the data must have a split train, validation or test, found {some(map(str, data))}")
        return {split: table for split, part in known.items() for table in _tables_in_memory(part).values()}
    convert: dict[bool, Callable[[], Any]] = {
        hasattr(data, "iloc"): lambda: datasets.Dataset.from_pandas(data, preserve_index=False),
        isinstance(data, pa.Table): lambda: datasets.Dataset(data),
        isinstance(data, datasets.Dataset): lambda: data,
    }
    if True not in convert:
        raise TypeError(
            "data must be a path, a pandas DataFrame, a datasets.Dataset or a pyarrow Table, found "
            f"{type(data).__name__}"
        )
    dataset = convert[True]()
    if not len(dataset):
        raise ValueError("the table has no rows")
    return {UNSPLIT: ArrowTable(dataset, "the table")}


def hub_tables(name: str) -> dict[str, Table]:
    """Return the splits of a dataset of the Hugging Face hub, or of a directory in its layout."""
    import datasets

    path, colon, config = name.rpartition(":")
    path, config = (path, config) if colon and path else (name, None)
    directory = Path(path).expanduser()
    saved = (directory / "state.json").exists() or (directory / "dataset_dict.json").exists()
    try:
        data = datasets.load_from_disk(directory) if saved else datasets.load_dataset(path, config)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"hf:{name} cannot be loaded: {reason}") from error
    tables = _tables_in_memory(data)
    for table in tables.values():
        table.source = f"hf:{name}"
    return tables
