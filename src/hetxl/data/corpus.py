"""Python source as one stream of tokens: which files, and how they are cut."""

import hashlib
import os
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetxl.data.dataset import Broken
from hetxl.data.progress import progress_bar

NEWLINE, INDENT, DEDENT = "<newline>", "<indent>", "<dedent>"
"""Names of the tokens whose text is white space. No token of Python's looks like them."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-")
"""What the build or the administrator of a machine writes into the standard library: it differs between machines."""

_NAMED = {tokenize.NEWLINE: NEWLINE, tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT}
_DROPPED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER})


@dataclass(frozen=True)
class Corpus:
    """The tokens of many files, one file after the other.

    Attributes:
        ids: [n] int32, which of `texts` each token is.
        texts: the distinct tokens, in the order in which they first appear.
        files: paths of the files with "/", relative to their folder.
        offsets: [files + 1] int64, file i has ids[offsets[i] : offsets[i + 1]].
        broken: files that could not be read as Python, which are not among `files`.
    """

    ids: np.ndarray
    texts: Sequence[str]
    files: Sequence[str]
    offsets: np.ndarray
    broken: Sequence[Broken] = ()


def source_files(folder: Path) -> list[str]:
    """Paths of the Python files of a folder, relative to it and with "/", sorted: the same on every machine.

    Tests, installed packages and what differs between builds of the same Python are left out.

    Args:
        folder: where to look, at any depth.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"source must be a folder of Python files, found no folder {folder}")
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and _kept(name)]
        relative = Path(parent).relative_to(folder)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py") and _kept(name)]
    return sorted(found)


def fingerprint(folder: Path, files: Sequence[str]) -> str:
    """A short hash of the paths and contents of files: it changes when the folder's code does.

    Args:
        folder: that the paths are relative to.
        files: relative paths.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        try:
            content = (folder / file).read_bytes()
        except OSError:  # a link to nowhere; reading it will say so
            content = b""
        # With its length, so that no text can move from one file to the next unseen.
        digest.update(f"{file}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def split_of(file: str) -> str:
    """The split of a file, by a hash of its relative path: 90 % "train", 5 % "validation", 5 % "test".

    Args:
        file: relative path with "/".
    """
    digest = hashlib.blake2b(file.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return "train" if share < 0.9 else "validation" if share < 0.95 else "test"


def file_tokens(path: Path) -> Iterator[str]:
    """The tokens of a Python file: their texts, and names for ends of lines and changes of indentation.

    Comments and blank lines are dropped. Raises SyntaxError, UnicodeDecodeError or tokenize.TokenError for what is not
    Python.

    Args:
        path: of the file.
    """
    with tokenize.open(path) as lines:
        for kind, text, start, _, _ in tokenize.generate_tokens(lines.readline):
            if kind in _DROPPED:
                continue
            if kind == tokenize.ERRORTOKEN:  # before Python 3.12; later ones raise by themselves
                raise SyntaxError(f"unexpected {text!r} in line {start[0]}")
            yield _NAMED.get(kind, text)


def read_corpus(folder: Path, files: Sequence[str]) -> Corpus:
    """Tokenise files, with a progress bar on a terminal.

    Args:
        folder: that the paths are relative to.
        files: relative paths, as from `source_files`.
    """
    known: dict[str, int] = {}
    streams, kept, broken = [], [], []
    with warnings.catch_warnings(), progress_bar("Reading Python source", len(files)) as advance:
        warnings.simplefilter("ignore")  # newer Pythons warn of doubtful literals in what they tokenise
        for file in files:
            advance(1)
            try:
                # A list first: a file that breaks half-way must leave no tokens behind.
                texts = list(file_tokens(folder / file))
            except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError) as error:
                broken.append(Broken(file, str(error)))
                continue
            streams.append(np.fromiter((known.setdefault(text, len(known)) for text in texts), np.int32, len(texts)))
            kept.append(file)
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
    ids = np.concatenate(streams) if streams else np.empty(0, dtype=np.int32)
    return Corpus(ids, list(known), kept, offsets, broken)


def _kept(name: str) -> bool:
    return not name.startswith(SKIPPED_PREFIXES)
