"""Draws of negatives follow the probabilities that are stated for them."""

import pytest
import torch

from hetxl.classifiers.sampled import LogUniform, Uniform, Unigram, build_proposal

K = 12
PROPOSALS = {
    "uniform": lambda: Uniform(K),
    "log-uniform": lambda: LogUniform(K),
    "unigram": lambda: Unigram(torch.tensor([0, 5, 1, 9, 30, 2, 2, 7, 1, 1, 0, 42])),
    "tempered": lambda: Unigram(torch.tensor([0, 5, 1, 9, 30, 2, 2, 7, 1, 1, 0, 42]), 0.5),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_class_frequencies_match_the_proposal(name):
    proposal, draws = PROPOSALS[name](), 200_000
    negatives = proposal.draw(draws, torch.Generator().manual_seed(0), torch.device("cpu"))
    q = proposal.log_q(torch.arange(K)).double().exp()
    assert float(q.sum()) == pytest.approx(1, abs=1e-6)
    share = torch.bincount(negatives, minlength=K) / draws
    # Five standard errors of a binomial share.
    assert ((share - q).abs() < 5 * (q * (1 - q) / draws).sqrt() + 1e-9).all()


def test_draws_are_those_of_the_generator():
    for make in PROPOSALS.values():
        first, second = (make().draw(9, torch.Generator().manual_seed(3), torch.device("cpu")) for _ in range(2))
        assert torch.equal(first, second)


def test_unigram_counts_are_at_least_one():
    proposal = Unigram(torch.tensor([3, 0, 4]))
    torch.testing.assert_close(proposal.log_q(torch.arange(3)).exp(), torch.tensor([3 / 8, 1 / 8, 4 / 8]))


def test_counts_are_asked_for_and_checked():
    for name in ("unigram", "in-batch"):
        with pytest.raises(ValueError, match=f"negatives from '{name}' need counts"):
            build_proposal(name, K, None, 1.0)
    with pytest.raises(ValueError, match=r"counts must have shape \[12\], found \[3\]"):
        build_proposal("unigram", K, torch.ones(3), 1.0)
    with pytest.raises(ValueError, match="counts must not be negative, found -1"):
        build_proposal("unigram", K, -torch.ones(K), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_of_the_module_changes_no_draw(dtype):
    counts = torch.arange(1, 5001)
    proposal, expected = Unigram(counts).to(dtype), Unigram(counts)
    draws = [each.draw(20_000, torch.Generator().manual_seed(0), torch.device("cpu")) for each in (proposal, expected)]
    assert torch.equal(*draws)
    assert torch.equal(proposal.log_q(torch.arange(5000)), expected.log_q(torch.arange(5000)))
    assert proposal.state_dict() == {}
    assert proposal.to("meta").cumulative(torch.device("cpu")).device.type == "cpu"  # nothing to be lost
