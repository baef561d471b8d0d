"""Pairs of an image and a text, for contrastive learning.

| data | contents |
| --- | --- |
| a name | pairs that another package adds (`hetxl_train.plugins`), with options as in `NAME:option=value` |
| a directory | images at any depth, each with its caption in a .txt file of the same stem; or `ROOT/train/…`, … |
| a table, `.csv`, `.jsonl` or `.parquet` | columns `path` (or an image) and `caption`, optionally `split`, `category` |
| tar shards, `name-{000..123}.tar` | `KEY.jpg` and `KEY.txt`, or a caption in `KEY.json` |
| `hf:NAME` | a dataset of the Hugging Face hub, or a directory in its layout, with such columns |
| a directory of arrays | `images.npy`, …: keys of a .npz file, and `captions.txt`; `hetxl embed --pairs` writes it |
| `.npz` or `.safetensors` | `images` [n, D] and `texts` [n, D′], both computed already: locked towers; in a .npz file |
| | `captions` [n] in place of `texts`, for a text tower that is trained, and optionally `split`, `category` |
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl._checks import integer_at_least
from hetxl_train import plugins
from hetxl_train.console import counted
from hetxl_train.data.arrays import ArraySplit, check_finite
from hetxl_train.data.build_dataset import SPLIT_NAMES, UNSPLIT, split_in_name, split_name, split_rows
from hetxl_train.data.dataset import SPLITS, InputSpec, RelabelledSplit, Split, Stored
from hetxl_train.data.image_files import ImageSource, Paths
from hetxl_train.data.image_folders import list_images
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.label_files import names_from_array
from hetxl_train.data.labels import Labels, printable, some
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays
from hetxl_train.data.open import check_options, split_spec
from hetxl_train.data.read import hub_tables
from hetxl_train.data.shards import TarImages, expand, index_shards, is_shards
from hetxl_train.data.tables import SPLIT, TABLE_SUFFIXES, Table, find_column, find_input, open_table
from hetxl_train.data.transforms import ImageTransform

CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "title", "name")
CATEGORY_COLUMNS = ("category", "categories", "label", "class")
ARRAY_SUFFIXES = (".npz", ".safetensors")


class NumberedSplit(RelabelledSplit):
    """A split whose labels are the row numbers: the targets that a loader returns tell which texts to take."""

    def __init__(self, source: Split) -> None:
        super().__init__(source, Labels(np.arange(len(source), dtype=np.int64)))


@dataclass(frozen=True)
class Texts:
    """Texts as captions, or as vectors."""

    captions: Sequence[str] | None = None  # m texts; None for vectors alone
    vectors: MappedArray | np.ndarray | None = None  # [m, D′], computed already; None for captions alone
    tables: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # as text towers read them

    def __post_init__(self) -> None:
        if self.captions is None and self.vectors is None:
            raise ValueError("texts must have captions or vectors, found neither")

    def __len__(self) -> int:
        return len(self.vectors if self.captions is None else self.captions)  # pyright: ignore[reportArgumentType]

    @cached_property
    def groups(self) -> np.ndarray:
        """[m] int64, equal for equal captions, or for equal vectors if there are no captions."""
        numbers: dict[Any, int] = {}
        vectors = () if self.captions is not None else self.take(np.arange(len(self)))
        keys = self.captions if self.captions is not None else (row.tobytes() for row in vectors)
        return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(self))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return the vectors of some texts [b] as [b, D′] float32."""
        if self.vectors is None:
            raise ValueError("texts have captions but no vectors; encode them first")
        if isinstance(self.vectors, MappedArray):
            return self.vectors.gather(np.asarray(indices))
        return np.asarray(self.vectors[indices], dtype=np.float32)


@dataclass(frozen=True)
class Swaps(Stored):
    """The images that have the text of another one."""

    what = "swaps"

    rows: np.ndarray  # [m] int64, ascending
    sources: np.ndarray  # [m] int64, the row whose text each has now
    rate: float  # the share of pairs that was requested
    within: bool  # whether texts were swapped within a category
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def mask(self, count: int) -> np.ndarray:
        """Return which of n pairs were swapped, [n] bool."""
        swapped = np.zeros(count, dtype=bool)
        swapped[self.rows] = True
        return swapped


@dataclass(frozen=True)
class PairSplit:
    """n pairs."""

    images: NumberedSplit  # n images, or vectors of images
    texts: Texts  # m texts that the images have
    sources: np.ndarray  # [n] int64, the text of each image
    categories: np.ndarray | None = None  # [n] int64, the topics of the pairs; None if not known
    swaps: Swaps | None = None  # the images that got the text of another one; None for no swaps

    def __post_init__(self) -> None:
        for name in ("sources", "categories"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.images):
                raise ValueError(
                    f"{name} must have one entry for each of {len(self.images)} pairs, found {len(values)}"
                )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def groups(self) -> np.ndarray:
        """[n] int64, equal for pairs with equal texts."""
        return self.texts.groups[self.sources]

    def caption(self, row: int) -> str | None:
        """Return the text of a pair; None if only its vector is known."""
        return None if self.texts.captions is None else self.texts.captions[int(self.sources[row])]

    def captions(self) -> list[str] | None:
        """Return the texts of all pairs; None if only vectors are known."""
        captions = self.texts.captions
        return None if captions is None else [captions[int(source)] for source in self.sources]


@dataclass(frozen=True)
class Pairs:
    """Splits of pairs of the same kind."""

    name: str
    image: InputSpec  # the input of an image tower: an image, or features for a locked one
    text: InputSpec | None  # features for a locked text tower; None for captions
    splits: dict[str, PairSplit]  # by the names in `hetxl_train.data.SPLITS`
    notes: Sequence[str] = field(default_factory=tuple)


def open_pairs(
    data: str | Path,
    *,
    transform: ImageTransform | None = None,
    seed: int = 0,
    cache: Path | None = None,
    whole: bool = False,
    **options: Any,
) -> Pairs:
    """Open pairs to train on or to evaluate, in one of the forms of this module.

    Data without splits is split: a tenth of the pairs each for validation and test, drawn with the seed.
    `whole` uses such files as one test split instead. Images from files go through the transform, to 64 × 64 pixels
    without one. The cache is by default $HETXL_CACHE, or ~/.cache/hetxl.
    """
    integer_at_least("seed", seed, 0)
    name, written = split_spec(str(data))
    if name in plugins.entries("pairs") and not Path(name).exists():
        return plugins.load("pairs", name)(cache=cache, **({"seed": seed} | written | options))
    check_options(options, (), str(data))
    return read_pairs(str(data), transform=transform, seed=seed, whole=whole, cache=cache)


def split_pairs(whole: Pairs, make: Callable[[np.ndarray], Split], seed: int) -> Pairs:
    """Draw the splits that are missing from the training pairs; `make(rows)` returns the images of some of these."""
    missing = [name for name in SPLITS if name not in whole.splits]
    if not missing:
        return whole
    train = whole.splits["train"]
    # Split by text, so that equal texts are not in both training and test.
    groups = train.groups
    first = np.unique(groups, return_index=True)[1]
    if len(first) < 3:
        raise ValueError(f"{whole.name} has {len(first)} distinct texts, too few to split; give the splits as files")
    parts = split_rows(Labels(np.arange(len(first))), len(first), missing, seed)
    splits = dict(whole.splits)
    for name, chosen in parts.items():
        rows = np.flatnonzero(np.isin(groups, groups[first[chosen]]))
        categories = None if train.categories is None else train.categories[rows]
        splits[name] = PairSplit(NumberedSplit(make(rows)), train.texts, train.sources[rows], categories)
    note = f"{' and '.join(missing)}: a tenth of the training pairs each, by text, drawn with seed {seed}"
    return replace(whole, splits={name: splits[name] for name in SPLITS if name in splits}, notes=(*whole.notes, note))


class _Rows(NamedTuple):
    """Rows as read: paths or vectors of n images, their texts, and optionally a split and a category of each."""

    images: ImageSource | MappedArray
    texts: Texts
    splits: list[str]
    categories: np.ndarray | None
    notes: Sequence[str] = ()

    def split(self, rows: np.ndarray, transform: ImageTransform) -> Split:
        """Return the images of some rows."""
        labels = Labels(np.arange(len(rows)))
        if isinstance(self.images, MappedArray):
            return ArraySplit(self.images, labels, rows)
        return ImageSplit(self.images, labels, rows, transform=transform)


def read_pairs(
    data: str | Path, *, transform: ImageTransform | None = None, seed: int = 0, whole: bool = False,
    cache: Path | None = None,
) -> Pairs:  # fmt: skip
    """Read pairs from a directory, a table, shards or arrays; the arguments are those of `open_pairs`."""
    path = Path(data).expanduser()
    shards, hub = is_shards(str(data)), str(data).startswith("hf:")
    if not shards and not hub and not path.exists():
        known = plugins.entries("pairs")
        names = f"neither the name of pairs ({', '.join(known)}) nor" if known else "not"
        raise FileNotFoundError(f"data={printable(str(path))!r} is {names} an existing path")
    suffix = path.suffix.lower()
    parts: list[_Rows] = []
    if hub:
        parts = [_read_table(table, split) for split, table in hub_tables(str(data)[3:]).items()]
    elif shards:
        parts = [_read_shards(str(data), cache)]
    elif path.is_dir() and (path / "images.npy").exists():
        parts = [_read_arrays(path)]
    elif path.is_dir():
        parts = [_read_directory(path)]
    elif suffix in ARRAY_SUFFIXES:
        parts = [_read_arrays(path)]
    elif suffix in TABLE_SUFFIXES:
        parts = [_read_table(open_table(path))]
    else:
        raise ValueError(
            f"{path} is not a known kind of pairs: give a directory of images with .txt files, a table "
            f"({', '.join(TABLE_SUFFIXES)}), shards (.tar) or arrays ({', '.join(ARRAY_SUFFIXES)})"
        )
    transform, first = transform or ImageTransform(64), parts[0]
    image = InputSpec("image", transform.shape, image=transform.preprocessing)
    if isinstance(first.images, MappedArray):
        image = InputSpec("features", (first.images.shape[1],))
    vectors = first.texts.vectors
    text = None if vectors is None else InputSpec("features", (vectors.shape[1],))
    splits, train = {}, None
    for rows in parts:
        names = np.array([name or ("test" if whole else "train") for name in rows.splits], dtype=object)
        for name in SPLITS:
            chosen = np.flatnonzero(names == name)
            if len(chosen):
                categories = None if rows.categories is None else rows.categories[chosen]
                images = NumberedSplit(rows.split(chosen, transform))
                splits[name] = PairSplit(images, rows.texts, chosen, categories)
                train = (rows, chosen) if name == "train" else train
    splits = {name: splits[name] for name in SPLITS if name in splits}
    notes = tuple(note for rows in parts for note in rows.notes)
    pairs = Pairs(printable(Path(str(data).removeprefix("hf:")).stem), image, text, splits, notes)
    if train is None:
        return pairs
    rows, training = train
    return split_pairs(pairs, lambda chosen: rows.split(training[chosen], transform), seed)


def _read_directory(root: Path) -> _Rows:
    """Read images with a .txt file of the same stem beside them; the first directory below the root may be a split."""
    images = list_images(root)
    paths, captions, splits, without = [], [], [], []
    for index in range(len(images)):
        path = images[index]
        relative = Path(os.path.relpath(path, root))
        caption = _read_caption(Path(path).with_suffix(".txt"))
        if caption is None:
            without.append(str(relative))
            continue
        paths.append(path)
        captions.append(caption)
        splits.append(SPLIT_NAMES.get(relative.parts[0].lower(), UNSPLIT) if len(relative.parts) > 1 else UNSPLIT)
    if not paths:
        raise ValueError(
            f"{root} has {len(images):,} images but no captions; put NAME.txt beside each of them, such as "
            f"{printable(without[0])} and {printable(str(Path(without[0]).with_suffix('.txt')))}"
        )
    notes = [f"left out images without a caption: {len(without):,} ({some(without)})"] if without else []
    if set(splits) - {UNSPLIT} and UNSPLIT in splits:
        raise ValueError(f"{root} has images outside of its split directories; move all into train, validation or test")
    return _Rows(Paths(paths), Texts(captions=captions), splits, None, notes)


def _read_caption(path: Path) -> str | None:
    """Return the text of a file in one line; None if it does not exist or is empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    return " ".join(text.split()) or None


def _read_table(table: Table, own_split: str = UNSPLIT) -> _Rows:
    images, kind = find_input(table, [name for name in table.kinds if find_column([name], CAPTION_COLUMNS) is None])
    if kind != "image":
        raise ValueError(
            f"{table.source} must have a column of images or paths of images; its columns: {table.listed()}"
        )
    caption = find_column([name for name in table.kinds if name != images], CAPTION_COLUMNS)
    if caption is None:
        names = " or ".join(CAPTION_COLUMNS)
        raise ValueError(f"{table.source} must have a column {names}; its columns: {table.listed()}")
    split, category = (find_column(table.kinds, names) for names in (SPLIT, CATEGORY_COLUMNS))
    chosen = [name for name in (caption, split, category) if name is not None]
    captions, splits, categories = [], [], []
    with closing(counted(table.rows(chosen), f"Reading {table.source}")) as rows:
        for number, values in enumerate(rows, 1):
            row = dict(zip(chosen, values, strict=True))
            text = " ".join(row[caption].split()) if isinstance(row[caption], str) else ""
            if not text:
                row_name = f"{table.source}, row {number} (counted from 1)"
                raise ValueError(f"{row_name} must have a caption, found {row[caption]!r}")
            captions.append(text)
            splits.append(split_name(table.source, row[split], number) if split is not None else own_split)
            categories.append(str(row[category]).strip() if category is not None else "")
    if not captions:
        raise ValueError(f"{table.source} has no rows")
    numbers = None if category is None else np.unique(categories, return_inverse=True)[1].astype(np.int64)
    return _Rows(table.images(images), Texts(captions=captions), splits, numbers)


def _read_shards(data: str, cache: Path | None) -> _Rows:
    """Read shards of images with captions, KEY.txt or a caption in KEY.json; the split is in their names."""
    addresses = expand(data)
    indices = index_shards(addresses, cache=cache)
    captions = [caption for index in indices for caption in index.captions]
    if "" in captions:
        name = TarImages(addresses, indices).name(captions.index(""))
        raise ValueError(f"{name} has no caption: looked for KEY.txt and a caption in KEY.json")
    splits = [split_in_name(address) for address, index in zip(addresses, indices, strict=True) for _ in index.starts]
    return _Rows(TarImages(addresses, indices), Texts(captions=captions), splits, None)


def _read_arrays(path: Path) -> _Rows:
    arrays, lines = {}, path / "captions.txt"
    if path.is_dir():
        for name in ("images", "texts", "split", "category"):
            if (file := path / f"{name}.npy").exists():
                arrays[name] = open_arrays(file)[""].called(str(path), name)
    else:
        arrays = open_arrays(path)
    images, vectors = (arrays.get(name) for name in ("images", "texts"))
    captions = names_from_array(arrays["captions"]) if "captions" in arrays else None
    if lines.is_file():
        captions = lines.read_text(encoding="utf-8", errors="surrogatepass").split("\n")[:-1]
    if images is None or (vectors is None and captions is None):
        raise ValueError(
            f"{path} must have the keys images and texts (or captions), found {some(arrays, 20) or 'none'}"
        )
    for array in filter(None, (images, vectors)):
        if len(array.shape) != 2 or not array.is_float or array.shape[1] < 1:
            raise ValueError(
                f"{array} must hold floating-point vectors [n, D], found {array.dtype} {list(array.shape)}"
            )
        check_finite(array)
    count = len(images)
    if not count:
        raise ValueError(f"{images} has no rows")
    for name in ("texts", "captions", "split", "category"):
        if name in arrays and len(arrays[name]) != count:
            raise ValueError(
                f"{arrays[name]} has {len(arrays[name]):,} rows, but 'images' has {count:,}; give one for each image"
            )
    if captions is not None and len(captions) != count:
        raise ValueError(
            f"{lines} has {len(captions):,} lines, but 'images' has {count:,} rows; give one for each image"
        )
    texts = Texts(captions, vectors)
    splits = [UNSPLIT] * count
    if "split" in arrays:
        names = names_from_array(arrays["split"])
        splits = [split_name(path, name, row) for row, name in enumerate(names, 1)]
    categories = None
    if "category" in arrays:
        categories = np.unique(np.asarray(arrays["category"].array), return_inverse=True)[1].astype(np.int64)
    return _Rows(images, texts, splits, categories)


def swapped(pairs: PairSplit, rate: float, within: bool = False, seed: int = 0) -> PairSplit:
    """Permute the texts of a share of the images; every text occurs as often as before.

    The images are drawn at random and their texts shifted by one in a random order, so that none keeps its text. An
    image whose new text equals its own (two families can have the same name for an icon) does not count as swapped.
    `rate` is the share of the pairs, from 0 to 1; `within` swaps texts only between pairs of the same category.
    """
    integer_at_least("seed", seed, 0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"rate must be from 0 to 1, the share of pairs to swap, found {rate!r}")
    if pairs.swaps is not None:
        raise ValueError("pairs have swaps already; start from the clean ones")
    if within and pairs.categories is None:
        raise ValueError("within=True needs categories of the pairs, which these lack; use within=False")
    rng = np.random.default_rng([seed, int(within)])
    categories = pairs.categories if within and pairs.categories is not None else np.zeros(len(pairs), dtype=np.int64)
    sources = np.arange(len(pairs))
    for members in _draw_swaps(categories, round(rate * len(pairs)), rng):
        sources[members] = np.roll(members, 1)
    groups = pairs.groups
    rows = np.flatnonzero(groups[sources] != groups)
    swaps = Swaps(rows, sources[rows], float(rate), bool(within), seed)
    return replace(pairs, sources=pairs.sources[sources], swaps=swaps)


def _draw_swaps(categories: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw `count` rows at random, by category and in a random order; none is alone in its category."""
    sizes = np.bincount(categories, minlength=1)
    order = rng.permutation(len(categories))
    order = order[sizes[categories[order]] > 1]
    count = min(count, len(order))
    taken, rest = order[:count], order[count:]
    counts = np.bincount(categories[taken], minlength=len(sizes))
    alone = counts[categories[taken]] == 1
    if alone.any():
        # Replace each by the next row of a category of which more rows were drawn.
        company = rest[counts[categories[rest]] > 1][: int(alone.sum())]
        taken = np.concatenate((taken[~alone], company))
    by_category = taken[np.argsort(categories[taken], kind="stable")]
    bounds = np.flatnonzero(np.diff(categories[by_category])) + 1
    return [members for members in np.split(by_category, bounds) if len(members) > 1]
