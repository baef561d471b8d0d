import dataclasses

import numpy as np
import pytest
import torch

from hetxl.contrastive.evaluate import recall_of, swap_scores, validate, zero_shot
from hetxl.contrastive.model import Embedded, Specs, build_towers, embed_pairs
from hetxl.contrastive.texts import TextReader
from hetxl.data.dataset import InputSpec
from hetxl.data.pairs import open_pairs
from hetxl.data.pairs_noise import swapped
from support.pairs import small, vectors_file

READER = TextReader(buckets=64)


@pytest.fixture
def split(tmp_path):
    names = [f"name {place // 2}" for place in range(80)]  # each twice
    return open_pairs(vectors_file(tmp_path / "x.npz", captions=names), whole=True).splits["test"]


@pytest.fixture
def model():
    return build_towers(small("x"), Specs(_vectors(), None)).eval()


def _vectors():
    return InputSpec("features", (6,))


def knowing(split, model):
    """Embeddings of images that are those of their texts: a model that knows everything."""
    found = embed_pairs(model, split, READER.table(split.texts))
    return Embedded(found.texts.clone(), found.texts, found.rows)


def test_a_model_that_knows_everything(split, model):
    found = zero_shot(model, split, knowing(split, model), READER, ("{}",), seen={"name 0", "name 1"})
    assert found["classes"] == 40
    assert found["chance"] == 1 / 40
    assert found["top1"] == found["top5"] == found["unseen_top1"] == 1
    assert found["unseen_classes"] == 38
    assert set(recall_of(model, split, knowing(split, model)).values()) == {1.0}


def test_a_model_that_knows_nothing_is_at_chance(split, model):
    known = knowing(split, model)
    images = torch.randn(len(known.rows), 8, generator=torch.Generator().manual_seed(0))
    found = zero_shot(model, split, known._replace(images=images), READER, ("{}",))
    assert found["top1"] < 0.2
    assert found["top5"] < 0.4
    assert "unseen_top1" not in found


def test_half_of_the_classes_known(split, model):
    known = knowing(split, model)
    images = known.images.clone()
    wrong = np.array([int(split.caption(row).split()[1]) >= 20 for row in known.rows])
    images[torch.from_numpy(wrong)] *= -1
    seen = {f"name {place}" for place in range(20)}
    found = zero_shot(model, split, known._replace(images=images), READER, ("{}",), seen=seen)
    assert found["top1"] == 0.5
    assert found["unseen_top1"] == 0


def test_draws_are_seeded(split, model):
    known = knowing(split, model)
    options = {"samples": 3}
    first, again = (zero_shot(model, split, known, READER, ("{}", "a {}"), seed=1, **options) for _ in range(2))
    assert first == again
    assert first["samples"] == 3


def test_validation_loss_is_the_mean_over_whole_batches(split, model):
    table = READER.table(split.texts)
    found = validate(model, split, table, limit=70, batch_size=32)
    rows = np.random.default_rng(0).permutation(80)[:70]
    embedded = embed_pairs(model, split, table, rows)
    parts = (slice(0, 32), slice(32, 64))
    with torch.no_grad():
        losses = [model.loss(embedded.images[part], embedded.texts[part], num_samples=0) for part in parts]
    assert found["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)
    assert "image_to_text@10" in found
    assert validate(model, split, table, limit=5, batch_size=32)["loss"] > 0


def test_scores_of_swapped_pairs(tmp_path, model):
    clean = open_pairs(vectors_file(tmp_path / "y.npz", captions=True), whole=True).splits["test"]
    noisy = swapped(clean, 0.3, seed=1)
    table = READER.table(noisy.texts)
    before, after = embed_pairs(model, clean, table), embed_pairs(model, noisy, table)
    # Images that are those of the texts they had before the swap.
    found = swap_scores(model, noisy, after._replace(images=before.texts))
    assert found["swapped"] == pytest.approx(0.3)
    assert found["distance_auroc"] == 1
    assert 0 <= found["noise_auroc"] <= 1
    assert found["noise_mean_swapped"] > 0
    det = build_towers(small("x", head="det"), Specs(_vectors(), None)).eval()
    assert "noise_auroc" not in swap_scores(det, noisy, embed_pairs(det, noisy, table))
    none = dataclasses.replace(clean, swaps=swapped(clean, 0).swaps)
    assert swap_scores(model, none, before)["distance_auroc"] is None
    with pytest.raises(ValueError, match="split must have swaps, found none"):
        swap_scores(model, clean, before)
