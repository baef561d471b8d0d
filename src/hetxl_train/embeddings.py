"""Vectors of rows by a fixed network, computed once and then read from a memory-mapped file.

The processes divide the work into pieces. Each piece is a separate file until all are joined, so that a killed command
resumes. Pieces and batches depend only on the rows, so the file is the same byte by byte for any number of processes
and interruptions.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl._files import read_arrays, read_json, sha256_of, whole_file, write_array, write_json
from hetxl_train.console import Console
from hetxl_train.data.dataset import Fetched, Unreadable, UnreadableExamples
from hetxl_train.data.fingerprint import changes
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays
from hetxl_train.distributed import World

BATCH = 64
"""Number of rows in a batch."""
PIECE = 16 * BATCH
"""Number of rows in a piece, the most that an interruption loses per process."""

Compute = Callable[[np.ndarray, UnreadableExamples], Iterator[tuple[Tensor, np.ndarray]]]
"""A function of rows [b] and of the counter of unreadable rows that yields vectors [m, D] on the CPU and their rows."""


def stored_vectors(
    path: Path, compute: Compute, rows: int, origin: dict[str, Any], console: Console, world: World
) -> tuple[MappedArray, np.ndarray]:  # fmt: skip
    """Return the memory-mapped vectors [n, D] of the readable rows, and these rows [n].

        torch.cat([vectors for vectors, _ in compute(np.arange(rows), UnreadableExamples())])

    Stored vectors are reused if they are complete and have the same origin. All processes of `world` call this.

    Args:
        path: NAME.npy, in the same directory as NAME_rows.npy and NAME.json.
        origin: everything that the vectors depend on, for JSON: "data" from `split_fingerprint`, and other entries.
    """
    if not world.on_main(partial(is_current, path, origin)):
        _compute(path, compute, rows, origin, console, world)
    world.wait()
    return open_arrays(path)[""], np.load(rows_path(path))


def rows_path(path: Path) -> Path:
    """Return the file with the rows of a file of vectors."""
    return path.with_name(f"{path.stem}_rows.npy")


def is_current(path: Path, origin: dict[str, Any]) -> bool:
    """Return whether stored vectors are complete and have this origin."""
    try:
        stored = read_json(path.with_suffix(".json"), dict)
        same = all(stored[name] == value for name, value in origin.items() if name != "data")
        unchanged = changes({"": stored["data"]}, {"": origin["data"]}, ("",)) is None
        return same and unchanged and all(stored[name] == value for name, value in _checksums(path).items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _checksums(path: Path) -> dict[str, str]:
    return {"features": sha256_of(path), "rows": sha256_of(rows_path(path))}


def _compute(
    path: Path, compute: Compute, rows: int, origin: dict[str, Any], console: Console, world: World
) -> None:  # fmt: skip
    """Compute the missing pieces, join them, and write the origin."""
    # Pieces of another origin have other names and are removed with the directory.
    key = hashlib.blake2b(json.dumps(origin, sort_keys=True).encode(), digest_size=8).hexdigest()
    directory = path.with_name(f"{path.stem}-pieces")
    numbers = range(0, rows, PIECE)
    files = [directory / f"{key}-{start:012d}.npz" for start in numbers]

    def work() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        rank = "" if world.is_main else f"-{world.rank}"
        unreadable = UnreadableExamples(path=path.with_name(f"{path.stem}_broken{rank}.txt"))
        own = world.share(files)
        with console.bar(f"vectors of {path.stem}", PIECE * len(own)) as bar:
            for number, file in enumerate(own, 1):
                if _piece(file) is None:
                    start = numbers[files.index(file)]
                    _write_piece(file, compute, np.arange(start, min(start + PIECE, rows)), unreadable)
                bar.to(PIECE * number)

    try:
        world.gather(work)
    finally:
        if world.is_main and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
    world.on_main(partial(_join, path, files, rows, origin))


def _write_piece(file: Path, compute: Compute, rows: np.ndarray, unreadable: UnreadableExamples) -> None:
    before, parts = len(unreadable.examples), [*compute(rows, unreadable)]
    broken = json.dumps([list(example) for example in unreadable.examples[before:]])
    vectors = np.concatenate([part.numpy() for part, _ in parts]) if parts else np.empty((0, 0), np.float32)
    read = np.concatenate([np.arange(0), *(some for _, some in parts)])
    with whole_file(file) as temporary, open(temporary, "wb") as out:
        np.savez(out, vectors=vectors.astype("<f4", copy=False), rows=read, broken=np.array(broken))


def _piece(file: Path) -> dict[str, np.ndarray] | None:
    """Return the content of a piece; None if it is missing or damaged."""
    try:
        return read_arrays(file, ("vectors", "rows", "broken"))
    except (OSError, ValueError):
        return None


def _join(path: Path, files: list[Path], rows: int, origin: dict[str, Any]) -> None:
    """Write the file of all pieces and remove them."""
    unreadable, read, width = UnreadableExamples(path=path.with_name(f"{path.stem}_broken.txt")), [np.arange(0)], 0
    for file in files:
        piece = read_arrays(file)
        width = max(width, piece["vectors"].shape[1])
        read.append(piece["rows"])
        broken = [Unreadable(*example) for example in json.loads(str(piece["broken"]))]
        unreadable.add(Fetched(torch.empty(0), piece["rows"], broken))
    done = np.concatenate(read)
    if rows and not len(done):
        first = unreadable.examples[0]
        shutil.rmtree(files[0].parent)
        raise ValueError(f"none of the {rows} {path.stem} examples could be read: {first.path}: {first.reason}")
    # Written sequentially: a full disk raises an error in a write, but kills a process that writes to a mapping.
    with whole_file(path) as temporary, open(temporary, "wb") as out:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(done), width)}
        np.lib.format.write_array_header_1_0(out, header)
        for file in files:
            out.write(read_arrays(file, ("vectors",))["vectors"].tobytes())
    write_array(rows_path(path), done)
    write_json(path.with_suffix(".json"), origin | _checksums(path))
    if files:
        shutil.rmtree(files[0].parent)
