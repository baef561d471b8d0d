"""benchmarks/contrastive.py: a smoke run with few pairs."""

import pytest


@pytest.mark.slow
def test_every_row_is_measured(load):
    said = []
    rows = load("contrastive").measure(pairs=96, features=8, samples=2, rounds=1, say=said.append)
    assert all(row.measured > 0 for row in rows)
    assert [row.bar.value for row in rows] == [1.3, 1.2, 1.3, 1.2, 3.5, 1.3, 1.2, 1.3, 1.2, 0.5]
    assert said == ["times", "memory", "S = 2"]


def test_every_loss_takes_a_step(load):
    module = load("contrastive")
    for link, noise in (("softmax", "none"), ("softmax", "both"), ("sigmoid", "none"), ("sigmoid", "both")):
        module.Batch(6, 4, link, noise).prepare()()
    for link in module.PLAIN:
        module.Batch(6, 4, link).prepare()()
    with pytest.raises(ValueError, match="link must be one of"):
        module.Batch(6, 4, "plain").prepare()
