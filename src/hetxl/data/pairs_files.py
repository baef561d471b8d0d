"""Pairs from files: a folder of pictures and captions, a manifest, or arrays of vectors."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl.data.arrays import ArraySplit, check_finite
from hetxl.data.assembly import SPLIT_NAMES, UNSPLIT, split_name
from hetxl.data.classes import printable, some
from hetxl.data.dataset import SPLITS, InputSpec, Split
from hetxl.data.folders import PATH_COLUMNS, find_images
from hetxl.data.images import ImageSplit, Paths, require_pillow
from hetxl.data.labels import Labels
from hetxl.data.pairs import NumberedSplit, Pairs, PairSplit, Texts, part_pairs
from hetxl.data.progress import counted
from hetxl.data.stored import Stored, open_arrays
from hetxl.data.tables import SPLIT_COLUMNS, TABLE_SUFFIXES, find_column, names_from_array, table_columns, table_rows

CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "title", "name")
CATEGORY_COLUMNS = ("category", "categories", "label", "class")
ARRAY_SUFFIXES = (".npz", ".safetensors")


class _Rows(NamedTuple):
    """What was read: paths or vectors of n images, their texts, and where there is one a split and category of each."""

    images: Paths | Stored
    texts: Texts
    splits: list[str]
    categories: np.ndarray | None
    notes: Sequence[str] = ()


def read_pairs(path: Path, *, image_size: int = 64, seed: int = 0, whole: bool = False) -> Pairs:
    """Pairs from files, in the forms of `hetxl.data.pairs`.

    Args:
        path: of a folder, a manifest or arrays.
        image_size: height and width of pictures.
        seed: of the split, where there is none.
        whole: data without splits is one test split.
    """
    if not path.exists():
        raise FileNotFoundError(f"data={printable(str(path))!r} is no file or folder, and not icons")
    suffix = path.suffix.lower()
    if not path.is_dir() and suffix in ARRAY_SUFFIXES:
        return _assemble(path, _read_arrays(path), image_size, seed, whole)
    if not path.is_dir() and suffix not in TABLE_SUFFIXES:
        raise ValueError(
            f"{path} is no kind of pairs that is known: give a folder of pictures with .txt files, a manifest "
            f"({', '.join(TABLE_SUFFIXES)}) or arrays ({', '.join(ARRAY_SUFFIXES)})"
        )
    require_pillow()
    rows = _read_folder(path) if path.is_dir() else _read_manifest(path)
    return _assemble(path, rows, image_size, seed, whole)


def _assemble(path: Path, rows: _Rows, image_size: int, seed: int, whole: bool) -> Pairs:
    if isinstance(rows.images, Stored):
        image = InputSpec("features", (rows.images.shape[1],))
    else:
        image = InputSpec("image", (3, image_size, image_size))
    vectors = rows.texts.vectors
    text = None if vectors is None else InputSpec("features", (vectors.shape[1],))
    make = _maker(rows.images, image_size)
    unsplit = "test" if whole else "train"
    names = np.array([name or unsplit for name in rows.splits], dtype=object)
    splits = {}
    for name in SPLITS:
        chosen = np.flatnonzero(names == name)
        if len(chosen):
            categories = None if rows.categories is None else rows.categories[chosen]
            splits[name] = PairSplit(NumberedSplit(make(chosen)), rows.texts, chosen, categories)
    if "train" not in splits:
        return Pairs(printable(path.stem), image, text, splits, tuple(rows.notes))
    training = np.flatnonzero(names == "train")
    found = Pairs(printable(path.stem), image, text, splits, tuple(rows.notes))
    return part_pairs(found, lambda chosen: make(training[chosen]), seed)


def _maker(images: Paths | Stored, image_size: int) -> Callable[[np.ndarray], Split]:
    """What makes a split of some images."""

    def make(rows: np.ndarray) -> Split:
        labels = Labels(np.arange(len(rows)))
        if isinstance(images, Stored):
            return ArraySplit(images, labels, rows)
        return ImageSplit(images, labels, rows, size=image_size)

    return make


def _read_folder(root: Path) -> _Rows:
    """Pictures with a .txt file of the same stem beside them; the first folder below the root may be a split."""
    found = find_images(root)
    paths, captions, splits, without = [], [], [], []
    for number in range(len(found)):
        path = found[number]
        caption = _caption(Path(path).with_suffix(".txt"))
        if caption is None:
            without.append(os.path.relpath(path, root))
            continue
        parts = Path(os.path.relpath(path, root)).parts
        paths.append(path)
        captions.append(caption)
        splits.append(SPLIT_NAMES.get(parts[0].lower(), UNSPLIT) if len(parts) > 1 else UNSPLIT)
    if not paths:
        raise ValueError(
            f"{root} has {len(found):,} pictures and no caption for any; put NAME.txt beside each of them, such as "
            f"{printable(without[0])} and {printable(str(Path(without[0]).with_suffix('.txt')))}"
        )
    notes = [f"left out pictures without a caption: {len(without):,} ({some(without)})"] if without else []
    if set(splits) - {UNSPLIT} and UNSPLIT in splits:
        raise ValueError(f"{root} has pictures beside its folders of splits; move all into train, validation or test")
    return _Rows(Paths(paths), Texts(captions=captions), splits, None, notes)


def _caption(path: Path) -> str | None:
    """The text of a file in one line; None where there is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    return " ".join(text.split()) or None


def _read_manifest(path: Path) -> _Rows:
    columns = table_columns(path)
    if find_column(columns, PATH_COLUMNS) is None and columns:
        raise ValueError(f"{path} must have a column {' or '.join(PATH_COLUMNS)}, found {some(columns, 20)}")
    caption = find_column(columns, CAPTION_COLUMNS)
    if caption is None:
        raise ValueError(
            f"{path} must have a column {' or '.join(CAPTION_COLUMNS)}, found {some(columns, 20) or 'none'}"
        )
    images = find_images(path)
    split, category = find_column(columns, SPLIT_COLUMNS), find_column(columns, CATEGORY_COLUMNS)
    wanted = [name for name in (caption, split, category) if name is not None]
    captions, splits, categories = [], [], []
    with closing(counted(table_rows(path, wanted), f"Reading {path}")) as rows:
        for number, values in enumerate(rows, 1):
            row = dict(zip(wanted, values, strict=True))
            captions.append(_text(path, row[caption], number))
            splits.append(split_name(path, row[split], number) if split is not None else UNSPLIT)
            categories.append(str(row[category]).strip() if category is not None else "")
    if not captions:
        raise ValueError(f"{path} has no rows")
    numbers = None if category is None else np.unique(categories, return_inverse=True)[1].astype(np.int64)
    return _Rows(images, Texts(captions=captions), splits, numbers)


def _text(path: Path, value: Any, number: int) -> str:
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if not text:
        raise ValueError(f"{path}, row {number} (counted from 1) must have a caption, found {value!r}")
    return text


def _read_arrays(path: Path) -> _Rows:
    arrays = open_arrays(path)
    images, vectors, captions = (arrays.get(name) for name in ("images", "texts", "captions"))
    if images is None or (vectors is None and captions is None):
        raise ValueError(
            f"{path} must have the keys images and texts (or captions), found {some(arrays, 20) or 'none'}"
        )
    for stored in filter(None, (images, vectors)):
        if len(stored.shape) != 2 or not stored.is_float or stored.shape[1] < 1:
            raise ValueError(
                f"array {stored.name!r} of {path} must hold floating-point vectors [n, D], found {stored.dtype} "
                f"{list(stored.shape)}"
            )
        check_finite(stored)
    count = len(images)
    if not count:
        raise ValueError(f"array 'images' of {path} has no rows")
    for name in ("texts", "captions", "split", "category"):
        if name in arrays and len(arrays[name]) != count:
            raise ValueError(
                f"array {name!r} of {path} has {len(arrays[name]):,} rows, and 'images' has {count:,}; give one each"
            )
    texts = Texts(vectors=vectors) if captions is None else Texts(captions=names_from_array(captions), vectors=vectors)
    splits = [UNSPLIT] * count
    if "split" in arrays:
        splits = [split_name(path, value, row) for row, value in enumerate(names_from_array(arrays["split"]), 1)]
    categories = None
    if "category" in arrays:
        categories = np.unique(np.asarray(arrays["category"].array), return_inverse=True)[1].astype(np.int64)
    return _Rows(images, texts, splits, categories)
