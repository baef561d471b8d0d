import numpy as np
import pytest
import torch

from hetxl.contrastive.model import BLOCK, Specs, build_towers, choose_templates, embed_pairs, embed_texts
from hetxl.contrastive.texts import TextReader
from hetxl.data.dataset import InputSpec
from hetxl.data.pairs import open_pairs
from support.pairs import picture_folder, small, vectors_file


@pytest.fixture
def pairs(tmp_path):
    return open_pairs(picture_folder(tmp_path / "shapes"), image_size=16, whole=True)


def test_towers_are_those_of_the_seed_whatever_the_head():
    specs = Specs(InputSpec("image", (1, 32, 32)), None)
    first, other_head, other_seed = (
        build_towers(small("x", **options), specs) for options in ({}, {"head": "det"}, {"seed": 1})
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
    build_towers(small("x"), specs)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_is_that_of_the_embeddings(pairs):
    config = small("x", head="det")
    texts = TextReader(buckets=config.buckets)
    model = build_towers(config, Specs(pairs.image, None)).eval()
    split = pairs.splits["test"]
    table = texts.table(split.texts)
    found = embed_pairs(model, split, table)
    assert found.images.shape == found.texts.shape == (24, 8)
    rows = np.arange(24)
    loss = model(split.images.fetch(rows).inputs, table.take(split.sources))
    assert torch.allclose(loss, model.loss(found.images, found.texts), atol=1e-5)


def test_broken_pictures_are_left_out(pairs, tmp_path):
    split = pairs.splits["test"]
    path = split.images.show(3).image
    with open(path, "wb") as file:
        file.write(b"no picture")
    model = build_towers(small("x"), Specs(pairs.image, None)).eval()
    table = TextReader(buckets=64).table(split.texts)
    found = embed_pairs(model, split, table)
    assert found.rows.tolist() == [row for row in range(24) if row != 3]
    assert torch.allclose(found.texts, embed_texts(model, table, split.sources[found.rows]))
    with pytest.raises(ValueError, match="none of 1 pictures could be read"):
        embed_pairs(model, split, table, np.array([3]))


def test_blocks(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", count=BLOCK + 3), whole=True)
    model = build_towers(small("x"), Specs(pairs.image, pairs.text)).eval()
    split = pairs.splits["test"]
    found = embed_pairs(model, split, TextReader().table(split.texts), np.array([BLOCK + 2, 0]))
    assert found.rows.tolist() == [BLOCK + 2, 0]
    whole = embed_pairs(model, split, TextReader().table(split.texts))
    assert torch.allclose(whole.images[[BLOCK + 2, 0]], found.images, atol=1e-6)


def test_locked_vectors_of_one_size_need_no_second_layer():
    features = InputSpec("features", (8,))
    model = build_towers(small("x"), Specs(features, features))
    assert not list(model.text.parameters())
    assert list(model.image.parameters())
    other = build_towers(small("x"), Specs(features, InputSpec("features", (5,))))
    assert list(other.text.parameters())


def test_templates_by_seed():
    seeds = np.random.default_rng(0).integers(0, 2**62, 3000)
    found = choose_templates(seeds, 3)
    assert np.bincount(found).min() > 900
    assert np.array_equal(found, choose_templates(seeds, 3))
    assert choose_templates(seeds, 1).max() == 0
