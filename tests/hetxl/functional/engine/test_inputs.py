import pytest
import torch

from hetxl.functional import Affine, GaussianNoise, LinearLift, LogitDistribution, Targets, mc_nll
from hetxl.functional.engine.inputs import (
    DIFFERENTIABLE,
    GivenMean,
    batch_shape_of,
    gather_inputs,
)
from support.cases import COVARIANCES, NOISY_GRID, VARIANTS, make, normals

D, K, S = 5, 7, 4
NOISY = [name for name in VARIANTS if name != "det"]


def distribution_of(variant, *batch, **options):
    head = make(variant, D, K, **options)
    distribution = head.logit_distribution(torch.randn(*batch, D, dtype=torch.float64))
    return head, distribution


def opaque_mean(distribution):
    """The same distribution with a classifier that is not known to be linear."""
    affine = distribution.classifier
    return LogitDistribution(distribution.features, lambda x: affine(x), distribution.noise, distribution.lift)


def sampled(inputs, order="samples"):
    """Sampled logits of the distribution that inputs stand for, [B, S, K]."""
    distribution, z = inputs.distribution_and_normals()
    return distribution.sample(z, order)


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize(("variant", "covariance", "residual"), NOISY_GRID)
def test_a_round_trip_gives_the_same_samples(variant, covariance, residual, order):
    head, distribution = distribution_of(variant, 2, 3, covariance=covariance, residual=residual)
    z = normals(head, 2, 3, samples=S)
    inputs = gather_inputs(distribution, z, 1.0)
    again = sampled(inputs, order)
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
    torch.testing.assert_close(inputs.mean.features, distribution.features.reshape(count, D), rtol=0, atol=0)
    if z is not None:
        torch.testing.assert_close(inputs.noise.z, z.reshape(count, *z.shape[-2:]), rtol=0, atol=0)
        scale = distribution.noise.scale.reshape(count, inputs.noise_features)
        torch.testing.assert_close(inputs.noise.gaussian.scale, scale, rtol=0, atol=0)


def test_factors_shared_by_the_examples_are_not_copied():
    head, distribution = distribution_of("het-xl", 2, 3)
    inputs = gather_inputs(distribution, normals(head, 2, 3), 1.0)
    assert inputs.noise.gaussian.factors is head.covariance.factor
    _, distribution = distribution_of("het-xl", 2, 3, covariance="low_rank")
    assert gather_inputs(distribution, normals(head, 2, 3), 1.0).noise.gaussian.factors.shape == (6, 2, D)


@pytest.mark.parametrize("variant", NOISY)
def test_shared_noise_is_the_same_for_every_example(variant):
    head, distribution = distribution_of(variant, 2, 3)
    z = normals(head, samples=S)  # [S, Q]
    inputs = gather_inputs(distribution, z, 1.0)
    assert inputs.noise.z.shape == (6, S, head.covariance.size)
    torch.testing.assert_close(inputs.noise.z, z.expand(6, -1, -1), rtol=0, atol=0)
    again = sampled(inputs).view(2, 3, S, K)
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
    again = sampled(inputs).view(3, 4, S, K)
    torch.testing.assert_close(again, distribution.sample(z))


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("het", "identity"),
        ("het-h", "hash"),
        ("het-xl", "classifier"),
        ("het-xl-own", "projection"),
    ],
)
def test_noise_has_the_kind_of_its_lift(variant, kind):
    head, distribution = distribution_of(variant, 3)
    inputs = gather_inputs(distribution, normals(head, 3), 1.0)
    assert inputs.noise.lift.kind == kind
    assert inputs.noise.lift is distribution.lift
    assert inputs.mean.weight is head.classifier.weight


def test_inputs_without_noise_have_one_sample():
    _, distribution = distribution_of("het-xl", 3)
    inputs = gather_inputs(distribution.without_noise(), None, 1.0)
    assert (inputs.noise, inputs.noise_features, inputs.noise_size, inputs.samples) == (None, 0, 0, 1)
    torch.testing.assert_close(sampled(inputs), distribution.mean.unsqueeze(-2))


@pytest.mark.parametrize("variant", NOISY)
def test_noise_without_normals_is_kept(variant):
    # For what is computed from variances, without samples.
    _, distribution = distribution_of(variant, 2, 3)
    inputs = gather_inputs(distribution, None, 1.0)
    again, z = inputs.distribution_and_normals()
    assert z is None
    assert inputs.samples == 1
    torch.testing.assert_close(again.variance, distribution.variance.view(6, K))


@pytest.mark.parametrize("variant", ["det", "het", "het-h", "het-xl-own"])
def test_an_opaque_classifier_gives_its_mean_logits(variant):
    head, distribution = distribution_of(variant, 2, 3)
    expected = distribution.mean
    z = None if head.covariance is None else normals(head, 2, 3, samples=S)
    inputs = gather_inputs(opaque_mean(distribution), z, 1.0)
    assert isinstance(inputs.mean, GivenMean)
    assert (inputs.batch, inputs.num_classes) == (6, K)
    torch.testing.assert_close(inputs.mean.mean, expected.reshape(6, K))
    torch.testing.assert_close(sampled(inputs), distribution.sample(z).reshape(6, -1, K))


def test_a_projection_by_the_classifiers_weight_gives_it_both_gradients():
    head, distribution = distribution_of("het-xl", 3)
    z, ids = normals(head, 3, samples=S), Targets(ids=torch.tensor([0, 3, 6]))
    projected = LogitDistribution(
        distribution.features, distribution.classifier, distribution.noise, LinearLift(head.classifier.weight)
    )
    weight, gradients = head.classifier.weight, []
    for each in (distribution, projected):
        loss = mc_nll(each, z, ids, temperature=1.0, link="softmax")
        gradients.append(torch.autograd.grad(loss, weight, retain_graph=True)[0])
    torch.testing.assert_close(*gradients)


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
    assert expected == DIFFERENTIABLE
    head, distribution = distribution_of("het-xl-own", 3)
    inputs = gather_inputs(distribution, normals(head, 3), 1.0)
    assert tuple(inputs.tensors()) == tuple(name for name in expected if name != "mean")
    doubled = inputs.with_tensors({name: 2 * tensor for name, tensor in inputs.tensors().items()})
    torch.testing.assert_close(doubled.noise.lift.weight, 2 * head.projection.weight)
    torch.testing.assert_close(doubled.temperature, 2 * inputs.temperature)
    assert doubled.noise.z is inputs.noise.z


def test_gradients_reach_what_was_flattened():
    head, distribution = distribution_of("het-xl", 2, 3)
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    inputs = gather_inputs(distribution, normals(head, 2, 3), temperature)
    sum(tensor.sum() for tensor in inputs.tensors().values()).backward()
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
        assert inputs.noise_size == noise.size


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("variant", NOISY)
def test_one_example_without_a_batch_is_a_batch_of_one(variant, covariance, order):
    head = make(variant, D, K, covariance=covariance)
    features, noise = torch.randn(D, dtype=torch.float64), normals(head, samples=S)
    results = []
    for shape in ((), (1,)):
        loss = head(features.expand(*shape, D), torch.full(shape, 3), noise=noise, order=order)
        gradients = torch.autograd.grad(loss, [value for name, value in head.named_parameters() if value.requires_grad])
        prediction = head.predict(features.expand(*shape, D), noise=noise, order=order)
        assert prediction.probs.shape == (*shape, K)
        results.append((loss.detach(), *gradients, prediction.probs.flatten(), prediction.logit_variance.flatten()))
    torch.testing.assert_close(*results)


def test_widened_inputs_are_the_same_numbers():
    head = make("het-xl-own", D, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        distribution = head.logit_distribution(torch.randn(3, D).bfloat16())
    inputs = gather_inputs(distribution, normals(head, 3, dtype=torch.bfloat16), 1.0)
    wide = inputs.widened()
    before, after = ({**each.tensors(), "z": each.noise.z} for each in (inputs, wide))
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, check_dtype=False)
    assert before["features"].dtype == before["z"].dtype == torch.bfloat16
