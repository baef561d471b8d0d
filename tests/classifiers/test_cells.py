"""Spherical k-means: rows that belong together are in one cell."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.classifiers.cells import find_cells, k_means, nearest


def generator():
    return torch.Generator().manual_seed(0)


def blobs(centres, each, spread):
    """Rows around centres, shuffled, and the centre of each."""
    own = torch.arange(centres).repeat_interleave(each)[torch.randperm(centres * each)]
    places = torch.randn(centres, 16)
    return places[own] + spread * torch.randn(len(own), 16), own


def test_nearest_by_hand():
    rows, centres = torch.randn(40, 5), F.normalize(torch.randn(7, 5), dim=-1)
    expected = F.cosine_similarity(rows.unsqueeze(1), centres, dim=-1).argmax(-1)
    assert torch.equal(nearest(rows, centres), expected)


def test_k_means_raises_the_cosines():
    rows, _ = blobs(12, 30, 0.5)
    found = k_means(rows, 12, generator())

    def cosine(centres):
        return float((F.normalize(rows, dim=-1) @ F.normalize(centres, dim=-1).T).amax(-1).mean())

    assert found.shape == (12, 16)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(12))
    assert cosine(found) > cosine(rows[:12]) + 0.03
    assert torch.equal(found, k_means(rows, 12, generator()))


def test_no_more_centres_than_rows():
    rows = F.normalize(torch.randn(5, 3), dim=-1)
    torch.testing.assert_close(k_means(rows, 9, generator()), rows)
    assert k_means(rows, 4, generator()).shape == (4, 3)


def test_cells_hold_rows_of_one_blob():
    rows, own = blobs(20, 60, 0.1)
    centres, cells = find_cells(lambda ids: rows[ids], len(rows), 100, generator())
    assert len(centres) == 100
    assert cells.shape == (1200,)
    assert cells.min() >= 0
    assert cells.max() < 100
    # Nearly every row is in a cell of its blob alone.
    alone = [len(own[cells == cell].unique()) == 1 for cell in cells]
    assert sum(alone) > 0.9 * len(rows)


@pytest.mark.parametrize(("total", "count"), [(1, 1), (3, 1), (40, 13)])
def test_few_rows(total, count):
    rows = torch.randn(total, 4)
    centres, cells = find_cells(lambda ids: rows[ids], total, count, generator())
    assert len(cells) == total
    assert cells.max() < len(centres) <= count


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_rows_that_are_all_alike(value):
    rows = torch.full((200, 4), value)
    centres, cells = find_cells(lambda ids: rows[ids], 200, 20, generator())
    assert centres.isfinite().all()
    assert cells.max() < len(centres)
