"""The typefaces of `glyphs`: which Debian packages, which of their faces, and which of these are of one family.

From each package one regular face is taken; other weights and widths of it draw nearly the same pictures. The Ume fonts
give two, which are different designs.

Families were found by drawing 200 characters of JIS level 1 with every face, 32 × 32, and correlating the pixels of the
same character. Faces with a mean correlation above 0.85 are one family: two weights of one typeface have 0.84 to 0.86
(MigMix, Kiloji), so faces that are more alike than that would give the same picture to training and test. There is
nothing between 0.826 and 0.871, so that the exact bound does not matter.

| family | correlation | why |
| --- | ---: | --- |
| mplus: VL Gothic, MigMix | 0.97 | both take their characters from M+ Fonts |
| motoya: Cedar, Maruberi | 0.96 | the same design with square and with round ends |
| arphic-ming: UMing, BabelStone Han | 0.88 | BabelStone Han was begun with Arphic's outlines; a third are unchanged |
| book-mincho: IPAex Mincho, BIZ UD Mincho | 0.88 | designs of their own, and very close |
| cwtex: Hei, Yen | 0.87 | one skeleton with two kinds of strokes |
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hetxl.data.build import Package, Unavailable, debian_package

LEAST = 8
"""With fewer packages than this there is no dataset."""


class Face(NamedTuple):
    """One face of a font package.

    Attributes:
        name: for a reader.
        package: that brings it.
        file: its name, anywhere below the package's usr/share/fonts.
        family: faces of one family draw near-duplicates.
        number: in a collection of fonts.
    """

    name: str
    package: str
    file: str
    family: str
    number: int = 0


FACES = (
    Face("Aoyagi Soseki", "fonts-aoyagi-soseki", "aoyagi-soseki.ttf", "aoyagi"),
    Face("AR PL UKai", "fonts-arphic-ukai", "ukai.ttc", "arphic-kai"),
    Face("AR PL UMing", "fonts-arphic-uming", "uming.ttc", "arphic-ming"),
    Face("BabelStone Han", "fonts-babelstone-han", "BabelStoneHan.ttf", "arphic-ming"),
    Face("cwTeX Hei", "fonts-cwtex-heib", "cwheib.ttf", "cwtex"),
    Face("cwTeX Yen", "fonts-cwtex-yen", "cwyen.ttf", "cwtex"),
    Face("Dejima Mincho", "fonts-dejima-mincho", "dejima-mincho-r227.ttf", "dejima"),
    Face("Hanazono Mincho", "fonts-hanazono", "HanaMinA.ttf", "hanazono"),
    Face("Ume Gothic", "fonts-horai-umefont", "ume-tgo4.ttf", "ume-gothic"),
    Face("Ume Mincho", "fonts-horai-umefont", "ume-tmo3.ttf", "ume-mincho"),
    Face("IPAex Gothic", "fonts-ipaexfont-gothic", "ipaexg.ttf", "ipaex-gothic"),
    Face("IPAex Mincho", "fonts-ipaexfont-mincho", "ipaexm.ttf", "book-mincho"),
    Face("Kiloji", "fonts-kiloji", "kiloji.ttf", "kiloji"),
    Face("Konatu", "fonts-konatu", "Konatu.ttf", "konatu"),
    Face("MigMix 2P", "fonts-migmix", "migmix-2p-regular.ttf", "mplus"),
    Face("BIZ UD Gothic", "fonts-morisawa-bizud-gothic", "BIZUDGothic-Regular.ttf", "bizud-gothic"),
    Face("BIZ UD Mincho", "fonts-morisawa-bizud-mincho", "BIZUDMincho-Regular.ttf", "book-mincho"),
    Face("Motoya L Cedar", "fonts-motoya-l-cedar", "MTLc3m.ttf", "motoya"),
    Face("Motoya L Maruberi", "fonts-motoya-l-maruberi", "MTLmr3m.ttf", "motoya"),
    Face("Reggae One", "fonts-reggae", "ReggaeOne-Regular.ttf", "reggae"),
    Face("Seto", "fonts-seto", "setofont.ttf", "seto"),
    Face("VL Gothic", "fonts-vlgothic", "VL-Gothic-Regular.ttf", "mplus"),
    Face("WenQuanYi Micro Hei", "fonts-wqy-microhei", "wqy-microhei.ttc", "wqy-microhei"),
    Face("WenQuanYi Zen Hei", "fonts-wqy-zenhei", "wqy-zenhei.ttc", "wqy-zenhei"),
    Face("Yusei Magic", "fonts-yusei-magic", "YuseiMagic-Regular.ttf", "yusei"),
)
"""25 faces of 24 packages, in 20 families."""

FAMILIES = len({face.family for face in FACES})
PACKAGES = tuple(dict.fromkeys(face.package for face in FACES))

UNSEEN = ("konatu", "dejima", "kiloji", "yusei", "reggae")
"""Families that are never trained on, one of each style: gothic, mincho, handwriting, marker pen and display. Those
with the most characters stay in training, and so do the brush faces, which are like no other."""


class Fonts(NamedTuple):
    """Faces that are on this machine.

    Attributes:
        faces: those found.
        paths: of their files.
        packages: that they are from.
        notes: what could not be had.
    """

    faces: Sequence[Face]
    paths: Sequence[Path]
    packages: Sequence[Package]
    notes: Sequence[str]


def fetch_fonts(folder: Path, packages: Iterable[str] = PACKAGES, least: int = LEAST) -> Fonts:
    """Download and unpack font packages, and find their faces. One that cannot be had is left out, with a note.

    Args:
        folder: of all packages.
        packages: names, of those in `PACKAGES`.
        least: an error if fewer can be had.
    """
    names = list(packages)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        raise ValueError(f"packages has {unknown[0]!r}, which has no face in the table of glyphs")
    had: dict[str, Package] = {}
    refused: list[str] = []
    for name in names:
        try:
            had[name] = debian_package(name, folder)
        except Unavailable as error:
            refused.append(str(error))
    if len(had) < least:
        raise Unavailable(
            f"glyphs needs at least {least} of its {len(names)} font packages, and {len(had)} can be had: {refused[0]}"
        )
    faces, paths, notes = [], [], []
    for face in FACES:
        if face.package in had:
            path = find_face(face, had[face.package].root)
            if path is None:
                notes.append(f"{face.name} is left out: {face.package} {had[face.package].version} has no {face.file}")
            else:
                faces.append(face)
                paths.append(path)
    notes += [f"left out: {reason}" for reason in refused]
    return Fonts(faces, paths, list(had.values()), notes)


def find_face(face: Face, root: Path) -> Path | None:
    """The file of a face in an unpacked package; None if it is not there.

    Args:
        face: to be found.
        root: of the package.
    """
    found = sorted((root / "usr" / "share" / "fonts").rglob(face.file))
    return found[0] if found else None
