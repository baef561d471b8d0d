"""The four heads: gradients, invariants, and what each does with its own options."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetxl import DetHead, HetHashHead, HetHead, HetXLHead, LearnedTemperature, build_head
from support.cases import GRID, LINKS, VARIANTS, make, normals, targets_for

NOISY = [name for name in VARIANTS if name != "det"]


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("variant", "covariance", "residual"), GRID)
def test_gradients_pass_gradcheck(variant, link, covariance, residual, order):
    head = make(variant, 3, 4, link=link, covariance=covariance, residual=residual, temperature=LearnedTemperature())
    head.double()
    features = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    noise, targets = normals(head, 2, samples=3), targets_for(head, 2)
    names, values = zip(*head.named_parameters(), strict=True)

    def loss(features, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(head, state, (features, targets), {"noise": noise, "order": order})

    def log_probs(features, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(head, state, (features,), {"noise": noise, "order": order})

    assert torch.autograd.gradcheck(loss, (features, *values), fast_mode=True)
    assert torch.autograd.gradcheck(log_probs, (features, *values), fast_mode=True)


@pytest.mark.parametrize(("variant", "covariance", "residual"), GRID)
def test_the_output_under_cross_entropy_is_the_loss(variant, covariance, residual):
    head = make(variant, covariance=covariance, residual=residual, dtype=torch.float32)
    features, noise = torch.randn(6, 5), normals(head, 6, dtype=torch.float32)
    ids = targets_for(head, 6)
    torch.testing.assert_close(
        F.cross_entropy(head(features, noise=noise), ids), head.loss(features, ids, noise=noise), rtol=1e-6, atol=1e-6
    )
    soft = torch.rand(6, 7).softmax(-1)
    torch.testing.assert_close(
        F.cross_entropy(head(features, noise=noise), soft), head.loss(features, soft, noise=noise), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_under_binary_cross_entropy_is_the_loss(variant):
    head = make(variant, link="sigmoid", dtype=torch.float32)
    features, noise = torch.randn(6, 5), normals(head, 6, dtype=torch.float32)
    labels = targets_for(head, 6).float()
    expected = F.binary_cross_entropy_with_logits(head(features, noise=noise), labels, reduction="none").sum(-1)
    torch.testing.assert_close(expected, head.loss(features, labels, "none", noise=noise), rtol=1e-6, atol=1e-6)
    ids = torch.randint(7, (6,))
    one_hot = F.one_hot(ids, 7)
    torch.testing.assert_close(head.loss(features, ids, noise=noise), head.loss(features, one_hot, noise=noise))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_leading_dimensions_are_kept(variant, link):
    head = make(variant, link=link)
    features, noise = torch.randn(2, 3, 5, dtype=torch.float64), normals(head, 2, 3)
    targets = targets_for(head, 2, 3)
    flat = (features.flatten(0, 1), noise.flatten(0, 1))
    assert head(features, noise=noise).shape == (2, 3, 7)
    torch.testing.assert_close(head(features, noise=noise).flatten(0, 1), head(flat[0], noise=flat[1]))
    losses = head.loss(features, targets, "none", noise=noise)
    assert losses.shape == (2, 3)
    torch.testing.assert_close(losses.flatten(), head.loss(flat[0], targets.flatten(0, 1), "none", noise=flat[1]))
    assert head.predict(features, top_k=2).indices.shape == (2, 3, 2)
    assert head(features[0, 0]).shape == (7,)
    assert head.logit_distribution(features).mean.shape == (2, 3, 7)


@pytest.mark.parametrize("variant", NOISY)
def test_noise_shared_by_the_batch(variant):
    head = make(variant)
    features, noise = torch.randn(3, 5, dtype=torch.float64), normals(head)
    torch.testing.assert_close(head(features, noise=noise), head(features, noise=noise.expand(3, -1, -1)))


@pytest.mark.parametrize("variant", NOISY)
def test_samples_and_generator(variant):
    head = make(variant, train_samples=2, eval_samples=9)
    features, ids = torch.randn(3, 5, dtype=torch.float64), torch.randint(7, (3,))

    def loss(seed, **options):
        return head.loss(features, ids, generator=torch.Generator().manual_seed(seed), **options)

    assert loss(1) == loss(1) != loss(2)
    assert loss(1) == loss(1, num_samples=2) != loss(1, num_samples=3)
    assert head.predict(features).num_samples == 9
    assert head.predict(features, num_samples=3).num_samples == 3
    head.eval()
    assert loss(1) == loss(1, num_samples=9)


@pytest.mark.parametrize("variant", NOISY)
def test_evaluation_mode_is_deterministic_and_does_not_depend_on_the_batch(variant):
    head = make(variant, eval_samples=9).eval()
    features, ids = torch.randn(3, 5, dtype=torch.float64), torch.randint(7, (3,))
    before = torch.get_rng_state()
    probs = head.predict(features).probs
    torch.testing.assert_close(head.predict(features[1:2]).probs, probs[1:2])
    torch.testing.assert_close(head(features).exp(), probs)
    torch.testing.assert_close(head(features, ids, reduction="none"), -probs.log().gather(1, ids[:, None])[:, 0])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(head.train().predict(features).probs, probs)  # a prediction is one in any mode
    head.eval_seed = 1
    assert not torch.allclose(head.predict(features).probs, probs)
    noise = head.covariance.draw(head.sampler, 9, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(head.predict(features).probs, head.predict(features, noise=noise).probs)


def test_draws_of_evaluation_are_the_same_in_every_precision_and_usable_with_gradients():
    head = make("het-xl", eval_samples=9, dtype=torch.float32).eval()
    with torch.inference_mode():
        head.predict(torch.randn(2, 5))  # the first to draw them
    features = torch.randn(2, 5, requires_grad=True)
    head(features).sum().backward()
    wide = copy.deepcopy(head).double()
    torch.testing.assert_close(wide.predict(features.double()).probs.float(), head.predict(features).probs)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", NOISY)
def test_zero_noise_is_the_deterministic_head(variant, link):
    head = make(variant, link=link)
    features = torch.randn(3, 5, dtype=torch.float64)
    noise = torch.zeros_like(normals(head, 3))
    deterministic = DetHead(
        5, 7, link=link, temperature=head.temperature, classifier=head.classifier, dtype=torch.float64
    )
    torch.testing.assert_close(head(features, noise=noise), deterministic(features))
    torch.testing.assert_close(
        head.predict(features, method="deterministic").probs, deterministic.predict(features).probs
    )


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip_and_deepcopy(variant, link):
    head = make(variant, link=link)
    features, noise = torch.randn(3, 5, dtype=torch.float64), normals(head, 3)
    other = make(variant, link=link)
    assert not torch.equal(other(features, noise=noise), head(features, noise=noise))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(features, noise=noise), head(features, noise=noise))
    copied = copy.deepcopy(head)
    assert torch.equal(copied(features, noise=noise), head(features, noise=noise))
    with torch.no_grad():
        next(copied.parameters()).add_(1)
    assert not torch.equal(copied(features, noise=noise), head(features, noise=noise))


@pytest.mark.parametrize("variant", VARIANTS)
def test_meta_device_and_back(variant):
    head = make(variant, device="meta")
    features = torch.randn(3, 5, dtype=torch.float64)
    assert head(features.to("meta")).shape == (3, 7)
    assert head.loss(features.to("meta"), torch.zeros(3, dtype=torch.int64, device="meta")).shape == ()
    head.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(head(features)).all()
    expected = make(variant)
    assert {k: v.shape for k, v in head.state_dict().items()} == {k: v.shape for k, v in expected.state_dict().items()}
    if isinstance(head, HetHashHead):
        assert isinstance(expected, HetHashHead)
        assert torch.equal(head.hash, expected.hash)


def test_created_under_a_device_context():
    with torch.device("meta"):
        heads = [make(variant) for variant in VARIANTS]
    assert all(value.is_meta for head in heads for value in head.state_dict().values())


def test_names_of_the_parameters():
    names = {name: set(make(name).state_dict()) for name in VARIANTS}
    classifier = {"classifier.weight", "classifier.bias"}
    covariance = {
        "covariance.factor",
        *(f"covariance.{part}.{kind}" for part in ("scale", "residual") for kind in ("weight", "bias")),
    }
    assert names["det"] == classifier
    assert names["het"] == names["het-xl"] == classifier | covariance
    assert names["het-h"] == names["het"] | {"hash"}
    assert names["het-xl-own"] == names["het"] | {"projection.weight"}


def test_noise_spaces_have_their_sizes():
    assert make("het").covariance.noise_features == 7
    assert make("het-h").covariance.noise_features == 5
    assert make("het-h", buckets=3).covariance.noise_features == 3
    assert make("het-xl").covariance.noise_features == 5
    assert make("het-xl-own").covariance.noise_features == 3


def test_het_h_shares_noise_between_classes_of_a_bucket():
    head = HetHashHead(5, 40, buckets=4, rank=2)
    assert head.hash.max() < 4
    factors = head.logit_distribution(torch.randn(1, 5)).factors[0].detach()
    same = (head.hash[0] == head.hash).nonzero().flatten()
    assert len(same) > 1
    assert torch.equal(factors[:, same], factors[:, :1].expand(-1, len(same)))
    assert torch.equal(HetHashHead(5, 40, buckets=4).hash, head.hash)
    assert not torch.equal(HetHashHead(5, 40, buckets=4, hash_seed=1).hash, head.hash)


def test_bias_options_set_the_bias():
    assert torch.equal(HetXLHead(5, 7, bias_init=-10.0).classifier.bias, torch.full((7,), -10.0))
    assert HetHead(5, 7, bias=False).classifier.bias is None
    head = HetXLHead(5, 7, bias_init=-10.0)
    head.reset_parameters()
    assert torch.equal(head.classifier.bias, torch.full((7,), -10.0))


def test_an_existing_linear_is_kept_by_reference():
    embedding = nn.Embedding(7, 5, dtype=torch.bfloat16)
    linear = nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
    linear.weight = embedding.weight  # tied
    head = HetXLHead(5, 7, classifier=linear, rank=2)
    assert head.classifier is linear
    assert head.classifier.weight is embedding.weight
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    head.loss(torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor([1, 2, 3])).backward()
    assert embedding.weight.grad is not None


@pytest.mark.parametrize("name", ["det", "het", "het-h", "het-xl"])
def test_function_as_classifier_matches_a_linear_layer(name):
    linear = nn.Linear(5, 7, dtype=torch.float64)
    weight, bias = linear.weight, linear.bias
    known = build_head(name, 5, 7, rank=2, classifier=linear, dtype=torch.float64)
    shapes = []

    def get_logits(features):
        shapes.append(features.shape)
        return features @ weight.T + bias

    opaque = build_head(name, 5, 7, rank=2, classifier=get_logits, dtype=torch.float64)
    opaque.load_state_dict({k: v for k, v in known.state_dict().items() if not k.startswith("classifier")})
    features, noise = torch.randn(2, 3, 5, dtype=torch.float64), normals(known, 2, 3, samples=9)
    ids = torch.randint(7, (2, 3))
    torch.testing.assert_close(opaque(features, noise=noise), known(features, noise=noise))
    torch.testing.assert_close(opaque.loss(features, ids, noise=noise), known.loss(features, ids, noise=noise))
    assert all(len(shape) == 2 for shape in shapes)
    prediction, expected = opaque.predict(features, noise=noise), known.predict(features, noise=noise)
    torch.testing.assert_close(prediction.covariance, expected.covariance)
    torch.testing.assert_close(prediction.logit_variance, expected.logit_variance)


def test_a_module_as_get_logits_is_registered_and_trained():
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7))
    head = HetXLHead(5, 7, classifier=network, rank=2)
    assert "classifier.0.weight" in head.state_dict()
    head.loss(torch.randn(3, 5), torch.tensor([0, 1, 2])).backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    with pytest.raises(ValueError, match='order="factors" needs a linear classifier'):
        head(torch.randn(3, 5), order="factors")


def test_a_linear_subclass_with_its_own_forward_is_opaque():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 3 * super().forward(input)

    linear = Scaled(5, 7)
    head = HetXLHead(5, 7, classifier=linear)
    features = torch.randn(2, 5)
    torch.testing.assert_close(head.logit_distribution(features).mean, linear(features))


def test_a_shared_temperature():
    temperature = LearnedTemperature(init=1.0)
    first, second = HetXLHead(5, 7, temperature=temperature), DetHead(5, 7, temperature=temperature)
    assert first.temperature is second.temperature is temperature


def test_custom_sampler_is_used():
    def zeros(batch, samples, size, *, generator=None, device=None, dtype=torch.float32):
        return torch.zeros(batch, samples, size, device=device, dtype=dtype)

    head = HetXLHead(5, 7, sampler=zeros)
    features = torch.randn(2, 5)
    torch.testing.assert_close(head.predict(features).probs, head.predict(features, method="deterministic").probs)
    assert "sampler='zeros'" in repr(head)


def test_clean_labels_are_predicted_with_a_quarter_of_the_noise():
    head = HetXLHead(4, 3, rank=2, noise_init=3.0).eval()
    features, noise = torch.randn(5, 4), torch.randn(64, 3)
    clean = head.predict(features, noise=noise, target="clean")
    observed = head.predict(features, noise=noise)
    head.noise_scale = 0.25
    torch.testing.assert_close(clean.probs, head.predict(features, noise=noise).probs)
    assert (clean.probs - observed.probs).abs().max() > 1e-2
    with pytest.raises(ValueError, match="target must be one of 'observed', 'clean'"):
        head.predict(features, target="true")
    det = DetHead(4, 3)
    assert torch.equal(det.predict(features, target="clean").probs, det.predict(features).probs)
