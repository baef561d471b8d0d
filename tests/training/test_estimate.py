"""What a run will need: right for a model that can be counted, and without a trace in it."""

import time

import pytest
import torch
from torch import nn

from hetxl.data.dataset import InputSpec
from hetxl.functional import LabelLists
from hetxl.training.backbones import Backbone
from hetxl.training.estimate import Estimate, estimate
from hetxl.training.model import Model, build_model
from hetxl.training.networks import Mlp
from support.training import small


def mlp_model(batch=16, frozen=False, **options):
    config = small(backbone="mlp", **options)
    with torch.random.fork_rng():
        model = build_model(config, InputSpec("features", (5,)), 8, "softmax")
    model.backbone = Backbone(Mlp(6, 7, 1, 5), 5, frozen)
    return config, model, torch.randn(batch, 6), torch.randint(8, (batch,))


def test_memory_of_a_known_model():
    config, model, inputs, targets = mlp_model(head="det", features=5)
    found = estimate(config, model, inputs, targets, 10).memory
    weights = 4 * ((6 * 7 + 7) + 2 * 7 + (7 * 5 + 5) + 2 * 5 + (5 * 8 + 8))
    assert found["weights"] == found["their gradients"] == weights
    assert found["the optimiser's moments"] == 2 * weights
    assert found["the moving average"] == 0
    # Inputs of the first layer [6], of the norm [7] with its mean and deviation, of GELU [7], of the last layer [7], of
    # the last norm [5] with its mean and deviation.
    assert found["the backbone's activations"] == 4 * 16 * (6 + 7 + 2 + 7 + 7 + 5 + 2)
    assert found["the head's blocks"] > 0


def test_activations_grow_with_the_batch_and_weights_do_not():
    small_batch = estimate(*mlp_model(16, features=5, ema=0.9), 10).memory
    large_batch = estimate(*mlp_model(160, features=5, ema=0.9), 10).memory
    assert large_batch["the backbone's activations"] == 10 * small_batch["the backbone's activations"]
    assert large_batch["weights"] == small_batch["weights"] == small_batch["the moving average"]


def test_a_frozen_backbone_keeps_nothing_and_has_no_gradients():
    config, model, inputs, targets = mlp_model(features=5, frozen=True)
    found = estimate(config, model, inputs, targets, 10).memory
    head = 4 * sum(parameter.numel() for parameter in model.head.parameters())
    assert found["the backbone's activations"] == 0
    assert found["their gradients"] == head
    assert found["weights"] > head
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_no_trace_in_a_model_with_batch_statistics(head):
    config = small(head=head, backbone="timm:test_resnet", pretrained=False)
    model = build_model(config, InputSpec("image", (3, 32, 32)), 8, "softmax").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(config, model, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4), 10)
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_dropout_does_not_move_the_generator():
    config, model, inputs, targets = mlp_model(features=5)
    model.backbone = Backbone(Mlp(6, 7, 2, 5, dropout=0.5), 5)
    state = torch.get_rng_state()
    estimate(config, model, inputs, targets, 10)
    assert torch.equal(torch.get_rng_state(), state)


def test_lists_of_labels():
    config = small()
    model = build_model(config, InputSpec("features", (4,)), 8, "sigmoid")
    lists = LabelLists(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 3]), None, 3)
    assert estimate(config, model, torch.randn(3, 4), lists, 10).seconds_per_step > 0


class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(0.05)
        return inputs


def test_time_is_that_of_a_step_and_its_parts():
    config = small()
    head = build_model(config, InputSpec("features", (4,)), 8, "softmax").head
    model = Model(Backbone(Slow(), 4), head)
    found = estimate(config, model, torch.randn(8, 4), torch.arange(8), steps=100, parts=3)
    assert found.seconds_per_step >= 3 * 0.05
    assert found.head_share < 0.9
    assert (found.steps, found.total) == (100, sum(found.memory.values()))


def test_in_words():
    text = str(Estimate({"weights": 10**6, "the head's blocks": 3 * 10**9}, 2.0, 0.75, 1000))
    assert text.startswith("about 33 min for 1,000 steps, 75% of it in the head; 3.0 GB of memory, ")
    assert text.endswith("most of it the head's blocks (3.0 GB)")
    text = str(Estimate({"weights": 10**6}, 0.01, 0.25, 100))
    assert text == "about 1 s for 100 steps, 75% of it in the backbone; 1 MB of memory, most of it weights (1 MB)"
