"""`hetxl embed`: compute the embeddings of a dataset with a trained network, in the formats that runs are trained on.

| data | content of the directory | next command |
| --- | --- | --- |
| labelled | `SPLIT.npy`, `SPLIT_labels.npy`, `class_names.txt` | `hetxl train DIRECTORY` |
| without labels | `features.npy` | `hetxl predict RUN DIRECTORY/features.npy` |
| pairs | `images.npy`, `texts.npy` or `captions.txt`, `split.npy` | `hetxl contrastive train DIRECTORY` |

For each file of vectors, NAME_rows.npy lists the rows that could be read, and NAME.json describes their origin. Several
processes divide the rows, and a killed command resumes with the same result byte by byte.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl._files import write_array, write_bytes
from hetxl_train.backbones import Backbone
from hetxl_train.config import TowerOptions
from hetxl_train.console import Console
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data.dataset import SPLITS, Fetched, InputSpec, Split
from hetxl_train.data.fingerprint import split_fingerprint
from hetxl_train.data.labels import Labels
from hetxl_train.data.open import BUILT_IN, open_dataset, open_inputs, tokenizer_of
from hetxl_train.data.pairs import Texts, open_pairs
from hetxl_train.data.read import read_data
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.distributed import World, world
from hetxl_train.mapped_towers import TableSplit
from hetxl_train.model import stored_features, weights_checksum
from hetxl_train.owner import owned
from hetxl_train.runs import is_contrastive, load_run
from hetxl_train.tower_networks import PUBLISHED, image_transform, is_network, tokenizer_for, tower_network
from hetxl_train.towers import TextReader


class Networks(NamedTuple):
    """The networks for images and texts that a model has."""

    transform: ImageTransform | None  # of images
    tokenize: Any  # of texts; None if the model takes none
    network: Callable[[str, InputSpec], Backbone]  # for a side, "image" or "text", and inputs of a kind
    texts: TextReader | None = None  # of a run of two towers


class Joined(Split):
    """The concatenation of several splits."""

    def __init__(self, splits: Sequence[Split]):
        self.splits, self.workers = splits, any(split.workers for split in splits)
        self.starts = np.cumsum([0, *map(len, splits)])
        self.labels = Labels(np.arange(self.starts[-1]))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read ascending rows [b]; seeds have no effect."""
        parts = []
        for split, start, stop in zip(self.splits, self.starts, self.starts[1:], strict=False):
            inside = rows[(rows >= start) & (rows < stop)]
            if len(inside):
                fetched = split.fetch(inside - start)
                parts.append(fetched._replace(rows=fetched.rows + start))
        inputs, read, unreadable = zip(*parts, strict=True)
        return Fetched(torch.cat(inputs), np.concatenate(read), [example for some in unreadable for example in some])


def embed(
    model: str, data: str, out: Path, *, pairs: bool = False, text: str | None = None, labels: bool = True,
    weights: str = PUBLISHED, image_size: int | None = None, text_length: int = 128, workers: int = 2,
    device: str = "auto", console: Console | None = None,
) -> Path:  # fmt: skip
    """Write the vectors of data to a directory, and return the directory.

    Args:
        model: a run directory, or a network of `tower_networks`.
        pairs: read the data as pairs of images and texts.
        text: network for the texts; None for that of the run, or to copy the texts.
        labels: whether the data has labels.
        weights: "published", "random", or a .safetensors file, as for towers.
    """
    console = console or Console()
    with world(device) as processes:
        if not processes.is_main:
            console = Console(quiet=True)
            processes.wait()
        with owned(out) if processes.is_main else contextlib.nullcontext():
            if processes.is_main:
                processes.wait()
            networks = _networks(model, weights, image_size, text_length)
            write = _Writer(out, workers, console, processes, model)
            if pairs:
                counts = write.pairs(networks, data, _text_networks(networks, text, text_length))
            else:
                counts = write.rows(networks, data, labels)
            processes.wait()
    console.say(f"{', '.join(f'{count:,} {name}' for name, count in counts.items())} vectors in {out}")
    return out


class _Writer:
    """Write the files of a directory; all processes take part."""

    def __init__(self, out: Path, workers: int, console: Console, processes: World, model: str):
        self.out, self.workers, self.console, self.world, self.model = out, workers, console, processes, model

    def vectors(self, name: str, network: Backbone, split: Split, data: dict[str, Any]) -> np.ndarray:
        """Write NAME.npy and return its rows."""
        network = Backbone(network, network.out_features, frozen=True).to(self.world.device)
        origin = {"data": data, "model": self.model, "network": weights_checksum(network)}
        path = self.out / f"{name}.npy"
        return stored_features(path, network, split, origin, self.workers, self.console, self.world)[1]

    def main(self, write: Callable[[], Any]) -> None:
        """Write in the main process."""
        self.world.on_main(write)

    def rows(self, networks: Networks, data: str, labels: bool) -> dict[str, int]:
        """Write the vectors and labels of a dataset."""
        if not labels:
            kind = read_data(data, labelled=False, splits=False, known=BUILT_IN).kind
            spec, tokenizer = self._spec(networks, kind), networks.tokenize
            split = open_inputs(data, spec, tokenizer=tokenizer)
            network = networks.network("text" if kind == "text" else "image", spec)
            return {"features": len(self.vectors("features", network, split, split_fingerprint(split)))}
        dataset = open_dataset(data, transform=networks.transform, tokenizer=networks.tokenize)
        network = networks.network("text" if dataset.input.kind == "text" else "image", dataset.input)
        counts = {}
        for name in SPLITS:
            if name in dataset.splits:
                split = dataset.splits[name]
                read = self.vectors(name, network, split, split_fingerprint(split))
                own, counts[name] = split.labels.subset(read), len(read)
                self.main(lambda name=name, own=own: _write_labels(self.out, name, own))
        names = "".join(f"{name}\n" for name in dataset.class_names)
        self.main(lambda: write_bytes(self.out / "class_names.txt", names.encode()))
        return counts

    def _spec(self, networks: Networks, kind: str) -> InputSpec:
        if kind == "text" and networks.tokenize is not None:
            return networks.tokenize.input
        if kind == "image" and networks.transform is not None:
            return InputSpec("image", networks.transform.shape, image=networks.transform.preprocessing)
        raise ValueError(f"{self.model} does not take {kind}; use another model, or other data")

    def pairs(self, networks: Networks, data: str, texts: Networks | None) -> dict[str, int]:
        """Write the vectors of images of pairs, and their texts or the vectors of the texts."""
        pairs = open_pairs(data, transform=networks.transform)
        splits = list(pairs.splits.values())
        joined = Joined([split.images for split in splits])
        fingerprints = [split_fingerprint(split) for split in splits]
        about = {
            "rows": len(joined),
            "all_labels": [part["all_labels"] for part in fingerprints],
            "input_sums": [number for part in fingerprints for number in part["input_sums"]],
        }
        network = networks.network("image", pairs.image)
        read, counts = self.vectors("images", network, joined, about), {}
        counts["image"] = len(read)
        names = np.repeat(list(pairs.splits), list(map(len, splits)))[read]
        self.main(lambda: write_array(self.out / "split.npy", names))
        captions = [split.captions() for split in splits]
        known = None if None in captions else [caption for own in captions for caption in own or ()]
        if known is not None:
            lines = "".join(f"{' '.join(known[row].split())}\n" for row in read)
            self.main(lambda: write_bytes(self.out / "captions.txt", lines.encode("utf-8", "surrogatepass")))
        if texts is not None:
            reader = texts.texts or TextReader(tokenize=texts.tokenize)
            vectors = None
            if pairs.text is not None:
                vectors = np.concatenate([split.texts.take(split.sources) for split in splits])[read]
            chosen = None if known is None else [known[row] for row in read]
            table = TableSplit(reader.once(Texts(captions=chosen, vectors=vectors)))
            network = texts.network("text", reader.spec(pairs) or InputSpec("text", (1,)))
            counts["text"] = len(self.vectors("texts", network, table, about))
        return counts


def _write_labels(out: Path, name: str, labels: Labels) -> None:
    write_array(out / f"{name}_labels.npy", labels.ids)
    if labels.offsets is not None:
        write_array(out / f"{name}_label_offsets.npy", labels.offsets)


def _networks(model: str, weights: str, image_size: int | None, length: int) -> Networks:
    """Return the networks of a model."""
    if is_network(model) and not model.startswith("run:"):

        def build(side: str, spec: InputSpec) -> Backbone:
            values: dict[str, Any] = {side: model, f"{side}_lock": "locked", f"{side}_weights": weights}
            return tower_network(TowerOptions(**values), side, spec)

        library = model.partition(":")[0]
        transform = image_transform(model, image_size)
        return Networks(transform, None if library == "timm" else _Late(model, length), build)
    path = Path(model.removeprefix("run:"))
    if not is_contrastive(path):
        trained = load_run(path)
        transform = trained.spec.transform if trained.spec.kind == "image" else None
        return Networks(transform, tokenizer_of(trained.run.config), lambda side, spec: trained.model.backbone)
    towers = load_contrastive_run(path)
    config, image = towers.run.config, towers.specs.image
    reader = TextReader.of(config)
    sides = {side: Backbone(getattr(towers.model, side), config.features, frozen=True) for side in ("image", "text")}
    transform = image.transform if image.kind == "image" else None
    return Networks(transform, reader.tokenize, lambda side, spec: sides[side], reader)


class _Late:
    """A tokenizer that is loaded on first use, because many models have none."""

    def __init__(self, model: str, length: int):
        self.model, self.length, self.loaded = model, length, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer(), name)

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        return self._tokenizer()(texts)

    def _tokenizer(self) -> Any:
        self.loaded = self.loaded or tokenizer_for(self.model, self.length)
        return self.loaded


def _text_networks(networks: Networks, text: str | None, length: int) -> Networks | None:
    """Return the network for the texts of pairs; None to copy the texts."""
    if text is not None:
        return _networks(text, PUBLISHED, None, length)
    return networks if networks.texts is not None else None
