import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassCalibrationError

from hetxl.metrics import calibration_error, reliability
from support.records import records_of, with_confidence


def drawn(n, seed=0, shift=0.0):
    """Examples that are right as often as their confidence says, or by `shift` less often."""
    generator = np.random.default_rng(seed)
    confidence = generator.uniform(0.5, 1, n)
    return with_confidence(confidence, generator.uniform(size=n) < confidence - shift)


@pytest.mark.parametrize("classes", [3, 20])
def test_equal_width_agrees_with_torchmetrics(classes):
    logits, targets = 3 * torch.randn(500, classes), torch.randint(classes, (500,))
    targets[::2] = logits.argmax(-1)[::2]
    reference = MulticlassCalibrationError(num_classes=classes, n_bins=15, norm="l1")
    expected = float(reference(logits.softmax(-1), targets))
    assert expected > 0.05
    assert calibration_error(records_of(logits, targets), kind="width") == pytest.approx(expected, abs=1e-6)


def test_equal_mass_bins_have_known_values():
    records = with_confidence([0.95, 0.55, 0.85, 0.65, 0.75], [True, False, True, True, False])
    actual = reliability(records, bins=2)
    # The lower bin takes the two least confident, the upper one the other three.
    np.testing.assert_allclose(actual, [(0.6, 0.5, 2), (0.85, 2 / 3, 3)], rtol=1e-6)
    assert calibration_error(records, bins=2) == pytest.approx((2 * 0.1 + 3 * (0.85 - 2 / 3)) / 5, rel=1e-5)


def test_equal_width_bins_have_known_values():
    records = with_confidence([0.5, 0.625, 0.75, 1.0], [True, False, True, True])
    # [0.5, 0.75) and [0.75, 1]: a lower edge belongs to its bin, and 1 to the last.
    np.testing.assert_allclose(reliability(records, bins=4, kind="width"), [(0.5625, 0.5, 2), (0.875, 1, 2)])


def test_equal_confidences_have_equal_accuracy_in_every_bin():
    records = with_confidence([0.75] * 40, [True] * 10 + [False] * 30)
    assert all(point[:2] == (0.75, 0.25) for point in reliability(records, bins=7))
    assert calibration_error(records, bins=7) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["mass", "width"])
def test_a_calibrated_sample_has_a_small_error_and_another_has_not(kind):
    # 20,000 examples in at most 15 bins: noise of about √(0.25 / 1333) ≈ 0.014 in each, less in the mean.
    assert calibration_error(drawn(20_000), kind=kind) < 0.015
    assert calibration_error(drawn(20_000, shift=0.2), kind=kind) == pytest.approx(0.2, abs=0.015)


@given(
    st.lists(st.tuples(st.floats(0.5, 1, width=32), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 20),
    st.sampled_from(["mass", "width"]),
    st.randoms(),
)
def test_reliability_bins_partition_the_examples(pairs, bins, kind, random):
    records = with_confidence(*zip(*pairs, strict=True))
    actual = reliability(records, bins, kind)
    assert sum(count for _, _, count in actual) == len(pairs)
    assert len(actual) <= bins
    assert all(0.5 <= confidence <= 1 and 0 <= accuracy <= 1 for confidence, accuracy, _ in actual)
    assert [confidence for confidence, _, _ in actual] == sorted(confidence for confidence, _, _ in actual)
    if kind == "mass":
        counts = [count for _, _, count in actual]
        assert max(counts) - min(counts) <= 1
    error = calibration_error(records, bins, kind)
    gap = abs(np.mean([confidence for confidence, _ in pairs]) - np.mean([hit for _, hit in pairs]))
    assert gap - 1e-6 <= error <= 1
    random.shuffle(pairs)
    shuffled = with_confidence(*zip(*pairs, strict=True))
    assert calibration_error(shuffled, bins, kind) == pytest.approx(error, abs=1e-12)


def test_invalid_arguments_raise():
    records = drawn(3)
    with pytest.raises(ValueError, match="kind must be one of 'mass', 'width', found 'widht'; did you mean 'width'"):
        reliability(records, kind="widht")
    with pytest.raises(ValueError, match="bins must be at least 1"):
        calibration_error(records, bins=0)
