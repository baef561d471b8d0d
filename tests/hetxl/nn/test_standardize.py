"""Features of mean 0 and variance 1, by themselves and inside a head."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl import DetHead, HetHashHead, HetHead, HetXLHead
from hetxl.integrations.export.head_file import load_head, save_head
from hetxl.nn import Standardize


@given(st.integers(0, 1000), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0.0, 1e4]))
def test_moments_over_batches_are_those_of_all_rows(seed, sizes, offset):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes) + 2, 3, generator=generator, dtype=torch.float64) * 5 + offset
    standardize = Standardize(3, dtype=torch.float64)
    standardize.measure(rows.split([*sizes, 2]))
    torch.testing.assert_close(standardize.mean, rows.mean(0))
    torch.testing.assert_close(standardize.deviation, rows.std(0, correction=0), rtol=1e-6, atol=0)


def test_standardised_rows_have_mean_0_and_variance_1():
    rows = 100 * torch.randn(500, 4) - 7
    standardize = Standardize(4)
    standardize.measure([rows])
    standardised = standardize(rows)
    torch.testing.assert_close(standardised.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardised.var(0, correction=0), torch.ones(4))


def test_a_constant_feature_keeps_its_scale():
    rows = torch.cat((torch.randn(20, 1), torch.full((20, 1), 0.1)), 1)
    standardize = Standardize(2)
    standardize.measure([rows])
    assert standardize.deviation[1] == 1
    torch.testing.assert_close(standardize(rows)[:, 1], torch.zeros(20), atol=1e-6, rtol=0)


def test_no_rows_to_measure_raise():
    with pytest.raises(ValueError, match="no features to measure"):
        Standardize(2).measure([])


@pytest.mark.parametrize("head_class", [DetHead, HetHead, HetHashHead, HetXLHead])
def test_a_head_that_standardises_equals_one_on_standardised_features(head_class, tmp_path):
    torch.manual_seed(1)
    head = head_class(6, 5, rank=2, standardize=True).double().eval()
    features = 1000 * torch.randn(30, 6, dtype=torch.float64) + 50
    head.standardize.measure([features])
    plain = head_class(6, 5, rank=2).double().eval()
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if "standardize" not in name})
    inner = (features - features.mean(0)) / features.std(0, correction=0)
    options = {} if head.covariance is None else {"noise": torch.randn(8, head.covariance.size, dtype=torch.float64)}
    labels = torch.arange(30) % 5
    torch.testing.assert_close(head(features, **options), plain(inner, **options))
    torch.testing.assert_close(head(features, labels, **options), plain(inner, labels, **options))
    torch.testing.assert_close(head.predict(features, **options).probs, plain.predict(inner, **options).probs)
    save_head(head, tmp_path / "head.safetensors")
    again = load_head(tmp_path / "head.safetensors")
    assert torch.equal(again.predict(features, **options).probs, head.predict(features, **options).probs)


def test_a_head_from_the_meta_device_passes_features_until_it_is_measured():
    with torch.device("meta"):
        head = HetXLHead(4, 3, standardize=True)
    head = head.to_empty(device="cpu")
    head.reset_parameters()
    features = torch.randn(2, 4)
    assert head.standardize is not None
    assert torch.equal(head.standardize(features), features)


def test_a_head_without_standardisation_has_no_buffers_for_it():
    assert not any("standardize" in name for name in HetXLHead(4, 3).state_dict())
