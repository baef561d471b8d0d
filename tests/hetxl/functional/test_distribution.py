import pytest
import torch

from hetxl.functional import (
    Affine,
    GaussianNoise,
    HashLift,
    IdentityLift,
    LinearLift,
    LogitDistribution,
    choose_order,
    correlation,
    hash_classes,
)

D, K, R = 4, 6, 2


def distribution(kind, residual="rank1", batch=(3,)):
    """A distribution of each kind of head: HET, HET-H, HET-XL, HET-XL with W′, HET-XL through an opaque classifier."""
    options = {"dtype": torch.float64}
    features, weight = torch.randn(*batch, D, **options), torch.randn(K, D, **options)
    classifier = Affine(weight, torch.randn(K, **options))
    size = {"het": K, "own": 3}.get(kind, D)
    noise = GaussianNoise(
        torch.randn(R, size, **options),
        torch.randn(*batch, size, **options),
        torch.rand(*batch, size, **options),
        residual,
    )
    lift = {
        "het": IdentityLift(),
        "hash": HashLift(hash_classes(K, D)),
        "xl": LinearLift(weight),
        "own": LinearLift(torch.randn(K, 3, **options)),
        "opaque": None,
    }[kind]
    return LogitDistribution(features, classifier, noise, lift)


KINDS = ["het", "hash", "xl", "own"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", ["rank1", "diagonal"])
@pytest.mark.parametrize("batch", [(3,), (2, 3), ()])
def test_both_orders_give_the_same_samples(kind, residual, batch):
    logits = distribution(kind, residual, batch)
    for z in (torch.randn(*batch, 5, logits.size), torch.randn(5, logits.size)):
        samples = logits.sample(z.double(), "samples")
        assert samples.shape == (*batch, 5, K)
        torch.testing.assert_close(samples, logits.sample(z.double(), "factors"))


def test_the_classifier_carries_the_noise_of_het_xl():
    logits = distribution("xl")
    assert logits.noise is not None
    z = torch.randn(3, 5, logits.size, dtype=torch.float64)
    noisy = logits.features.unsqueeze(1) + logits.noise.draw(z)
    torch.testing.assert_close(logits.sample(z), logits.classifier(noisy))


@pytest.mark.parametrize("kind", [*KINDS, "opaque"])
@pytest.mark.parametrize("residual", ["rank1", "diagonal"])
def test_samples_have_the_stated_mean_and_covariance(kind, residual):
    # 200,000 draws: standard error of an entry at most 0.0032 √(Σii Σjj), of a mean 0.0022 √Σii; allowed are five.
    logits = distribution(kind, residual, batch=(1,))
    draws = logits.sample(torch.randn(1, 200_000, logits.size, dtype=torch.float64))[0]
    covariance = logits.covariance(torch.arange(K).unsqueeze(0))[0]
    spread = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - logits.mean[0]).abs() / spread).max() < 0.012
    assert ((draws.T.cov() - covariance).abs() / torch.outer(spread, spread)).max() < 0.017
    torch.testing.assert_close(logits.variance[0], covariance.diagonal())


def test_the_covariance_of_het_xl_is_the_papers():
    logits = distribution("xl")
    assert isinstance(logits.classifier, Affine)
    assert logits.noise is not None
    weight = logits.classifier.weight
    expected = weight @ logits.noise.covariance() @ weight.T  # WᵀΣ′W in the paper's layout of W
    torch.testing.assert_close(logits.covariance(torch.arange(K).expand(3, K)), expected)


@pytest.mark.parametrize("kind", [*KINDS, "opaque"])
def test_covariances_of_some_classes(kind):
    logits = distribution(kind)
    full = logits.covariance(torch.arange(K).expand(3, K))
    classes = torch.tensor([[5, 0], [2, 2], [1, 3]])
    for row, (first, second) in enumerate(classes.tolist()):
        expected = full[row][[first, second]][:, [first, second]]
        torch.testing.assert_close(logits.covariance(classes)[row], expected)


def test_without_noise_there_is_no_covariance():
    logits = distribution("xl").without_noise()
    assert torch.equal(logits.variance, torch.zeros(3, K, dtype=torch.float64))
    assert torch.equal(
        logits.covariance(torch.zeros(3, 2, dtype=torch.int64)), torch.zeros(3, 2, 2, dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", [*KINDS, "opaque"])
def test_autocast_does_not_reach_variances(kind):
    logits = distribution(kind)
    classes = torch.tensor([[5, 0], [2, 2], [1, 3]])
    expected = logits.variance, logits.covariance(classes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close((logits.variance, logits.covariance(classes)), expected, rtol=1e-12, atol=1e-12)


def test_an_opaque_classifier_sees_noisy_features_and_nothing_else():
    seen = []

    def get_logits(features):
        seen.append(features)
        return features.square()

    noise = GaussianNoise(None, None, torch.ones(2, D))
    logits = LogitDistribution(torch.zeros(2, D), get_logits, noise)
    z = torch.randn(2, 3, 1)
    torch.testing.assert_close(logits.sample(z), z.square().expand(2, 3, D))
    assert len(seen) == 1
    with pytest.raises(ValueError, match='order="factors" needs a linear classifier'):
        logits.sample(z, "factors")


def test_opaque_and_linear_agree_when_the_classifier_is_affine():
    linear = distribution("xl")
    opaque = LogitDistribution(linear.features, linear.classifier, linear.noise)
    z = torch.randn(3, 5, linear.size, dtype=torch.float64)
    torch.testing.assert_close(opaque.sample(z), linear.sample(z))
    torch.testing.assert_close(opaque.factors, linear.factors)


def test_distribution_without_noise_has_zero_variance():
    logits = distribution("xl").without_noise()
    assert logits.size == 0
    assert logits.factors.shape == (3, 0, K)
    assert torch.equal(logits.variance, torch.zeros(3, K, dtype=torch.float64))
    assert torch.equal(logits.sample(None), logits.mean.unsqueeze(1))


@pytest.mark.parametrize(
    ("kind", "samples", "order"), [("xl", 3, "samples"), ("xl", 4, "factors"), ("opaque", 99, "samples")]
)
def test_order_depends_on_samples_and_basis(kind, samples, order):
    assert choose_order(distribution(kind), samples) == order  # Q = 3


def test_correlation_normalises_the_covariance():
    covariance = torch.tensor([[4.0, 3.0, 0.0], [3.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(correlation(covariance), expected)
