import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetxl import DetHead
from hetxl.classifiers import AdaptiveClassifier
from hetxl.functional import LabelLists
from hetxl.functional.flips import flipped_log_probs
from hetxl.metrics import fit_scales, fit_temperature, scaling
from hetxl.nn import FixedTemperature
from support.cases import make

GRID = torch.logspace(-1.3, 1.3, 40_001, dtype=torch.float64)


def scaled(n=400, classes=10, sharpness=3.0, link="softmax"):
    """Logits that are too sharp by a factor, with labels drawn from the right probabilities."""
    right = torch.randn(n, classes, dtype=torch.float64)
    if link == "softmax":
        return sharpness * right, torch.multinomial(right.softmax(-1), 1).squeeze(-1)
    return sharpness * right, torch.bernoulli(right.sigmoid())


def head_of(classes, link="softmax"):
    return DetHead(classes, classes, classifier=nn.Identity(), link=link)


def brute_force(loss):
    """The best of 40,001 temperatures, which are 1.5e-4 apart, by golden thirds of the convex loss."""
    low, high = 0, len(GRID) - 1
    while high - low > 2:
        third = (high - low) // 3
        if loss(GRID[low + third]) < loss(GRID[high - third]):
            high -= third
        else:
            low += third
    return float(min(GRID[low : high + 1], key=loss))


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 7.0])
def test_softmax_agrees_with_a_grid(sharpness):
    logits, targets = scaled(sharpness=sharpness)
    actual = fit_temperature(head_of(10), logits.split(64), targets)
    expected = brute_force(lambda tau: F.cross_entropy(logits / tau, targets))
    assert actual == pytest.approx(expected, rel=2e-4)
    assert actual == pytest.approx(sharpness, rel=0.2)


def test_softmax_with_flipped_labels_agrees_with_a_grid():
    logits, targets = scaled()
    targets = torch.where(torch.rand(len(targets)) < 0.3, torch.randint(10, targets.shape), targets)
    head = head_of(10)
    head.flip_rate = 0.3
    actual = fit_temperature(head, logits.split(64), targets)
    expected = brute_force(
        lambda tau: -flipped_log_probs((logits / tau).log_softmax(-1), 0.3).gather(1, targets[:, None]).mean()
    )
    assert actual == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_sigmoid_agrees_with_a_grid(sharpness):
    logits, labels = scaled(sharpness=sharpness, link="sigmoid")
    lists = LabelLists.from_sparse(labels.to_sparse())
    actual = fit_temperature(head_of(10, "sigmoid"), logits.split(64), lists)
    expected = brute_force(lambda tau: F.binary_cross_entropy_with_logits(logits / tau, labels))
    assert actual == pytest.approx(expected, rel=2e-4)


def test_fit_takes_few_passes_and_is_independent_of_batches(monkeypatch):
    logits, targets = scaled()
    passes = []

    def batches():
        passes.append(1)
        return iter(logits.split(100))

    actual = fit_temperature(head_of(10), batches, targets)
    assert len(passes) <= 10
    monkeypatch.setattr(scaling, "MAX_BYTES", 4 * 10 * 7)
    assert fit_temperature(head_of(10), batches, targets) == pytest.approx(actual, rel=1e-9)


def test_float32_is_precise_enough():
    logits, targets = scaled(n=2000)
    actual = fit_temperature(head_of(10), [logits.float() + 1000], targets)
    assert actual == pytest.approx(fit_temperature(head_of(10), [logits], targets), rel=1e-3)


def test_the_result_lowers_the_loss_of_a_real_head():
    head = make("det", temperature=0.3)
    features, targets = torch.randn(50, 5, dtype=torch.float64), torch.randint(7, (50,))
    tau = fit_temperature(head, [features], targets)
    best = make("det", temperature=tau, classifier=head.classifier)
    assert tau > 0.3
    assert best.loss(features, targets) < head.loss(features, targets)


def test_labels_to_leave_out_are_left_out():
    logits, targets = scaled()
    some = targets.clone()
    some[::2] = -100
    expected = fit_temperature(head_of(10), [logits[1::2]], targets[1::2])
    assert fit_temperature(head_of(10), logits.split(30), some) == pytest.approx(expected)
    sigmoid = head_of(10, "sigmoid")
    expected = fit_temperature(sigmoid, [logits[1::2]], targets[1::2])
    assert fit_temperature(sigmoid, logits.split(30), some) == pytest.approx(expected)


def test_the_ends_of_the_range():
    logits = 5 * torch.eye(6, dtype=torch.float64)
    assert fit_temperature(head_of(6), [logits], torch.arange(6)) == pytest.approx(0.05, rel=1e-4)
    assert fit_temperature(head_of(6), [-logits], torch.arange(6)) == pytest.approx(20, rel=1e-4)
    # Nothing to gain: τ stays 1.
    assert fit_temperature(head_of(6), [torch.zeros(2, 6)], torch.tensor([0, 1])) == 1


def test_invalid_input_raises():
    logits, targets = scaled(n=8)
    for features, actual in ((torch.zeros(1, 5), "features holds 1 examples and targets 2"), (None, "not finite")):
        few = torch.full((2, 5), torch.nan) if features is None else features
        with pytest.raises(ValueError, match=actual):
            fit_temperature(make("het-xl"), [few.double()], torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="features holds 8 examples and targets 9"):
        fit_temperature(head_of(10), [logits], torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="features holds more examples than targets, which has 7"):
        fit_temperature(head_of(10), [logits], targets[:7])
    with pytest.raises(ValueError, match="found none among 8"):
        fit_temperature(head_of(10), [logits], torch.full((8,), -100))
    with pytest.raises(ValueError, match="the loss is nan"):
        fit_temperature(head_of(10), [logits * torch.nan], targets)
    once = iter([logits])
    with pytest.raises(ValueError, match="features holds 0 examples and targets 8; return the batches again"):
        fit_temperature(head_of(10), lambda: once, targets)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_temperature_with_tiny_noise_equals_that_without_noise(link, scale):
    det, noisy = make("det", link=link), make("het-xl", link=link, noise_init=1e-6, temperature=0.7, eval_samples=2)
    with torch.no_grad():
        det.classifier.weight.mul_(3 * scale)
        noisy.classifier.load_state_dict(det.classifier.state_dict())
        for parameter in noisy.covariance.parameters():
            parameter.mul_(1e-3)
        noisy.covariance.residual.bias.fill_(-20)  # before a softplus
    features = torch.randn(400, 5, dtype=torch.float64)
    targets = det.classifier(features).argmax(-1)
    targets[:200] = torch.randint(7, (200,))
    if link == "sigmoid":
        targets = LabelLists.from_lists([[int(target)] for target in targets])
    temperature_before = noisy.temperature
    actual = fit_temperature(noisy, [features[:100], features[100:]], targets)
    assert actual == pytest.approx(fit_temperature(det, [features], targets), rel=0.02)
    assert actual == fit_temperature(noisy, lambda: iter([features]), targets)
    assert noisy.temperature is temperature_before
    assert noisy.training


def test_the_result_lowers_the_loss_of_a_head_with_noise():
    head = make("het-xl", noise_init=2.0, temperature=1.0, eval_samples=32).eval()
    features, targets = torch.randn(200, 5, dtype=torch.float64), torch.randint(7, (200,))
    actual = fit_temperature(head, [features], targets, seed=3)
    losses = []
    for temperature in (actual, actual / 1.1, actual * 1.1, 1.0):
        head.temperature = FixedTemperature(temperature)
        losses.append(float(head.loss(features, targets, generator=torch.Generator().manual_seed(3)).detach()))
    assert losses[0] <= min(losses) + 1e-6


def test_clusters_whose_logits_depend_on_the_temperature():
    classifier = AdaptiveClassifier(16, 40, [6, 15], div_value=2.0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.mul_(3)
    head = DetHead(16, 40, classifier=classifier)
    features = torch.randn(300, 16, dtype=torch.float64)
    with torch.no_grad():
        targets = classifier(features).argmax(-1)
    targets[::2] = torch.randint(40, (150,))

    @torch.no_grad()
    def loss(temperature):
        return float(DetHead(16, 40, temperature=float(temperature), classifier=classifier).loss(features, targets))

    actual = fit_temperature(head, features.split(64), targets)
    assert actual == pytest.approx(brute_force(loss), rel=5e-3)


def twins(wrong):
    """A head whose noise goes between twins, with features and labels of which a share is that of the twin.

    Its mean logits prefer the right class by 2; the noise between twins has a standard deviation of 3.
    """
    head = make("het-xl", 6, 6, rank=1, residual="rank1", temperature=1.3, eval_samples=64)
    classes = torch.arange(1200) % 6
    with torch.no_grad():
        head.classifier.weight.copy_(2 * torch.eye(6))
        head.classifier.bias.zero_()
        head.covariance.factor.copy_(torch.tensor([[1.5, -1.5] * 3]) / 2)
        head.covariance.scale.weight.zero_()
        head.covariance.scale.bias.fill_(1)
        head.covariance.residual.weight.zero_()
        head.covariance.residual.bias.fill_(-20)
    features = torch.eye(6, dtype=torch.float64)[classes]
    flipped = torch.arange(1200) % 10 < 10 * wrong
    return head, features, torch.where(flipped, classes ^ 1, classes)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_the_scales_are_the_best_of_all(wrong):
    head, features, targets = twins(wrong)
    temperature_before = head.temperature
    actual = fit_scales(head, features.split(500), targets, seed=1)
    assert head.temperature is temperature_before
    assert (head.noise_scale, head.training) == (1.0, True)
    head.eval()

    def loss(temperature, noise):
        head.temperature, head.noise_scale = FixedTemperature(temperature), noise
        return float(head.loss(features, targets, generator=torch.Generator().manual_seed(1)).detach())

    grid = [(temperature, noise) for noise in scaling.NOISE_SCALES for temperature in torch.logspace(-1.3, 0.7, 41)]
    assert loss(*actual) <= min(loss(float(temperature), noise) for temperature, noise in grid) + 1e-6
    assert actual.noise == 0 if not wrong else actual.noise > 0  # right labels have no use for noise between twins


def test_scales_of_a_head_without_noise():
    logits, targets = torch.randn(200, 10, dtype=torch.float64), torch.randint(10, (200,))
    assert fit_scales(head_of(10), [logits], targets) == (fit_temperature(head_of(10), [logits], targets), 1.0)


def test_a_temperature_is_fitted_to_the_noise_that_is_left_in():
    head, features, targets = twins(0.2)
    head.noise_scale = 0.0
    det = make("det", 6, 6)
    det.classifier.load_state_dict(head.classifier.state_dict())
    assert fit_temperature(head, [features], targets) == fit_temperature(det, [features], targets)
    assert head.noise_scale == 0


def test_scales_need_a_label():
    head, features, targets = twins(0.0)
    with pytest.raises(ValueError, match="at least one example with a label, found none among 1200"):
        fit_scales(head, [features], torch.full_like(targets, -100))


def test_scales_with_several_labels_an_example():
    head, features, targets = twins(0.2)
    head.link = "sigmoid"
    lists = LabelLists.from_lists([[int(target)] for target in targets])
    actual = fit_scales(head, [features], lists)
    assert actual.noise in scaling.NOISE_SCALES
    head.eval()
    losses = []
    for scales in (actual, scaling.Scales(1.0, 1.0), scaling.Scales(1.0, 0.0)):
        head.temperature, head.noise_scale = FixedTemperature(scales.temperature), scales.noise
        losses.append(float(head.loss(features, lists, generator=torch.Generator().manual_seed(0)).detach()))
    assert losses[0] <= min(losses)


def test_scales_without_gain_stay_one():
    head, features, targets = twins(0.0)
    with torch.no_grad():
        head.classifier.weight.zero_()
    assert fit_scales(head, [features], targets) == (1.0, 1.0)
    assert fit_temperature(head, [features], targets) == 1


def test_every_module_keeps_its_mode():
    head, features, targets = twins(0.0)
    head.classifier.eval()
    fit_scales(head, [features[:50]], targets[:50])
    assert head.training
    assert not head.classifier.training


@pytest.mark.parametrize(("right", "end"), [(True, scaling.LOW), (False, scaling.HIGH)])
def test_a_head_with_noise_reaches_the_ends_of_the_range(right, end):
    head, features, targets = twins(0.0)
    head.noise_scale = 0.25
    targets = targets if right else (targets + 2) % 6
    assert fit_temperature(head, [features], targets) == pytest.approx(end)


def test_fits_in_inference_mode_and_leaves_no_gradients():
    head, features, targets = twins(0.2)
    expected = fit_temperature(head, [features], targets)
    with torch.inference_mode():
        assert fit_temperature(head, [features + 0], targets) == expected
    assert all(parameter.requires_grad and parameter.grad is None for parameter in head.parameters())
