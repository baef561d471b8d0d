"""Pairs of a picture and a text, for contrastive learning.

| data | what it holds |
| --- | --- |
| `icons` | the built-in benchmark, with options as in `icons:held_out=phosphor` |
| a folder | pictures at any depth, each with its caption in a .txt file of the same stem; or `ROOT/train/…` and so on |
| a manifest, `.csv`, `.jsonl` or `.parquet` | columns `path` and `caption`, and where rows have one `split` and |
| | `category` |
| `.npz` or `.safetensors` | `images` [n, D] and `texts` [n, D′], both computed already: locked towers; in a .npz file |
| | `captions` [n] in place of `texts`, for a text tower that is trained, and where rows have one `split`, `category` |

The files are read in `hetxl.data.pairs_files`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetxl.data.dataset import SPLITS, Fetched, InputSpec, Shown, Split
from hetxl.data.icons import IconSplit, load_icons
from hetxl.data.icons_names import categories_of
from hetxl.data.labels import Labels
from hetxl.data.open import check_options
from hetxl.data.spec import split_spec
from hetxl.data.splitting import split_rows
from hetxl.data.stored import Stored
from hetxl.functional._checks import integer_at_least

if TYPE_CHECKING:
    from hetxl.data.pairs_noise import Swaps

ICONS = "icons"


class NumberedSplit(Split):
    """A split whose label is the number of the row: what a loader gives as target tells which texts to take.

    Args:
        split: of pictures or features.
    """

    def __init__(self, split: Split) -> None:
        self.split, self.workers = split, split.workers
        self.labels = Labels(np.arange(len(split), dtype=np.int64))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows, as the split within does."""
        return self.split.fetch(rows, seeds)

    def show(self, row: int) -> Shown:
        """As the split within does."""
        return self.split.show(row)


@dataclass(frozen=True)
class Texts:
    """Texts as they are, or as vectors.

    Attributes:
        captions: m texts; None where there are vectors alone.
        vectors: [m, D′], computed already; None for captions alone.
        groups: [m] int64, equal for equal texts.
    """

    captions: Sequence[str] | None = None
    vectors: Stored | np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.captions is None and self.vectors is None:
            raise ValueError("texts must have captions or vectors, found neither")

    def __len__(self) -> int:
        return len(self.vectors if self.captions is None else self.captions)  # pyright: ignore[reportArgumentType]

    @cached_property
    def groups(self) -> np.ndarray:
        """[m] int64, equal for equal captions, or for equal vectors where there are no captions."""
        numbers: dict[Any, int] = {}
        keys = (
            self.captions if self.captions is not None else (row.tobytes() for row in self.take(np.arange(len(self))))
        )
        return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(self))

    def take(self, places: np.ndarray) -> np.ndarray:
        """Vectors of some texts, [b, D′] float32.

        Args:
            places: [b]
        """
        if self.vectors is None:
            raise ValueError("texts have captions and no vectors; encode them first")
        if isinstance(self.vectors, Stored):
            return self.vectors.gather(np.asarray(places))
        return np.asarray(self.vectors[places], dtype=np.float32)


@dataclass(frozen=True)
class PairSplit:
    """n pairs.

    Attributes:
        images: n pictures, or vectors of them.
        texts: m texts that pictures have.
        sources: [n] int64, which text each picture has.
        categories: [n] int64, what the pairs are about; None where that is not known.
        swaps: which pictures got the text of another; None for none.
    """

    images: NumberedSplit
    texts: Texts
    sources: np.ndarray
    categories: np.ndarray | None = None
    swaps: "Swaps | None" = None

    def __post_init__(self) -> None:
        for name in ("sources", "categories"):
            found = getattr(self, name)
            if found is not None and len(found) != len(self.images):
                raise ValueError(f"{name} must have one entry for each of {len(self.images)} pairs, found {len(found)}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def groups(self) -> np.ndarray:
        """[n] int64, equal for pairs with equal texts."""
        return self.texts.groups[self.sources]

    def caption(self, row: int) -> str | None:
        """The text of a pair; None where there is only its vector."""
        return None if self.texts.captions is None else self.texts.captions[int(self.sources[row])]

    def captions(self) -> list[str] | None:
        """The texts of all pairs; None where there are only vectors."""
        captions = self.texts.captions
        return None if captions is None else [captions[int(place)] for place in self.sources]


@dataclass(frozen=True)
class Pairs:
    """Splits of pairs of the same kind.

    Attributes:
        name: for titles.
        image: what an image tower gets: an image, or features for one that is locked.
        text: features for a locked text tower; None for captions.
        splits: by the names in `hetxl.data.SPLITS`.
        notes: what a reader should know.
    """

    name: str
    image: InputSpec
    text: InputSpec | None
    splits: dict[str, PairSplit]
    notes: Sequence[str] = field(default_factory=tuple)


def open_pairs(
    data: str | Path,
    *,
    image_size: int = 64,
    seed: int = 0,
    cache: Path | None = None,
    whole: bool = False,
    **options: Any,
) -> Pairs:
    """Pairs to train on or to evaluate; the forms are those of this module.

    Data without splits is parted: a tenth of the pairs each for validation and test, drawn with the seed.

    Args:
        data: "icons" (with options as in "icons:held_out=phosphor"), or the path of a folder, a manifest or arrays.
        image_size: height and width of pictures from files.
        seed: of the split of data that has none.
        cache: folder for files that can be made again; by default $HETXL_CACHE, or ~/.cache/hetxl.
        whole: data from files that has no splits is one test split instead of being parted.
        **options: of icons, as in `hetxl.data.icons.load_icons`.
    """
    integer_at_least("image_size", image_size, 8)
    integer_at_least("seed", seed, 0)
    name, written = split_spec(str(data))
    if name == ICONS and not Path(name).exists():
        return icon_pairs(cache=cache, **({"seed": seed} | written | options))
    check_options(options, (), str(data))
    from hetxl.data.pairs_files import read_pairs

    return read_pairs(Path(data).expanduser(), image_size=image_size, seed=seed, whole=whole)


def icon_pairs(**options: Any) -> Pairs:
    """The pairs of `icons`: an icon and its name. Categories are `hetxl.data.icons_names.categories_of`.

    Args:
        **options: as in `hetxl.data.icons.load_icons`.
    """
    check_options(options, ("held_out", "each", "limit", "seed", "cache"), ICONS)
    dataset = load_icons(**options)
    texts = Texts(captions=list(dataset.class_names))
    by_class, _ = categories_of(dataset.class_names)
    splits = {}
    for name, split in dataset.splits.items():
        assert isinstance(split, IconSplit)
        ids = split.labels.ids
        splits[name] = PairSplit(NumberedSplit(split), texts, ids, by_class[ids])
    return Pairs(ICONS, dataset.input, None, splits, dataset.notes)


def part_pairs(whole: Pairs, make: Callable[[np.ndarray], Split], seed: int) -> Pairs:
    """Pairs with the splits that are missing drawn from the training pairs.

    Args:
        whole: with a training split.
        make: gives the images of some rows of it, `make(rows)`.
        seed: of the draw.
    """
    missing = [name for name in SPLITS if name not in whole.splits]
    if not missing:
        return whole
    train = whole.splits["train"]
    # By text: equal ones go together, so that none is trained on and tested.
    groups = Labels(train.groups)
    first = np.unique(groups.ids, return_index=True)[1]
    if len(first) < 3:
        raise ValueError(f"{whole.name} has {len(first)} different texts, too few to part; give the splits as files")
    parts = split_rows(Labels(np.arange(len(first))), len(first), missing, seed)
    splits = dict(whole.splits)
    for name, chosen in parts.items():
        rows = np.flatnonzero(np.isin(groups.ids, groups.ids[first[chosen]]))
        categories = None if train.categories is None else train.categories[rows]
        splits[name] = PairSplit(NumberedSplit(make(rows)), train.texts, train.sources[rows], categories)
    note = f"{' and '.join(missing)}: a tenth of the training pairs each, by text, drawn with seed {seed}"
    return replace(whole, splits={name: splits[name] for name in SPLITS if name in splits}, notes=(*whole.notes, note))
