"""The files of `icons`: every icon of seven families drawn once, with its name. It can be interrupted.

The fonts and their tables of names are in the Python package qtawesome. Twelve fonts are seven families; the two of
Material Design are one design, and most of the one is in the other.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetxl.data.build import Made, Package, write_array, write_json
from hetxl.data.glyph_render import FINER, MISSING, SIZE, draw, engine, open_font, reduced
from hetxl.data.icons_names import stem_of, words_of
from hetxl.data.progress import progress_bar

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

PACKAGE = "qtawesome"
FOLDER = "qtawesome/fonts"

MARGIN = 1
"""Pixels that stay free at every side: icons that are wider than the rest are made smaller."""

ROOM = 3
"""Side of the sheet that an icon is drawn on over that of the picture: nothing is cut off before it is measured."""

UNFINISHED = "drawn-"
"""How the names of files begin that only an interrupted build leaves."""


class Family(NamedTuple):
    """Fonts that are one family.

    Attributes:
        name: as it is typed.
        title: for a reader.
        design: families of one design draw the same things alike; never is one trained on and another tested.
        fonts: how the names of the files of its fonts begin; each has a table of the same name.
        licence: of the fonts, as the package's description tells it.
    """

    name: str
    title: str
    design: str
    fonts: tuple[str, ...]
    licence: str


FAMILIES = (
    Family("codicon", "Codicons", "codicon", ("codicon",), "CC-BY-4.0"),
    Family("elusive", "Elusive Icons", "elusive", ("elusiveicons-webfont",), "OFL-1.1"),
    Family(
        "fontawesome",
        "Font Awesome 5 and 6",
        "fontawesome",
        tuple(
            f"fontawesome{version}-{kind}-webfont" for kind in ("solid", "regular", "brands") for version in ("6", "5")
        ),
        "OFL-1.1",
    ),
    Family("material5", "Material Design Icons 5", "material", ("materialdesignicons5-webfont",), "Apache-2.0"),
    Family("material6", "Material Design Icons 6", "material", ("materialdesignicons6-webfont",), "Apache-2.0"),
    Family("phosphor", "Phosphor", "phosphor", ("phosphor",), "MIT"),
    Family("remix", "Remix Icon", "remix", ("remixicon",), "Apache-2.0"),
)
"""Seven, in the order of the rows."""

DESIGNS = tuple(dict.fromkeys(family.design for family in FAMILIES))


class Drawn(NamedTuple):
    """The icons of one font.

    Attributes:
        pictures: [m, 32, 32] uint8, ink: 0 for paper, 255 for black.
        names: m, as words.
        blank: how many names had no drawing.
    """

    pictures: np.ndarray
    names: list[str]
    blank: int


def make_icons(folder: Path, package: Package, each: int | None) -> Made:
    """Draw and write all icons, with a progress bar; fonts that were drawn before are not drawn again.

    Left out are blank drawings, a font's sign for characters that it has not, and of drawings that are equal to the
    pixel within a family all but the first.

    Args:
        folder: for the files.
        package: qtawesome, unpacked.
        each: only the first so many names of each font; None for all.

    Returns:
        What they were made of.
    """
    tables = {font: _table(package, font, each) for family in FAMILIES for font in family.fonts}
    pictures, names, families, blank, repeated = [], [], [], 0, 0
    with progress_bar("Drawing icons", sum(map(len, tables.values()))) as advance:
        for number, family in enumerate(FAMILIES):
            seen: set[bytes] = set()
            for font in family.fonts:
                drawn = _drawn(folder, package, font, tables[font], advance)
                blank += drawn.blank
                for picture, name in zip(drawn.pictures, drawn.names, strict=True):
                    if (digest := picture.tobytes()) in seen:
                        repeated += 1
                        continue
                    seen.add(digest)
                    pictures.append(picture)
                    names.append(name)
                    families.append(number)
    stacked = np.stack(pictures)
    write_array(folder / "pictures.npy", 255 - stacked)  # black on white, as pictures are
    write_array(folder / "families.npy", np.array(families, dtype=np.int16))
    designs = [FAMILIES[number].design for number in families]
    write_array(folder / "shares.npy", shares_of(stacked, names, designs))
    write_json(folder / "names.json", names)
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink()
    licences = "; ".join(f"{family.title}: {family.licence}" for family in FAMILIES)
    notes = (
        f"licences of the fonts: {licences}",
        f"left out: {blank:,} names without a drawing, {repeated:,} drawings that their family has already",
        f"drawn by {engine()}",
    )
    return Made([package], notes)


def shares_of(pictures: np.ndarray, names: Sequence[str], designs: Sequence[str]) -> np.ndarray:
    """A number in [0, 1) for each icon, by a hash.

    Icons of one design that have the same stem, or the same picture, have the same number: a split by it has no picture
    on both sides.

    Args:
        pictures: [n, 32, 32] uint8
        names: n, as words.
        designs: n

    Returns:
        [n] float64
    """
    groups: dict[object, int] = {}
    above: list[int] = []

    def root(place: int) -> int:
        while above[place] != place:
            above[place] = above[above[place]]
            place = above[place]
        return place

    owners = []
    for picture, name, design in zip(pictures, names, designs, strict=True):
        found = []
        for key in ((design, stem_of(name)), (design, picture.tobytes())):
            if key not in groups:
                groups[key] = len(above)
                above.append(len(above))
            found.append(root(groups[key]))
        first, last = min(found), max(found)
        above[last] = first
        owners.append(first)
    # Named by the first stem of the group, which is the lowest number in it.
    stems = {number: key for key, number in groups.items() if isinstance(key, tuple) and isinstance(key[1], str)}
    shares = {number: _share(*stems[number]) for number in {root(owner) for owner in owners}}
    return np.array([shares[root(owner)] for owner in owners])


def draw_icon(font: "FreeTypeFont", character: str) -> np.ndarray | None:
    """An icon centred by its ink in the scale of its font, [32, 32] uint8; None where there is no ink.

    Args:
        font: from `hetxl.data.glyph_render.open_font`.
        character: one code point.
    """
    from PIL.Image import Resampling

    ink = draw(font, character, ROOM)
    if ink is None:
        return None
    most, side = (SIZE - 2 * MARGIN) * FINER, max(ink.size)
    if side > most:
        width, height = (max(1, round(length * most / side)) for length in ink.size)
        ink = ink.resize((width, height), Resampling.BOX)
    picture = reduced(ink)
    return picture if picture.any() else None


def _drawn(
    folder: Path, package: Package, font: str, table: Mapping[str, str], advance: Callable[[int], None]
) -> Drawn:
    """What a font draws; every font that is done has two files of its own."""
    same = json.dumps([package.sha256, engine(), dict(table)])
    stem = f"{UNFINISHED}{font}-{hashlib.blake2b(same.encode(), digest_size=8).hexdigest()}"
    ink, names = folder / f"{stem}.npy", folder / f"{stem}.json"
    if names.exists():
        advance(len(table))
    else:
        opened = open_font(_file(package, font, ".ttf"))
        missing = draw_icon(opened, MISSING)  # what the font draws for a character that it has not
        found: list[tuple[str, np.ndarray]] = []
        for name, character in table.items():
            picture = draw_icon(opened, character)
            if picture is not None and (missing is None or not np.array_equal(picture, missing)):
                found.append((words_of(name), picture))
            advance(1)
        write_array(ink, np.array([picture for _, picture in found], dtype=np.uint8).reshape(-1, SIZE, SIZE))
        write_json(names, [name for name, _ in found])  # last: where it is, both are
    pictures, kept = np.load(ink), json.loads(names.read_text(encoding="utf-8"))
    return Drawn(pictures, kept, len(table) - len(kept))


def _table(package: Package, font: str, each: int | None) -> dict[str, str]:
    """The characters of a font by their names, in the order of the names."""
    path = _file(package, f"{font}-charmap", ".json")
    try:
        table = {name: chr(int(point, 16)) for name, point in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of names and code points: {error}") from None
    return dict(sorted(table.items())[:each])


def _file(package: Package, start: str, suffix: str) -> Path:
    """The file of a font or of its table: behind the name there is a version."""
    found = [path for path in (package.root / FOLDER).glob(f"{start}-*{suffix}") if path.name[len(start) + 1].isdigit()]
    if len(found) != 1:
        raise FileNotFoundError(
            f"{package.name} {package.version} has {len(found)} files {start}-VERSION{suffix} in {FOLDER}, not 1"
        )
    return found[0]


def _share(design: str, stem: str) -> float:
    """A number in [0, 1) that depends on nothing but the two."""
    digest = hashlib.blake2b(f"{design}\0{stem}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
