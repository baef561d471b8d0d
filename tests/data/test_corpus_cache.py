"""Tokens on disk: used where they are sound, and never in the way."""

import numpy as np
import pytest

from hetxl.data.corpus import Corpus, read_corpus, source_files
from hetxl.data.corpus_cache import cache_folder, cached_corpus, load_corpus, save_corpus
from hetxl.data.dataset import Broken


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.py").write_text("é = 'ü'\n")
    (folder / "b.py").write_text("x = (\n")
    return folder


def assert_same(found, expected):
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    assert found.ids.dtype == expected.ids.dtype
    assert list(found.texts) == list(expected.texts)
    assert list(found.files) == list(expected.files)
    assert list(found.broken) == list(expected.broken)


def test_what_is_written_is_read(source, tmp_path):
    corpus = read_corpus(source, source_files(source))
    path = tmp_path / "deep" / "er" / "a.npz"
    assert save_corpus(corpus, path)
    assert_same(load_corpus(path), corpus)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.npz"]


def test_the_second_time_the_cache_is_used(source, tmp_path):
    cache = tmp_path / "cache"
    first = cached_corpus(source, cache)
    (path,) = cache.iterdir()
    marked = Corpus(first.ids, ["from", "the", "cache", "!"], first.files, first.offsets, [Broken("p", "r")])
    save_corpus(marked, path)
    assert_same(cached_corpus(source, cache), marked)


def test_changed_source_is_read_anew(source, tmp_path):
    cached_corpus(source, tmp_path / "cache")
    (source / "a.py").write_text("é = 'o'\n")
    assert "'o'" in cached_corpus(source, tmp_path / "cache").texts


def test_a_damaged_cache_is_made_anew(source, tmp_path):
    cache = tmp_path / "cache"
    corpus = cached_corpus(source, cache)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    damaged = [b"", b"not a zip", whole[:10], whole[: len(whole) // 2], whole[:-1]]
    for place in range(0, len(whole), 7):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        assert_same(cached_corpus(source, cache), corpus)
    path.write_bytes(b"not a zip")
    cached_corpus(source, cache)
    assert_same(load_corpus(path), corpus)


def test_another_file_in_its_place(source, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, ids=np.arange(3))
    assert load_corpus(path) is None
    np.save(tmp_path / "a.npy", np.arange(3))
    assert load_corpus(tmp_path / "a.npy") is None
    assert load_corpus(tmp_path / "missing.npz") is None


def test_a_cache_that_cannot_be_written_is_done_without(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not save_corpus(read_corpus(source, []), tmp_path / "file" / "a.npz")
    for cache in (tmp_path / "file", tmp_path / "file" / "below", None):
        assert_same(cached_corpus(source, cache), read_corpus(source, source_files(source)))


def test_a_write_that_fails_leaves_nothing_behind(source, tmp_path):
    path = tmp_path / "cache" / "a.npz"
    path.mkdir(parents=True)  # a folder where the file should be
    assert not save_corpus(read_corpus(source, []), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.npz"]


def test_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HETXL_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "hetxl"
    monkeypatch.setenv("HETXL_CACHE", "~/other")
    assert cache_folder() == tmp_path / "other"
    assert cache_folder(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.setenv("HETXL_CACHE", "~no-such-user/cache")
    assert cache_folder() is None
