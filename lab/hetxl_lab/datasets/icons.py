"""Images of icons with their names, pairs for contrastive learning (the Python package qtawesome).

24,000 pairs of a small image and a few words. Twelve fonts form seven families, which draw many of the same things in
different ways. The two families of Material Design are one design, since one contains most of the other. One design is
held out: its images are never in training, nor are many of its names. Few icons share a name, and most test names are
in no training pair, so names suit pairs, not a classifier. A classifier can use their categories, see `load_icons`.

| name in the font | words | stem | category |
| --- | --- | --- | --- |
| arrow-left-bold | arrow left bold | arrow left | arrow |
| account_circle-outline | account circle outline | account circle | account |

Icons of one design with the same stem show the same thing in different styles. The category is the first word of the
stem if at least `MIN_NAMES` names begin with it, else a word of the stem that as many share, else `OTHER`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hetxl._checks import integer_at_least, one_of
from hetxl._files import read_json, write_array
from hetxl_lab.build import store
from hetxl_lab.build.packages import Package, python_package
from hetxl_lab.datasets import glyph_images
from hetxl_lab.datasets.glyph_images import SIZE, SmallImageSplit, draw, engine
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import Dataset, InputSpec, Shown, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.open import check_options
from hetxl_train.data.pairs import NumberedSplit, Pairs, PairSplit, Texts

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

VERSION = 1  # version of the files; increase it when their content changes
# The Python package, and the directory in it with the fonts and their tables of names.
PACKAGE, FONTS = "qtawesome", "qtawesome/fonts"
HELD_OUT = "remix"  # by default, the design excluded from training
LABELS = ("names", "categories")
VALIDATION = 0.1  # share of the other designs' icons in the validation split
MARGIN = 1  # empty pixels on every side; larger icons are scaled down
# Side of the canvas relative to the image, large enough that no icon is cut off before it is measured.
CANVAS = 3
UNFINISHED = "drawn-"  # prefix of the files that only an interrupted build leaves
# Words at the end of a name that describe the style of the drawing. They stay in the name.
STYLES = frozenset(("outline", "fill", "line", "bold", "light", "thin", "sharp", "rounded", "filled", "solid"))
MIN_NAMES = 8  # least number of names in a category
OTHER = "other"  # the category of names that share no word with enough others

NAMES_ARE_NOT_CLASSES = (
    "nine in ten names of icons in validation and test have no training row; use icons:labels=categories, or the "
    "pairs: hetxl contrastive train icons"
)

_SEPARATORS = re.compile(r"[\s_\-./]+")


class Family(NamedTuple):
    """Fonts of one family."""

    name: str  # as it is typed
    title: str  # for a reader
    design: str  # families of one design draw similar icons, so they share a split
    fonts: tuple[str, ...]  # prefixes of its fonts' file names; each font has a table of the same name
    licence: str  # licence of the fonts, from the package's description


_KINDS = ("solid", "regular", "brands")
FONT_AWESOME = tuple(f"fontawesome{version}-{kind}-webfont" for kind in _KINDS for version in ("6", "5"))
FAMILIES = (
    Family("codicon", "Codicons", "codicon", ("codicon",), "CC-BY-4.0"),
    Family("elusive", "Elusive Icons", "elusive", ("elusiveicons-webfont",), "OFL-1.1"),
    Family("fontawesome", "Font Awesome 5 and 6", "fontawesome", FONT_AWESOME, "OFL-1.1"),
    Family("material5", "Material Design Icons 5", "material", ("materialdesignicons5-webfont",), "Apache-2.0"),
    Family("material6", "Material Design Icons 6", "material", ("materialdesignicons6-webfont",), "Apache-2.0"),
    Family("phosphor", "Phosphor", "phosphor", ("phosphor",), "MIT"),
    Family("remix", "Remix Icon", "remix", ("remixicon",), "Apache-2.0"),
)
"""Seven, in the order of the rows."""

DESIGNS = tuple(dict.fromkeys(family.design for family in FAMILIES))


class IconSplit(SmallImageSplit):
    """Images of icons [1, 32, 32] as in `SmallImageSplit`, with indices [m] into `FAMILIES` and the names of all n."""

    def __init__(
        self, images: np.ndarray, rows: np.ndarray, labels: Labels, families: np.ndarray, names: Sequence[str]
    ):
        super().__init__(images, rows, labels)
        self.families, self.names = families, names

    def name(self, row: int) -> str:
        """Return the name of an icon."""
        return self.names[int(self.rows[row])]

    def show(self, row: int) -> Shown:
        """Return the image, its name and its family."""
        family = FAMILIES[int(self.families[row])].title
        return Shown(text=f"{self.name(row)} ({family})", pixels=self.pixels(row))


def build_icons(*, each: int | None = None, cache: Path | None = None) -> Path:
    """Download the fonts and draw all icons, about half a minute; reuse existing files.

    Args:
        each: number of names to draw from each of the twelve fonts; None for all.
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    options = _options(each)

    def write(directory: Path) -> store.Sources:
        return make_icons(directory, python_package(PACKAGE, store.packages_directory(cache)), each)

    return store.build("icons", options, cache, write, VERSION)


def load_icons(
    *,
    labels: str = "names",
    held_out: str = HELD_OUT,
    each: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Load icons as a dataset; `hetxl data build icons` builds the files.

    The test split is the design that is held out. A tenth of the others is the validation split, by a hash of the name
    without words of style: "arrow left bold" and "arrow left thin" of one design are in the same split.
    `open_pairs("icons")` of `hetxl_train.data.pairs` gives the pairs for contrastive learning. Arguments that are not
    below are those of `build_icons`.

    Args:
        labels: "names": the classes are the 15,776 names, for pairs. "categories": they are the words that names share
            (`categories_of`), for a classifier; icons of no category are left out.
        held_out: the design of the test split: codicon, elusive, fontawesome, material, phosphor or remix.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: seed of that draw.
    """
    one_of("labels", labels, LABELS)
    one_of("held_out", held_out, DESIGNS)
    store.check_limit(limit, seed)
    built = store.open_built("icons", _options(each), cache, VERSION)
    images, names = built.array("pictures"), built.json("names")
    families, shares = np.array(built.array("families")), np.array(built.array("shares"))
    label_names = names
    if labels == "categories":
        category_ids, categories = categories_of(names)
        label_names = [categories[category] for category in category_ids]
    classes = sorted(set(label_names) - {OTHER} if labels == "categories" else set(label_names))
    class_ids = {name: number for number, name in enumerate(classes)}
    ids = np.array([class_ids.get(name, -1) for name in label_names], dtype=np.int64)
    test = np.array([FAMILIES[number].design == held_out for number in families])
    validation = ~test & (shares >= 1 - VALIDATION)
    splits: dict[str, Split] = {}
    for name, inside in (("train", ~test & ~validation), ("validation", validation), ("test", test)):
        rows = np.flatnonzero(inside & (ids >= 0))
        if name == "train":
            rows = store.limited(rows, limit, seed)
        splits[name] = IconSplit(images, rows, Labels(ids[rows]), families[rows], names)
    notes = (*built.source_notes(), *built.manifest["notes"], *_notes(splits, held_out, labels))
    refusal = NAMES_ARE_NOT_CLASSES if labels == "names" else None
    spec = InputSpec("image", (1, SIZE, SIZE))
    return Dataset("icons", spec, classes, splits, notes=notes, not_for_training=refusal)


def _notes(splits: dict[str, Split], held_out: str, labels: str) -> list[str]:
    train, test = set(splits["train"].labels.ids.tolist()), set(splits["test"].labels.ids.tolist())
    return [
        f"never trained on: the design {held_out}, which is the test split; {len(test - train):,} of its "
        f"{len(test):,} {labels} are in no training pair",
        "validation: a tenth of the other designs, by a hash of the name without words of style",
    ]


def _options(each: int | None) -> dict[str, int]:
    """Check the options that the files depend on."""
    return {} if each is None else {"each": integer_at_least("each", each, 1)}


def icon_pairs(**options: Any) -> Pairs:
    """Load the pairs of an icon and its name, with categories from `categories_of`; options as in `load_icons`."""
    check_options(options, ("held_out", "each", "limit", "seed", "cache"), "icons")
    dataset = load_icons(**options)
    texts = Texts(captions=list(dataset.class_names))
    categories, _ = categories_of(dataset.class_names)
    splits = {
        name: PairSplit(NumberedSplit(split), texts, split.labels.ids, categories[split.labels.ids])
        for name, split in dataset.splits.items()
    }
    return Pairs("icons", dataset.input, None, splits, dataset.notes)


def words_of(name: str) -> str:
    """Return a name of a font's table as words with spaces between.

    >>> words_of("arrow-left-bold")
    'arrow left bold'
    """
    return _SEPARATORS.sub(" ", name).strip().lower()


def stem_of(words: str) -> str:
    """Return a name from `words_of` without the words of its style, unless it has no others."""
    stem = words.split()
    while len(stem) > 1 and stem[-1] in STYLES:
        stem.pop()
    return " ".join(stem)


def categories_of(names: Sequence[str], min_names: int = MIN_NAMES) -> tuple[np.ndarray, list[str]]:
    """Return the category of each name, [n] int64, and the names of the categories.

    The names are from `words_of`; they may repeat, and count once. `min_names` share the word of a category.
    """
    stems = [stem_of(name).split() for name in names]
    distinct = {tuple(stem) for stem in stems}
    first = Counter(stem[0] for stem in distinct if stem)
    anywhere = Counter(word for stem in distinct for word in set(stem))

    def category(stem: Sequence[str]) -> str:
        if stem and first[stem[0]] >= min_names:
            return stem[0]
        # Prefer a word that many names begin with to one that many contain: "box" to "left".
        shared = [word for word in stem if anywhere[word] >= min_names]
        return max(shared, key=lambda word: (first[word], word), default=OTHER)

    categories, ids = np.unique([category(stem) for stem in stems], return_inverse=True)
    return ids.astype(np.int64), categories.tolist()


def make_icons(directory: Path, package: Package, each: int | None) -> store.Sources:
    """Draw and write all icons, with a progress bar; fonts that were drawn before are not drawn again.

    Leaves out blank drawings, a font's sign for missing characters, and drawings of a family that equal an earlier one
    in every pixel.
    """
    tables = {font: _table(package, font, each) for family in FAMILIES for font in family.fonts}
    images, names, families, blank, repeated = [], [], [], 0, 0
    with progress_bar("Drawing icons", sum(map(len, tables.values()))) as advance:
        for number, family in enumerate(FAMILIES):
            seen: set[bytes] = set()
            for font in family.fonts:
                font_images, font_names = _draw_font(directory, package, font, tables[font], advance)
                blank += len(tables[font]) - len(font_names)
                for image, name in zip(font_images, font_names, strict=True):
                    if (content := image.tobytes()) in seen:
                        repeated += 1
                        continue
                    seen.add(content)
                    images.append(image)
                    names.append(name)
                    families.append(number)
    ink = np.stack(images)
    write_array(directory / "pictures.npy", 255 - ink)  # black on white
    write_array(directory / "families.npy", np.array(families, dtype=np.int16))
    write_array(directory / "shares.npy", shares_of(ink, names, [FAMILIES[number].design for number in families]))
    store.write_json(directory / "names.json", names)
    for path in directory.glob(f"{UNFINISHED}*"):
        path.unlink()
    licences = "; ".join(f"{family.title}: {family.licence}" for family in FAMILIES)
    notes = (
        f"licences of the fonts: {licences}",
        f"left out: {blank:,} names without a drawing, {repeated:,} drawings that their family has already",
        f"drawn by {engine()}",
    )
    return store.Sources([package], notes)


def shares_of(images: np.ndarray, names: Sequence[str], designs: Sequence[str]) -> np.ndarray:
    """Return a number in [0, 1) for each of n icons by a hash, [n] float64, to split by.

    Icons of one design with the same stem or the same image [32, 32] have the same number, so that no image is in two
    splits.
    """
    groups: dict[tuple[str, str | bytes], int] = {}
    parents: list[int] = []

    def root(group: int) -> int:
        while parents[group] != group:
            parents[group] = parents[parents[group]]
            group = parents[group]
        return group

    owners = []
    for image, name, design in zip(images, names, designs, strict=True):
        roots = []
        for key in ((design, stem_of(name)), (design, image.tobytes())):
            if key not in groups:
                groups[key] = len(parents)
                parents.append(len(parents))
            roots.append(root(groups[key]))
        parents[max(roots)] = min(roots)
        owners.append(min(roots))
    # Hash the first stem of the group, the one with the lowest number.
    stems = {group: (design, stem) for (design, stem), group in groups.items() if isinstance(stem, str)}
    shares = {group: store.hash_fraction(*stems[group]) for group in {root(owner) for owner in owners}}
    return np.array([shares[root(owner)] for owner in owners])


def draw_icon(font: "FreeTypeFont", character: str) -> np.ndarray | None:
    """Draw an icon centred by its ink in the scale of its font, [32, 32] uint8; None for a blank drawing."""
    from PIL.Image import Resampling

    ink = draw(font, character, CANVAS)
    if ink is None:
        return None
    most, side = (SIZE - 2 * MARGIN) * glyph_images.OVERSAMPLING, max(ink.size)
    if side > most:
        width, height = (max(1, round(length * most / side)) for length in ink.size)
        ink = ink.resize((width, height), Resampling.BOX)
    image = glyph_images.reduced(ink)
    return image if image.any() else None


def _draw_font(
    directory: Path, package: Package, font: str, table: Mapping[str, str], advance: Callable[[int], None]
) -> tuple[np.ndarray, list[str]]:
    """Return what a font draws, ink [m, 32, 32] uint8 and m names; write two files for every finished font."""
    key = json.dumps([package.sha256, engine(), dict(table)])
    stem = f"{UNFINISHED}{font}-{blake2b(key.encode(), digest_size=8).hexdigest()}"
    ink_path, names_path = directory / f"{stem}.npy", directory / f"{stem}.json"
    if names_path.exists():
        advance(len(table))
    else:
        opened = glyph_images.open_font(_file(package, font, ".ttf"))
        missing = draw_icon(opened, glyph_images.MISSING)  # the sign for a missing character
        drawn: dict[str, np.ndarray] = {}
        for name, character in table.items():
            image = draw_icon(opened, character)
            if image is not None and (missing is None or not np.array_equal(image, missing)):
                drawn[name] = image
            advance(1)
        write_array(ink_path, np.array(list(drawn.values()), dtype=np.uint8).reshape(-1, SIZE, SIZE))
        store.write_json(names_path, [words_of(name) for name in drawn])  # last: if it exists, both do
    return np.load(ink_path), read_json(names_path)


def _table(package: Package, font: str, each: int | None) -> dict[str, str]:
    """Return the characters of a font by their names, in the order of the names."""
    path = _file(package, f"{font}-charmap", ".json")
    try:
        table = {name: chr(int(point, 16)) for name, point in read_json(path).items()}
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of names and code points: {error}") from None
    return dict(sorted(table.items())[:each])


def _file(package: Package, start: str, suffix: str) -> Path:
    """Return the file of a font or of its table, whose name ends in a version."""
    files = [path for path in (package.root / FONTS).glob(f"{start}-*{suffix}") if path.name[len(start) + 1].isdigit()]
    if len(files) != 1:
        raise FileNotFoundError(
            f"{package.name} {package.version} has {len(files)} files {start}-VERSION{suffix} in {FONTS}, expected 1"
        )
    return files[0]
