import pytest
import torch

from hetxl import HetXLHead
from support.cases import LINKS, VARIANTS, make, normals


@pytest.mark.parametrize("method", ["mc", "deterministic"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_top_k_is_a_part_of_the_whole(variant, link, method):
    head = make(variant, link=link)
    features, noise = torch.randn(4, 5, dtype=torch.float64), normals(head, 4)
    whole = head.predict(features, noise=noise, method=method)
    top = head.predict(features, top_k=3, noise=noise, method=method)
    values, indices = whole.probs.topk(3)
    assert whole.indices is None
    assert torch.equal(top.indices, indices)
    torch.testing.assert_close(top.values, values)
    torch.testing.assert_close(top.log_probs.exp(), values)
    torch.testing.assert_close(top.logit_variance, whole.logit_variance.gather(-1, indices))
    torch.testing.assert_close(top.covariance, whole.covariance[:, :3, :3])
    torch.testing.assert_close(top.correlation, whole.correlation[:, :3, :3])
    torch.testing.assert_close(top.entropy, whole.entropy)
    assert torch.equal(top.top_class, indices[:, 0])
    assert torch.equal(whole.top_class, indices[:, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_prediction_agrees_with_the_head(variant):
    head = make(variant)
    features, noise = torch.randn(4, 5, dtype=torch.float64), normals(head, 4)
    prediction = head.predict(features, noise=noise)
    torch.testing.assert_close(prediction.log_probs, head(features, noise=noise).detach())
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(4, dtype=torch.float64))
    entropy = torch.distributions.Categorical(probs=prediction.probs).entropy()
    torch.testing.assert_close(prediction.entropy, entropy)
    assert (prediction.mutual_information >= -1e-12).all()
    assert not prediction.probs.requires_grad
    assert not prediction.covariance.requires_grad


def test_expected_entropy_is_that_of_single_samples():
    head = make("het-xl")
    features, noise = torch.randn(4, 5, dtype=torch.float64), normals(head, 4, samples=6)
    singles = [head.predict(features, noise=noise[:, [s]]).entropy for s in range(6)]
    torch.testing.assert_close(head.predict(features, noise=noise).expected_entropy, torch.stack(singles).mean(0))


def test_covariance_matches_sampled_logits():
    # 100,000 draws: the standard error of an entry is at most 0.0045 √(Σii Σjj); allowed are five.
    head = make("het-xl")
    features = torch.randn(1, 5, dtype=torch.float64)
    prediction = head.predict(features, top_k=3)
    with torch.no_grad():
        logits = head.logit_distribution(features).sample(torch.randn(1, 100_000, 3, dtype=torch.float64))
    sampled = logits[0][:, prediction.classes[0]].T.cov()
    scale = prediction.logit_variance[0].sqrt()
    assert ((sampled - prediction.covariance[0]).abs() / torch.outer(scale, scale)).max() < 0.023


def test_deterministic_method_has_a_logit_variance():
    head = make("het-xl")
    features = torch.randn(2, 5, dtype=torch.float64)
    prediction = head.predict(features, method="deterministic")
    assert prediction.num_samples is None
    assert (prediction.logit_variance > 0).all()
    torch.testing.assert_close(prediction.entropy, prediction.expected_entropy)


def test_describe_is_one_line():
    torch.manual_seed(0)
    head = HetXLHead(5, 3, rank=2)
    prediction = head.predict(torch.randn(2, 5), generator=torch.Generator().manual_seed(0))
    line = prediction.describe(1, names=["cat", "dog", "fox"])
    assert "\n" not in line
    first = ["cat", "dog", "fox"][int(prediction.top_class[1])]
    assert line.startswith(f"{first} {float(prediction.probs[1].max()):.1%}, ")
    assert "nats" in line
    assert "correlation" in line
    assert str(prediction).startswith("Prediction(2 examples, mc, 256 samples: ")
    assert "from noise" not in head.predict(torch.randn(1, 5), method="deterministic").describe()
    assert "correlation" not in make("det").predict(torch.randn(1, 5, dtype=torch.float64)).describe()


@pytest.mark.parametrize("covariance", ["efficient", "low_rank", "diagonal", "full"])
def test_prediction_read_after_autocast_is_float32(covariance):
    torch.manual_seed(0)
    head = HetXLHead(8, 10, covariance=covariance, rank=3, noise_init=1.0)
    features = torch.randn(4, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = head.predict(features)
    expected = head.predict(features.float())
    assert "correlation" in repr(prediction)
    assert prediction.logit_variance.dtype == prediction.covariance.dtype == torch.float32
    torch.testing.assert_close(prediction.logit_variance, expected.logit_variance, rtol=0.05, atol=0.02)
    torch.testing.assert_close(prediction.logits.mean, expected.logits.mean, rtol=0.05, atol=0.02)


def test_labels_is_the_deprecated_name_of_the_top_class():
    prediction = HetXLHead(4, 6).predict(torch.randn(3, 4))
    with pytest.warns(DeprecationWarning, match="renamed to top_class"):
        assert torch.equal(prediction.labels, prediction.top_class)
