"""Tar shards in the convention of webdataset: `name-000000.tar` with KEY.jpg and KEY.cls, KEY.json or KEY.txt.

Every shard is indexed once: the position of each image and its label. The index gives random access, on disks or by
byte ranges in any store of fsspec, so shards can be shuffled, divided over processes and resumed like other data. The
index is cached until a shard changes.
"""

import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from hetxl._files import parse_json, read_arrays, write_arrays
from hetxl_train.console import progress_bar
from hetxl_train.data.build_dataset import UNSPLIT, Part, Parts
from hetxl_train.data.cache import fingerprint_of, make_cache_directory
from hetxl_train.data.dataset import Shown
from hetxl_train.data.image_files import IMAGE_SUFFIXES, Encoded
from hetxl_train.data.labels import LabelBuilder, RawLabels
from hetxl_train.data.mapped_arrays import ChangedError, check_unchanged, stamp
from hetxl_train.data.remote import is_remote, open_address, read_remote
from hetxl_train.data.strings import Strings
from hetxl_train.data.tables import AUTO, LABELS, Columns, find_column

VERSION = "1"  # version of the index
THREADS = 16  # remote shards that are indexed at a time
BLOCK = 2**20  # bytes of them that are read at a time
TEXTS = ("names", "labels", "captions")
CAPTIONS = ("caption", "text", "title")
LABEL_MEMBERS = ("cls", "json", "txt")
"""What a label is read from: the first of these members that a sample has."""


class ShardIndex(NamedTuple):
    """The samples of a shard."""

    starts: np.ndarray  # [n] int64, the first byte of each image
    sizes: np.ndarray  # [n] int64, its bytes
    names: Strings  # of its members
    labels: Strings  # as JSON; empty for none
    captions: Strings  # empty for none
    without_image: int  # samples that were left out


class TarImages:
    """Images inside tar files, by where they begin."""

    def __init__(self, shards: Sequence[str], indices: Sequence[ShardIndex]) -> None:
        self.shards = list(shards)
        self.remote = any(map(is_remote, shards))
        self.stamps = [] if self.remote else [stamp(shard) for shard in shards]
        self.ends = np.cumsum([len(index.starts) for index in indices])
        self.starts = np.concatenate([index.starts for index in indices])
        self.sizes = np.concatenate([index.sizes for index in indices])
        self.names = [index.names for index in indices]
        self._files: dict[int, int] = {}  # open shards

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, indices: Sequence[int]) -> Sequence[Encoded]:
        """Return the content of some images."""
        shards = np.searchsorted(self.ends, indices, side="right").tolist()
        if self.remote:
            starts = self.starts[indices].tolist()
            ends = (self.starts[indices] + self.sizes[indices]).tolist()
            return read_remote([self.shards[shard] for shard in shards], starts, ends)
        return [self._read_local(shard, index) for shard, index in zip(shards, indices, strict=True)]

    def _read_local(self, shard: int, index: int) -> Encoded:
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self.shards[shard], os.O_RDONLY)
            check_unchanged(self.shards[shard], self.stamps[shard], self._files[shard])
            size = int(self.sizes[index])
            content = os.pread(self._files[shard], size, int(self.starts[index]))
        except ChangedError:
            raise
        except OSError as error:
            return error
        return content if len(content) == size else OSError("the shard was cut off")

    def name(self, index: int) -> str:
        """Return the shard and the member of an image."""
        shard = int(np.searchsorted(self.ends, index, side="right"))
        first = int(self.ends[shard - 1]) if shard else 0
        return f"{self.shards[shard]}/{self.names[shard][index - first]}"

    def show(self, index: int) -> Shown:
        """Return an image and its name."""
        content = self.read([index])[0]
        return Shown(text=self.name(index), encoded=content if isinstance(content, bytes) else None)


def is_shards(data: str) -> bool:
    """Whether data is an address of shards: a .tar file, with braces or `*` for many."""
    return data.lower().endswith((".tar", ".tar.gz", ".tgz"))


def expand(data: str) -> list[str]:
    """Return the addresses of shards: braces are numbers or words, `*` and `?` are looked up.

    >>> expand("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    addresses = list(_braces(data))
    if any(letter in data for letter in "*?"):
        return [match for address in addresses for match in _glob(address)]
    return addresses


def _braces(text: str) -> Iterator[str]:
    before, brace, rest = text.partition("{")
    inside, closing_brace, after = rest.partition("}")
    if not brace or not closing_brace:
        yield text
        return
    first, dots, last = inside.partition("..")
    if dots and first.isdecimal() and last.isdecimal():
        words = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        words = inside.split(",")
    for word in words:
        for end in _braces(after):
            yield before + word + end


def _glob(address: str) -> list[str]:
    fs, path = open_address(address)
    matches = sorted(fs.glob(path))
    if not matches:
        raise FileNotFoundError(f"{address} matches no file")
    return [fs.unstrip_protocol(match) if is_remote(address) else match for match in matches]


def read_shards(
    addresses: Sequence[str], columns: Columns = AUTO, *, cache: Path | None = None, labelled: bool = True,
    splits: bool = True,
) -> Parts:  # fmt: skip
    """Read the images of shards and, if they have them, their labels; `splits` has no effect."""
    indices = index_shards(addresses, columns, cache)
    images = TarImages(addresses, indices)
    if not len(images):
        raise ValueError(f"{_source(addresses)} has no images; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    labels = None
    if labelled or all(label for index in indices for label in index.labels):
        labels = _labels(addresses, indices)
    left_out = sum(index.without_image for index in indices)
    notes = [f"left out samples of shards without an image: {left_out:,}"] if left_out else []
    return Parts("image", {UNSPLIT: Part(images, labels)}, None, notes)


def _source(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} … {PurePosixPath(addresses[-1]).name}"


def _labels(addresses: Sequence[str], indices: Sequence[ShardIndex]) -> RawLabels:
    builder = LabelBuilder(_source(addresses))
    for address, index in zip(addresses, indices, strict=True):
        for number, label in enumerate(index.labels):
            if not label:
                raise ValueError(
                    f"{address}/{index.names[number]} has no label: looked for KEY.cls, a label in KEY.json (another "
                    "key with --label-column) and KEY.txt"
                )
            builder.add(json.loads(label))
    return builder.build()


def index_shards(addresses: Sequence[str], columns: Columns = AUTO, cache: Path | None = None) -> list[ShardIndex]:
    """Return the index of each shard, from the cache or by reading it."""
    directory = make_cache_directory(cache) / "shards"
    directory.mkdir(exist_ok=True)
    # Remote shards are read in parallel; indexing local shards is limited by Python, which runs one thread at a time.
    threads = min(len(addresses), THREADS) if any(map(is_remote, addresses)) else 1
    read, indices = partial(_cached_index, label=columns.label, directory=directory), []
    with ThreadPoolExecutor(threads) as pool, progress_bar("Indexing shards", len(addresses)) as advance:
        for index in pool.map(read, addresses):
            indices.append(index)
            advance(1)
    return indices


def _cached_index(address: str, label: str | None, directory: Path) -> ShardIndex:
    if address.lower().endswith((".gz", ".tgz")):
        raise ValueError(f"{address} is compressed, so that its images cannot be read in any order; unpack it to .tar")
    fs, path = open_address(address)
    if not fs.isfile(path):
        raise FileNotFoundError(f"{address} is not a file")
    target = directory / f"{PurePosixPath(address).stem[:40]}-{fingerprint_of([address], VERSION, label or '')}.npz"
    with suppress(ValueError, OSError, KeyError):  # missing or damaged: written again
        file = read_arrays(target)
        names, labels, captions = (Strings.of(file[name], file[f"{name}_ends"]) for name in TEXTS)
        return ShardIndex(file["starts"], file["sizes"], names, labels, captions, int(file["without_image"]))
    index = _index(address, label)
    arrays: dict[str, Any] = {"starts": index.starts, "sizes": index.sizes, "without_image": index.without_image}
    for name in TEXTS:
        strings: Strings = getattr(index, name)
        arrays |= {name: strings.block, f"{name}_ends": strings.ends}
    write_arrays(target, arrays)
    return index


def _index(address: str, label_column: str | None) -> ShardIndex:
    """Read a shard once."""
    starts, sizes, names, labels, captions, left_out = [], [], [], [], [], 0
    for sample in _samples(address):
        if sample.image is None:
            left_out += 1
            continue
        starts.append(sample.image.offset_data)
        sizes.append(sample.image.size)
        names.append(sample.image.name)
        label = _label(sample.texts, label_column, address, sample.key)
        labels.append("" if label is None else json.dumps(label))
        captions.append(_caption(sample.texts))
    places = (np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64))
    return ShardIndex(*places, Strings(names), Strings(labels), Strings(captions), left_out)


class _Sample(NamedTuple):
    key: str
    image: tarfile.TarInfo | None
    texts: dict[str, str]  # the content of the other members that are read, by extension


def _samples(address: str) -> Iterator[_Sample]:
    """Yield the samples of a shard: neighbours whose names are the same up to the first dot."""
    sample = _Sample("", None, {})
    for member, content in _members(address):
        folder, _, file = member.name.rpartition("/")
        stem, _, extension = file.partition(".")
        key, extension = f"{folder}/{stem}", extension.lower()
        if key != sample.key:
            if sample.key:
                yield sample
            sample = _Sample(key, None, {})
        if os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES:
            sample = sample if sample.image is not None else sample._replace(image=member)
        elif extension in LABEL_MEMBERS:
            sample.texts[extension] = content()
    if sample.key:
        yield sample


def _members(address: str) -> Iterator[tuple[tarfile.TarInfo, Callable[[], str]]]:
    """Yield the files of a shard, and a function that reads one as text."""
    fs, path = open_address(address)
    # A store is read from front to back, a disk by jumps over the images.
    with fs.open(path, "rb") as stream:
        try:
            mode = "r|" if is_remote(address) else "r:"
            with tarfile.open(fileobj=stream, mode=mode, bufsize=BLOCK) as archive:
                for member in archive:
                    if member.isfile() and not os.path.basename(member.name).startswith("."):
                        yield member, lambda member=member: _read_text(archive, member, address)
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{address} is not a readable tar file ({error}): it was cut off or damaged") from error


def _read_text(archive: tarfile.TarFile, member: tarfile.TarInfo, address: str) -> str:
    stream = archive.extractfile(member)
    assert stream is not None
    with closing(stream):
        try:
            return stream.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{address}/{member.name} is not UTF-8 text; save it as UTF-8") from None
        except tarfile.TarError as error:
            raise ValueError(f"{address}/{member.name} cannot be read ({error}): the shard was cut off") from None


def _label(texts: dict[str, str], column: str | None, address: str, key: str) -> Any:
    """Return the label of a sample: a name, an id or a list of them; None if it has none."""
    if "cls" in texts and column is None:
        return texts["cls"]
    values = _json(texts, address, key)
    name = find_column(values, LABELS) if column is None else column
    if name in values:
        return values[name]
    return None if column is not None else texts.get("txt")


def _json(texts: dict[str, str], address: str, key: str) -> dict[str, Any]:
    values = parse_json(texts.get("json", "{}"), f"{address}{key}.json")
    return values if isinstance(values, dict) else {"label": values}


def _caption(texts: dict[str, str]) -> str:
    """Return the caption of a sample, empty if it has none."""
    if "txt" in texts:
        return " ".join(texts["txt"].split())
    values = _json(texts, "", "")
    name = find_column(values, CAPTIONS)
    return " ".join(str(values[name]).split()) if name is not None else ""
