"""The files of `glyphs`: every face draws every character, and every picture is damaged. It can be interrupted."""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl.data.build import Made, write_array, write_json
from hetxl.data.glyph_damage import damage, source_of
from hetxl.data.glyph_fonts import UNSEEN, Fonts
from hetxl.data.glyph_render import SIZE, Rendered, engine, render
from hetxl.data.glyph_sets import homes
from hetxl.data.progress import progress_bar

SEED = 0
"""Of the damage. Other damage is to be had as another variant."""

BLOCK = 2048
"""Pictures that are damaged at a time."""

UNFINISHED = "drawn-"
"""How the names of files begin that only an interrupted build leaves."""


def make_glyphs(folder: Path, fonts: Fonts, wanted: Sequence[str], least: int, variants: int) -> Made:
    """Draw, damage and write all pictures, with a progress bar; faces that were drawn before are not drawn again.

    Args:
        folder: for the files.
        fonts: to draw with.
        wanted: characters.
        least: families that must draw a character; it is left out with fewer.
        variants: pictures of each face and character.

    Returns:
        What they were made of.
    """
    rendered = _render_all(folder, fonts, wanted)
    families = list(dict.fromkeys(face.family for face in fonts.faces))
    member = np.array([families.index(face.family) for face in fonts.faces])  # [faces]
    drawn = np.zeros((len(families), len(wanted)), dtype=bool)
    for place, found in zip(member, rendered, strict=True):
        drawn[place] |= found.drawn
    kept = np.flatnonzero(drawn.sum(0) >= least)
    if not len(kept):
        raise ValueError(f"fonts must be at most {drawn.sum(0).max()}, found {least}: no character has more families")
    characters = [wanted[int(number)] for number in kept]
    notes = [*fonts.notes, f"drawn by {engine()}"]
    if len(kept) < len(wanted) and least == 1:
        notes.append(f"{len(wanted) - len(kept):,} of {len(wanted):,} characters are left out: no font draws them")
    table = _rows(rendered, kept, variants)
    write_array(folder / "labels.npy", table.labels)
    write_array(folder / "faces.npy", table.faces)
    home = homes(families, characters, drawn[:, kept], UNSEEN)
    write_array(folder / "homes.npy", home[member[table.faces], table.labels])
    write_json(folder / "glyphs.json", {"characters": characters, "faces": [face._asdict() for face in fonts.faces]})
    _damage_all(folder, [face.name for face in fonts.faces], rendered, characters, table)
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink()
    return Made(fonts.packages, notes)


class _Rows(NamedTuple):
    """What each picture is of, [n]: its place among the pictures of its face, and the rest as in `GlyphSplit`."""

    places: np.ndarray
    labels: np.ndarray
    faces: np.ndarray
    variants: np.ndarray


def _rows(rendered: Sequence[Rendered], kept: np.ndarray, variants: int) -> _Rows:
    """All pictures in the order of faces, characters and variants."""
    pieces = []
    for face, found in enumerate(rendered):
        labels = np.flatnonzero(found.drawn[kept])
        places = np.cumsum(found.drawn)[kept[labels]] - 1
        columns = (places, labels, np.full(len(labels), face))
        pieces.append([*(np.repeat(column, variants) for column in columns), np.tile(np.arange(variants), len(labels))])
    places, labels, faces, variant = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return _Rows(places, labels.astype(np.int32), faces.astype(np.int16), variant)


def _render_all(folder: Path, fonts: Fonts, wanted: Sequence[str]) -> list[Rendered]:
    """What each face draws; every face that is done has two files of its own."""
    versions = {package.name: package.sha256 for package in fonts.packages}
    found = []
    with progress_bar("Drawing characters", len(fonts.faces) * len(wanted)) as advance:
        for face, path in zip(fonts.faces, fonts.paths, strict=True):
            # What else the drawing depends on is in the name: files of another version are not taken for these.
            same = f"{versions[face.package]} {engine()} {''.join(wanted)}"
            stem = f"{UNFINISHED}{path.stem}-{blake2b(same.encode(), digest_size=8).hexdigest()}"
            ink, drawn = folder / f"{stem}-ink.npy", folder / f"{stem}.npy"
            if drawn.exists():
                advance(len(wanted))
            else:
                result = render(path, wanted, face.number, advance)
                write_array(ink, result.pictures)
                write_array(drawn, result.drawn)  # last: where it is, both are
            found.append(Rendered(np.load(ink, mmap_mode="r"), np.load(drawn)))
    return found


def _damage_all(
    folder: Path, names: Sequence[str], rendered: Sequence[Rendered], characters: Sequence[str], table: _Rows
) -> None:
    """Write pictures.npy and severity.npy."""
    count = len(table.labels)
    severity = np.empty(count, dtype=np.float32)
    # In blocks and straight to the disk: with many variants they need not fit in memory.
    unfinished = folder / f".pictures.{os.getpid()}.npy"
    pictures = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=(count, SIZE, SIZE))
    try:
        with progress_bar("Damaging pictures", count) as advance:
            for rows in _blocks(table.faces):
                face = int(table.faces[rows.start])
                sources = [
                    source_of(SEED, names[face], characters[int(label)], int(variant))
                    for label, variant in zip(table.labels[rows], table.variants[rows], strict=True)
                ]
                pictures[rows], severity[rows] = damage(rendered[face].pictures[table.places[rows]], sources)
                advance(len(sources))
        pictures.flush()
        write_array(folder / "severity.npy", severity)
        os.replace(unfinished, folder / "pictures.npy")
    finally:
        unfinished.unlink(missing_ok=True)


def _blocks(faces: np.ndarray) -> Iterator[slice]:
    """Runs of rows of one face, not too many in one."""
    bounds = [0, *(np.flatnonzero(np.diff(faces)) + 1).tolist(), len(faces)]
    for start, stop in pairwise(bounds):
        for first in range(start, stop, BLOCK):
            yield slice(first, min(stop, first + BLOCK))
