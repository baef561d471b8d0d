import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetxl.integrations.convert.layer import LAYERS
from hetxl.nn import build_head

HetXLLayer = LAYERS["het-xl"]

FEATURES = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(2, 8, 4, 5, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_a_layer_is_the_head_with_the_same_parameters(name, link):
    torch.manual_seed(0)
    linear = nn.Linear(8, 5)
    head = build_head(name, 8, 5, rank=2, link=link, classifier=copy.deepcopy(linear))
    torch.manual_seed(0)
    nn.Linear(8, 5)
    layer = LAYERS[name](linear, rank=2, link=link)
    state = {key.removeprefix("classifier."): value for key, value in head.state_dict().items()}
    assert sorted(state) == sorted(layer.state_dict())
    layer.load_state_dict(state)
    labels = torch.tensor([0, 4, 2]) if link == "softmax" else torch.eye(5)[:3]
    noise = {} if name == "det" else {"noise": torch.randn(6, layer.covariance.size)}
    assert torch.equal(layer(FEATURES, labels, **noise), head(FEATURES, labels, **noise))
    assert torch.equal(layer.predict(FEATURES, **noise).probs, head.predict(FEATURES, **noise).probs)


def test_parameters_are_the_layers_own():
    linear = nn.Linear(8, 5, dtype=torch.float64)
    linear.weight.requires_grad_(False)
    layer = HetXLLayer(linear.eval())
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}
    assert not hasattr(layer, "classifier")
    assert HetXLLayer(nn.Linear(8, 5, bias=False)).bias is None


def test_outputs_are_log_probabilities_in_the_layers_shape():
    layer = HetXLLayer(nn.Linear(8, 5))
    assert layer(FEATURES.expand(2, 3, 8)).shape == (2, 3, 5)
    torch.testing.assert_close(layer(FEATURES).exp().sum(-1), torch.ones(3))


@pytest.mark.parametrize("layer", [nn.Linear(8, 5), nn.Conv2d(8, 5, 1), nn.Conv2d(8, 5, 1, bias=False)])
def test_without_noise_the_output_is_the_layers_bit_for_bit(layer):
    inputs = IMAGES if isinstance(layer, nn.Conv2d) else FEATURES
    before = layer(inputs)
    assert torch.equal(LAYERS["det"](layer, temperature=1.0)(inputs), before)
    for options in ({"eval_method": "deterministic"}, {"noise_scale": 0.0}):
        noisy = HetXLLayer(layer, temperature=1.0, **options).eval()
        assert torch.equal(noisy(inputs), before)
        assert not torch.equal(noisy.train()(inputs), before)


def test_a_temperature_divides_the_logits():
    linear = nn.Linear(8, 5)
    torch.testing.assert_close(LAYERS["det"](linear, temperature=2.0)(FEATURES), linear(FEATURES) / 2)


@pytest.mark.parametrize(("link", "method"), [("softmax", "mean_field"), ("sigmoid", "probit")])
def test_evaluation_without_samples(link, method):
    layer = HetXLLayer(nn.Linear(8, 5), link=link, eval_method=method, noise_init=1.0).eval()
    probs = layer.predict(FEATURES, method=method).probs
    actual = layer(FEATURES)
    torch.testing.assert_close(actual.exp() if link == "softmax" else torch.sigmoid(actual), probs)
    with pytest.raises(ValueError, match="eval_method"):
        HetXLLayer(nn.Linear(8, 5), eval_method="guess")


def test_convolution_classifies_every_pixel():
    convolution = nn.Conv2d(8, 5, 1)
    layer = HetXLLayer(convolution, rank=2)
    labels = torch.randint(5, (2, 4, 5))
    noise = torch.randn(6, layer.covariance.size)
    rows = IMAGES.movedim(1, -1)
    actual = layer(IMAGES, noise=noise)
    assert actual.shape == (2, 5, 4, 5)
    torch.testing.assert_close(layer(IMAGES, labels, noise=noise), F.nll_loss(actual, labels))
    torch.testing.assert_close(layer(rows, labels, rows=True, noise=noise), F.nll_loss(actual, labels))
    torch.testing.assert_close(layer.mean_logits(rows).movedim(-1, 1), convolution(IMAGES))
    assert layer(IMAGES[0]).shape == (5, 4, 5)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("layer", "inputs"), [(nn.Linear(8, 5), FEATURES), (nn.Conv2d(8, 5, 1), IMAGES)])
def test_outputs_may_be_changed_in_place(layer, inputs, link):
    head = HetXLLayer(copy.deepcopy(layer).double(), rank=2, link=link)
    noise = torch.randn(6, head.covariance.size, dtype=torch.float64)
    actual = []
    for change in (lambda output: output * 2, lambda output: output.mul_(2)):
        head.zero_grad()
        change(head(inputs.double(), noise=noise)).sin().sum().backward()
        actual.append([parameter.grad for parameter in head.parameters()])
    torch.testing.assert_close(*actual)


def test_hooks_move_with_their_handles():
    linear, seen = nn.Linear(8, 5), []
    handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    layer = HetXLLayer(linear)
    layer(FEATURES)
    linear(FEATURES)
    assert seen == ["HetXLLayer"]
    back = layer.layer()
    back(FEATURES)
    assert seen == ["HetXLLayer", "Linear"]
    handle.remove()
    back(FEATURES)
    assert len(seen) == 2


@pytest.mark.parametrize("layer", [nn.Linear(8, 5), nn.Conv2d(8, 5, 1)])
def test_the_layer_comes_back_with_its_temperature_folded_in(layer):
    inputs = IMAGES if isinstance(layer, nn.Conv2d) else FEATURES
    before = layer(inputs).detach()
    unfolded = HetXLLayer(layer, temperature=2.0).layer(fold=False)
    assert type(unfolded) is type(layer)
    assert torch.equal(unfolded(inputs), before)
    torch.testing.assert_close(HetXLLayer(layer, temperature=2.0).layer()(inputs), before / 2)


def test_reset_parameters_draws_all_parameters():
    layer = HetXLLayer(nn.Linear(8, 5))
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    changed = [name for name, value in layer.state_dict().items() if not torch.equal(value, before[name])]
    assert {"weight", "bias", "covariance.factor"} <= set(changed)
    assert layer.weight.abs().max() <= 8**-0.5


def test_captured_rows_tell_where_outputs_came_from():
    layer = HetXLLayer(nn.Linear(8, 5))
    sequences = torch.randn(2, 4, 8)
    with layer.capture() as captured:
        assert layer.capturing
        numbers = layer(sequences)
    assert not layer.capturing
    assert numbers.shape == (2, 4, 5)
    assert torch.equal(captured.rows(numbers[..., 0]), sequences)
    assert torch.equal(captured.rows(numbers[torch.arange(2), torch.tensor([3, 1])][:, 0]), sequences[[0, 1], [3, 1]])
    with pytest.raises(ValueError, match="changes the values"):
        captured.rows(numbers.mean(1)[:, 0])
    with pytest.raises(ValueError, match="changes the values"):
        captured.rows(numbers[..., 0] + 1)


def test_captured_rows_need_one_call():
    layer = HetXLLayer(nn.Linear(8, 5))
    with layer.capture() as captured:
        layer(FEATURES)
        with pytest.raises(ValueError, match="called twice"):
            layer(FEATURES)
    with layer.capture() as captured, pytest.raises(ValueError, match="did not call"):
        captured.rows(torch.zeros(3))
    with pytest.raises(ValueError, match="did not call"):
        captured.rows_of(torch.randn(3, 5), 5)


def test_rounded_row_numbers_are_refused():
    layer = HetXLLayer(nn.Linear(8, 5))
    features = torch.randn(1025, 8)
    with layer.capture() as captured:
        numbers = layer(features)[:, 0]
    with pytest.raises(ValueError, match=r"torch\.float16, which can identify only 1024 of 1025 rows"):
        captured.rows(numbers.half())
    for row in (300, 1024):  # even one row that rounding puts in another's place
        with pytest.raises(ValueError, match="changes the values"):
            captured.rows(numbers[[row]].bfloat16().float())
    assert torch.equal(captured.rows(numbers[-2:].double()), features[-2:])


def test_changed_values_are_refused_for_one_row_too():
    layer = HetXLLayer(nn.Linear(8, 5))
    with layer.capture() as captured:
        numbers = layer(FEATURES[:1])[:, 0]
    for changed in (2 * numbers, numbers.tanh(), numbers.relu(), numbers.abs(), numbers * torch.nan, numbers / 0):
        with pytest.raises(ValueError, match="changes the values"):
            captured.rows(changed)


@pytest.mark.parametrize("positions", [2, 3, 4, 9, 49, 169, 196])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_averages_are_not_taken_for_the_row_in_the_middle(batch, positions):
    layer = HetXLLayer(nn.Linear(8, 5))
    for shape, dim in (((batch, positions, 8), 1), ((positions, batch, 8), 0)):
        with layer.capture() as captured:
            numbers = layer(torch.randn(shape))
        with pytest.raises(ValueError, match="changes the values"):
            captured.rows_of(numbers.mean(dim), 5)


def test_all_classes_are_looked_at():
    layer = HetXLLayer(nn.Linear(8, 5))
    with layer.capture() as captured:
        numbers = layer(FEATURES)
    assert torch.equal(captured.rows_of(numbers.clone(), 5), FEATURES)
    with pytest.raises(ValueError, match="changes the values"):
        captured.rows_of(numbers.masked_fill(torch.arange(5) == 2, -torch.inf), 5)


def test_a_layer_with_other_classes_is_taken_over():
    layer, larger = HetXLLayer(nn.Linear(8, 5)), nn.Linear(8, 7, bias=False)
    noise = layer.covariance
    layer.take(larger)
    assert layer.weight is larger.weight
    assert layer.bias is None
    assert layer.covariance is noise
    assert layer(FEATURES).shape == (3, 7)
    assert layer.takes_any_classes
    assert LAYERS["det"](nn.Linear(8, 5)).takes_any_classes
    assert not HetXLLayer(nn.Linear(8, 5), noise_features=3).takes_any_classes
    assert not any(LAYERS[name](nn.Linear(8, 5)).takes_any_classes for name in ("het", "het-h"))


def test_captured_rows_find_the_class_dimension():
    layer = HetXLLayer(nn.Linear(8, 5))
    features = torch.randn(5, 4, 5, 8)
    with layer.capture() as captured:
        numbers = layer(features)
    for dim in range(4):
        assert torch.equal(captured.rows_of(numbers.movedim(-1, dim), 5), features)
    with pytest.raises(ValueError, match=r"5 classes last.*found shape \[\]"):
        captured.rows_of(torch.tensor(1.0), 5)
    with pytest.raises(ValueError, match="changes the values"):
        captured.rows_of(numbers + torch.arange(5), 5)
