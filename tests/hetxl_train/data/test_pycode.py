"""Next-token prediction: windows, targets, splits and options."""

import ast
import bisect
import colorsys
import heapq
import json
import tokenize
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from hetxl_train.data.cache import cache_directory
from hetxl_train.data.dataset import Unreadable
from hetxl_train.data.pycode import (
    DEDENT,
    INDENT,
    NEWLINE,
    cached_corpus,
    code_text,
    file_tokens,
    load_corpus,
    load_pycode,
    read_corpus,
    save_corpus,
    source_files,
    source_fingerprint,
    text_tokens,
)
from hetxl_train.data.tokens import OTHER, Corpus, split_of

FILES = 80


@pytest.fixture
def source(tmp_path):
    """Small files in all splits: names that all share, some that a few share, and one of its own for each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "source"
    for number in range(FILES):
        path = folder / f"p{number % 3}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"own_{number} = name_{rng.integers(20)}.name_{rng.integers(40)}" for _ in range(rng.integers(1, 9))]
        path.write_text("def f(x):\n    return x\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def load(source, tmp_path):
    return lambda **options: load_pycode(**({"source": source, "cache": tmp_path / "cache"} | options))


def files_of(source, split):
    return [list(file_tokens(source / file)) for file in source_files(source) if split_of(file) == split]


def everything(split):
    return split.fetch(np.arange(len(split))).inputs


@pytest.mark.parametrize("context", [1, 5, 40])
@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_examples_match_a_plain_loop(load, source, name, context):
    dataset = load(classes=30, context=context)
    ids = {token: number for number, token in enumerate(dataset.class_names)}
    other, padding, start = 30, 31, 32
    inputs, targets = [], []
    for tokens in files_of(source, name):
        before = [padding] * (context - 1) + [start]
        for token in tokens:
            if token in ids:
                inputs.append(before[-context:])
                targets.append(ids[token])
            before.append(ids.get(token, other))
    assert torch.equal(everything(dataset.splits[name]), torch.tensor(inputs))
    assert dataset.splits[name].labels.ids.tolist() == targets
    assert dataset.input.kind == "tokens"
    assert dataset.input.shape == (context,)
    assert dataset.input.vocabulary == 33


def test_other_is_context_and_never_a_target(load):
    dataset = load(classes=30)
    assert OTHER not in dataset.class_names
    for split in dataset.splits.values():
        assert split.labels.ids.max() < 30
        assert (everything(split) == 30).any()


def test_splits_share_no_file(load, source):
    dataset = load(classes=10_000)
    assert any("10,000 classes were requested" in note for note in dataset.notes)
    own = {name for name in dataset.class_names if name.startswith("own_")}
    train = {f"own_{file.split('/m')[1][:-3]}" for file in source_files(source) if split_of(file) == "train"}
    # The names of the other splits' files were never seen, so they are not even classes.
    assert own == train
    for name in ("validation", "test"):
        split = dataset.splits[name]
        seen = {dataset.class_names[label] for label in split.labels.ids}
        assert not seen & own
        assert (everything(split) == dataset.num_classes).any()


def test_equal_calls_give_equal_data(load, source, tmp_path):
    first = load(limit=50, seed=3)
    assert len(first.splits["train"]) == 50
    for again in (load(limit=50, seed=3), load(limit=50, seed=3, cache=tmp_path / "elsewhere")):
        assert list(first.class_names) == list(again.class_names)
        assert first.notes == again.notes
        for name, split in first.splits.items():
            assert torch.equal(everything(split), everything(again.splits[name]))
            np.testing.assert_array_equal(split.labels.ids, again.splits[name].labels.ids)


def test_an_example_is_shown_as_code(load):
    split = load(classes=10_000).splits["train"]
    assert split.show(0).text == "→ ?"
    assert split.show(2).text == "def f → ?"
    # def f ( x ) : NEWLINE INDENT return: the target of row 9 comes after that.
    assert split.show(9).text == "def f(x):\n    return → ?"
    assert split.show(8).text == "def f(x):\n    → ?"
    deep = load(classes=10_000, context=4).splits["train"]
    assert deep.show(6).text == "… (x): → ?"
    assert OTHER in load(classes=20).splits["test"].show(14).text


def test_files_that_are_not_python_are_counted(load, source):
    (source / "p0" / "bad.py").write_text("x = (\n")
    (note,) = [note for note in load().notes if "left out" in note]
    assert note.startswith("1 file is not Python and left out, such as p0/bad.py: ")
    (source / "p0" / "worse.py").write_text("x = (\n")
    assert any(note.startswith("2 files are not Python") for note in load().notes)


@pytest.mark.parametrize(
    ("files", "missing"),
    [({}, "train"), ({"typing.py": "x\n", "os.py": "x\n"}, "test"), ({"typing.py": "", "os.py": "x\n"}, "train")],
    ids=["none", "no test file", "an empty file"],
)
def test_source_with_too_few_files_raises(tmp_path, files, missing):
    for name, content in files.items():  # typing.py is a training file, os.py one for validation
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"source must have code for every split, found none for '{missing}' in the"):
        load_pycode(source=tmp_path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": 1}, ValueError, "classes must be at least 2, found 1"),
        ({"classes": 8.0}, TypeError, "classes must be an integer"),
        ({"context": 0}, ValueError, "context must be at least 1, found 0"),
        ({"limit": 0}, ValueError, "limit must be at least 1, found 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
        ({"source": "nowhere"}, FileNotFoundError, "nowhere is not a directory"),
    ],
)
def test_invalid_options_raise(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_pycode(**({"cache": tmp_path} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_standard_library(tmp_path):
    dataset = load_pycode(cache=tmp_path)
    assert dataset.num_classes == 8192
    assert len(dataset.splits["train"]) > 1_000_000
    for name in ("validation", "test"):
        assert 0.02 < len(dataset.splits[name]) / len(dataset.splits["train"]) < 0.12
    assert {"self", "(", "<newline>", "<indent>", "<dedent>"} < set(dataset.class_names)
    assert "standard library of Python" in dataset.notes[0]


@pytest.fixture
def tree(tmp_path):
    """A folder with Python files, some of which do not count."""
    for name in [
        "b.py",
        "a/z.py",
        "a/b/c.py",
        "test/x.py",
        "a/tests/x.py",
        "site-packages/x.py",
        "__pycache__/x.py",
        "idlelib/idle_test/x.py",
        "config-3.11-linux/x.py",
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "notes.txt",
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name = {name!r}\n")
    return tmp_path


def test_tests_packages_and_generated_files_are_left_out(tree):
    assert source_files(tree) == ["a/b/c.py", "a/z.py", "b.py"]


def test_missing_source_directory_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="source must be a directory of Python files"):
        source_files(tmp_path / "nowhere")


def test_file_tokens_drop_comments_and_blank_lines(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('# note\n\nif x:\n    y = (1,\n      2)  # more\n\nz = "it\'s"')
    condition = ["if", "x", ":", NEWLINE, INDENT, "y", "=", "(", "1", ",", "2", ")", NEWLINE, DEDENT]
    assert list(file_tokens(path)) == [*condition, "z", "=", '"it\'s"', NEWLINE]


def test_file_encoding_is_honoured(tmp_path):
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\né = 1\n".encode("latin-1"))
    assert "é" in list(file_tokens(tmp_path / "a.py"))


def test_a_corpus_is_the_files_one_after_the_other():
    folder = Path(json.__file__).parent
    files = source_files(folder)
    corpus = read_corpus(folder, files)
    assert list(corpus.files) == files
    assert corpus.offsets[0] == 0
    assert corpus.offsets[-1] == len(corpus.ids)
    assert len(set(corpus.texts)) == len(corpus.texts)
    for number, file in enumerate(files):
        ids = corpus.ids[corpus.offsets[number] : corpus.offsets[number + 1]]
        with open(folder / file, "rb") as stream:
            tokens = list(tokenize.tokenize(stream.readline))
        dropped = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
        names = {tokenize.NEWLINE: NEWLINE, tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT}
        assert [corpus.texts[i] for i in ids] == [names.get(t.type, t.string) for t in tokens if t.type not in dropped]


@pytest.mark.parametrize(
    "content",
    [
        b"x = (1,\n",
        b"x = 'no end\n",
        b"if x:\n        a\n    b\n",
        b"\xff\xfe",
        b"# coding: no-such-code\n",
        b"x = $\n",
    ],
    ids=["open bracket", "open string", "indentation", "not utf-8", "unknown encoding", "no token"],
)
def test_files_that_are_not_python_are_left_out_whole(tmp_path, content):
    (tmp_path / "a.py").write_bytes(b"good = 1\n")
    (tmp_path / "b.py").write_bytes(b"half = 2\n" * (not content.startswith(b"#")) + content)
    (tmp_path / "c.py").write_bytes(b"good = 3\n")
    corpus = read_corpus(tmp_path, source_files(tmp_path))
    assert list(corpus.files) == ["a.py", "c.py"]
    assert [entry.path for entry in corpus.unreadable] == ["b.py"]
    assert corpus.unreadable[0].reason
    assert list(corpus.texts) == ["good", "=", "1", NEWLINE, "3"]
    assert corpus.ids.tolist() == [0, 1, 2, 3, 0, 1, 4, 3]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("import numpy as", ["import", "numpy", "as"]),
        ("x = 1\n", ["x", "=", "1", NEWLINE]),
        ("for x in y:\n    print(x, ", ["for", "x", "in", "y", ":", NEWLINE, INDENT, "print", "(", "x", ","]),
        ("if x:\n    pass", ["if", "x", ":", NEWLINE, INDENT, "pass"]),
        ("# nothing", []),
        ("", []),
    ],
)
def test_texts_that_break_off_have_the_tokens_before(text, tokens):
    assert text_tokens(text) == tokens


def test_no_files_give_an_empty_corpus(tmp_path):
    corpus = read_corpus(tmp_path, [])
    assert len(corpus.ids) == 0
    assert corpus.offsets.tolist() == [0]


def test_unreadable_source_file(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    corpus = read_corpus(tmp_path, source_files(tmp_path))
    assert [entry.path for entry in corpus.unreadable] == ["gone.py"]
    assert source_fingerprint(tmp_path, ["gone.py"])


def test_the_fingerprint_changes_with_names_and_contents(tmp_path):
    def mark(first, second):
        (tmp_path / "a.py").write_text(first)
        (tmp_path / "b.py").write_text(second)
        return source_fingerprint(tmp_path, ["a.py", "b.py"])

    base = mark("x = 1\n", "y\n")
    assert mark("x = 1\n", "y\n") == base
    assert len({base, mark("x = 2\n", "y\n"), mark("x = 1\ny\n", ""), source_fingerprint(tmp_path, ["a.py"])}) == 4


def test_files_are_split_by_their_names_in_nine_of_ten():
    counts = Counter(split_of(f"package/module_{number}.py") for number in range(20_000))
    assert counts["train"] == pytest.approx(18_000, abs=200)
    assert counts["validation"] == pytest.approx(1_000, abs=150)
    assert counts["test"] == pytest.approx(1_000, abs=150)
    # Fixed for good: another split would make results of different versions incomparable.
    assert [split_of(name) for name in ("os.py", "enum.py", "typing.py")] == ["validation", "test", "train"]


@pytest.fixture
def two_files(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.py").write_text("é = 'ü'\n")
    (folder / "b.py").write_text("x = (\n")
    return folder


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    assert actual.ids.dtype == expected.ids.dtype
    assert list(actual.texts) == list(expected.texts)
    assert list(actual.files) == list(expected.files)
    assert list(actual.unreadable) == list(expected.unreadable)


def test_corpus_round_trip(two_files, tmp_path):
    corpus = read_corpus(two_files, source_files(two_files))
    path = tmp_path / "deep" / "er" / "a.npz"
    assert save_corpus(corpus, path)
    assert_same(load_corpus(path), corpus)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.npz"]


def test_corpus_cache_is_reused(two_files, tmp_path):
    cache = tmp_path / "cache"
    first = cached_corpus(two_files, cache)
    (path,) = cache.iterdir()
    marked = Corpus(first.ids, ["from", "the", "cache", "!"], first.files, first.offsets, [Unreadable("p", "r")])
    save_corpus(marked, path)
    assert_same(cached_corpus(two_files, cache), marked)


def test_changed_source_is_read_again(two_files, tmp_path):
    cached_corpus(two_files, tmp_path / "cache")
    (two_files / "a.py").write_text("é = 'o'\n")
    assert "'o'" in cached_corpus(two_files, tmp_path / "cache").texts


def test_damaged_corpus_cache_is_rewritten(two_files, tmp_path):
    cache = tmp_path / "cache"
    corpus = cached_corpus(two_files, cache)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    damaged = [b"", b"not a zip", whole[:10], whole[: len(whole) // 2], whole[:-1]]
    for offset in range(0, len(whole), 7):
        damaged.append(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
    for content in damaged:
        path.write_bytes(content)
        assert_same(cached_corpus(two_files, cache), corpus)
    path.write_bytes(b"not a zip")
    cached_corpus(two_files, cache)
    assert_same(load_corpus(path), corpus)


def test_other_files_are_not_a_corpus(two_files, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, ids=np.arange(3))
    assert load_corpus(path) is None
    np.save(tmp_path / "a.npy", np.arange(3))
    assert load_corpus(tmp_path / "a.npy") is None
    assert load_corpus(tmp_path / "missing.npz") is None


def test_unwritable_cache_is_ignored(two_files, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not save_corpus(read_corpus(two_files, []), tmp_path / "file" / "a.npz")
    for cache in (tmp_path / "file", tmp_path / "file" / "below", None):
        assert_same(cached_corpus(two_files, cache), read_corpus(two_files, source_files(two_files)))


def test_failed_write_leaves_no_file(two_files, tmp_path):
    path = tmp_path / "cache" / "a.npz"
    path.mkdir(parents=True)  # a folder where the file should be
    assert not save_corpus(read_corpus(two_files, []), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.npz"]


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HETXL_CACHE", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "hetxl"
    monkeypatch.setenv("HETXL_CACHE", "~/other")
    assert cache_directory() == tmp_path / "other"
    assert cache_directory(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.setenv("HETXL_CACHE", "~no-such-user/cache")
    assert cache_directory() is None


SNIPPET = """\
from . import a
@wrap
class A(B):
    def f(self, *args, **options):
        x = -1 * y - 2
        if x not in (1, 2) and not [3]:
            return a.b[0](c)[1:]

        return {'k': None}
while True:
    pass
"""


def written_out(path):
    return code_text(list(file_tokens(path)))


def test_code_text_reads_like_code(tmp_path):
    (tmp_path / "a.py").write_text(SNIPPET)
    assert written_out(tmp_path / "a.py") == SNIPPET.replace("\n\n", "\n")


@pytest.mark.parametrize("module", [bisect, colorsys, heapq])
def test_code_text_of_modules_parses_to_the_same_code(module):
    path = Path(module.__file__)
    assert ast.dump(ast.parse(written_out(path))) == ast.dump(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], ""),
        (["self", "."], "self."),
        ([")", NEWLINE], ")\n"),
        (["if", "a", ":", NEWLINE, INDENT], "if a:\n    "),
        # The window starts two levels deep; its first line is a part of a line.
        (["+", "b", NEWLINE, "c", NEWLINE, DEDENT, DEDENT, "d"], "+b\n        c\nd"),
        ([DEDENT, "else", ":", NEWLINE, INDENT, "x"], "else:\n    x"),
        (["a", "=", "<other>", "(", "<other>", ")"], "a = <other>(<other>)"),
        (["return", "(", "a", ">", "(", "b", ")", ")"], "return (a > (b))"),
    ],
)
def test_code_text_of_windows(tokens, text):
    assert code_text(tokens) == text
