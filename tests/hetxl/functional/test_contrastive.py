"""The formulas of the paper against sums written out pair by pair."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl.functional import GaussianNoise
from hetxl.functional.contrastive import (
    NORMALIZE,
    contrastive_keys,
    contrastive_loss,
    noise_base,
    noise_scale,
    noisy_queries,
)

B, S, D, R = 5, 3, 4, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair_by_pair(queries, keys, link, scale, bias):
    """1/B Σ_n of one direction, with nothing but scalars; keys [B, 1, D] are the same for all samples."""
    total = 0.0
    for n in range(len(queries)):
        each = []
        for s in range(queries.shape[1]):
            drawn = [key[min(s, len(key) - 1)] for key in keys]
            logits = [
                scale * sum(float(q) * float(k) for q, k in zip(queries[n, s], key, strict=True)) for key in drawn
            ]
            if link == "softmax":
                each.append([math.exp(logits[n]) / sum(math.exp(value) for value in logits)])
            else:
                signs = [1 if i == n else -1 for i in range(len(keys))]
                each.append([1 / (1 + math.exp(-sign * (u + bias))) for sign, u in zip(signs, logits, strict=True)])
        means = [sum(column) / len(each) for column in zip(*each, strict=True)]
        total -= sum(math.log(mean) for mean in means)
    return total / len(queries)


def test_the_softmax_loss_is_the_mean_of_two_directions():
    image, text = normal(B, S, D, seed=1), normal(B, 1, D, seed=2)
    keys = image_keys, text_keys = normal(B, D, seed=3), normal(B, D, seed=4)
    loss = contrastive_loss(image, text, *keys, link="softmax", scale=1.3)
    directions = (image, text_keys.unsqueeze(1)), (text, image_keys.unsqueeze(1))
    expected = sum(pair_by_pair(*direction, "softmax", 1.3, 0.0) for direction in directions) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("samples", [1, S])
def test_the_sigmoid_loss_has_one_direction_with_the_noise_of_both_sides(samples):
    image, text = normal(B, S, D, seed=1), normal(B, samples, D, seed=2)
    keys = normal(B, D, seed=3), normal(B, D, seed=4)  # of no use here
    loss = contrastive_loss(image, text, *keys, link="sigmoid", scale=1.3, bias=-1.5)
    assert float(loss) == pytest.approx(pair_by_pair(image, text, "sigmoid", 1.3, -1.5), rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from(["softmax", "sigmoid"]), st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_the_order_of_the_pairs_does_not_matter(batch, samples, link, seed):
    queries = normal(batch, samples, D, seed=seed), normal(batch, samples, D, seed=seed + 1)
    keys = normal(batch, D, seed=seed + 2), normal(batch, D, seed=seed + 3)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    there = contrastive_loss(*queries, *keys, link=link, scale=2.0, bias=-1.0)
    shuffled = (part[order] for part in (*queries, *keys))
    torch.testing.assert_close(contrastive_loss(*shuffled, link=link, scale=2.0, bias=-1.0), there)


def test_without_a_scale_every_pair_is_as_likely():
    queries, keys = normal(B, S, D), normal(B, D)
    loss = contrastive_loss(queries, queries, keys, keys, link="softmax", scale=0.0)
    assert float(loss) == pytest.approx(math.log(B))
    loss = contrastive_loss(queries, queries, keys, keys, link="sigmoid", scale=0.0)
    assert float(loss) == pytest.approx(B * math.log(2))


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_normalize_sets_where_lengths_become_one(normalize):
    embeddings, z = 3 * normal(B, D), normal(B, S, R + 1, seed=1)
    noise = GaussianNoise(normal(B, R, D, seed=2), residual=normal(B, D, seed=3).abs())
    queries = noisy_queries(embeddings, noise, z, normalize)
    base = noise_base(embeddings, normalize)
    keys = contrastive_keys(embeddings, normalize)
    unit = embeddings / embeddings.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(base, unit if normalize in ("before", "both") else embeddings)
    torch.testing.assert_close(keys, embeddings if normalize == "none" else unit)
    expected = base.unsqueeze(1) + noise.draw(z)
    if normalize in ("after", "both"):
        expected = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(noisy_queries(embeddings, None, None, normalize), keys.unsqueeze(1))


def test_half_precision_is_widened():
    assert noise_base(torch.ones(2, 3, dtype=torch.bfloat16), "before").dtype == torch.float32
    assert contrastive_keys(torch.ones(2, 3, dtype=torch.float16), "none").dtype == torch.float32


@pytest.mark.parametrize(
    "noise",
    [
        GaussianNoise(normal(B, R, D), residual=normal(B, D, seed=1).abs()),
        GaussianNoise(
            normal(R, D), scale=normal(B, D, seed=1), residual=normal(B, D, seed=2), residual_kind="diagonal"
        ),
        GaussianNoise(normal(B, D, D)),
        GaussianNoise(None, residual=normal(B, D)),
    ],
)
def test_the_scale_is_that_of_the_covariance(noise):
    expected = (noise.covariance().diagonal(dim1=-2, dim2=-1).sum(-1) / D).sqrt()
    torch.testing.assert_close(noise_scale(noise), expected)
