import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

from hetxl.contrastive import ContrastiveLoss
from hetxl.contrastive.retrieval import auroc, pair_distance, pair_noise, retrieval_recall


def test_recall_equals_a_plain_count():
    images, texts = (F.normalize(torch.randn(40, 6), dim=-1) for _ in range(2))
    texts = F.normalize(texts + 0.7 * images, dim=-1)
    actual = retrieval_recall(images, texts, (1, 3))
    scores = images @ texts.T
    for name, table in (("image_to_text", scores), ("text_to_image", scores.T)):
        for k in (1, 3):
            hits = [row in table[row].topk(k).indices for row in range(40)]
            assert actual[f"{name}@{k}"] == pytest.approx(np.mean(hits))
    assert actual["image_to_text@1"] < actual["image_to_text@3"]


def test_blocks_change_nothing(monkeypatch):
    images, texts = torch.randn(30, 4), torch.randn(30, 4)
    whole = retrieval_recall(images, texts)
    monkeypatch.setattr("hetxl.contrastive.retrieval.SCORES", 70)
    assert retrieval_recall(images, texts) == whole


def test_equal_texts_are_right_for_each_other():
    texts = torch.eye(4)[[0, 0, 1, 2]]
    images = torch.eye(4)[[0, 0, 1, 2]]
    assert retrieval_recall(images, texts, (1,))["image_to_text@1"] == 0.5  # the twin is as near
    assert retrieval_recall(images, texts, (1,), np.array([5, 5, 6, 7]))["image_to_text@1"] == 1


def test_a_collapsed_model_retrieves_nothing():
    actual = retrieval_recall(torch.ones(20, 3), torch.ones(20, 3), (1, 10))
    assert set(actual.values()) == {0.0}


def test_invalid_input_raises():
    good = torch.randn(4, 3)
    for images, texts in ((good, good[:3]), (good[:0], good[:0]), (good[0], good[0])):
        with pytest.raises(ValueError, match=r"images and texts must both be \[n, D\]"):
            retrieval_recall(images, texts)
    with pytest.raises(ValueError, match="texts must be finite"):
        retrieval_recall(good, good * torch.nan)
    with pytest.raises(ValueError, match="ks must be numbers from 1"):
        retrieval_recall(good, good, (0,))
    with pytest.raises(ValueError, match="groups must have one entry for each of 4 pairs"):
        retrieval_recall(good, good, groups=np.arange(3))


def test_noise_of_pairs_is_the_mean_of_both_variances():
    loss = ContrastiveLoss(6, rank=2)
    images, texts = torch.randn(7, 6), torch.randn(7, 6)
    assert loss.text_noise is not None
    variances = [
        loss.noise_of_image(images).covariance().diagonal(dim1=-2, dim2=-1).mean(-1),
        loss.text_noise(F.normalize(texts, dim=-1)).covariance().diagonal(dim1=-2, dim2=-1).mean(-1),
    ]
    assert torch.allclose(pair_noise(loss, images, texts), (sum(variances) / 2).sqrt(), atol=1e-6)
    computed = ContrastiveLoss(6, rank=2, noise="text")
    assert computed.text_noise is not None
    expected = computed.text_noise(F.normalize(texts, dim=-1)).covariance().diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
    assert torch.allclose(pair_noise(computed, images, texts), expected, atol=1e-6)
    with pytest.raises(ValueError, match="this loss has none"):
        pair_noise(ContrastiveLoss(6, noise="none"), images, texts)


def test_pair_distance_is_one_minus_the_cosine():
    loss = ContrastiveLoss(6, noise="none")
    images = torch.randn(7, 6)
    assert torch.allclose(pair_distance(loss, images, 3 * images), torch.zeros(7), atol=1e-6)
    assert torch.allclose(pair_distance(loss, images, -images), 2 * torch.ones(7), atol=1e-6)


def test_auroc_equals_scikit_learn():
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(0, 9, 200) / 3, rng.random(200) < 0.3  # with ties
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores))
    assert auroc(np.arange(4.0), np.array([0, 0, 1, 1])) == 1
    assert auroc(np.ones(4), np.array([0, 0, 1, 1])) == 0.5
    assert auroc(scores, np.zeros(200)) is None
    with pytest.raises(ValueError, match=r"must both be \[n\]"):
        auroc(scores, positive[:3])
