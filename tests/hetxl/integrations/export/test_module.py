"""What is exported predicts as the head does, with one noise for all examples, in blocks."""

import types

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hetxl
from hetxl.functional.engine.predict import METHODS
from hetxl.integrations.export import module as export_module
from hetxl.integrations.export.module import FixedNoiseHead, cheaper_order, exportable, fixed_noise
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import InputSpec
from hetxl_train.model import build_model
from support.cases import GRID, LINKS, VARIANTS, make


def small(variant, **options):
    return make(variant, dtype=torch.float32, **({"noise_init": 1.0, "eval_samples": 6} | options)).eval()


def expected(head, features, module):
    return head.predict(features, method=module.fixed.method, noise=module.noise).probs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_module_equals_predict(variant, link, method):
    features = torch.randn(3, 5)
    for _, covariance, residual in [case for case in GRID if case[0] == variant]:
        head = small(variant, link=link, covariance=covariance, residual=residual)
        module = exportable(head, method)
        actual = module(features)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected(head, features, module), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "det"])
def test_the_scale_of_the_noise_comes_along(variant, scale):
    head, features = small(variant, noise_scale=scale), torch.randn(3, 5)
    module = exportable(head)
    torch.testing.assert_close(module(features), expected(head, features, module), rtol=0, atol=1e-6)
    assert module.about["method"] == ("mc" if scale else "deterministic")
    assert module.about.get("noise_scale") == (scale or None)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "det"])
def test_both_orders_and_many_blocks(variant, link, monkeypatch):
    monkeypatch.setattr(export_module, "BLOCK", 15)  # two samples of seven classes
    head, features = small(variant, link=link, eval_samples=11), torch.randn(3, 5)
    for order in ("samples", "factors"):
        module = exportable(head, order=order)
        torch.testing.assert_close(module(features), expected(head, features, module), rtol=0, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        actual = func(*args, **(kwargs or {}))
        if isinstance(actual, torch.Tensor):
            self.elements = max(self.elements, actual.numel())
        return actual


@pytest.mark.parametrize("order", ["samples", "factors"])
def test_no_tensor_holds_all_samples(order):
    head, features = small("het-xl", classes=3000, eval_samples=700), torch.randn(2, 5)
    module = exportable(head, order=order)
    with Largest() as largest:
        actual = module(features)
    assert largest.elements <= 2 * export_module.BLOCK < 2 * 700 * 3000
    torch.testing.assert_close(actual, expected(head, features, module), rtol=0, atol=1e-6)


def test_the_graph_stays_small(monkeypatch):
    assert export_module._block_size(256, 10**7) == 16
    assert export_module._block_size(256, 100) == 256
    assert export_module._block_size(1, 10**9) == 1
    head = small("het-xl")
    features = torch.randn(2, 5)
    distribution = head.logit_distribution(features)
    assert cheaper_order(distribution, distribution.size) == "samples"
    assert cheaper_order(distribution, distribution.size + 1) == "factors"
    monkeypatch.setattr(export_module, "ROWS", 10)
    assert cheaper_order(distribution, 100) == "samples"
    assert cheaper_order(small("het").logit_distribution(features), 100) == "samples"


@pytest.mark.parametrize("variant", VARIANTS)
def test_top_k_gives_the_most_probable_classes(variant):
    head, features = small(variant), torch.randn(4, 5)
    module = exportable(head, top_k=3)
    probs, classes = module(features)
    needed = expected(head, features, module).topk(3)
    torch.testing.assert_close(probs, needed.values, rtol=0, atol=1e-6)
    assert torch.equal(classes, needed.indices)
    assert torch.equal(module.probabilities(features).gather(-1, classes), probs)


def test_the_noise_is_fixed_by_the_seed():
    head, features = small("het-xl", residual="diagonal"), torch.randn(2, 5)
    first, again, other = (exportable(head, seed=seed) for seed in (1, 1, 2))
    assert first.noise.shape == (6, 7)  # S, R + N
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first(features), again(features))
    torch.testing.assert_close(first(features)[:1], first(features[:1]))  # shared by the batch
    assert not torch.equal(first.noise, other.noise)
    assert exportable(head, num_samples=9).noise.shape == (9, 7)
    pairs = fixed_noise(small("het", sampler="antithetic"), 4, 0)
    assert torch.equal(pairs[0], -pairs[1])
    assert exportable(head, "mean_field").noise is None

    def ones(batch, samples, size, *, generator, device, dtype):
        return torch.ones(batch, samples, size, dtype=dtype)

    own = exportable(small("het", sampler=ones))
    assert torch.equal(own.noise, torch.ones(6, 3))
    assert own.about["sampler"] == "custom"


def test_exported_module_is_a_float32_copy_in_evaluation_mode():
    head, features = make("het-xl", dtype=torch.bfloat16, eval_samples=6), torch.randn(2, 5)
    head.train()
    module = exportable(head)
    assert head.training
    assert not any(part.training for part in module.modules())
    assert head.classifier.weight.dtype == torch.bfloat16
    before = module(features)
    assert before.dtype == torch.float32
    with torch.no_grad():
        head.classifier.weight.zero_()
    assert torch.equal(module(features), before)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_about_describes_the_exported_module():
    about = exportable(small("het-xl", temperature=2.0), top_k=2, seed=4).about
    assert about == {
        "method": "mc",
        "link": "softmax",
        "num_classes": 7,
        "temperature": 2.0,
        "num_samples": 6,
        "sampler": "orthogonal",
        "seed": 4,
        "top_k": 2,
    }
    assert exportable(small("det")).about["method"] == "deterministic"
    assert "seed" not in exportable(small("het"), "probit").about


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (InputSpec("tokens", (3,), 11), {}),
        (InputSpec("features", (5,)), {"backbone": "mlp", "dropout": 0.5, "frozen": True}),
        (InputSpec("image", (3, 16, 16)), {}),
    ],
)
def test_whole_models_are_exportable(spec, options):
    model = build_model(TrainConfig(rank=2, width=8, features=4, eval_samples=6, **options), spec, 7, "softmax")
    model.train()
    module = exportable(model)
    inputs = torch.randint(11, (3, 3)) if spec.kind == "tokens" else torch.randn(3, *spec.shape)
    needed = expected(model.head, model.eval().backbone(inputs), module)
    torch.testing.assert_close(module(inputs), needed, rtol=0, atol=1e-6)
    assert isinstance(model.head, hetxl.HetXLHead)  # the model itself is as it was


class Wrapped(nn.Module):
    """Two inputs, an output with .logits, and the head under two names."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = small("het-xl")
        self.last = self.head

    def forward(self, inputs, scale):
        return types.SimpleNamespace(logits=self.last(self.body(inputs) * scale))


def test_any_module_with_one_head():
    model, inputs, scale = Wrapped(), torch.randn(3, 4), torch.rand(3, 1)
    module = exportable(model)
    assert isinstance(module.model.last, FixedNoiseHead)
    assert module.model.head is module.model.last
    needed = expected(model.head, model.body(inputs) * scale, module)
    torch.testing.assert_close(module(inputs, scale), needed, rtol=0, atol=1e-6)


def test_converted_convolutions_are_exportable():
    model = hetxl.convert(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 1)), rank=2, eval_samples=6, noise_init=1.0)
    images = torch.randn(2, 3, 6, 5)
    module = exportable(model)
    actual = module(images)
    assert actual.shape == (2, 7, 4, 3)
    torch.testing.assert_close(actual.movedim(1, -1), hetxl.predict(model, images, noise=module.noise).probs)


class Rows(nn.Module):
    """A linear layer over the channels of images, classes second."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 7)

    def forward(self, images):
        return self.last(images.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(("model", "width"), [(nn.Conv2d(3, 7, 1), 5), (nn.Conv2d(3, 7, 1), 7), (Rows(), 5)])
def test_top_k_is_given_for_every_pixel(model, width):
    model = hetxl.convert(nn.Sequential(model), rank=2, eval_samples=6)
    images = torch.randn(2, 3, 4, width)
    module = exportable(model, top_k=3)
    probs, classes = module(images)
    needed = module.probabilities(images).topk(3, 1)
    assert probs.shape == (2, 3, 4, width)
    assert torch.equal(probs, needed.values)
    assert torch.equal(classes, needed.indices)


def test_converted_models_of_transformers():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8
    )
    model = hetxl.convert(transformers.ViTForImageClassification(config), rank=2, eval_samples=6).eval()
    images = torch.randn(2, 3, 16, 16)
    module = exportable(model)
    torch.testing.assert_close(module(images), hetxl.predict(model, images, noise=module.noise).probs)
    assert isinstance(hetxl.revert(model).classifier, nn.Linear)  # the model itself is as it was


class Changed(nn.Module):
    """A head or a layer, and something that is done to what it returns."""

    def __init__(self, change, last):
        super().__init__()
        self.last, self.change = last, change

    def forward(self, inputs):
        return self.change(self.last(inputs))


@pytest.mark.parametrize("last", [lambda: small("het-xl"), lambda: hetxl.convert(nn.Linear(5, 7), rank=2)])
@pytest.mark.parametrize(
    "change",
    [
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.Sigmoid(),
        nn.ReLU(inplace=True),
        lambda outputs: outputs / 2,
        lambda outputs: outputs + outputs.new_tensor([0, 0, 1, 0, 0, 0, 0]),
        lambda outputs: outputs.reshape(3, -1, 7).mean(0),
    ],
)
def test_changed_outputs_are_refused(change, last):
    module = exportable(Changed(change, last()))
    for rows in (3, 6, 9):
        with pytest.raises(ValueError, match=r"changes the values that its head returns \(a softmax"):
            module.check(torch.randn(rows, 5))


@pytest.mark.parametrize("change", [lambda outputs: outputs[-1:], lambda outputs: outputs.mT])
def test_chosen_and_moved_outputs_are_let_through(change):
    model, features = Changed(change, small("het-xl")), torch.randn(3, 5)
    module = exportable(model)
    module.check(features)
    torch.testing.assert_close(module(features), change(expected(model.last, features, module)), rtol=0, atol=1e-6)


def test_other_outputs_are_refused():
    with pytest.raises(TypeError, match=r"must be a tensor or have \.logits, found dict"):
        exportable(Changed(lambda outputs: {"out": outputs}, small("det"))).check(torch.randn(3, 5))
    with pytest.raises(ValueError, match="must have 7 classes last"):
        exportable(Changed(lambda outputs: outputs[:, :3], small("det"))).check(torch.randn(3, 5))
    images = hetxl.convert(nn.Sequential(nn.Conv2d(5, 7, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), layer="0")
    with pytest.raises(ValueError, match="changes the values"):
        exportable(images).check(torch.randn(2, 5, 3, 3))


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"method": "magic"}, ValueError, "method must be one of 'mc'"),
        ({"method": "mean-field"}, ValueError, "did you mean 'mean_field'"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1"),
        ({"num_samples": 2.0}, TypeError, "num_samples must be an integer"),
        ({"top_k": 8}, ValueError, "top_k must be at most the number of classes, 7, found 8"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"order": "both"}, ValueError, "order must be one of"),
        ({"model": nn.Linear(5, 7)}, ValueError, "must contain a hetxl head"),
        ({"model": nn.Sequential(small("det"), small("det"))}, ValueError, "found 2 (0, 1)"),
        ({"model": "runs/mine"}, TypeError, "found str"),
    ],
)
def test_invalid_arguments_raise(words, error, message):
    with pytest.raises(error) as raised:
        exportable(**{"model": small("het-xl")} | words)
    assert message in str(raised.value)
