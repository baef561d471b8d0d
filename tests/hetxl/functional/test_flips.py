"""Uniformly random labels: probabilities, and the estimate of their share."""

import pytest
import torch

from hetxl.functional.flips import fit_flip_rate, flipped, flipped_log_probs


def labelled(rate, rows=4000, classes=6, sharpness=4.0, seed=0):
    """Draw logits [n, K] of the classes and labels [n], a share of which is drawn from all classes."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(rows, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    flipped = torch.rand(rows, generator=generator) < rate
    return logits, torch.where(flipped, torch.randint(classes, (rows,), generator=generator), labels)


def test_flipped_probabilities_are_a_mixture_with_the_uniform_ones():
    log_probs = torch.randn(5, 4, dtype=torch.float64).log_softmax(-1)
    expected = (0.7 * log_probs.exp() + 0.3 / 4).log()
    torch.testing.assert_close(flipped_log_probs(log_probs, 0.3), expected)
    torch.testing.assert_close(flipped(log_probs[:, 1], 0.3, 4), expected[:, 1])
    assert torch.isfinite(flipped(torch.tensor(-1e4), 0.3, 4))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("flatness", [1.0, 3.0])
def test_the_share_of_flipped_labels_is_found_from_flat_probabilities(rate, flatness):
    logits, labels = labelled(rate)
    estimate = fit_flip_rate(logits / flatness, labels)
    # The standard error of a share of 4,000 rows is 0.008 at most; a third of the labels is right by chance.
    assert estimate.rate == pytest.approx(rate, abs=0.04)
    assert estimate.significant


def test_labels_without_flips_give_no_evidence():
    logits, labels = labelled(0.0)
    assert fit_flip_rate(logits, labels).rate < 0.02
    assert not fit_flip_rate(logits, labels).significant


def test_labels_confused_with_one_class_give_no_evidence():
    logits, labels = labelled(0.0)
    swapped = torch.rand(len(labels), generator=torch.Generator().manual_seed(1)) < 0.3
    labels = torch.where(swapped, labels ^ 1, labels)
    pairs = torch.arange(6) ^ 1
    observed = (0.7 * logits.softmax(-1) + 0.3 * logits.softmax(-1)[:, pairs]).log()  # what a head with noise predicts
    assert not fit_flip_rate(observed, labels).significant


def test_weights_count_as_repetitions():
    logits, labels = labelled(0.3, rows=300)
    weight = torch.arange(300) % 3
    repeated = torch.repeat_interleave(torch.arange(300), weight)
    whole, single = fit_flip_rate(logits, labels, weight), fit_flip_rate(logits[repeated], labels[repeated])
    assert whole == pytest.approx(single)
