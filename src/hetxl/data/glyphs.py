"""Pictures of Han characters in many typefaces, some of them damaged: thousands of classes, many of them alike.

A class is a character, an input a grey picture of 32 × 32 pixels. The labels are noisy where damage has taken away what
tells two characters apart; how severe it is, is known for each picture.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from hetxl.data.build import Made, array, build, find, packages_folder, read_json
from hetxl.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.glyph_damage import shifted
from hetxl.data.glyph_files import make_glyphs
from hetxl.data.glyph_fonts import FAMILIES, UNSEEN, fetch_fonts
from hetxl.data.glyph_render import SIZE
from hetxl.data.glyph_sets import SETS, UNSEEN_HOME, candidates
from hetxl.data.images import GREY_MEAN, GREY_STD, require_pillow
from hetxl.data.labels import Labels
from hetxl.functional._checks import integer_at_least, one_of

VERSION = 1
"""Of the files; to be raised when they are made in another way."""

FONTS = 5
"""Families that draw a character of the set "common", at least."""

REACH = 2
"""Pixels by which training pictures are moved, at most."""


class GlyphSplit(Split):
    """Pictures [1, 32, 32] out of one array on disk.

    With seeds, each is moved by up to 2 pixels in either direction.

    Args:
        pictures: [n, 32, 32] uint8 of the whole dataset, black on white; may be memory-mapped.
        rows: [m] which of them are in this split.
        labels: of these.
        severity: [m] float32, how severely each is damaged, from 0 to 1.
        faces: [m] which typeface each is of.
        names: of all typefaces.
        class_names: K characters.
    """

    def __init__(
        self,
        pictures: np.ndarray,
        rows: np.ndarray,
        labels: Labels,
        severity: np.ndarray,
        faces: np.ndarray,
        names: Sequence[str],
        class_names: Sequence[str],
    ):
        self.pictures, self.rows, self.labels, self.severity = pictures, rows, labels, severity
        self.faces, self.names, self.class_names = faces, names, class_names

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, 1, 32, 32] float32, white is 1 and black −1."""
        rows = np.asarray(rows, dtype=np.int64)
        pictures = np.asarray(self.pictures[self.rows[rows]])
        if seeds is not None:
            pictures = shifted(pictures, offsets(np.asarray(seeds)), None)
        inputs = torch.from_numpy(pictures).unsqueeze(1).float().div_(255)
        return Fetched(inputs.sub_(GREY_MEAN).div_(GREY_STD), rows)

    def show(self, row: int) -> Shown:
        """The picture, and its character and typeface."""
        character, face = self.class_names[int(self.labels.ids[row])], self.names[int(self.faces[row])]
        return Shown(text=f"{character} {face}", pixels=np.array(self.pictures[self.rows[row]]))


def offsets(seeds: np.ndarray) -> np.ndarray:
    """Where training pictures are moved, [b, 2] in −2 to 2, by a hash of each seed.

    Args:
        seeds: [b] integers.
    """
    mixed = seeds.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the mixing of SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    width = np.uint64(2 * REACH + 1)
    return np.stack((mixed % width, mixed // width % width), axis=1).astype(np.int64) - REACH


def build_glyphs(*, characters: str = "jis1", variants: int = 1, fonts: int = FONTS, cache: Path | None = None) -> Path:
    """Download the fonts and draw all characters, one to two minutes for "jis1"; at once if that was done before.

    Args:
        characters: "jis1", the 2,965 of level 1 of JIS X 0208; "jis", the 6,355 of levels 1 and 2; or "common", all
            that at least `fonts` families draw, about 20,000.
        variants: pictures of each typeface and character, each with damage of its own.
        fonts: see "common".
        cache: folder for it; None for $HETXL_CACHE, or ~/.cache/hetxl.

    Returns:
        The folder of the files.
    """
    options = _options(characters, variants, fonts)
    require_pillow()

    def make(folder: Path) -> Made:
        found = fetch_fonts(packages_folder(cache))
        return make_glyphs(folder, found, candidates(characters), fonts if characters == "common" else 1, variants)

    return build("glyphs", options, cache, make, VERSION)


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
    """Pictures of characters, split by family of typefaces and character; `hetxl data build glyphs` makes their files.

    Five families are never trained on. Of each other family, the pictures of a character are all in one split: 80 % of
    these pairs in training, 10 % in validation and 10 % in test.

    Args:
        characters: as in `build_glyphs`.
        variants: as in `build_glyphs`.
        fonts: as in `build_glyphs`.
        unseen: whether the test split is all pictures of the five families instead.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: of that draw.
        cache: as in `build_glyphs`.
    """
    options = _options(characters, variants, fonts)
    if not isinstance(unseen, bool):
        raise TypeError(f"unseen must be true or false, found {unseen!r}")
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    built = find("glyphs", options, cache, VERSION)
    table = read_json(built, "glyphs")
    pictures = array(built, "pictures")
    home, labels, severity, faces = (np.array(array(built, name)) for name in ("homes", "labels", "severity", "faces"))
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(home == (UNSEEN_HOME if unseen and name == "test" else number))
        if name == "train" and limit is not None and limit < len(rows):
            rows = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:limit])]
        splits[name] = GlyphSplit(
            pictures,
            rows,
            Labels(labels[rows].astype(np.int64)),
            severity[rows],
            faces[rows],
            [face["name"] for face in table["faces"]],
            table["characters"],
        )
    return Dataset(
        "glyphs",
        InputSpec("image", (1, SIZE, SIZE)),
        table["characters"],
        splits,
        notes=(*_sources(built.manifest["packages"]), *_notes(table["faces"], unseen), *built.manifest["notes"]),
    )


def _options(characters: str, variants: int, fonts: int) -> dict[str, str | int]:
    """Those that the files depend on, checked."""
    one_of("characters", characters, SETS)
    integer_at_least("variants", variants, 1)
    integer_at_least("fonts", fonts, 1)
    if fonts > FAMILIES:
        raise ValueError(f"fonts must be at most {FAMILIES}, the families of typefaces, found {fonts}")
    if characters == "common":
        return {"characters": characters, "variants": variants, "fonts": fonts}
    if fonts != FONTS:
        raise ValueError(f"fonts={fonts} goes with characters=common; leave it out for {characters!r}")
    return {"characters": characters, "variants": variants}


def _sources(packages: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The packages with their versions, and their licences; in two lines, because they are two dozen."""
    yield "sources: " + ", ".join(f"{package['name']} {package['version']}" for package in packages)
    by_licence: dict[str, list[str]] = {}
    for package in packages:
        licence = package["licence"].removesuffix(f" (see usr/share/doc/{package['name']}/copyright)")
        by_licence.setdefault(licence, []).append(package["name"])
    yield "licences: " + "; ".join(f"{', '.join(names)}: {licence}" for licence, names in by_licence.items())


def _notes(faces: Sequence[Mapping[str, str]], unseen: bool) -> Iterator[str]:
    """What a reader should know."""
    families = {face["family"] for face in faces}
    never = ", ".join(face["name"] for face in faces if face["family"] in UNSEEN)
    yield f"{len(faces)} typefaces in {len(families)} families; never trained on: {never or 'none'}"
    what = "all pictures of the typefaces never trained on" if unseen else "families and characters held out"
    yield f"split by family and character; test: {what}"
    yield "damaged at random, half of the pictures hardly and a tenth past recognition; `severity` of a split tells"
