"""Locked towers whose vectors are computed once: pairs with the vectors of their images, and tables with the vectors of
texts. Only the layer after them is trained."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl_train.backbones import Backbone
from hetxl_train.console import Console
from hetxl_train.data.dataset import Fetched, InputSpec, Split
from hetxl_train.data.fingerprint import split_fingerprint
from hetxl_train.data.labels import Labels
from hetxl_train.data.pairs import NumberedSplit, Pairs, PairSplit, Texts
from hetxl_train.distributed import World
from hetxl_train.embeddings import BATCH
from hetxl_train.loaders import blocks
from hetxl_train.model import FeatureFile, stored_features, weights_checksum
from hetxl_train.towers import TextReader, TextTable, TokenTable


class TableSplit(Split):
    """The texts of a table as inputs of a tower."""

    def __init__(self, table: TextTable):
        self.table, self.labels = table, Labels(np.arange(len(table.read)))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Return rows [b] of the table; seeds have no effect."""
        inputs: Any = self.table.read.take(rows)
        if isinstance(inputs, np.ndarray):
            inputs = torch.from_numpy(inputs)
        return Fetched(inputs, np.asarray(rows, dtype=np.int64))


class LockedEncoder:
    """An `Encoder` of a `TextReader` that computes the vectors of texts with a locked network."""

    def __init__(self, network: Backbone, tokenize: Any):
        self.network, self.tokenize, self.size = network, tokenize, network.out_features

    @torch.no_grad()
    def encode(self, texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
        """Return vectors [n, D′] float32."""
        table = TokenTable(texts, self.tokenize)
        device = next(self.network.parameters()).device
        parts = [self.network(table.take(rows).to(device)).float() for rows in blocks(np.arange(len(texts)), BATCH)]
        return torch.cat(parts).cpu().numpy() if parts else np.empty((0, self.size), dtype=np.float32)


def map_images(
    pairs: Pairs, network: Backbone, directory: Path, workers: int, console: Console, world: World
) -> Pairs:  # fmt: skip
    """Return pairs with the vectors of their images, stored in NAME-images.npy, without unreadable images."""
    checksum, splits = weights_checksum(network), {}
    for name, split in pairs.splits.items():
        origin = {"data": split_fingerprint(split), "network": checksum}
        path = directory / f"{name}-images.npy"
        vectors, rows = stored_features(path, network, split.images, origin, workers, console, world)
        splits[name] = _rows_of(split, FeatureFile(split.images, vectors, rows), rows)
    return replace(pairs, image=InputSpec("features", (network.out_features,)), splits=splits)


def _rows_of(split: PairSplit, images: Split, rows: np.ndarray) -> PairSplit:
    """Return the pairs of some rows, with the given images."""
    categories, swaps = split.categories, split.swaps
    if swaps is not None and len(rows) < len(split):
        places = np.full(len(split), -1, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        readable = places[swaps.rows] >= 0
        images_of, texts_of = (places[own[readable]] for own in (swaps.rows, swaps.sources))
        swaps = replace(swaps, rows=images_of, sources=texts_of)
    return PairSplit(
        NumberedSplit(images), split.texts, split.sources[rows], None if categories is None else categories[rows], swaps
    )


def map_texts(
    reader: TextReader, splits: Sequence[PairSplit], templates: Sequence[str], network: Backbone, directory: Path,
    console: Console, world: World,
) -> TextReader:  # fmt: skip
    """Return a reader of the vectors of texts; those of the splits, with and without templates, are in a directory."""
    mapped = TextReader(reader.tower, reader.buckets, reader.cache, tokenize=reader.tokenize)
    mapped.encoder, checksum = LockedEncoder(network, reader.tokenize), weights_checksum(network)
    mapped.key = (mapped.encoder,)
    distinct = {id(split.texts): split.texts for split in splits}.values()
    for number, texts in enumerate(distinct):
        for form, prompts in enumerate(dict.fromkeys([tuple(templates), ("{}",)])):
            table = TableSplit(reader.once(texts, prompts))
            content = "\0".join([*prompts, *(texts.captions or ())]).encode("utf-8", "surrogatepass")
            origin = {"data": {"rows": len(table), "all_labels": zlib.crc32(content)}, "network": checksum}
            path = directory / f"texts-{number}-{form}.npy"
            vectors, _ = stored_features(path, network, table, origin, 0, console, world)
            mapped.own[id(texts), prompts] = TextTable(Texts(vectors=vectors), len(texts))
    return mapped
