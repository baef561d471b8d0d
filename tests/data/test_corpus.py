"""Which files there are and how they are cut into tokens."""

import json
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from hetxl.data.corpus import DEDENT, INDENT, NEWLINE, file_tokens, fingerprint, read_corpus, source_files, split_of


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


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="source must be a folder of Python files, found no folder"):
        source_files(tmp_path / "nowhere")


def test_tokens_of_a_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('# note\n\nif x:\n    y = (1,\n      2)  # more\n\nz = "it\'s"')
    condition = ["if", "x", ":", NEWLINE, INDENT, "y", "=", "(", "1", ",", "2", ")", NEWLINE, DEDENT]
    assert list(file_tokens(path)) == [*condition, "z", "=", '"it\'s"', NEWLINE]


def test_the_encoding_of_a_file_is_honoured(tmp_path):
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
            found = list(tokenize.tokenize(stream.readline))
        dropped = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
        names = {tokenize.NEWLINE: NEWLINE, tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT}
        assert [corpus.texts[i] for i in ids] == [names.get(t.type, t.string) for t in found if t.type not in dropped]


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
def test_what_is_not_python_is_left_out_whole(tmp_path, content):
    (tmp_path / "a.py").write_bytes(b"good = 1\n")
    (tmp_path / "b.py").write_bytes(b"half = 2\n" * (not content.startswith(b"#")) + content)
    (tmp_path / "c.py").write_bytes(b"good = 3\n")
    corpus = read_corpus(tmp_path, source_files(tmp_path))
    assert list(corpus.files) == ["a.py", "c.py"]
    assert [entry.path for entry in corpus.broken] == ["b.py"]
    assert corpus.broken[0].reason
    assert list(corpus.texts) == ["good", "=", "1", NEWLINE, "3"]
    assert corpus.ids.tolist() == [0, 1, 2, 3, 0, 1, 4, 3]


def test_no_files_give_an_empty_corpus(tmp_path):
    corpus = read_corpus(tmp_path, [])
    assert len(corpus.ids) == 0
    assert corpus.offsets.tolist() == [0]


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    corpus = read_corpus(tmp_path, source_files(tmp_path))
    assert [entry.path for entry in corpus.broken] == ["gone.py"]
    assert fingerprint(tmp_path, ["gone.py"])


def test_the_fingerprint_changes_with_names_and_contents(tmp_path):
    def mark(first, second):
        (tmp_path / "a.py").write_text(first)
        (tmp_path / "b.py").write_text(second)
        return fingerprint(tmp_path, ["a.py", "b.py"])

    base = mark("x = 1\n", "y\n")
    assert mark("x = 1\n", "y\n") == base
    assert len({base, mark("x = 2\n", "y\n"), mark("x = 1\ny\n", ""), fingerprint(tmp_path, ["a.py"])}) == 4


def test_files_are_split_by_their_names_in_nine_of_ten():
    counts = Counter(split_of(f"package/module_{number}.py") for number in range(20_000))
    assert counts["train"] == pytest.approx(18_000, abs=200)
    assert counts["validation"] == pytest.approx(1_000, abs=150)
    assert counts["test"] == pytest.approx(1_000, abs=150)
    # Fixed for good: another split would make results of different versions incomparable.
    assert [split_of(name) for name in ("os.py", "enum.py", "typing.py")] == ["validation", "test", "train"]
