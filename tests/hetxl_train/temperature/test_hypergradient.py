"""Gradients of τ against finite differences in double precision, and against one another."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import hetxl
from hetxl.functional import LabelLists
from hetxl.nn import LearnedTemperature
from hetxl_train.temperature.hypergradient import (
    Batch,
    clipped_tangents,
    logit_slopes,
    loss_gradients,
    mixed_derivative,
    step_tangent,
)

HEADS = ("det", "het", "het-h", "het-xl")
D, K = 5, 6


class Small(nn.Module):
    """A backbone of one layer and a head, in double precision."""

    def __init__(self, head: str, link: str = "softmax"):
        super().__init__()
        torch.manual_seed(3)
        options = {} if head == "det" else {"rank": 2, "noise_init": 1.0}
        self.backbone = nn.Sequential(nn.Linear(4, D), nn.Tanh()).double()
        temperature = LearnedTemperature(init=0.7, dtype=torch.float64)
        self.head = hetxl.build_head(
            head, D, K, temperature=temperature, link=link, train_samples=3, dtype=torch.float64, **options
        )
        with torch.no_grad():
            self.head.classifier.weight.mul_(4)

    def forward(self, inputs, targets, **options):
        return self.head(self.backbone(inputs), targets, **options)

    @property
    def raw(self) -> nn.Parameter:
        [derivative] = self.head.temperature.parameters()
        return derivative

    @property
    def others(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter is not self.raw]


def batch(seed: int, size: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(K, (size,), generator=generator))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_autograd(model: Small, data: Batch, **options) -> list[torch.Tensor]:
    loss = model(data.inputs, data.targets, reduction="sum", generator=seeded(5), **options)
    [gradient] = torch.autograd.grad(loss, model.raw, create_graph=True)
    derivative = torch.autograd.grad(gradient.sum(), model.others, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.others, derivative, strict=True)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_the_mixed_derivative_is_that_of_autograd(head, chunk_bytes):
    model, data = Small(head), batch(0)
    derivative = mixed_derivative(
        model.backbone, model.head, data, model.others, generator=seeded(5), chunk_bytes=chunk_bytes
    )
    for actual, expected in zip(derivative, by_autograd(model, data), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert any(value.abs().max() > 1e-3 for value in derivative)


def test_mixed_derivative_ignores_the_noise_scale_of_predictions():
    model, data = Small("het-xl"), batch(0)
    whole = by_autograd(model, data)
    model.head.noise_scale = 0.5
    derivative = mixed_derivative(model.backbone, model.head, data, model.others, generator=seeded(5))
    for actual, expected in zip(derivative, whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_ignored_labels_do_not_count():
    model, data = Small("het-xl"), batch(0)
    targets = data.targets.clone()
    targets[2] = -100
    data = Batch(data.inputs, targets)
    derivative = mixed_derivative(model.backbone, model.head, data, model.others, generator=seeded(5))
    for actual, expected in zip(derivative, by_autograd(model, data), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_the_mixed_derivative_of_other_losses():
    model, data = Small("het-xl"), batch(0)
    options = {"label_smoothing": 0.2}
    derivative = mixed_derivative(model.backbone, model.head, data, model.others, generator=seeded(5), chunk_bytes=1,
                             **options)  # fmt: skip
    for actual, expected in zip(derivative, by_autograd(model, data, **options), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_the_mixed_derivative_with_several_labels():
    model, data = Small("het", link="sigmoid"), batch(0, 3)
    lists = Batch(data.inputs, LabelLists.from_lists([[0, 2], [], [1]]))
    derivative = mixed_derivative(model.backbone, model.head, lists, model.others, generator=seeded(5), chunk_bytes=1)
    for actual, expected in zip(derivative, by_autograd(model, lists), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_slopes_of_the_logits():
    logits = 3 * torch.randn(4, 3, K, dtype=torch.float64, generator=seeded(1))
    targets = torch.tensor([0, 5, -100, 2])

    def gradient(tau: float) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        index = targets.clamp(min=0)[:, None, None].expand(4, 3, 1)
        chosen = F.log_softmax(leaf / tau, -1).gather(-1, index).squeeze(-1).logsumexp(1)
        [derivative] = torch.autograd.grad(-(chosen * (targets >= 0)).sum(), leaf)
        return derivative

    step = 1e-5
    expected = (gradient(0.8 + step) - gradient(0.8 - step)) / (2 * step)
    torch.testing.assert_close(logit_slopes(logits, targets, 0.8), expected, rtol=1e-6, atol=1e-8)


OPTIMIZERS = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9)),
}


def one_step(
    model: Small, optimizer: optim.Optimizer, data: Batch, clip: float
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """A step of training; gives the gradients before clipping and their norm."""
    _, gradients = loss_gradients(model, data, model.others, generator=seeded(5))
    for parameter, gradient in zip(model.others, gradients, strict=True):
        parameter.grad = gradient / len(data)
    unclipped = [parameter.grad.clone() for parameter in model.others]
    norm = nn.utils.clip_grad_norm_(model.others, clip) if clip else None
    optimizer.step()
    return unclipped, norm


def validation_loss(model: Small, data: Batch) -> float:
    with torch.no_grad():
        return float(model(data.inputs, data.targets, reduction="mean", generator=seeded(6)))


@pytest.mark.parametrize(("head", "kind"), list(itertools.product(HEADS, OPTIMIZERS)))
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_gradient_is_that_of_the_validation_loss_one_step_ahead(head, kind, clip):
    train, validation = batch(0), batch(1)

    def prepared(shift: float) -> tuple[Small, optim.Optimizer]:
        """After two steps, so that the optimiser's averages hold something; then τ is shifted."""
        model = Small(head)
        optimizer = OPTIMIZERS[kind](model.others)
        for seed in (8, 9):
            one_step(model, optimizer, batch(seed), clip)
        with torch.no_grad():
            model.raw.add_(shift)
        return model, optimizer

    def ahead(shift: float) -> float:
        model, optimizer = prepared(shift)
        one_step(model, optimizer, train, clip)
        return validation_loss(model, validation)

    model, optimizer = prepared(0.0)
    mixed = [
        value / len(train)
        for value in mixed_derivative(model.backbone, model.head, train, model.others, generator=seeded(5))
    ]
    before, norm = one_step(model, optimizer, train, clip)
    mixed = mixed if norm is None else clipped_tangents(before, mixed, norm, clip)
    _, gradients = loss_gradients(model, validation, [model.raw, *model.others], generator=seeded(6))
    direct, *slopes = (gradient / len(validation) for gradient in gradients)
    [group] = optimizer.param_groups
    along = sum(
        (step_tangent(optimizer, group, parameter, parameter.grad, tangent) * slope).sum()
        for parameter, tangent, slope in zip(model.others, mixed, slopes, strict=True)
    )
    derivative = float(direct + along)
    step = 1e-5
    expected = (ahead(step) - ahead(-step)) / (2 * step)
    assert derivative == pytest.approx(expected, rel=1e-4, abs=1e-9)
    # The way through the step by itself, which is a small part of the whole where steps are small.
    assert float(along) == pytest.approx(expected - float(direct), rel=1e-4, abs=1e-8)
    assert abs(float(along)) > 1e-6


@pytest.mark.parametrize("head", HEADS)
def test_the_direct_gradient_on_training_examples_is_the_ordinary_one(head):
    model, data = Small(head), batch(0)
    model(data.inputs, data.targets, generator=seeded(5)).backward()
    _, [derivative] = loss_gradients(model, data, [model.raw], generator=seeded(5))
    torch.testing.assert_close(derivative / len(data), model.raw.grad, rtol=1e-12, atol=0)


def test_a_parameter_without_a_gradient_stays():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    derivative = step_tangent(optimizer, optimizer.param_groups[0], parameter, parameter.grad, torch.zeros(2).double())
    assert derivative.tolist() == [0, 0]


def test_other_optimisers_are_errors():
    parameter = nn.Parameter(torch.zeros(2))
    for optimizer in (optim.RMSprop([parameter]), optim.SGD([parameter], momentum=0.9, nesterov=True)):
        with pytest.raises(TypeError, match="optimizer must be Adam"):
            step_tangent(optimizer, optimizer.param_groups[0], parameter, torch.zeros(2), torch.zeros(2))
