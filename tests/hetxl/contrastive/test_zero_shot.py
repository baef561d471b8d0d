import math

import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive import ContrastiveLoss
from hetxl.contrastive.retrieval import top_k, zero_shot_log_probs, zero_shot_weights

D, K, N = 6, 9, 5


def encode(texts):
    """A vector that depends on the text alone."""
    return torch.stack([torch.randn(D, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in texts])


def test_weights_are_means_over_prompts():
    names, templates = ["bell", "whale"], ("{}", "an icon of {}")
    actual = zero_shot_weights(encode, names, templates)
    for name, row in zip(names, actual, strict=True):
        expected = sum(F.normalize(encode([template.replace("{}", name)])[0], dim=0) for template in templates)
        assert torch.allclose(row, F.normalize(expected, dim=0), atol=1e-6)
    assert torch.allclose(zero_shot_weights(encode, names, templates, block=1), actual)


@pytest.mark.parametrize("normalize", ["before", "after", "both", "none"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_log_probs_without_noise(link, normalize):
    torch.manual_seed(1)
    loss = ContrastiveLoss(D, link=link, rank=2, normalize=normalize, bias_init=-1.0)
    images, weights = torch.randn(N, D), F.normalize(torch.randn(K, D), dim=-1)
    logits = 3 * loss.embed_image(images) @ weights.T
    expected = F.log_softmax(logits, -1) if link == "softmax" else F.logsigmoid(logits - 1)
    actual = zero_shot_log_probs(loss, images, weights)
    assert torch.allclose(actual, expected, atol=1e-5)
    ids, values = top_k(loss, images, weights, 3)
    assert torch.equal(ids, expected.topk(3).indices)
    assert torch.allclose(values, expected.topk(3).values, atol=1e-5)


@pytest.mark.parametrize("normalize", ["before", "after", "both", "none"])
def test_log_probs_over_draws(normalize):
    loss = ContrastiveLoss(D, rank=2, normalize=normalize, noise_init=0.5)
    images, weights = torch.randn(N, D), F.normalize(torch.randn(K, D), dim=-1)
    actual = zero_shot_log_probs(loss, images, weights, 7, torch.Generator().manual_seed(3))
    noise = loss.noise_of_image(images)
    z = loss.image_noise.draw(noise, 7, torch.Generator().manual_seed(3))
    base = F.normalize(images, dim=-1) if normalize in ("before", "both") else images
    drawn = base.unsqueeze(1) + noise.draw(z)
    if normalize in ("after", "both"):
        drawn = F.normalize(drawn, dim=-1)
    expected = torch.logsumexp(F.log_softmax(3 * drawn @ weights.T, -1), 1) - math.log(7)
    assert torch.allclose(actual, expected, atol=1e-5)
    assert torch.allclose(actual.exp().sum(-1), torch.ones(N), atol=1e-5)


def test_blocks_change_nothing(monkeypatch):
    loss = ContrastiveLoss(D, rank=2, noise="none")
    images, weights = torch.randn(N, D), torch.randn(K, D)
    whole = zero_shot_log_probs(loss, images, weights)
    monkeypatch.setattr("hetxl.contrastive.retrieval.SCORES", 2 * K)
    assert torch.allclose(zero_shot_log_probs(loss, images, weights), whole, atol=1e-6)
    assert zero_shot_log_probs(loss, images[:0], weights).shape == (0, K)
    assert top_k(loss, images, weights, 99)[0].shape == (N, K)


def test_invalid_input_raises():
    loss = ContrastiveLoss(D, noise="text", rank=2)
    with pytest.raises(ValueError, match="num_samples=3 needs noise on the image side"):
        zero_shot_log_probs(loss, torch.randn(N, D), torch.randn(K, D), 3)
    with pytest.raises(ValueError, match=r"images must be \[n, D\] and weights \[K, D\], found \[5, 6\] and \[9, 4\]"):
        zero_shot_log_probs(loss, torch.randn(N, D), torch.randn(K, 4))
    with pytest.raises(ValueError, match="class_names and templates must not be empty, found 0 and 1"):
        zero_shot_weights(encode, [])
    with pytest.raises(ValueError, match=r"templates must hold {} once each.*found 'icon'"):
        zero_shot_weights(encode, ["bell"], ["icon"])
