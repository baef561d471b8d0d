"""The index finds what is nearest, and follows W."""

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F

from hetxl.classifiers import index as module
from hetxl.classifiers.index import ClassIndex, find_cells, k_means, nearest, top_logits

K, D = 3000, 16


def clustered(classes=K, features=D):
    """W with rows in clusters, a bias, and queries that are rows with noise."""
    torch.manual_seed(0)
    centres = torch.randn(classes // 30, features)
    weight = centres[torch.randint(len(centres), (classes,))] + 0.5 * torch.randn(classes, features)
    queries = weight[torch.randint(classes, (200,))] + 0.3 * torch.randn(200, features)
    return weight, 0.2 * torch.randn(classes), queries


def ready(max_stale=5, **options):
    weight, bias, queries = clustered(**options)
    index = ClassIndex(max_stale, 0.99)
    index.follow(weight, bias, queries, strictly=False)
    return index, weight, bias, queries


def first(index, weight, bias, queries):
    return index.search(weight, bias, queries, 1, thorough=True)[1][:, 0]


def test_recall_of_clustered_rows():
    index, weight, bias, queries = ready(classes=K)
    assert index.recall(weight, bias, queries, 10, thorough=True) >= 0.98
    assert index.recall(weight, bias, queries, 32, thorough=False) >= 0.7
    scores, ids = index.search(weight, bias, queries, 5, thorough=True)
    exact = (queries @ weight.T + bias).gather(-1, ids)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    # Vectors are held in half precision.
    torch.testing.assert_close(scores, exact, rtol=2e-3, atol=2e-2)


def test_rows_of_any_length_and_no_bias():
    weight, _, queries = clustered()
    weight = weight * torch.rand(K, 1).mul(4).exp()
    for scale in (1e-8, 1.0, 1e8):
        index = ClassIndex(5, 0.99)
        index.follow(weight * scale, None, queries, strictly=True)
        assert index.recall(weight * scale, None, queries, 10, thorough=True) >= 0.95


def test_a_few_rows_much_longer_than_the_others():
    weight, bias, queries = clustered()
    weight[:8] *= 30
    index = ClassIndex(5, 0.5)
    index.follow(weight, bias, queries, strictly=True)
    near = first(index, weight, bias, queries)
    # They are nearest for most queries, of whatever direction.
    assert (near < 8).double().mean() > 0.8
    assert torch.equal(near, (queries @ weight.T + bias).argmax(-1))


def test_exact_logits_in_blocks(monkeypatch):
    weight, bias, queries = clustered()
    expected = (queries @ weight.T + bias).topk(7)
    monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(module, "SCORES", 1)
    monkeypatch.setattr(module, "QUERIES", 64)
    scores, ids = top_logits(weight, bias, queries, 7)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(ids, expected.indices)
    some = torch.arange(1, K, 7)
    scores, ids = top_logits(weight, bias, queries, 7, some)
    assert (ids % 7 == 1).all()
    torch.testing.assert_close(scores, (queries @ weight[some].T + bias[some]).topk(7).values)


def test_rows_that_were_touched_are_never_stale():
    index, weight, bias, queries = ready(classes=1200)
    moved = torch.tensor([3, 700, 1100])
    index.touch(moved)
    assert 700 not in first(index, weight, bias, 9 * torch.ones(1, D))
    assert index.staleness(weight, bias) == 0
    weight[moved] = torch.tensor([[1.0], [50.0], [-50.0]]).expand(-1, D)
    assert index.staleness(weight, bias) == 1
    index.follow(weight, bias, queries, strictly=False)
    ones = torch.ones(1, D)
    scores, ids = index.search(weight, bias, torch.cat((ones, -ones)), 3, thorough=True)
    assert ids[:, 0].tolist() == [700, 1100]
    torch.testing.assert_close(scores[0, 0], 50.0 * D + bias[700])
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert index.recall(weight, bias, queries, 10, thorough=True) >= 0.97


def test_without_a_step_nothing_becomes_fresh():
    index, weight, bias, queries = ready()
    index.touch(torch.arange(100))
    index.follow(weight, bias, queries, strictly=False)
    assert not index.fresh.any()
    weight.mul_(1.0)
    index.follow(weight, bias, queries, strictly=False)
    assert index.fresh.sum() == 100
    assert not index.waiting.any()


def test_many_fresh_rows_become_part_of_the_index(monkeypatch):
    monkeypatch.setattr(module, "FEW_FRESH", 100)
    index, weight, bias, queries = ready(classes=1200)
    old = index.index
    index.touch(torch.arange(200, 500))
    weight[200:500] = weight[200:500].roll(1, 0) + 0.01
    weight[300] = 50.0
    index.follow(weight, bias, queries, strictly=False)
    assert not index.fresh.any()
    assert index.index is old
    assert index.staleness(weight, bias) == 1
    assert index.index.ntotal == 1200
    assert first(index, weight, bias, torch.ones(1, D)).tolist() == [300]
    assert index.recall(weight, bias, queries, 10, thorough=True) >= 0.95


def test_staleness_is_bounded():
    index, weight, bias, queries = ready(max_stale=3)
    ages = []
    for _ in range(9):
        weight.add_(0.01)
        index.follow(weight, bias, queries, strictly=False)
        ages.append(index.staleness(weight, bias))
    assert ages == [1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_strictly_any_change_counts():
    index, weight, bias, queries = ready()
    old = index.index
    index.follow(weight, bias, queries, strictly=True)
    assert index.index is old
    weight[5] = 50.0
    index.follow(weight, bias, queries, strictly=True)
    assert index.index is not old
    assert first(index, weight, bias, torch.ones(1, D)).tolist() == [5]
    bias[9] = 1e4
    index.follow(weight, bias, queries, strictly=True)
    assert first(index, weight, bias, torch.ones(1, D)).tolist() == [9]


def test_changes_that_torch_does_not_count():
    index, weight, bias, queries = ready()
    weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)))
    assert index.staleness(weight, bias) == 1
    index.follow(weight, bias, queries, strictly=True)
    assert index.staleness(weight, bias) == 0
    assert torch.equal(first(index, weight, bias, queries), top_logits(weight, bias, queries, 1)[1].squeeze(-1))


def test_other_tensors_need_another_index():
    index, weight, bias, queries = ready()
    other = weight.flip(0).clone()
    assert index.staleness(other, bias) is None
    index.follow(other, bias, queries, strictly=False)
    assert index.recall(other, bias, queries, 10, thorough=True) >= 0.95


def test_the_same_index_from_the_same_rows():
    indexes = [ready()[0] for _ in range(2)]
    _, weight, bias, queries = ready()
    results = [index.search(weight, bias, queries, 40, thorough=False) for index in indexes]
    assert torch.equal(results[0][1], results[1][1])


def test_copies_are_not_built():
    index, weight, bias, _ = ready()
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert other.staleness(weight, bias) is None
        assert (other.max_stale, other.recall_target) == (5, 0.99)


def test_made_in_inference_mode_and_used_outside():
    weight, bias, queries = clustered()
    index = ClassIndex(5, 0.9)
    with torch.inference_mode():
        index.follow(weight, bias, queries, strictly=True)
    index.touch(torch.tensor([1]))
    weight.add_(0.0)
    index.follow(weight, bias, queries, strictly=False)
    assert index.fresh.sum() == 1
    with torch.inference_mode():
        frozen = weight * 2
        assert index.staleness(frozen, None) is None


def test_search_returns_every_class_when_all_are_asked_for():
    weight, bias, queries = clustered(classes=40)
    index = ClassIndex(5, 0.99)
    index.follow(weight, bias, queries[:0], strictly=True)
    ids = index.search(weight, bias, queries, 40, thorough=True)[1]
    assert torch.equal(ids.sort(-1).values, torch.arange(40).expand(len(queries), -1))
    index.touch(torch.arange(30))
    weight.add_(0.1)
    index.follow(weight, bias, queries, strictly=False)
    ids = index.search(weight, bias, queries, 40, thorough=True)[1]
    assert torch.equal(ids.sort(-1).values, torch.arange(40).expand(len(queries), -1))


def test_weights_that_are_not_finite():
    weight, bias, queries = clustered(classes=100)
    weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match="must be finite, found"):
        ClassIndex(5, 0.99).follow(weight, bias, queries, strictly=True)


def test_missing_faiss_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"RetrievedClassifier needs faiss: pip install faiss-cpu"):
        ClassIndex(5, 0.9).build(torch.randn(9, 2), None, torch.randn(1, 2))


def generator():
    return torch.Generator().manual_seed(0)


def blobs(centres, each, spread):
    """Rows around centres, shuffled, and the centre of each."""
    own = torch.arange(centres).repeat_interleave(each)[torch.randperm(centres * each)]
    points = torch.randn(centres, 16)
    return points[own] + spread * torch.randn(len(own), 16), own


def test_nearest_equals_the_cosine_argmax():
    rows, centres = torch.randn(40, 5), F.normalize(torch.randn(7, 5), dim=-1)
    expected = F.cosine_similarity(rows.unsqueeze(1), centres, dim=-1).argmax(-1)
    assert torch.equal(nearest(rows, centres), expected)


def test_k_means_raises_the_cosines():
    rows, _ = blobs(12, 30, 0.5)
    fitted = k_means(rows, 12, generator())

    def cosine(centres):
        return float((F.normalize(rows, dim=-1) @ F.normalize(centres, dim=-1).T).amax(-1).mean())

    assert fitted.shape == (12, 16)
    torch.testing.assert_close(fitted.norm(dim=-1), torch.ones(12))
    assert cosine(fitted) > cosine(rows[:12]) + 0.03
    assert torch.equal(fitted, k_means(rows, 12, generator()))


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
def test_find_cells_accepts_few_rows(total, count):
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
