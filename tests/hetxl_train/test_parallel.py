"""How networks are prepared for devices: the same results, by other means."""

import copy

import pytest
import torch
from torch import nn

from hetxl_train.backbones import Cnn, Mlp
from hetxl_train.config import TrainConfig
from hetxl_train.distributed import World
from hetxl_train.parallel import prepare
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support.training import QUIET, small, write_images

CPU = World(torch.device("cpu"))


def results(network, inputs):
    """Outputs and gradients."""
    torch.manual_seed(0)
    outputs = network(inputs)
    outputs.square().sum().backward()
    return [outputs.detach(), *(parameter.grad for parameter in network.parameters())]


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"channels_last": True}], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "timm"])
def test_a_prepared_network_computes_the_same(kind, options):
    torch.manual_seed(1)
    inputs = torch.randn(3, 5) if kind == "mlp" else torch.randn(3, 3, 32, 32)
    if kind == "timm":
        timm = pytest.importorskip("timm")
        network = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, depth=2, embed_dim=24)
    else:
        network = Mlp(5, 8, 3, 4, dropout=0.3) if kind == "mlp" else Cnn(8, 2, 4, 32)
    prepared = prepare(copy.deepcopy(network), TrainConfig(**options), CPU)
    assert prepared.state_dict().keys() == network.state_dict().keys()
    for expected, actual in zip(results(network, inputs), results(prepared, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_keeps_fewer_activations():
    def saved_numbers(options):
        network, sizes = prepare(Mlp(5, 64, 8, 4), TrainConfig(**options), CPU), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda x: x
        ):
            network(torch.randn(100, 5))
        return sum(sizes)

    assert saved_numbers({"activation_checkpointing": True}) < 0.5 * saved_numbers({})


def test_channels_last_reaches_the_convolutions():
    seen = []
    network = prepare(Cnn(8, 1, 4, 32), TrainConfig(channels_last=True), CPU)
    convolution = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    convolution.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    network(torch.randn(2, 3, 32, 32))
    assert seen == [True]


def test_batch_norms_are_synchronised_on_accelerators_only():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    names = network.state_dict().keys()
    options = TrainConfig(sync_batchnorm=True)
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in prepare(network, options, CPU).modules())
    with pytest.raises(ValueError, match="sync_batchnorm needs an accelerator, found device cpu"):
        prepare(network, options, World(torch.device("cpu"), 0, 2))
    converted = prepare(network, options, World(torch.device("cuda"), 0, 2))
    assert isinstance(list(converted.children())[1], nn.SyncBatchNorm)
    assert converted.state_dict().keys() == names


def test_a_run_with_all_options_of_one_process_trains_and_is_read_back(tmp_path):
    options = {"activation_checkpointing": True, "channels_last": True, "evaluation_precision": "bfloat16"}
    sizes = {"image_size": 16, "width": 8, "depth": 1, "features": 8, "ema": 0.5, "workers": 0}
    data = str(write_images(tmp_path / "images", each=20))
    run = train(small(tmp_path / "run", data=data, batch_size=8, **options, **sizes), console=QUIET)
    plain = train(small(tmp_path / "plain", data=data, batch_size=8, **sizes), console=QUIET)
    values = [torch.cat([value.flatten() for value in load_run(path.path).model.parameters()]) for path in (run, plain)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
def test_a_compiled_network_trains_like_one_that_is_not(tmp_path):
    sizes = {"backbone": "mlp", "width": 8, "features": 4, "depth": 1}
    runs = [train(small(tmp_path / str(flag), compile=flag, **sizes), console=QUIET) for flag in (False, True)]
    values = [torch.cat([value.flatten() for value in load_run(run.path).model.parameters()]) for run in runs]
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-4)
