"""Label frequencies of the nearest rows, against their two-line definition."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.metrics import Neighbours


def drawn(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 100.0, 0.01])  # standardised away
    return torch.randn(rows, 3, generator=generator) * scale + 5, torch.randint(4, (rows,), generator=generator)


def test_frequencies_follow_their_definition():
    features, labels = drawn(50)
    queries, _ = drawn(7, seed=1)
    frequencies = Neighbours(features, labels, 4, k=6).label_frequencies(queries)
    mean, scale = features.mean(0), features.std(0, correction=0)
    nearest = torch.cdist((queries - mean) / scale, (features - mean) / scale).topk(6, largest=False).indices
    assert torch.allclose(frequencies, F.one_hot(labels[nearest], 4).float().mean(1))


def test_a_row_is_not_its_own_neighbour():
    features, labels = drawn(20)
    rows = np.arange(100, 120)
    alone = Neighbours(features, labels, 4, rows=rows, k=1)
    own = F.one_hot(labels, 4).float()
    assert torch.equal(alone.label_frequencies(features), own)
    assert not torch.equal(alone.label_frequencies(features, rows), own)
    frequencies = Neighbours(features, labels, 4, rows=rows, k=50).label_frequencies(features, rows)
    assert torch.allclose(frequencies, (own.sum(0) - own) / 19)


def test_rows_without_a_label_are_left_out():
    features, labels = drawn(20)
    labels[:10] = IGNORE_INDEX
    frequencies = Neighbours(features, labels, 4, k=20).label_frequencies(features[:3])
    assert torch.allclose(frequencies, F.one_hot(labels[10:], 4).float().mean(0).expand(3, 4))


def test_several_labels_count_each():
    features, _ = drawn(3)
    lists = LabelLists.from_lists([[0, 2], [], [2]])
    frequencies = Neighbours(features, lists, 4, link="sigmoid", k=3).label_frequencies(features[:1])
    assert torch.allclose(frequencies, torch.tensor([[1 / 3, 0, 2 / 3, 0]]))


def test_default_k_follows_the_rows_of_a_class():
    features, _ = drawn(200)
    for classes, k in ((2, 25), (20, 10), (100, 5)):
        assert Neighbours(features, torch.arange(200) % classes, classes).k == k


@pytest.mark.parametrize("features", [torch.zeros(0, 3), torch.zeros(4), torch.full((2, 3), torch.nan)])
def test_wrong_features_are_refused(features: torch.Tensor):
    with pytest.raises(ValueError, match="features must"):
        Neighbours(features, torch.zeros(len(features), dtype=torch.int64), 4)
