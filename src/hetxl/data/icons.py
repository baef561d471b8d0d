"""Icons and their names: 24,000 pairs of a small picture and a few words, for contrastive learning.

Seven families of icons draw many of the same things in their own ways. One design is held out: its pictures are never
seen, and many of its names neither. Most names are shared by few icons, and most of those that are tested are in no
training pair: names are for pairs, and no classes for a classifier. Categories of names are, see `load_icons`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hetxl.data.build import Made, array, build, find, packages_folder, python_package, read_json
from hetxl.data.dataset import Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.glyph_damage import shifted
from hetxl.data.glyph_render import SIZE
from hetxl.data.glyphs import offsets
from hetxl.data.icons_files import DESIGNS, FAMILIES, PACKAGE, make_icons
from hetxl.data.icons_names import OTHER, categories_of
from hetxl.data.images import GREY_MEAN, GREY_STD, require_pillow
from hetxl.data.labels import Labels
from hetxl.functional._checks import integer_at_least, one_of

VERSION = 1
"""Of the files; to be raised when they are made in another way."""

HELD_OUT = "remix"
"""The design that is never trained on, unless another is asked for."""

LABELS = ("names", "categories")

VALIDATION = 0.1
"""Share of the other designs' icons that validate."""


class IconSplit(Split):
    """Pictures [1, 32, 32] out of one array on disk, each with its name.

    With seeds, each is moved by up to 2 pixels in either direction.

    Args:
        pictures: [n, 32, 32] uint8 of the whole dataset, black on white; may be memory-mapped.
        rows: [m] which of them are in this split.
        labels: of these.
        families: [m] places in `hetxl.data.icons_files.FAMILIES`.
        names: n, of the whole dataset.
    """

    def __init__(
        self,
        pictures: np.ndarray,
        rows: np.ndarray,
        labels: Labels,
        families: np.ndarray,
        names: Sequence[str],
    ):
        self.pictures, self.rows, self.labels = pictures, rows, labels
        self.families, self.names = families, names

    def name(self, row: int) -> str:
        """The name of an icon."""
        return self.names[int(self.rows[row])]

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, 1, 32, 32] float32, white is 1 and black −1."""
        rows = np.asarray(rows, dtype=np.int64)
        pictures = np.asarray(self.pictures[self.rows[rows]])
        if seeds is not None:
            pictures = shifted(pictures, offsets(np.asarray(seeds)), None)
        inputs = torch.from_numpy(np.array(pictures)).unsqueeze(1).float().div_(255)
        return Fetched(inputs.sub_(GREY_MEAN).div_(GREY_STD), rows)

    def show(self, row: int) -> Shown:
        """The picture, its name and its family."""
        family = FAMILIES[int(self.families[row])].title
        return Shown(text=f"{self.name(row)} ({family})", pixels=np.array(self.pictures[self.rows[row]]))


def build_icons(*, each: int | None = None, cache: Path | None = None) -> Path:
    """Download the fonts and draw all icons, about half a minute; at once if that was done before.

    Args:
        each: only the first so many names of each of the twelve fonts, for a quick try; None for all.
        cache: folder for it; None for $HETXL_CACHE, or ~/.cache/hetxl.

    Returns:
        The folder of the files.
    """
    options = _options(each)
    require_pillow()

    def make(folder: Path) -> Made:
        return make_icons(folder, python_package(PACKAGE, packages_folder(cache)), each)

    return build("icons", options, cache, make, VERSION)


def load_icons(
    *,
    labels: str = "names",
    held_out: str = HELD_OUT,
    each: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Icons as a dataset; `hetxl data build icons` makes the files.

    The test split is the design that is held out. Of the others a tenth validates, by a hash of the name without words
    of style: "arrow left bold" and "arrow left thin" of one design are in the same split. `open_pairs("icons")` of
    `hetxl.data.pairs` gives the pairs for contrastive learning.

    Args:
        labels: "names": the classes are the 15,776 names, for pairs. "categories": they are the words that names share
            (`hetxl.data.icons_names.categories_of`), for a classifier; icons of no category are left out.
        held_out: the design of the test split: codicon, elusive, fontawesome, material, phosphor or remix.
        each: as in `build_icons`.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: of that draw.
        cache: as in `build_icons`.
    """
    one_of("labels", labels, LABELS)
    one_of("held_out", held_out, DESIGNS)
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    built = find("icons", _options(each), cache, VERSION)
    pictures, names = array(built, "pictures"), read_json(built, "names")
    families, shares = np.array(array(built, "families")), np.array(array(built, "shares"))
    told = names
    if labels == "categories":
        found, categories = categories_of(names)
        told = [categories[place] for place in found]
    classes = sorted(set(told) - {OTHER} if labels == "categories" else set(told))
    places = {name: place for place, name in enumerate(classes)}
    ids = np.array([places.get(name, -1) for name in told], dtype=np.int64)
    apart = np.array([FAMILIES[number].design == held_out for number in families])
    validates = ~apart & (shares >= 1 - VALIDATION)
    splits: dict[str, Split] = {}
    for name, inside in (("train", ~apart & ~validates), ("validation", validates), ("test", apart)):
        rows = np.flatnonzero(inside & (ids >= 0))
        if name == "train" and limit is not None and limit < len(rows):
            rows = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:limit])]
        splits[name] = IconSplit(pictures, rows, Labels(ids[rows]), families[rows], names)
    return Dataset(
        "icons",
        InputSpec("image", (1, SIZE, SIZE)),
        classes,
        splits,
        notes=(*built.sources(), *built.manifest["notes"], *_notes(splits, held_out, labels)),
    )


def _notes(splits: dict[str, Split], held_out: str, labels: str) -> list[str]:
    """What a reader should know."""
    train, test = set(splits["train"].labels.ids.tolist()), set(splits["test"].labels.ids.tolist())
    never = len(test - train)
    return [
        f"never trained on: the design {held_out}, which is the test split; {never:,} of its {len(test):,} {labels} "
        "are in no training pair",
        "validation: a tenth of the other designs, by a hash of the name without words of style",
    ]


def _options(each: int | None) -> dict[str, int]:
    """Those that the files depend on, checked."""
    return {} if each is None else {"each": integer_at_least("each", each, 1)}
