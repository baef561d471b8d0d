"""Graphs that are compiled whole, with the evaluations as operators in them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetxl
from hetxl.functional import LabelLists
from support.cases import LINKS, make, normals, targets_for


class Model(nn.Module):
    """A backbone with a head."""

    def __init__(self, link: str = "softmax"):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
        self.head = hetxl.HetXLHead(5, 7, rank=2, link=link, temperature=hetxl.LearnedTemperature())

    def forward(self, inputs, targets=None, **options):
        return self.head(self.backbone(inputs), targets, **options)


def whole(function, backend: str = "aot_eager"):
    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same_loss_and_gradients(model, compiled, *args, **options):
    expected, actual = model(*args, **options).sum(), compiled(*args, **options).sum()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected))


@pytest.mark.parametrize("link", LINKS)
def test_a_backbone_with_a_head_compiles_whole(link):
    model = Model(link)
    compiled, noise = whole(model), normals(model.head, dtype=torch.float32)
    inputs, targets = torch.randn(3, 4), targets_for(model.head, 3).to(torch.int64 if link == "softmax" else None)
    assert_same_loss_and_gradients(model, compiled, inputs, targets, noise=noise)
    assert_same_loss_and_gradients(model, compiled, inputs, targets, noise=noise, reduction="none")
    assert_same_loss_and_gradients(model, compiled, inputs, noise=noise)


def test_draws_are_those_of_the_default_generator_for_any_batch_size():
    model = Model()
    compiled = whole(model)
    for batch in (3, 5, 6):
        inputs, targets = torch.randn(batch, 4), torch.randint(7, (batch,))
        torch.manual_seed(batch)
        loss = compiled(inputs, targets)
        torch.manual_seed(batch)
        torch.testing.assert_close(loss, model(inputs, targets))


def test_options_of_the_loss_compile_whole():
    model = Model()
    compiled, noise = whole(model), normals(model.head, 3, dtype=torch.float32)
    inputs, weight = torch.randn(3, 4), torch.rand(7)
    options = {"noise": noise, "class_weight": weight, "label_smoothing": 0.1, "weight": torch.rand(3)}
    assert_same_loss_and_gradients(model, compiled, inputs, torch.tensor([0, -100, 6]), **options)
    assert_same_loss_and_gradients(model, compiled, inputs, torch.rand(3, 7).softmax(-1), noise=noise)
    lists = LabelLists(torch.tensor([0, 2]), torch.tensor([1, 6]), None, 3)
    tagger = Model("sigmoid")
    assert_same_loss_and_gradients(tagger, whole(tagger), inputs, lists, noise=noise)


def test_evaluation_and_predictions_compile_whole():
    model = Model().eval()
    inputs = torch.randn(3, 4)
    torch.testing.assert_close(whole(model)(inputs), model(inputs))
    for options in ({}, {"top_k": 3}, {"method": "mean_field"}, {"classes": torch.tensor([[1, 6], [0, 2], [3, 3]])}):

        def predict(values, options=options):
            prediction = model.head.predict(model.backbone(values), **options)
            return prediction.probs, prediction.indices, prediction.entropy, prediction.mutual_information

        torch.testing.assert_close(whole(predict)(inputs), predict(inputs))


def test_a_class_id_out_of_range_is_refused_in_a_compiled_graph():
    model = Model()
    with pytest.raises(ValueError, match="class id 7; allowed are 0 to 6"):
        whole(model)(torch.randn(2, 4), torch.tensor([0, 7]))


def test_operators_have_shapes_and_gradients_as_torch_checks_them():
    head = make("het-xl", 3, 4)
    features, noise = torch.randn(2, 3, dtype=torch.float64), normals(head, 2)
    temperature = torch.ones((), dtype=torch.float64)
    assert head.covariance is not None
    gaussian = head.covariance(features)
    tensors = {"features": features, "weight": head.classifier.weight, "bias": head.classifier.bias}
    tensors |= gaussian.parts() | {"temperature": temperature, "z": noise}
    leaves = [value.detach().clone().requires_grad_(name != "z") for name, value in tensors.items()]
    names = ",".join(tensors)
    needed = names.removesuffix(",z")
    args = (leaves, names, "classifier,rank1", needed, "log_probs", torch.float64, "softmax", "", 0, False)
    torch.library.opcheck(torch.ops.hetxl.evaluate.default, args)
    losses = ([*leaves[:-1], noise, torch.tensor([1, 3]), torch.ones(2, dtype=torch.float64)], f"{names},ids,factor")
    args = (*losses, "classifier,rank1", needed, "nll", torch.float64, "softmax", "", 0, False)
    torch.library.opcheck(torch.ops.hetxl.evaluate.default, args)


@pytest.mark.slow
# Warnings of the compiler about itself.
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("link", LINKS)
def test_generated_code_gives_the_same_loss_and_gradients(link):
    model = Model(link)
    compiled, noise = whole(model, "inductor"), normals(model.head, dtype=torch.float32)
    for batch in (3, 5):
        inputs, targets = (
            torch.randn(batch, 4),
            targets_for(model.head, batch).to(torch.int64 if link == "softmax" else torch.float32),
        )
        assert_same_loss_and_gradients(model, compiled, inputs, targets, noise=noise)
        loss = F.mse_loss(compiled(inputs, noise=noise), torch.zeros(batch, 7))
        torch.testing.assert_close(
            gradients(model, loss), gradients(model, F.mse_loss(model(inputs, noise=noise), torch.zeros(batch, 7)))
        )
