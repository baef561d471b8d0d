import numpy as np
import pytest
import torch

from hetxl.contrastive.ngrams import NgramTable
from hetxl.contrastive.towers import LockedTower, NgramTower, image_tower, text_tower
from hetxl.data.dataset import InputSpec

TEXT = {"buckets": 50, "embedding": 6, "width": 16, "depth": 2, "dropout": 0.0}


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 16, 16), (3, 64, 64)])
def test_pictures(shape):
    tower = image_tower(InputSpec("image", shape), 10, 8, 1)
    found = tower(torch.randn(4, *shape))
    assert found.shape == (4, 10)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


def test_texts_do_not_depend_on_the_batch():
    tower = text_tower(None, 10, **TEXT)
    assert isinstance(tower, NgramTower)
    table = NgramTable(["bell", "whale", ""], tower.buckets)
    whole = tower(table.take(np.array([0, 1, 2])))
    alone = tower(table.take(np.array([1])))
    assert whole.shape == (3, 10)
    assert torch.allclose(whole[1:2], alone, atol=1e-6)
    assert not torch.allclose(whole[0], whole[1], atol=1e-3)


def test_locked_towers():
    vectors = torch.randn(4, 6)
    for tower in (
        image_tower(InputSpec("features", (6,)), 10, 8, 1),
        text_tower(InputSpec("features", (6,)), 10, **TEXT),
    ):
        assert isinstance(tower, LockedTower)
        assert tower(vectors).shape == (4, 10)
    bare = LockedTower(6, 6, project=False)
    assert bare(vectors) is vectors
    assert not list(bare.parameters())


def test_bad_input():
    with pytest.raises(ValueError, match=r"features must be 6, the size of the locked tower's vectors.*found 10"):
        LockedTower(6, 10, project=False)
    with pytest.raises(ValueError, match="takes images or features, found tokens"):
        image_tower(InputSpec("tokens", (6,), 9), 10, 8, 1)
    with pytest.raises(ValueError, match="buckets must be at least 1, found 0"):
        NgramTower(10, buckets=0)
