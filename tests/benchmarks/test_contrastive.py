"""benchmarks/contrastive.py: a smoke run with few pairs."""

import pytest


@pytest.mark.slow
def test_every_row_is_measured(load):
    said = []
    rows = load("contrastive").measure(pairs=96, features=8, samples=2, rounds=1, say=said.append)
    assert len(rows) == 6
    assert all(row.measured > 0 for row in rows)
    assert [row.bar.value for row in rows] == [1.3, 1.2, 1.3, 1.2, 1.3, 0.5]
    assert said == ["times", "memory", "S = 2"]


def test_every_loss_takes_a_step(load):
    batch = load("contrastive").Batch
    for link, noise in (("plain", "none"), ("softmax", "none"), ("softmax", "both"), ("sigmoid", "both")):
        batch(6, 4, link, noise).prepare()()
