"""Images of Chinese characters in many typefaces, some of them damaged (Debian's font packages).

A class is a character, an input a grey image of 32 × 32 pixels: thousands of classes, many of which look similar.
Labels are noisy where damage hides the difference between two characters; each image's severity is known.

Each package provides one regular face, since its other weights and widths draw nearly the same images. The Ume fonts
provide two, which are different designs.

Families were found by drawing 200 characters of JIS level 1 with every face, 32 × 32, and correlating the pixels of the
same character. Faces with a mean correlation above 0.85 are one family: two weights of one typeface have 0.84 to 0.86
(MigMix, Kiloji), so more similar faces would put the same image into training and test. No pair is between 0.826 and
0.871, so the exact bound does not matter.

| family | correlation | reason |
| --- | ---: | --- |
| mplus: VL Gothic, MigMix | 0.97 | both take their characters from M+ Fonts |
| motoya: Cedar, Maruberi | 0.96 | the same design with square and with round ends |
| arphic-ming: UMing, BabelStone Han | 0.88 | BabelStone Han was begun with Arphic's outlines; a third are unchanged |
| book-mincho: IPAex Mincho, BIZ UD Mincho | 0.88 | separate but very similar designs |
| cwtex: Hei, Yen | 0.87 | one skeleton with two kinds of strokes |
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl._checks import integer_at_least, one_of
from hetxl._files import read_json, write_array, write_whole
from hetxl_lab.build import store
from hetxl_lab.build.packages import Package, Unavailable, debian_package
from hetxl_lab.datasets.glyph_images import SIZE, Rendered, SmallImageSplit, damage, engine, image_generator, render
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import SPLITS, Dataset, InputSpec, Shown, Split
from hetxl_train.data.labels import Labels

VERSION = 1  # version of the files; increase it when their content changes
FONTS = 5  # least number of families that draw a character of the set "common"
MIN_PACKAGES = 8  # the dataset is not built from fewer font packages
SEED = 0  # seed of the damage, which differs between variants
BLOCK = 2048  # images to damage at a time
UNFINISHED = "drawn-"  # prefix of the files that only an interrupted build leaves
SETS = ("jis1", "jis", "common")

# Rows of JIS X 0208 with the 2,965 characters in daily use, and with 3,390 rarer ones.
LEVEL_1, LEVEL_2 = range(16, 48), range(48, 85)
# CJK Unified Ideographs and their extension A. Compatibility ideographs duplicate these characters, and hardly any font
# has the later extensions.
IDEOGRAPHS = (range(0x4E00, 0xA000), range(0x3400, 0x4DC0))
UNSEEN_SPLIT = len(SPLITS)  # the number of a split for the families that are never trained on
TRAIN, VALIDATION = 0.8, 0.9  # bounds of the hash of a family and a character


class Face(NamedTuple):
    """One face of a font package."""

    name: str  # for a reader
    package: str  # that contains it
    file: str  # its name, anywhere below the package's usr/share/fonts
    family: str  # faces of one family draw near-duplicates
    number: int = 0  # in a collection of fonts


FACES = tuple(Face(**face) for face in read_json(Path(__file__).with_name("faces.json")))
"""25 faces of 24 packages, in 20 families."""

FAMILIES = len({face.family for face in FACES})
PACKAGES = tuple(dict.fromkeys(face.package for face in FACES))

UNSEEN = ("konatu", "dejima", "kiloji", "yusei", "reggae")
"""Families that are never trained on, one of each style: gothic, mincho, handwriting, marker pen and display. Those
with the most characters stay in training, and so do the brush faces, which are like no other."""


class GlyphSplit(SmallImageSplit):
    """Images of characters [1, 32, 32] as in `SmallImageSplit`.

    Args:
        severity: [m] float32, how severely each is damaged, from 0 to 1.
        faces: [m] index of the typeface of each.
        names: of all typefaces.
        class_names: K characters.
    """

    def __init__(self, images: np.ndarray, rows: np.ndarray, labels: Labels, *, severity: np.ndarray,
                 faces: np.ndarray, names: Sequence[str], class_names: Sequence[str]):  # fmt: skip
        super().__init__(images, rows, labels)
        self.severity, self.faces, self.names, self.class_names = severity, faces, names, class_names

    def show(self, row: int) -> Shown:
        """Return the image, and its character and typeface."""
        character, face = self.class_names[int(self.labels.ids[row])], self.names[int(self.faces[row])]
        return Shown(text=f"{character} {face}", pixels=self.pixels(row))


def build_glyphs(*, characters: str = "jis1", variants: int = 1, fonts: int = FONTS, cache: Path | None = None) -> Path:
    """Download the fonts and draw all characters, one to two minutes for "jis1"; reuse existing files.

    Args:
        characters: "jis1", the 2,965 of level 1 of JIS X 0208; "jis", the 6,355 of levels 1 and 2; or "common", all
            that at least `fonts` families draw, about 20,000.
        variants: images of each typeface and character, each with its own damage.
        fonts: least number of families for "common".
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    options = _options(characters, variants, fonts)

    def write(directory: Path) -> store.Sources:
        available, min_families = fetch_fonts(store.packages_directory(cache)), fonts if characters == "common" else 1
        return make_glyphs(directory, available, candidates(characters), min_families, variants)

    return store.build("glyphs", options, cache, write, VERSION)


def load_glyphs(
    *,
    characters: str = "jis1",
    variants: int = 1,
    fonts: int = FONTS,
    unseen: bool = False,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Load images of characters, split by family of typefaces and character; `hetxl data build glyphs` builds them.

    Five families are never trained on. Of each other family, the images of a character are all in one split: 80 % of
    these pairs in training, 10 % in validation and 10 % in test. `characters`, `variants`, `fonts` and `cache` are as
    in `build_glyphs`.

    Args:
        unseen: whether the test split is all images of the five families instead.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: seed of that draw.
    """
    options = _options(characters, variants, fonts)
    if not isinstance(unseen, bool):
        raise TypeError(f"unseen must be true or false, found {unseen!r}")
    store.check_limit(limit, seed)
    built = store.open_built("glyphs", options, cache, VERSION)
    table, images = built.json("glyphs"), built.array("pictures")
    columns = ("homes", "labels", "severity", "faces")
    split_ids, labels, severity, faces = (np.array(built.array(column)) for column in columns)
    names = [face["name"] for face in table["faces"]]
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(split_ids == (UNSEEN_SPLIT if unseen and name == "test" else number))
        if name == "train":
            rows = store.limited(rows, limit, seed)
        splits[name] = GlyphSplit(
            images, rows, Labels(labels[rows].astype(np.int64)),
            severity=severity[rows], faces=faces[rows], names=names, class_names=table["characters"],
        )  # fmt: skip
    notes = (*_sources(built.manifest["packages"]), *_notes(table["faces"], unseen), *built.manifest["notes"])
    return Dataset("glyphs", InputSpec("image", (1, SIZE, SIZE)), table["characters"], splits, notes=notes)


def _options(characters: str, variants: int, fonts: int) -> dict[str, str | int]:
    """Check the options that the files depend on."""
    one_of("characters", characters, SETS)
    integer_at_least("variants", variants, 1)
    integer_at_least("fonts", fonts, 1)
    if fonts > FAMILIES:
        raise ValueError(f"fonts must be at most {FAMILIES}, the number of font families, found {fonts}")
    if characters == "common":
        return {"characters": characters, "variants": variants, "fonts": fonts}
    if fonts != FONTS:
        raise ValueError(f"fonts={fonts} needs characters=common; leave it out for {characters!r}")
    return {"characters": characters, "variants": variants}


def _sources(packages: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Return the packages with their versions, and their licences, in two lines, because they are two dozen."""
    yield "sources: " + ", ".join(f"{package['name']} {package['version']}" for package in packages)
    by_licence: dict[str, list[str]] = {}
    for package in packages:
        licence = package["licence"].removesuffix(f" (see usr/share/doc/{package['name']}/copyright)")
        by_licence.setdefault(licence, []).append(package["name"])
    yield "licences: " + "; ".join(f"{', '.join(names)}: {licence}" for licence, names in by_licence.items())


def _notes(faces: Sequence[Mapping[str, str]], unseen: bool) -> Iterator[str]:
    families = {face["family"] for face in faces}
    held_out = ", ".join(face["name"] for face in faces if face["family"] in UNSEEN)
    yield f"{len(faces)} typefaces in {len(families)} families; never trained on: {held_out or 'none'}"
    test = "all images of the typefaces never trained on" if unseen else "families and characters held out"
    yield f"split by family and character; test: {test}"
    yield "damaged at random, half of the images hardly and a tenth past recognition; see `severity` of a split"


class Fonts(NamedTuple):
    """Faces that are available on this machine."""

    faces: Sequence[Face]  # in the order of `FACES`
    paths: Sequence[Path]  # of their files
    packages: Sequence[Package]  # that they are from
    notes: Sequence[str]  # on faces and packages that are left out


def fetch_fonts(directory: Path, names: Iterable[str] = PACKAGES, least: int = MIN_PACKAGES) -> Fonts:
    """Download and unpack font packages and find their faces; an unavailable one is left out, with a note.

    The names are of packages in `PACKAGES`; if fewer than `least` are available, that is an error.
    """
    names = list(names)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        raise ValueError(f"names has {unknown[0]!r}, a package without a face in the table of glyphs")
    packages: dict[str, Package] = {}
    errors: list[str] = []
    for name in names:
        try:
            packages[name] = debian_package(name, directory)
        except Unavailable as error:
            errors.append(str(error))
    if len(packages) < least:
        have = f"{len(packages)} are available: {errors[0]}"
        raise Unavailable(f"glyphs needs at least {least} of its {len(names)} font packages, {have}")
    paths = {face: find_face(face, packages[face.package].root) for face in FACES if face.package in packages}
    present = {face: path for face, path in paths.items() if path is not None}
    notes = [
        f"{face.name} is left out: {face.package} {packages[face.package].version} has no {face.file}"
        for face in paths
        if face not in present
    ]
    notes += [f"left out: {error}" for error in errors]
    return Fonts(list(present), list(present.values()), list(packages.values()), notes)


def find_face(face: Face, root: Path) -> Path | None:
    """Return the file of a face in a package unpacked in `root`; None if the package has no such file."""
    return min((root / "usr" / "share" / "fonts").rglob(face.file), default=None)


def candidates(characters: str) -> list[str]:
    """Return the characters of a set in `SETS` by code point; for "common", all characters to look for in fonts."""
    if characters == "common":
        return sorted(chr(point) for block in IDEOGRAPHS for point in block)
    rows = (*LEVEL_1, *LEVEL_2) if characters == "jis" else LEVEL_1
    return sorted(filter(None, (_jis(row, cell) for row in rows for cell in range(1, 95))))


def _jis(row: int, cell: int) -> str | None:
    """Return a character of JIS X 0208; None for an empty cell."""
    try:
        return bytes((0xA0 + row, 0xA0 + cell)).decode("euc_jp")
    except UnicodeDecodeError:
        return None


def split_numbers(
    families: Sequence[str], characters: Sequence[str], drawn: np.ndarray, unseen: Sequence[str]
) -> np.ndarray:
    """Assign each family and character to a split by a hash: 80 % train, 10 % validation and 10 % test.

    All faces of a family go together, so that no near-duplicate of a training image is tested. A character that would
    be in no training image keeps its pair with the lowest hash there.

    Args:
        drawn: [F, K] bool, which families draw which characters.
        unseen: names of families that are never trained on.

    Returns:
        [F, K] uint8, an index into `SPLITS` or `UNSEEN_SPLIT`; without meaning for pairs that are not drawn.
    """
    shares = np.array([[store.hash_fraction(family, character) for character in characters] for family in families])
    shares = shares.reshape(len(families), len(characters))
    numbers = np.where(shares < TRAIN, 0, np.where(shares < VALIDATION, 1, 2)).astype(np.uint8)
    seen = np.array([family not in unseen for family in families], dtype=bool)[:, None] & drawn
    lost = np.flatnonzero(seen.any(0) & ~(seen & (numbers == 0)).any(0))
    lowest = np.where(seen, shares, 2.0)[:, lost].argmin(0) if len(lost) else lost
    numbers[lowest, lost] = 0
    numbers[[family in unseen for family in families]] = UNSEEN_SPLIT
    return numbers


def make_glyphs(
    directory: Path, fonts: Fonts, charset: Sequence[str], min_families: int, variants: int
) -> store.Sources:
    """Draw, damage and write all images, with a progress bar; faces that were drawn before are not drawn again.

    Characters that fewer than `min_families` draw are left out. `variants` are images of each face and character.
    """
    rendered = _render_all(directory, fonts, charset)
    families = list(dict.fromkeys(face.family for face in fonts.faces))
    family_ids = np.array([families.index(face.family) for face in fonts.faces])  # [faces]
    drawn = np.zeros((len(families), len(charset)), dtype=bool)
    for family, face in zip(family_ids, rendered, strict=True):
        drawn[family] |= face.drawn
    chosen = np.flatnonzero(drawn.sum(0) >= min_families)
    if not len(chosen):
        most = drawn.sum(0).max()
        raise ValueError(f"fonts must be at most {most}, found {min_families}: no character has more families")
    characters = [charset[int(number)] for number in chosen]
    notes = [*fonts.notes, f"drawn by {engine()}"]
    if len(chosen) < len(charset) and min_families == 1:
        notes.append(f"{len(charset) - len(chosen):,} of {len(charset):,} characters are left out: no font draws them")
    table = _rows(rendered, chosen, variants)
    write_array(directory / "labels.npy", table.labels)
    write_array(directory / "faces.npy", table.faces)
    numbers = split_numbers(families, characters, drawn[:, chosen], UNSEEN)
    write_array(directory / "homes.npy", numbers[family_ids[table.faces], table.labels])
    store.write_json(
        directory / "glyphs.json", {"characters": characters, "faces": [face._asdict() for face in fonts.faces]}
    )
    _damage_all(directory, [face.name for face in fonts.faces], rendered, characters, table)
    for path in directory.glob(f"{UNFINISHED}*"):
        path.unlink()
    return store.Sources(fonts.packages, notes)


class _Rows(NamedTuple):
    """The content of each image, [n]: its index among the images of its face, and the rest as in `GlyphSplit`."""

    indices: np.ndarray
    labels: np.ndarray
    faces: np.ndarray
    variants: np.ndarray


def _rows(rendered: Sequence[Rendered], chosen: np.ndarray, variants: int) -> _Rows:
    """List all images in the order of faces, characters and variants."""
    pieces = []
    for face, (_, drawn) in enumerate(rendered):
        labels = np.flatnonzero(drawn[chosen])
        indices = np.cumsum(drawn)[chosen[labels]] - 1
        columns = (indices, labels, np.full(len(labels), face))
        pieces.append([*(np.repeat(column, variants) for column in columns), np.tile(np.arange(variants), len(labels))])
    indices, labels, faces, variant = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return _Rows(indices, labels.astype(np.int32), faces.astype(np.int16), variant)


def _render_all(directory: Path, fonts: Fonts, charset: Sequence[str]) -> list[Rendered]:
    """Draw with each face; write two files for every finished face."""
    checksums = {package.name: package.sha256 for package in fonts.packages}
    rendered = []
    with progress_bar("Drawing characters", len(fonts.faces) * len(charset)) as advance:
        for face, path in zip(fonts.faces, fonts.paths, strict=True):
            # The name includes all that determines the drawing, so that files of another version are not reused.
            key = f"{checksums[face.package]} {engine()} {''.join(charset)}"
            stem = f"{UNFINISHED}{path.stem}-{blake2b(key.encode(), digest_size=8).hexdigest()}"
            ink, drawn = directory / f"{stem}-ink.npy", directory / f"{stem}.npy"
            if drawn.exists():
                advance(len(charset))
            else:
                result = render(path, charset, face.number, advance)
                write_array(ink, result.images)
                write_array(drawn, result.drawn)  # last: if it exists, both do
            rendered.append(Rendered(np.load(ink, mmap_mode="r"), np.load(drawn)))
    return rendered


def _damage_all(
    directory: Path, names: Sequence[str], rendered: Sequence[Rendered], characters: Sequence[str], table: _Rows
) -> None:
    """Write severity.npy, and the images to pictures.npy, the name that version 1 of the files has."""
    count = len(table.labels)
    severity = np.empty(count, dtype=np.float32)

    def write_images(path: Path) -> None:
        # Write in blocks directly to the disk, since many variants may not fit in memory.
        images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, SIZE, SIZE))
        with progress_bar("Damaging images", count) as advance:
            for rows in _blocks(table.faces):
                face = int(table.faces[rows.start])
                generators = [
                    image_generator(SEED, names[face], characters[int(label)], int(variant))
                    for label, variant in zip(table.labels[rows], table.variants[rows], strict=True)
                ]
                images[rows], severity[rows] = damage(rendered[face].images[table.indices[rows]], generators)
                advance(len(generators))
        images.flush()

    write_whole(directory / "pictures.npy", write_images)
    write_array(directory / "severity.npy", severity)


def _blocks(faces: np.ndarray) -> Iterator[slice]:
    """Return slices of at most `BLOCK` rows of one face each."""
    bounds = [0, *(np.flatnonzero(np.diff(faces)) + 1).tolist(), len(faces)]
    for start, stop in pairwise(bounds):
        for first in range(start, stop, BLOCK):
            yield slice(first, min(stop, first + BLOCK))
