"""A corpus on disk, so that source is tokenised once. A cache is never trusted and never needed: what cannot be read is
made anew, and what cannot be written is done without."""

import io
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from hetxl.data.corpus import Corpus, fingerprint, read_corpus, source_files
from hetxl.data.dataset import Broken

FORMAT = 1
"""Part of the name of a cache file; to be raised when tokens are cut or stored in another way."""


def cache_folder(cache: Path | None = None) -> Path | None:
    """Where caches are kept: `cache`, or the environment's HETXL_CACHE, or ~/.cache/hetxl.

    Args:
        cache: an own choice.

    Returns:
        The folder, which need not exist; None on a machine where the user has no home.
    """
    try:
        return Path(cache or os.environ.get("HETXL_CACHE") or "~/.cache/hetxl").expanduser()
    except RuntimeError:
        return None


def cached_corpus(folder: Path, cache: Path | None) -> Corpus:
    """The tokens of the Python files of a folder, from the cache where they are in it.

    Args:
        folder: of the source.
        cache: folder of caches, made if it is not there; None for none.
    """
    files = source_files(folder)
    if cache is None:
        return read_corpus(folder, files)
    # Another Python may cut the same source in other tokens (f-strings since 3.12).
    python = f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"
    path = cache / f"pycode-{FORMAT}-{python}-{fingerprint(folder, files)}.npz"
    corpus = load_corpus(path)
    if corpus is None:
        corpus = read_corpus(folder, files)
        save_corpus(corpus, path)
    return corpus


def load_corpus(path: Path) -> Corpus | None:
    """Read what `save_corpus` wrote; None if it is not there or damaged.

    Args:
        path: of the cache file.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            ids, offsets = arrays["ids"], arrays["offsets"]
            rest = json.loads(arrays["rest"].tobytes())
        return Corpus(ids, rest["texts"], rest["files"], offsets, [Broken(*entry) for entry in rest["broken"]])
    except Exception:  # zipfile, zlib, numpy and json each raise their own for damaged bytes; checksums find the rest
        return None


def save_corpus(corpus: Corpus, path: Path) -> bool:
    """Write a corpus, all of it or nothing; its folder is made if need be.

    Args:
        corpus: to be written.
        path: of the cache file.

    Returns:
        Whether it was written: a full or read-only disk is no error.
    """
    rest = {
        "texts": list(corpus.texts),
        "files": list(corpus.files),
        "broken": [list(entry) for entry in corpus.broken],
    }
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name until it is whole: readers and writers may run at the same time.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
            temporary = Path(file.name)
            packed = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
            np.savez_compressed(file, ids=corpus.ids, offsets=corpus.offsets, rest=packed)
        os.replace(temporary, path)
    except OSError:
        return False
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # there only if something went wrong, an interrupt included
    return True
