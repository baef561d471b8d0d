import pytest
import torch

from hetxl.functional import Affine, GaussianNoise, LogitDistribution
from hetxl.functional.engine.inputs import GRADIENTS, batch_shape_of, gather_inputs
from support.cases import COVARIANCES, RESIDUALS, VARIANTS, make, normals

D, K, S = 5, 7, 4
NOISY = [name for name in VARIANTS if name != "det"]


def distribution_of(variant, *batch, **options):
    head = make(variant, D, K, **options)
    distribution = head.logit_distribution(torch.randn(*batch, D, dtype=torch.float64))
    return head, distribution


def opaque_mean(distribution):
    """The same distribution with a classifier that nobody knows to be linear."""
    affine = distribution.classifier
    return LogitDistribution(distribution.features, lambda x: affine(x), distribution.noise, distribution.lift)


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("variant", NOISY)
def test_a_round_trip_gives_the_same_samples(variant, covariance, residual, order):
    head, distribution = distribution_of(variant, 2, 3, covariance=covariance, residual=residual)
    z = normals(head, 2, 3, samples=S)
    inputs = gather_inputs(distribution, z, 1.0)
    again = inputs.distribution().sample(inputs.z, order)
    torch.testing.assert_close(again.view(2, 3, S, K), distribution.sample(z, order), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (1,), (6,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_any_shape_becomes_one_dimension(variant, batch):
    head, distribution = distribution_of(variant, *batch)
    z = None if head.covariance is None else normals(head, *batch, samples=S)
    inputs = gather_inputs(distribution, z, 1.0)
    count = torch.Size(batch).numel()
    assert batch_shape_of(distribution, z) == torch.Size(batch)
    assert (inputs.batch, inputs.num_classes, inputs.samples) == (count, K, 1 if z is None else S)
    torch.testing.assert_close(inputs.features, distribution.features.reshape(count, D), rtol=0, atol=0)
    if z is not None:
        torch.testing.assert_close(inputs.z, z.reshape(count, *z.shape[-2:]), rtol=0, atol=0)
        torch.testing.assert_close(
            inputs.scale, distribution.noise.scale.reshape(count, inputs.noise_features), rtol=0, atol=0
        )


def test_factors_shared_by_the_examples_are_not_copied():
    head, distribution = distribution_of("het-xl", 2, 3)
    inputs = gather_inputs(distribution, normals(head, 2, 3), 1.0)
    assert inputs.factors is head.covariance.factor
    _, distribution = distribution_of("het-xl", 2, 3, covariance="low_rank")
    assert gather_inputs(distribution, normals(head, 2, 3), 1.0).factors.shape == (6, 2, D)


@pytest.mark.parametrize("variant", NOISY)
def test_shared_noise_is_the_same_for_every_example(variant):
    head, distribution = distribution_of(variant, 2, 3)
    z = normals(head, samples=S)  # [S, Q]
    inputs = gather_inputs(distribution, z, 1.0)
    assert inputs.z.shape == (6, S, head.covariance.size)
    torch.testing.assert_close(inputs.z, z.expand(6, -1, -1), rtol=0, atol=0)
    again = inputs.distribution().sample(inputs.z).view(2, 3, S, K)
    torch.testing.assert_close(again, distribution.sample(z))


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("variant", NOISY)
def test_one_example_against_many_draws(variant, covariance):
    # Features [3, 1, D] against normals [3, 4, S, Q]: every example with four sets of draws.
    head, distribution = distribution_of(variant, 3, 1, covariance=covariance)
    z = normals(head, 3, 4, samples=S)
    inputs = gather_inputs(distribution, z, 1.0)
    assert batch_shape_of(distribution, z) == (3, 4)
    assert inputs.batch == 12
    again = inputs.distribution().sample(inputs.z).view(3, 4, S, K)
    torch.testing.assert_close(again, distribution.sample(z))


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("det", "none"),
        ("het", "identity"),
        ("het-h", "hash"),
        ("het-xl", "classifier"),
        ("het-xl-own", "projection"),
    ],
)
def test_the_kind_of_lift(variant, kind):
    head, distribution = distribution_of(variant, 3)
    inputs = gather_inputs(distribution, None if kind == "none" else normals(head, 3), 1.0)
    assert inputs.lift == kind
    assert (inputs.buckets is not None) == (kind == "hash")
    assert (inputs.projection is not None) == (kind == "projection")
    assert (inputs.noise is None) == (kind == "none")
    assert inputs.weight is head.classifier.weight


def test_without_noise():
    _, distribution = distribution_of("het-xl", 3)
    inputs = gather_inputs(distribution.without_noise(), None, 1.0)
    assert (inputs.lift, inputs.noise, inputs.z, inputs.noise_features, inputs.samples) == ("none", None, None, 0, 1)
    torch.testing.assert_close(inputs.distribution().sample(None), distribution.mean.unsqueeze(-2))


@pytest.mark.parametrize("variant", NOISY)
def test_noise_without_normals_is_kept(variant):
    # For what is computed from variances, without samples.
    _, distribution = distribution_of(variant, 2, 3)
    inputs = gather_inputs(distribution, None, 1.0)
    assert inputs.z is None
    assert inputs.samples == 1
    torch.testing.assert_close(inputs.distribution().variance, distribution.variance.view(6, K))


@pytest.mark.parametrize("variant", ["det", "het", "het-h", "het-xl-own"])
def test_an_opaque_classifier_gives_its_mean_logits(variant):
    head, distribution = distribution_of(variant, 2, 3)
    expected = distribution.mean
    z = None if head.covariance is None else normals(head, 2, 3, samples=S)
    inputs = gather_inputs(opaque_mean(distribution), z, 1.0)
    assert inputs.features is None
    assert inputs.weight is None
    assert (inputs.batch, inputs.num_classes) == (6, K)
    torch.testing.assert_close(inputs.mean, expected.reshape(6, K))
    again = inputs.distribution().sample(inputs.z)
    torch.testing.assert_close(again, distribution.sample(z).reshape(6, -1, K))


def test_a_weight_equal_to_the_classifiers_is_not_the_classifiers():
    # Two parameters that happen to hold the same numbers get two gradients.
    head, distribution = distribution_of("het-xl", 3)
    distribution.classifier = Affine(head.classifier.weight.clone(), head.classifier.bias)
    inputs = gather_inputs(distribution, torch.randn(3, S, 3, dtype=torch.float64), 1.0)
    assert inputs.lift == "projection"


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_sums_and_temperature_are_wide(dtype, wide):
    head = make("het-xl", D, K, dtype=dtype)
    distribution = head.logit_distribution(torch.randn(3, D, dtype=dtype))
    inputs = gather_inputs(distribution, normals(head, 3, dtype=dtype), 2)
    assert inputs.wide == wide
    assert inputs.temperature.dtype == wide
    assert inputs.temperature == 2


def test_the_tensors_that_autograd_sees():
    expected = ("features", "weight", "bias", "mean", "factors", "scale", "residual", "projection", "temperature")
    assert expected == GRADIENTS
    head, distribution = distribution_of("het-xl-own", 3)
    inputs = gather_inputs(distribution, normals(head, 3), 1.0)
    assert [tensor is None for tensor in inputs.tensors()] == [False, False, False, True] + [False] * 5
    doubled = inputs.with_tensors(tuple(None if tensor is None else 2 * tensor for tensor in inputs.tensors()))
    torch.testing.assert_close(doubled.projection, 2 * head.projection.weight)
    torch.testing.assert_close(doubled.temperature, 2 * inputs.temperature)
    assert doubled.z is inputs.z
    assert doubled.lift == "projection"


def test_gradients_reach_what_was_flattened():
    head, distribution = distribution_of("het-xl", 2, 3)
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    inputs = gather_inputs(distribution, normals(head, 2, 3), temperature)
    sum(tensor.sum() for tensor in inputs.tensors() if tensor is not None).backward()
    assert temperature.grad == 1
    for name, parameter in head.named_parameters():
        if name != "temperature.raw":
            assert parameter.grad.abs().sum() > 0, name


def test_the_size_of_the_noise_space_comes_from_what_there_is():
    features = torch.randn(2, D, dtype=torch.float64)
    affine = Affine(torch.randn(K, D, dtype=torch.float64))
    for noise in (
        GaussianNoise(None, None, torch.rand(2, K, dtype=torch.float64)),
        GaussianNoise(torch.randn(3, K, dtype=torch.float64)),
    ):
        distribution = make("het", D, K).logit_distribution(features)
        distribution = LogitDistribution(features, affine, noise, distribution.lift)
        inputs = gather_inputs(distribution, torch.randn(2, S, noise.size, dtype=torch.float64), 1.0)
        assert inputs.noise_features == K
        assert inputs.noise.size == noise.size


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("variant", NOISY)
def test_one_example_without_a_batch_is_a_batch_of_one(variant, covariance, order):
    head = make(variant, D, K, covariance=covariance)
    features, noise = torch.randn(D, dtype=torch.float64), normals(head, samples=S)
    found = []
    for shape in ((), (1,)):
        loss = head(features.expand(*shape, D), torch.full(shape, 3), noise=noise, order=order)
        gradients = torch.autograd.grad(loss, [value for name, value in head.named_parameters() if value.requires_grad])
        prediction = head.predict(features.expand(*shape, D), noise=noise, order=order)
        assert prediction.probs.shape == (*shape, K)
        found.append((loss.detach(), *gradients, prediction.probs.flatten(), prediction.logit_variance.flatten()))
    torch.testing.assert_close(*found)


def test_widened_inputs_are_the_same_numbers():
    head = make("het-xl-own", D, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        distribution = head.logit_distribution(torch.randn(3, D).bfloat16())
    inputs = gather_inputs(distribution, normals(head, 3, dtype=torch.bfloat16), 1.0)
    wide = inputs.widened()
    for name in (*GRADIENTS, "z"):
        value = getattr(inputs, name)
        if value is None:
            assert getattr(wide, name) is None
        else:
            assert getattr(wide, name).dtype == torch.float32
            torch.testing.assert_close(getattr(wide, name), value, rtol=0, atol=0, check_dtype=False)
    assert inputs.features.dtype == inputs.z.dtype == torch.bfloat16
