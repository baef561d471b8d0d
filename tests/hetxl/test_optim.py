"""The learning rate over the steps, and which parameters decay."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hetxl import HetXLHead
from hetxl.optim import (
    NOISE_PRIOR,
    PRIORS,
    Recipe,
    Scaling,
    add_prior,
    best_prior,
    build_optimizer,
    choose_prior,
    choose_scaling,
    learning_rate_at,
    noise_free_steps,
    parameter_groups,
    prior_penalties,
    prior_steps,
    set_learning_rate,
)
from hetxl_train.data.dataset import InputSpec
from hetxl_train.model import build_model
from support.training import small

STEPS = 200


def rates(steps=STEPS, **options):
    config = small(learning_rate=1e-2, **options)
    return np.array([learning_rate_at(step, steps, config.optim) for step in range(steps)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_warm_up_peak_and_decay(schedule):
    learning_rates = rates(schedule=schedule, warmup=0.1, warmup_from=1e-5)
    assert learning_rates[0] == pytest.approx(1e-5 + (1e-2 - 1e-5) / 20)
    np.testing.assert_allclose(np.diff(learning_rates[:20]), (1e-2 - 1e-5) / 20)
    assert learning_rates.max() == learning_rates[19] == learning_rates[20] == 1e-2
    assert (np.diff(learning_rates[20:]) < 0).all()
    assert 0 < learning_rates[-1] < 1e-4


def test_schedules_decay_as_documented():
    linear, cosine = rates(schedule="linear", warmup=0), rates(schedule="cosine", warmup=0)
    np.testing.assert_allclose(linear, 1e-2 * (1 - np.arange(STEPS) / STEPS))
    np.testing.assert_allclose(cosine, 5e-3 * (1 + np.cos(np.pi * np.arange(STEPS) / STEPS)))
    learning_rates = rates(schedule="constant", warmup=10)
    assert (learning_rates[9:] == 1e-2).all()
    assert (learning_rates[:9] < 1e-2).all()


def test_warm_up_in_steps_and_as_a_share():
    np.testing.assert_array_equal(rates(warmup=20), rates(warmup=0.1))
    assert rates(warmup=0)[0] == 1e-2
    assert rates(warmup=1)[0] == 1e-2


def test_learning_rate_stays_below_its_peak_in_edge_cases():
    assert (np.diff(rates(5, warmup=100)) > 0).all()  # a warm-up longer than the run
    assert rates(1, warmup=0)[0] == 1e-2
    assert rates(warmup=10, warmup_from=1.0).max() == 1e-2  # never above the peak


def test_no_decay_for_temperature_biases_and_norms():
    config = small(
        backbone="mlp", width=8, features=4, weight_decay=0.3, temperature="learned", temperature_learning_rate=5.0
    )
    model = build_model(config, InputSpec("features", (4,)), 8, "softmax")
    groups = {group["name"]: group for group in parameter_groups(model, config.optim)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "decayed": 0.3,
        "plain": 0.0,
        "temperature": 0.0,
    }
    assert all(name.startswith("head.temperature.") for name in groups["temperature"]["names"])
    assert groups["temperature"]["scale"] == 5.0
    norms = [f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.LayerNorm)]
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    assert norms
    assert set(groups["plain"]["names"]) == {*norms, *biases}
    assert {"head.classifier.weight", "backbone.body.first.weight"} <= set(groups["decayed"]["names"])
    grouped = [name for group in groups.values() for name in group["names"]]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "decay", "scale"),
    [
        ({"noise_learning_rate": 0.1}, 0.3, 0.1),
        ({"noise_weight_decay": 0.0}, 0.0, 1.0),
        ({"noise_learning_rate": 3.0, "noise_weight_decay": 0.05}, 0.05, 3.0),
    ],
)
def test_the_covariance_may_have_a_recipe_of_its_own(options, decay, scale):
    config = small(weight_decay=0.3, **options)
    model = build_model(config, InputSpec("features", (4,)), 8, "softmax")
    groups = {group["name"]: group for group in parameter_groups(model, config.optim)}
    assert set(groups) == {"decayed", "plain", "noise decayed", "noise plain"}
    noise = [name for name, _ in model.named_parameters() if name.startswith("head.covariance.")]
    assert sorted(groups["noise decayed"]["names"] + groups["noise plain"]["names"]) == sorted(noise)
    assert all(name.endswith(".bias") for name in groups["noise plain"]["names"])
    assert (groups["noise decayed"]["weight_decay"], groups["noise plain"]["weight_decay"]) == (decay, 0)
    assert groups["noise decayed"]["scale"] == groups["noise plain"]["scale"] == scale
    assert (groups["decayed"]["weight_decay"], groups["decayed"]["scale"]) == (0.3, 1)
    # A head without noise has nothing to put there.
    det = build_model(small(head="det", **options), InputSpec("features", (4,)), 8, "softmax")
    assert [group["name"] for group in parameter_groups(det, config.optim)] == ["decayed", "plain"]


def test_only_the_heads_temperature_is_one():
    model = nn.ModuleDict({"backbone": nn.ModuleDict({"temperature": nn.Linear(2, 2)}), "head": nn.Linear(2, 2)})
    assert [group["name"] for group in parameter_groups(model, small().optim)] == ["decayed", "plain"]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert [group["names"] for group in parameter_groups(model, small().optim)] == [["1.weight"], ["1.bias"]]


def test_the_optimiser_has_the_options_and_every_group_its_multiple():
    config = small(temperature="learned", temperature_learning_rate=3.0, beta1=0.8, beta2=0.95)
    optimizer = build_optimizer(build_model(config, InputSpec("features", (4,)), 8, "softmax"), config.optim)
    set_learning_rate(optimizer, 0.5)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
        "decayed": 0.5,
        "plain": 0.5,
        "temperature": 1.5,
    }
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    assert isinstance(optimizer, torch.optim.AdamW)


def test_schedule_restarts_when_the_noise_is_switched_on():
    recipe = Recipe(1e-2, noise_start=0.25, warmup=0.1)
    learning_rates = [learning_rate_at(step, 200, recipe) for step in range(200)]
    plain = Recipe(1e-2, warmup=0.1)
    assert noise_free_steps(200, recipe) == 50
    assert learning_rates[:50] == [learning_rate_at(step, 50, plain) for step in range(50)]
    assert learning_rates[50:] == [learning_rate_at(step, 150, plain) for step in range(150)]


def test_penalties_are_the_gradient_of_the_log_prior():
    head = HetXLHead(6, 5, rank=2).double()
    penalties = prior_penalties(head, prior=4.0, rows=50)
    covered = {id(penalty.parameter) for penalty in penalties}
    assert covered == {id(parameter) for parameter in head.parameters() if parameter.dim() > 1}
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_prior(penalties, noise=False)
    # −log N(W; 0, prior / D) over the rows of the mean loss.
    weight = head.classifier.weight
    expected = torch.autograd.grad((weight.square() / (2 * 4.0 / 6)).sum() / 50, weight)[0]
    torch.testing.assert_close(weight.grad, expected)
    assert not head.covariance.factor.grad.any()
    add_prior(penalties, noise=True)
    torch.testing.assert_close(head.covariance.factor.grad, head.covariance.factor.detach() * 2 / (NOISE_PRIOR * 50))


@pytest.mark.parametrize(("signal", "rows", "strong"), [(0.3, 60, True), (30.0, 4000, False)])
def test_the_prior_is_strong_where_labels_say_little(signal, rows, strong):
    generator = torch.Generator().manual_seed(0)
    weight = signal * torch.randn(20, 4, generator=generator) / 20**0.5
    features = torch.randn(rows + 2000, 20, generator=generator)
    labels = torch.multinomial((features @ weight).softmax(-1), 1, generator=generator).squeeze(1)
    losses = choose_prior(features[:rows], labels[:rows], features[rows:], labels[rows:], 4, steps=100)
    best = min(losses, key=losses.__getitem__)
    assert best == min(PRIORS) if strong else best > 3
    again = choose_prior(features[:rows], labels[:rows], features[rows:], labels[rows:], 4, steps=100)
    assert again == losses


def test_the_best_prior_is_where_a_parabola_over_its_logarithm_is_lowest():
    def losses(optimum: float) -> dict[float, float]:
        return {prior: 0.5 + 0.02 * (math.log(prior) - math.log(optimum)) ** 2 for prior in PRIORS}

    for optimum in (2.0, 10.0, 14.0, 20.0, 50.0):
        assert best_prior(losses(optimum)) == pytest.approx(optimum)
    assert best_prior(losses(0.1)) == PRIORS[0]
    assert best_prior(losses(1000.0)) == PRIORS[-1]
    assert best_prior(dict.fromkeys(PRIORS, 0.5)) == PRIORS[0]
    assert best_prior({1.0: 0.7, 3.0: 0.5, 10.0: 0.5, 30.0: 0.7}) == pytest.approx(30**0.5, rel=0.1)


def test_strong_priors_are_trained_before_they_are_judged():
    generator = torch.Generator().manual_seed(0)
    deviation = torch.logspace(0.5, -1, 32)
    features = torch.randn(2000, 32, generator=generator) * deviation / deviation.square().mean().sqrt()
    weight = torch.randn(32, 5, generator=generator)
    labels = torch.multinomial((features @ weight * 0.5).softmax(-1), 1, generator=generator).squeeze(1)
    rows = features[:1000], labels[:1000], features[1000:], labels[1000:], 5
    chosen, exact, hasty = choose_prior(*rows), choose_prior(*rows, steps=2000), choose_prior(*rows, steps=50)
    assert chosen[1.0] == pytest.approx(exact[1.0], rel=0.005)
    assert best_prior(chosen) == pytest.approx(best_prior(exact), rel=0.2)
    # Strong priors start from initial weights: with few steps they look worse than they are, and the weakest wins.
    assert hasty[1.0] > 1.05 * exact[1.0]
    assert best_prior(hasty) > 5 * best_prior(exact)


def test_small_heads_take_more_steps_to_choose_a_prior():
    assert [prior_steps(2000, weights) for weights in (2**10, 2**18, 2**22)] == [600, 200, 40]
    assert prior_steps(500, 2**10) == 150
    assert prior_steps(30, 2**10) == 0


def test_the_prior_of_rows_of_labels():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 5, generator=generator)
    labels = (features[:, :3] > 1).float()
    losses = choose_prior(features[:200], labels[:200], features[200:], labels[200:], 3, link="sigmoid", steps=50)
    share = labels[:200].mean(0)
    constant = torch.nn.functional.binary_cross_entropy(share.expand(100, -1), labels[200:], reduction="sum") / 100
    assert min(losses.values()) < 0.6 * constant


def test_held_out_rows_are_judged_in_blocks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 4, generator=generator), torch.arange(60) % 3
    weight = torch.rand(20, generator=generator)
    rows = (features[:40], labels[:40], features[40:], labels[40:], 3)
    whole = choose_prior(*rows, held_out_weight=weight, steps=20)
    monkeypatch.setattr("hetxl.optim.LOGITS", 21)
    assert choose_prior(*rows, held_out_weight=weight, steps=20) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "lamb", "lion"])
def test_every_optimizer_lowers_the_loss_by_its_groups(name):
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(64, 4)
    targets = inputs @ torch.randn(4, 3)
    recipe = Recipe(0.02, optimizer=name)
    optimizer = build_optimizer(model, recipe)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    losses = []
    for _ in range(30):
        set_learning_rate(optimizer, 0.02)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_adamw_is_torchs_fused_one():
    optimizer = build_optimizer(nn.Linear(4, 3), Recipe(0.02, beta1=0.8))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["fused"], optimizer.defaults["betas"]) == (True, (0.8, 0.999))
    momentum = build_optimizer(nn.Linear(4, 3), Recipe(0.02, beta1=0.8, optimizer="sgd"))
    assert (type(momentum), momentum.defaults["momentum"]) == (torch.optim.SGD, 0.8)
    with pytest.raises(ValueError, match=r"optimizer must be adamw, sgd or one of timm's, found 'adamx'; did you mean"):
        build_optimizer(nn.Linear(4, 3), Recipe(0.02, optimizer="adamx"))


def test_optimizers_of_torch_need_no_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    build_optimizer(nn.Linear(4, 3), Recipe(0.02, optimizer="sgd"))
    with pytest.raises(ImportError, match=r"optimizer 'lamb' needs timm: pip install 'hetxl\[timm\]'"):
        build_optimizer(nn.Linear(4, 3), Recipe(0.02, optimizer="lamb"))


def test_layers_learn_slower_the_deeper_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    depths = {"0.weight": 2, "0.bias": 2, "1.weight": 1, "1.bias": 1}
    groups = parameter_groups(model, Recipe(0.1, layer_decay=0.5), depths)
    scales = {name: group["scale"] for group in groups for name in group["names"]}
    assert scales == {
        "0.weight": 0.25, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0.5, "2.weight": 1, "2.bias": 1
    }  # fmt: skip
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert (decays["0.weight"], decays["0.bias"]) == (0.01, 0)
    assert len(parameter_groups(model, Recipe(0.1), depths)) == 2


def test_the_inverse_square_root_schedule():
    recipe = Recipe(1.0, warmup=4, schedule="inverse_sqrt")
    rates = [learning_rate_at(step, 100, recipe) for step in range(100)]
    assert max(rates) == rates[3] == 1.0
    assert rates[15] == pytest.approx(0.5)
    assert rates[63] == pytest.approx(0.25)


def test_small_directions_keep_their_size_where_that_suits_held_out_rows():
    generator = torch.Generator().manual_seed(0)
    deviation = torch.cat([torch.full((3,), 10.0), torch.full((27,), 0.5)])
    features = torch.randn(400, 30, generator=generator)  # standardised: the raw ones have the deviations
    means = torch.randn(4, 30, generator=generator)
    rows = features[:300], features[300:]

    def scaling_for(columns: slice, deviation: torch.Tensor | None) -> Scaling:
        logits = (features * 2)[:, columns] @ means[:, columns].T
        labels = torch.distributions.Categorical(logits=logits).sample()
        return choose_scaling(deviation, rows[0], labels[:300], rows[1], labels[300:], 4, steps=50)

    torch.manual_seed(0)
    common = scaling_for(slice(3), deviation).common  # the classes differ in the large directions
    assert common == pytest.approx(math.sqrt((3 * 100 + 27 * 0.25) / 30))
    assert scaling_for(slice(3, None), deviation).common is None
    assert scaling_for(slice(3), None).common is None
    assert scaling_for(slice(3), torch.full((30,), 10.0)).common is None
