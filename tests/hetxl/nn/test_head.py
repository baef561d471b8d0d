"""What all heads do alike: precision, extremes, errors, compilation and export."""

import copy

import pytest
import torch
from torch import nn

from hetxl import HetXLHead, LearnedTemperature
from hetxl.nn.heads import check_features, check_normals, under_autocast
from support.cases import LINKS, VARIANTS, make, normals, targets_for

NOISY = [name for name in VARIANTS if name != "det"]


def finite_loss_and_gradients(head, features, targets, **options):
    features.requires_grad_()
    loss = head.loss(features, targets, **options)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(features.grad).all()
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name
    assert torch.isfinite(head(features, **options)).all()
    return loss.detach()


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("raw", [-1e4, 0.0, 1e4])
def test_huge_logits_at_any_temperature(variant, link, order, raw):
    head = make(variant, link=link, dtype=torch.float32, temperature=LearnedTemperature())
    nn.init.constant_(head.temperature.raw, raw)
    with torch.no_grad():
        head.classifier.weight.mul_(1e4)
    features, noise = torch.randn(4, 5), normals(head, 4, dtype=torch.float32)
    targets = head.logit_distribution(features).mean.argmin(-1)  # the least probable class: p[y] far below 1e-45
    loss = finite_loss_and_gradients(head, features, targets, noise=noise, order=order)
    assert loss > 103 or raw > 0  # −log 1e-45 = 103


def test_the_gradient_is_right_where_probabilities_underflow():
    head = make("het-xl", temperature=0.05)
    with torch.no_grad():
        head.classifier.weight.mul_(1e3)
    features = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    noise = normals(head, 4)
    targets = head.logit_distribution(features).mean.argmin(-1)
    assert head(features, noise=noise).gather(1, targets[:, None]).max() < -1e3
    assert torch.autograd.gradcheck(lambda x: head.loss(x, targets, noise=noise), (features,), eps=1e-9, atol=1e-3)


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_and_two_classes_train_and_predict(variant, link, classes):
    head = make(variant, classes=classes, link=link)
    features = torch.randn(3, 5, dtype=torch.float64)
    loss = finite_loss_and_gradients(head, features, targets_for(head, 3))
    if classes == 1 and link == "softmax":
        torch.testing.assert_close(loss.item(), 0.0)
    assert head.predict(features, top_k=1).indices.shape == (3, 1)
    assert str(head.predict(features))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_sample_and_rank_zero(variant, link):
    head = make(variant, link=link, rank=0, train_samples=1)
    finite_loss_and_gradients(head, torch.randn(3, 5, dtype=torch.float64), targets_for(head, 3))


@pytest.mark.parametrize("sampler", ["iid", "antithetic", "orthogonal", "sobol"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_batch_has_zero_loss_and_empty_predictions(variant, link, sampler):
    head = make(variant, link=link, sampler=sampler)
    features = torch.randn(0, 5, dtype=torch.float64)
    assert finite_loss_and_gradients(head, features, targets_for(head, 0)) == 0
    assert head(features).shape == (0, 7)
    prediction = head.predict(features, top_k=2)
    assert prediction.probs.shape == (0, 2)
    assert prediction.covariance.shape == (0, 2, 2)
    assert str(prediction).startswith("Prediction(0 examples")


@pytest.mark.parametrize("variant", VARIANTS)
def test_non_contiguous_input(variant):
    head = make(variant)
    features, noise = torch.randn(5, 6, dtype=torch.float64).T, normals(head, 6)
    assert not features.is_contiguous()
    strided = noise.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(head(features, noise=strided), head(features.contiguous(), noise=noise))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_features_give_a_nan_loss(variant, link):
    head = make(variant, link=link)
    features = torch.randn(3, 5, dtype=torch.float64)
    features[1, 2] = torch.nan
    losses = head.loss(features, targets_for(head, 3), "none")
    assert losses.isnan().tolist() == [False, True, False]
    assert head.loss(features, targets_for(head, 3)).isnan()
    assert head.predict(features).probs[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_output_is_near_float32(variant, link, dtype):
    wide = make(variant, classes=40, link=link, dtype=torch.float32)
    half = make(variant, classes=40, link=link, dtype=dtype)
    half.load_state_dict(wide.state_dict())
    wide.load_state_dict(half.state_dict())  # the same rounded weights
    features, noise = torch.randn(16, 5).to(dtype), normals(wide, 16, samples=64, dtype=torch.float32).to(dtype)
    output = half(features, noise=noise)
    assert output.dtype == dtype
    targets = targets_for(wide, 16).to(torch.int64)
    loss = half.loss(features, targets, noise=noise)
    assert loss.dtype == torch.float32
    # Products round to 8 bits (bfloat16: relative 2⁻⁸), sums over classes and samples do not.
    torch.testing.assert_close(loss, wide.loss(features.float(), targets, noise=noise.float()), rtol=0.01, atol=0)
    expected = wide(features.float(), noise=noise.float())
    torch.testing.assert_close(output.float(), expected, rtol=0.03, atol=0.05)
    loss.backward()
    assert {parameter.grad.dtype for parameter in half.parameters() if parameter.grad is not None} == {dtype}
    assert half.predict(features).probs.dtype == torch.float32


def test_reductions_are_wide_in_half_precision():
    # 40,000 equal classes: a bfloat16 sum would stall at 256 of them.
    head = HetXLHead(4, 40_000, dtype=torch.bfloat16, rank=2)
    nn.init.zeros_(head.classifier.weight)
    nn.init.zeros_(head.classifier.bias)
    loss = head.loss(torch.randn(2, 4, dtype=torch.bfloat16), torch.tensor([3, 5]), num_samples=2)
    torch.testing.assert_close(loss.item(), 10.596635, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_output_is_float32(variant):
    head = make(variant, dtype=torch.float32)
    features, noise = torch.randn(6, 5), normals(head, 6, dtype=torch.float32)
    ids = targets_for(head, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, loss = head(features, noise=noise), head.loss(features, ids, noise=noise)
        narrow = head.loss(features.bfloat16(), ids, noise=noise)
    assert output.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(loss, head.loss(features, ids, noise=noise), rtol=0.02, atol=0.02)
    torch.testing.assert_close(narrow, loss, rtol=0.02, atol=0.02)
    loss.backward()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_head_equals_eager(variant, link):
    torch.compiler.reset()
    head = make(variant, link=link, dtype=torch.float32)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    features, noise = torch.randn(3, 5), normals(head, 3, dtype=torch.float32)
    targets = targets_for(head, 3)
    torch.testing.assert_close(compiled(features, noise=noise), head(features, noise=noise))
    compiled(features, targets, noise=noise).backward()
    gradients = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    head(features, targets, noise=noise).backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in head.parameters()])
    assert torch.isfinite(compiled(features, targets))  # its own draws


class Predict(nn.Module):
    """Prediction with fixed noise, as one would export it."""

    def __init__(self, head, noise, top_k=None):
        super().__init__()
        self.head, self.top_k = head, top_k
        self.register_buffer("noise", noise)

    def forward(self, features):
        prediction = self.head.predict(features, top_k=self.top_k, noise=self.noise)
        if self.top_k is None:
            return prediction.probs, prediction.entropy
        return prediction.values, prediction.indices, prediction.covariance


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", NOISY)
def test_export_with_a_dynamic_batch(variant, link, top_k):
    head = make(variant, link=link, dtype=torch.float32).eval()
    module = Predict(head, normals(head, dtype=torch.float32), top_k)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(module, (torch.randn(4, 5),), dynamic_shapes=({0: batch},))
    features = torch.randn(9, 5)
    torch.testing.assert_close(program.module()(features), module(features))


BAD_CALLS = [
    (
        {"features": torch.randn(3, 4)},
        ValueError,
        r"features must have shape \[..., 5\] \(in_features\), found \[3, 4\]",
    ),
    ({"features": torch.ones(3, 5, dtype=torch.int64)}, TypeError, "features must be a floating-point tensor"),
    ({"features": [[1.0]]}, TypeError, "features must be a floating-point tensor .* found list"),
    (
        {"features": torch.randn(3, 5).double()},
        TypeError,
        "features have dtype torch.float64 but the head has torch.float32",
    ),
    ({"targets": torch.tensor([0, 7, 1])}, ValueError, "class id 7; allowed are 0 to 6"),
    ({"targets": torch.tensor([0, -1, 1])}, ValueError, "class id -1; allowed are 0 to 6"),
    ({"targets": torch.tensor([0.0, 1.5, 1.0])}, TypeError, "class ids must be integers, found dtype torch.float32"),
    ({"targets": torch.zeros(3, 6)}, ValueError, r"\[3, 7\]; found shape \[3, 6\]"),
    ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', found 'average'"),
    ({"num_samples": 0}, ValueError, "num_samples must be at least 1, found 0"),
    ({"num_samples": 2.5}, TypeError, "num_samples must be an integer of at least 1, found 2.5"),
    (
        {"noise": torch.randn(3, 4, 2)},
        ValueError,
        r"noise must have shape \[3, S, 3\], or \[S, 3\] .* found \[3, 4, 2\]",
    ),
    ({"noise": torch.randn(2, 4, 3)}, ValueError, r"noise must have shape \[3, S, 3\]"),
    ({"noise": torch.randn(3, 0, 3)}, ValueError, r"S at least 1; found \[3, 0, 3\]"),
    ({"noise": torch.randn(3, 4, 3), "num_samples": 2}, ValueError, "num_samples is 2 but noise holds 4 samples"),
    (
        {"order": "sample"},
        ValueError,
        "order must be one of 'samples', 'factors', found 'sample'; did you mean 'samples'",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_invalid_calls_raise(change, error, message):
    head = HetXLHead(5, 7, rank=2)
    call = {"features": torch.randn(3, 5), "targets": torch.tensor([0, 1, 2])} | change
    with pytest.raises(error, match=message):
        head.loss(**call)


BAD_OPTIONS = [
    ({"in_features": 0}, ValueError, "in_features must be at least 1, found 0"),
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, found 0"),
    ({"num_classes": 7.0}, TypeError, "num_classes must be an integer of at least 1, found 7.0"),
    (
        {"link": "sofmax"},
        ValueError,
        "link must be one of 'softmax', 'sigmoid', found 'sofmax'; did you mean 'softmax'",
    ),
    ({"covariance": "dense"}, ValueError, "covariance must be one of .* found 'dense'"),
    ({"residual": "none"}, ValueError, "residual must be one of .* found 'none'"),
    ({"sampler": "sobel"}, ValueError, "sampler must be one of .* did you mean 'sobol'"),
    ({"rank": -2}, ValueError, "rank must be at least 0, found -2"),
    ({"train_samples": 0}, ValueError, "train_samples must be at least 1, found 0"),
    ({"eval_samples": True}, TypeError, "eval_samples must be an integer"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, found 0.0"),
    ({"temperature": "hot"}, TypeError, "temperature must be a positive number"),
    ({"noise_features": 0}, ValueError, "noise_features must be at least 1, found 0"),
    ({"classifier": nn.Linear(5, 9)}, ValueError, "classifier maps 5 features to 9 classes, but in_features=5"),
    ({"classifier": 3}, TypeError, "classifier must be None, an nn.Linear, a module or a function, found int"),
    ({"bias": False, "bias_init": -10.0}, ValueError, "bias_init=-10.0 needs bias=True"),
    ({"classifier": nn.Linear(5, 7), "bias_init": -10.0}, ValueError, "bias_init applies to a new classifier"),
    ({"ranks": 3}, TypeError, "unexpected keyword argument 'ranks'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_OPTIONS)
def test_invalid_options_raise(change, error, message):
    with pytest.raises(error, match=message):
        HetXLHead(**({"in_features": 5, "num_classes": 7} | change))


def test_a_get_logits_of_the_wrong_size():
    head = HetXLHead(5, 7, classifier=nn.Sequential(nn.Linear(5, 6)))
    with pytest.raises(ValueError, match=r"classifier must return logits of shape \[3, 7\] .* found \[3, 6\]"):
        head(torch.randn(3, 5), noise=torch.zeros(1, 51))


def test_invalid_predictions_raise():
    head = HetXLHead(5, 7)
    with pytest.raises(ValueError, match="top_k must be at most the number of classes, 7, found 8"):
        head.predict(torch.randn(2, 5), top_k=8)
    with pytest.raises(ValueError, match="top_k must be at least 1, found 0"):
        head.predict(torch.randn(2, 5), top_k=0)
    with pytest.raises(ValueError, match=r"method must be one of 'mc', .* found 'mcmc'; did you mean 'mc'"):
        head.predict(torch.randn(2, 5), method="mcmc")


def test_noise_that_a_batch_shares():
    head = make("het-xl", sampler="iid", residual="diagonal")
    shared, each = head.covariance.draw("iid", 4), head.covariance.draw("iid", 4, (2, 3), dtype=torch.float64)
    assert (shared.shape, each.shape) == ((4, head.covariance.size), (2, 3, 4, head.covariance.size))
    assert each.dtype == torch.float64
    features = torch.randn(2, 5, dtype=torch.float64)
    drawn = head.predict(features, num_samples=4, generator=torch.Generator().manual_seed(3))
    noise = head.covariance.draw("iid", 4, (2,), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.equal(drawn.probs, head.predict(features, noise=noise).probs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loss_without_gradients(variant, link, mode):
    head, features = make(variant, link=link), torch.randn(3, 5, dtype=torch.float64)
    targets, noise = targets_for(head, 3), normals(head)
    expected = head(features, targets, noise=noise)
    with mode():
        loss = head(features, targets, noise=noise)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_one_example_without_batch_matches_a_batch_of_one(variant, link, top_k):
    head, features = make(variant, link=link), torch.randn(5, dtype=torch.float64)
    noise = normals(head)
    single, batch = (head.predict(inputs, top_k, noise=noise) for inputs in (features, features[None]))
    assert single.entropy.shape == ()
    assert torch.equal(single.probs, batch.probs[0])


def test_hooks_fire_for_the_loss():
    head, calls = HetXLHead(5, 7), []
    head.register_forward_hook(lambda *_: calls.append(1))
    head.loss(torch.randn(2, 5), torch.tensor([0, 1]))
    assert calls == [1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_head_learns_a_linear_rule(variant):
    torch.manual_seed(0)
    head = make(variant, 8, 4, dtype=torch.float32)
    features = torch.randn(256, 8)
    labels = (features @ torch.randn(8, 4)).argmax(-1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    start = loss = head.loss(features, labels)
    for _ in range(60):
        optimizer.zero_grad()
        loss = head.loss(features, labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * start.item()
    accuracy = (head.predict(features).top_class == labels).float().mean()
    assert accuracy > 0.9


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "det"])
def test_the_scale_of_the_noise_is_for_evaluation(variant, link):
    head = make(variant, link=link, temperature=1.0, noise_scale=0.5, noise_init=1.0)
    whole = make(variant, link=link, temperature=1.0, noise_init=1.0)
    whole.load_state_dict(head.state_dict())
    features, noise = torch.randn(3, 5, dtype=torch.float64), normals(head, 3)
    torch.testing.assert_close(head(features, noise=noise), whole(features, noise=noise))
    head.eval()
    whole.eval()
    torch.testing.assert_close(head(features, noise=noise), whole(features, noise=noise / 2))
    half, all_of_it = (module.predict(features, noise=noise) for module in (head, whole))
    torch.testing.assert_close(half.probs, whole.predict(features, noise=noise / 2).probs)
    torch.testing.assert_close(half.logit_variance, all_of_it.logit_variance / 4)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "det"])
def test_without_its_noise_a_head_is_deterministic_in_evaluation(variant):
    head = make(variant, temperature=0.7, noise_scale=0, noise_init=1.0).eval()
    features, targets = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 1, 2])
    mean = torch.log_softmax(head.logit_distribution(features).mean / 0.7, -1)
    torch.testing.assert_close(head(features), mean)
    torch.testing.assert_close(head(features, targets), torch.nn.functional.nll_loss(mean, targets))
    prediction = head.predict(features, top_k=2)
    assert prediction.method == "deterministic"
    torch.testing.assert_close(prediction.log_probs, mean.topk(2).values)
    head.train()
    assert not torch.allclose(head(features), mean)  # training has the noise
    with pytest.raises(ValueError, match="noise_scale must be at least 0 and finite, found -1"):
        make(variant, noise_scale=-1)
    with pytest.raises(TypeError, match="noise_scale must be a number of at least 0, found None"):
        make(variant, noise_scale=None)
    with pytest.raises(ValueError, match="noise_scale must be at least 0 and finite, found nan"):
        head.noise_scale = float("nan")
    assert "noise_scale=0" in repr(head)


def test_features_must_fit():
    check_features(torch.zeros(2, 3, 4), 4, torch.float32)
    check_features(torch.zeros(4, dtype=torch.float64), 4, None)
    with pytest.raises(TypeError, match=r"floating-point tensor \[..., 4\], found list"):
        check_features([1.0], 4, None)
    with pytest.raises(TypeError, match=r"found dtype torch.int64"):
        check_features(torch.zeros(2, 4, dtype=torch.int64), 4, None)
    with pytest.raises(ValueError, match=r"shape \[..., 4\] \(in_features\), found \[2, 3\]"):
        check_features(torch.zeros(2, 3), 4, None)
    with pytest.raises(TypeError, match=r"features have dtype torch.float64 but the head has torch.float32"):
        check_features(torch.zeros(2, 4, dtype=torch.float64), 4, torch.float32)


def test_autocast_takes_any_precision():
    features = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert not under_autocast(features)
    with torch.autocast("cpu"):
        assert under_autocast(features)
        check_features(features, 4, torch.float32)


@pytest.mark.parametrize("shape", [(2, 5, 3), (5, 3)])
def test_normals_of_each_example_or_of_all(shape):
    check_normals(torch.zeros(shape), (2,), 3, None)
    check_normals(torch.zeros(shape), (2,), 3, 5)
    with pytest.raises(ValueError, match="num_samples is 4 but noise holds 5 samples"):
        check_normals(torch.zeros(shape), (2,), 3, 4)


@pytest.mark.parametrize("shape", [(3,), (5, 4), (3, 5, 3), (2, 0, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"noise must have shape \[2, S, 3\], or \[S, 3\] shared by all examples"):
        check_normals(torch.zeros(shape), (2,), 3, None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_flip_rate_mixes_predictions_with_all_classes(variant):
    head = make(variant, flip_rate=0.2, temperature=1.0).double().eval()
    plain = copy.deepcopy(head)
    plain.flip_rate = 0.0
    features, targets = torch.randn(4, head.in_features, dtype=torch.float64), torch.tensor([0, 1, -100, 2])
    options = {"generator": torch.Generator().manual_seed(0)}
    clean = head.predict(features, target="clean", method="deterministic").probs
    torch.testing.assert_close(clean, plain.predict(features, method="deterministic").probs)
    expected = 0.8 * plain.predict(features, generator=torch.Generator().manual_seed(0)).probs + 0.2 / head.num_classes
    observed = head.predict(features, **options)
    torch.testing.assert_close(observed.probs, expected)
    torch.testing.assert_close(observed.entropy, -(expected * expected.log()).sum(-1))
    top = head.predict(features, top_k=2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(top.probs, expected.topk(2).values)
    torch.testing.assert_close(top.entropy, observed.entropy)
    with torch.no_grad():
        torch.testing.assert_close(head(features, generator=torch.Generator().manual_seed(0)).exp(), expected)
        loss = head(features, targets, weight=torch.tensor([1.0, 2, 3, 4]), generator=torch.Generator().manual_seed(0))
    losses = -expected[torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2])].log()
    torch.testing.assert_close(loss, (losses * torch.tensor([1.0, 2, 4])).sum() / 7)


def test_gradients_with_a_flip_rate_are_those_of_the_mixture():
    head = make("het-xl", flip_rate=0.3).double()
    features, targets = (
        torch.randn(3, head.in_features, dtype=torch.float64, requires_grad=True),
        torch.tensor([0, 1, 2]),
    )
    noise = torch.randn(2, head.covariance.size, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: head(x, targets, noise=noise), features)


def test_flip_rate_is_refused_where_it_has_no_meaning():
    with pytest.raises(ValueError, match="flip_rate must be below 1, found 1"):
        make("det", flip_rate=1.0)
    with pytest.raises(ValueError, match='flip_rate needs one label per example, found link="sigmoid"'):
        make("det", flip_rate=0.1, link="sigmoid")
    head = make("det", flip_rate=0.1).double()
    rows = torch.full((2, head.num_classes), 1 / head.num_classes)
    with pytest.raises(ValueError, match="flip_rate needs class ids as targets"):
        head(torch.randn(2, head.in_features, dtype=torch.float64), rows)
