"""Next-token prediction on Python source, a benchmark with thousands of classes that is available on every machine.

The classes are tokens and the inputs are the preceding tokens. Labels are ambiguous: many names can follow `self.`.
"""

import hashlib
import io
import json
import keyword
import os
import platform
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hetxl._checks import integer_at_least
from hetxl._files import parse_json, read_arrays, write_arrays
from hetxl_train.console import progress_bar
from hetxl_train.data.cache import cache_directory
from hetxl_train.data.dataset import SPLITS, Dataset, Unreadable
from hetxl_train.data.tokens import Corpus, split_of, token_splits

NEWLINE, INDENT, DEDENT = "<newline>", "<indent>", "<dedent>"
"""Names of whitespace tokens, which are not valid Python tokens."""

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-")
"""Files of the standard library that differ between machines, because the build or the administrator writes them."""

FORMAT = 1  # part of the name of a cache file; to be raised when tokens are cut or stored in another way
_NAMED = {tokenize.NEWLINE: NEWLINE, tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT}
_DROPPED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER})
_TIGHT_BEFORE = frozenset(")]}.,:;")
_TIGHT_AFTER = frozenset("([{.~@")
_PREFIXES = frozenset({"*", "**", "+", "-"})
_WORDS_BEFORE_VALUES = frozenset(keyword.kwlist) - {"None", "True", "False"}


def load_pycode(
    *,
    classes: int = 8192,
    context: int = 16,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
    source: Path | None = None,
) -> Dataset:
    """Load next-token prediction on the source of Python's standard library, split by file.

    The classes are the most frequent tokens of the training files, the most frequent first. Any other token is
    `<other>` in the context, and never a target: positions before it are not examples. The same Python gives the same
    data on every machine.

    Args:
        classes: K, at most.
        context: C, the number of tokens before the target that are the input.
        limit: keep at most this many training rows, drawn at random; None for all.
        cache: directory for the tokens, so that later calls are quick; by default $HETXL_CACHE, or ~/.cache/hetxl.
        source: another directory of Python files; by default the running Python's standard library.
    """
    integer_at_least("classes", classes, 2)
    integer_at_least("context", context, 1)
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    directory = Path(sysconfig.get_path("stdlib") if source is None else source)
    corpus = cached_corpus(directory, cache_directory(cache))
    file_splits = np.array([SPLITS.index(split_of(file)) for file in corpus.files], dtype=np.int64)  # [files]
    tokens = token_splits(corpus, file_splits, classes=classes, context=context, limit=limit, seed=seed, text=code_text)
    for name, split in tokens.splits.items():
        if not len(split):
            raise ValueError(
                f"source must have code for every split, found none for {name!r} in the {len(file_splits)} Python "
                f"files of {directory}, which are split by their names; use a directory with more files"
            )
    counts = np.bincount(file_splits, minlength=len(SPLITS))
    by_split = ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))
    origin = f"the standard library of Python {platform.python_version()}" if source is None else f"{source}"
    distinct = len(tokens.classes)
    notes = [
        f"source: {origin}; split by file: {by_split}",
        f"{tokens.known:.1%} of the tokens are among the {distinct:,} classes; the others are not targets",
    ]
    if distinct < classes:
        notes.append(f"{classes:,} classes were requested; the training files have {distinct:,} distinct tokens")
    if corpus.unreadable:
        first = corpus.unreadable[0]
        files = "1 file is" if len(corpus.unreadable) == 1 else f"{len(corpus.unreadable):,} files are"
        notes.append(f"{files} not Python and left out, such as {first.path}: {first.reason}")
    return Dataset("pycode", tokens.input, tokens.classes, tokens.splits, notes=tuple(notes))


def source_files(directory: Path) -> list[str]:
    """Return the Python files of a directory at any depth, relative to it and with "/", sorted.

    Tests, installed packages and what differs between builds of the same Python are left out, so that the list is the
    same on every machine.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"source must be a directory of Python files, but {directory} is not a directory")
    files = []
    for parent, directories, names in os.walk(directory):
        portable = {name for name in (*directories, *names) if not name.startswith(SKIPPED_PREFIXES)}
        directories[:] = [name for name in directories if name in portable and name not in SKIPPED_DIRECTORIES]
        relative = Path(parent).relative_to(directory)
        files += [(relative / name).as_posix() for name in names if name in portable and name.endswith(".py")]
    return sorted(files)


def source_fingerprint(directory: Path, files: Sequence[str]) -> str:
    """Return a short hash of the relative paths and contents of files: it changes when the code does."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        try:
            content = (directory / file).read_bytes()
        except OSError:  # a broken link; reading it will say so
            content = b""
        # With its length, so that no text can move from one file to the next unseen.
        digest.update(f"{file}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def file_tokens(path: Path) -> Iterator[str]:
    """Yield the tokens of a Python file: their texts, and names for ends of lines and changes of indentation.

    Comments and blank lines are dropped. Raises SyntaxError, UnicodeDecodeError or tokenize.TokenError for what is not
    Python.
    """
    with tokenize.open(path) as lines:
        yield from _cut(lines.readline)


def text_tokens(text: str) -> list[str]:
    """Return the tokens of a piece of Python, which may break off anywhere, as `file_tokens` has those of a file."""
    tokens: list[str] = []
    with suppress(SyntaxError, tokenize.TokenError):  # what follows the break is not known
        tokens.extend(_cut(io.StringIO(text).readline))
    while tokens and tokens[-1] == DEDENT:  # the end of the text ends the last line and all blocks
        tokens.pop()
    return tokens[:-1] if tokens[-1:] == [NEWLINE] and not text.endswith("\n") else tokens


def _cut(readline: Callable[[], str]) -> Iterator[str]:
    for kind, text, start, _, _ in tokenize.generate_tokens(readline):
        if kind in _DROPPED:
            continue
        if kind == tokenize.ERRORTOKEN:  # before Python 3.12; later versions raise themselves
            raise SyntaxError(f"unexpected {text!r} in line {start[0]}")
        yield _NAMED.get(kind, text)


def read_corpus(directory: Path, files: Sequence[str]) -> Corpus:
    """Tokenise files, given by paths relative to a directory as from `source_files`."""
    index: dict[str, int] = {}
    streams, readable, unreadable = [], [], []
    with warnings.catch_warnings(), progress_bar("Reading Python source", len(files)) as advance:
        warnings.simplefilter("ignore")  # newer Pythons warn of doubtful literals in what they tokenise
        for file in files:
            advance(1)
            try:
                # A list first: a file that fails half-way must leave no tokens behind.
                texts = list(file_tokens(directory / file))
            except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError) as error:
                unreadable.append(Unreadable(file, str(error)))
                continue
            streams.append(np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int32, len(texts)))
            readable.append(file)
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
    ids = np.concatenate(streams) if streams else np.empty(0, dtype=np.int32)
    return Corpus(ids, list(index), readable, offsets, unreadable)


def cached_corpus(directory: Path, cache: Path | None) -> Corpus:
    """Return the tokens of the Python files of a directory, from the cache if they are in it.

    The cache is optional: unreadable files are computed again, and failed writes are ignored. Its directory is created
    if missing; None for no cache.
    """
    files = source_files(directory)
    if cache is None:
        return read_corpus(directory, files)
    # Other versions of Python may tokenise the same source differently (f-strings since 3.12).
    python = f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"
    path = cache / f"pycode-{FORMAT}-{python}-{source_fingerprint(directory, files)}.npz"
    corpus = load_corpus(path)
    if corpus is None:
        corpus = read_corpus(directory, files)
        save_corpus(corpus, path)
    return corpus


def load_corpus(path: Path) -> Corpus | None:
    """Read a file that `save_corpus` wrote; None if it does not exist or is damaged."""
    try:
        arrays = read_arrays(path, ("ids", "offsets", "rest"))  # whose checksums find changed bytes
        rest = parse_json(arrays["rest"].tobytes(), str(path), dict)
        broken = [Unreadable(*entry) for entry in rest["broken"]]
        return Corpus(arrays["ids"], rest["texts"], rest["files"], arrays["offsets"], broken)
    except (OSError, ValueError, TypeError):
        return None


def save_corpus(corpus: Corpus, path: Path) -> bool:
    """Write a corpus atomically; return whether it was written: a full or read-only disk is not an error."""
    rest = {"texts": list(corpus.texts), "files": list(corpus.files), "broken": list(map(list, corpus.unreadable))}
    packed = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    try:
        write_arrays(path, {"ids": corpus.ids, "offsets": corpus.offsets, "rest": packed})
    except OSError:
        return False
    return True


def code_text(tokens: Sequence[str]) -> str:
    """Return tokens, a part of a file, as lines of code, spaced and indented nearly as people write it.

    The first line may be a part of a line; the others are indented relative to the lowest of them. If the last token
    ends a line, the indentation of the next line follows.
    """
    # Every DEDENT without its INDENT says that the part starts that much deeper.
    depth = lowest = 0
    for token in tokens:
        depth += (token == INDENT) - (token == DEDENT)
        lowest = min(lowest, depth)
    depth = -lowest
    lines = [""]
    previous = ""  # the token before in the same line
    tight = True  # whether the next token follows without a space
    for token in tokens:
        if token == NEWLINE:
            lines.append("    " * depth)
            previous, tight = "", True
        elif token in (INDENT, DEDENT):
            depth += 1 if token == INDENT else -1
            if not previous:  # it precedes the first token of its line
                lines[-1] = "    " * depth
        else:
            if not (tight or _touch(previous, token)) or (previous == "." and token == "import"):
                lines[-1] += " "
            lines[-1] += token
            tight = token in _TIGHT_AFTER or (token in _PREFIXES and not _ends_value(previous))
            previous = token
    return "\n".join(lines)


def _touch(left: str, right: str) -> bool:
    """Whether two tokens of a line stand without a space between them."""
    if right == ".":
        return left not in _WORDS_BEFORE_VALUES  # from . import
    return right in _TIGHT_BEFORE or (right in ("(", "[") and _ends_value(left))


def _ends_value(token: str) -> bool:
    """Whether the operand of an operator, a call or an index can end with this token."""
    if token in _WORDS_BEFORE_VALUES:
        return False
    name = len(token) > 2 and token.startswith("<") and token.endswith(">")  # such as <other>
    return name or token[-1:].isalnum() or token[-1:] in tuple("_)]}\"'")
