import math

import pytest
import torch
from torch import nn

from hetxl.training.checkpoint import Checkpoint, CheckpointError, Checkpoints
from hetxl.training.config import TrainConfig
from hetxl.training.state import finite, load_moments, load_weights, restoring, tensors_of


def trained(seed, steps=3):
    """A model and its optimiser after a few steps."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "names": names}], lr=0.1)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def test_there_and_back_goes_on_alike():
    model, optimizer = trained(0)
    checkpoint = Checkpoint(3, {name: value.clone() for name, value in tensors_of(model, optimizer).items()}, {})
    other, its = trained(1, steps=1)
    load_weights(other, checkpoint)
    load_moments(its, checkpoint)
    for one, its_optimizer in ((model, optimizer), (other, its)):
        step(one, its_optimizer, 2)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_before_the_first_step_there_are_no_moments():
    names = tensors_of(*trained(0, steps=0))
    assert sorted(names) == ["model.bias", "model.weight"]


def test_averaged_weights_where_there_are_some():
    model, optimizer = trained(0)
    tensors = {**tensors_of(model, optimizer), "average.weight": torch.full((2, 3), 7.0, dtype=torch.float64)}
    load_weights(model, Checkpoint(3, tensors, {}), averaged=True)
    assert torch.equal(model.weight.detach(), torch.full((2, 3), 7.0))
    load_weights(model, Checkpoint(3, {**tensors, "model.weight": torch.zeros(2, 3)}, {}))
    assert not model.weight.any()


def test_a_checkpoint_of_another_model_is_told():
    model, optimizer = trained(0)
    checkpoint = Checkpoint(3, tensors_of(nn.Linear(4, 2), optimizer), {})
    told = r"step 3 is of another model or version: .*start in another directory"
    with pytest.raises(CheckpointError, match=told), restoring(checkpoint):
        load_weights(model, checkpoint)
    missing = {name: value for name, value in tensors_of(model, optimizer).items() if "exp_avg_sq" not in name}
    with pytest.raises(CheckpointError, match="exp_avg_sq"), restoring(checkpoint):
        load_moments(optimizer, Checkpoint(3, missing, {}))


def test_a_loss_that_is_not_finite_says_what_to_change(tmp_path):
    config = TrainConfig(data="x", learning_rate=0.5, clip=2.0)
    checkpoints = Checkpoints(tmp_path, 1)
    assert finite(1.5, 7, checkpoints, config) == 1.5
    with pytest.raises(FloatingPointError, match=r"nan after step 7\. Lower --learning-rate \(now 0.5\).*below 2"):
        finite(math.nan, 7, checkpoints, config)
    checkpoints.save(Checkpoint(4, {"model.w": torch.zeros(1)}, {}))
    with pytest.raises(FloatingPointError, match="the last checkpoint is of step 4"):
        finite(math.inf, 7, checkpoints, config)
