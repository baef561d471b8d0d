"""benchmarks/samplers.py: what turns its measurements into the page."""

import pytest


@pytest.fixture(scope="module")
def samplers(load):
    return load("samplers")


@pytest.mark.parametrize("count", [1, 4, 10, 100, 700, 5000])
def test_equivalent_iid_inverts_an_exact_line(samplers, count):
    iid = [3 / samples**0.5 for samples in samplers.SAMPLES]
    assert samplers.equivalent_iid(3 / count**0.5, iid) == pytest.approx(count)


@pytest.mark.parametrize(
    ("value", "text"), [(0.000384, "0.000384"), (0.0616, "0.0616"), (2.5, "2.50"), (87.04, "87.0")]
)
def test_digits_keeps_three(samplers, value, text):
    assert samplers.digits(value) == text


@pytest.mark.parametrize("value", [0.000384, 0.0616, 2.5, 87.04, 1234.0])
def test_digits_reads_back(samplers, value):
    assert float(samplers.digits(value).replace(",", "")) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("scale", ["small", "medium", "large"])
def test_logits_have_the_stated_noise(samplers, scale):
    logits = samplers.make_logits(samplers.NOISE_SCALES[scale])
    assert logits.variance.mean().sqrt().item() == pytest.approx(samplers.NOISE_SCALES[scale], rel=1e-3)
    assert logits.mean.std().item() == pytest.approx(samplers.MEAN_SCALE, rel=0.1)
