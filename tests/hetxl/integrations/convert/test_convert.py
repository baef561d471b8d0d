import copy
import pickle
import subprocess
import sys
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hetxl
from hetxl.integrations.convert import features_of, head_of, install, mean_logits
from hetxl.integrations.convert.adapter import Adapted
from hetxl.integrations.convert.layer import LAYERS

HetXLLayer = LAYERS["het-xl"]

INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


@pytest.mark.parametrize("head", LAYERS)
def test_conversion_keeps_the_model(head):
    model = network()
    before, names = model(INPUTS), dict(model.named_parameters())
    body = model[0]
    assert hetxl.convert(model, head) is model
    assert model[0] is body
    assert isinstance(model[2], LAYERS[head])
    assert all(dict(model.named_parameters())[name] is value for name, value in names.items())
    assert torch.equal(mean_logits(model, INPUTS), before)


def test_revert_restores_the_model():
    model = network()
    before, state = model(INPUTS), copy.deepcopy(model.state_dict())
    assert hetxl.revert(hetxl.convert(model)) is model
    assert isinstance(model[2], nn.Linear)
    assert torch.equal(model(INPUTS), before)
    assert list(model.state_dict()) == list(state)


def test_convert_of_a_linear_layer_returns_a_head():
    linear = nn.Linear(8, 5)
    head = hetxl.convert(linear)
    assert isinstance(head, HetXLLayer)
    assert isinstance(hetxl.revert(head), nn.Linear)


def test_going_back_folds_the_temperature_in():
    model = hetxl.convert(network(), temperature=hetxl.LearnedTemperature(init=2.0))
    expected = mean_logits(model, INPUTS)
    torch.testing.assert_close(hetxl.revert(model)(INPUTS), expected)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.out = nn.Linear(8, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_tied_weights_stay_tied():
    model = hetxl.convert(Tied(), temperature=2.0)
    assert model.out.weight is model.embed.weight
    with pytest.raises(ValueError, match=r"tied to embed\.weight.*fold=False"):
        hetxl.revert(model)
    assert hetxl.revert(model, fold=False).out.weight is model.embed.weight


def test_named_layer_is_converted():
    model = hetxl.convert(network(), layer="0", rank=2)
    assert isinstance(model[0], HetXLLayer)


def test_options_are_passed_to_the_head():
    head = hetxl.convert(network(), rank=3, train_samples=7, noise_init=0.5, covariance="low_rank")[2]
    assert (head.covariance.rank, head.train_samples, head.covariance.init) == (3, 7, 0.5)
    assert head.temperature() == 1.0
    with pytest.raises(TypeError, match="ranks"):
        hetxl.convert(network(), ranks=3)


def test_invalid_requests_raise():
    with pytest.raises(ValueError, match=r"head must be one of .*found 'hetxl'"):
        hetxl.convert(network(), "hetxl")
    with pytest.raises(TypeError, match="model must be a torch module, found str"):
        hetxl.convert("resnet50")
    model = hetxl.convert(network())
    with pytest.raises(ValueError, match=r"a converted layer \(2\); call hetxl\.revert"):
        hetxl.convert(model)
    with pytest.raises(ValueError, match=r"no converted layer; call hetxl\.convert"):
        hetxl.revert(network())


def test_failed_conversion_leaves_the_model_unchanged():
    model = network()
    with pytest.raises(ValueError, match="rank"):
        hetxl.convert(model, rank=-1)
    assert isinstance(model[2], nn.Linear)
    assert model(INPUTS).shape == (6, 5)


def test_the_fused_loss_is_the_loss_of_the_output():
    model = hetxl.convert(network(), rank=2).double()
    inputs = INPUTS.double()
    noise = torch.randn(9, model[2].covariance.size, dtype=torch.float64)
    plain = F.cross_entropy(model[2](model[:2](inputs), noise=noise), LABELS)
    fused = hetxl.fused_loss(model, inputs, LABELS, noise=noise)
    torch.testing.assert_close(fused, plain)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (fused, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_predictions_of_a_converted_model():
    model = hetxl.convert(network())
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    actual = hetxl.predict(model, INPUTS, top_k=2, generator=generators[0])
    expected = model[2].predict(model[:2](INPUTS), top_k=2, generator=generators[1])
    assert torch.equal(actual.probs, expected.probs)
    assert torch.equal(hetxl.predict(model, (INPUTS,), method="deterministic").probs, model[2].predict(
        model[:2](INPUTS), method="deterministic").probs)  # fmt: skip


class Upsampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, images, scale=1):
        return F.interpolate(self.head(self.body(images)), scale_factor=scale, mode="bilinear", align_corners=True)


def test_segmentation_by_a_convolution():
    torch.manual_seed(0)
    model = hetxl.convert(Upsampled(), rank=2)
    images, labels = torch.randn(2, 3, 4, 6), torch.randint(5, (2, 4, 6))
    noise = torch.randn(9, model.head.covariance.size)
    loss = hetxl.fused_loss(model, {"images": images}, labels, noise=noise)
    torch.testing.assert_close(loss, F.nll_loss(model.head(model.body(images), noise=noise), labels))
    assert features_of(model, images).shape == (2, 4, 6, 8)
    with pytest.raises(ValueError, match="changes the values"):
        hetxl.fused_loss(model, (images, 2), torch.zeros(2, 8, 12, dtype=torch.long))


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.head, self.change = nn.Linear(8, 5), change

    def forward(self, inputs):
        return self.change(self.head(inputs))


def test_other_outputs_are_refused():
    with pytest.raises(TypeError, match=r"must be a tensor or have \.logits, found list"):
        hetxl.predict(hetxl.convert(Changed(lambda logits: [logits])), INPUTS)
    with pytest.raises(ValueError, match="must have 5 classes last"):
        hetxl.predict(hetxl.convert(Changed(lambda logits: logits[:, :3])), INPUTS)


def test_converted_model_can_be_copied_and_pickled():
    model = hetxl.convert(network())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(mean_logits(other, INPUTS), mean_logits(model, INPUTS))
    assert head_of(torch.nn.DataParallel(model)) is model[2]


def test_state_dicts_load_into_models_converted_alike():
    model, plain = hetxl.convert(network(), rank=3, eval_samples=8), network()
    nn.init.normal_(model[2].weight)
    again = hetxl.convert(network(), rank=3, eval_samples=8)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(INPUTS), model.eval()(INPUTS))
    missing, unexpected = again.load_state_dict(plain.state_dict(), strict=False)
    assert all(name.startswith("2.covariance.") for name in missing)
    assert unexpected == []
    assert torch.equal(mean_logits(again, INPUTS), plain(INPUTS))


def test_a_converted_model_learns():
    model = hetxl.convert(network(), train_samples=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
    assert (model.eval()(INPUTS).argmax(-1) == LABELS).all()


def test_importing_hetxl_imports_no_other_library():
    names = (
        "timm",
        "transformers",
        "lightning",
        "pytorch_lightning",
        "open_clip",
        "onnx",
        "onnxruntime",
        "sklearn",
        "torch._dynamo",
    )
    code = f"import sys, hetxl; print([name for name in {names!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("size", [(8, 8), (12, 8), (8, 12)])
def test_images_as_wide_as_there_are_classes(size):
    torch.manual_seed(0)
    model = hetxl.convert(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 1)), "det")
    images, labels = torch.randn(2, 3, *size), torch.randint(8, (2, *size))
    outputs = model(images)
    torch.testing.assert_close(hetxl.fused_loss(model, images, labels), F.cross_entropy(outputs, labels))
    torch.testing.assert_close(mean_logits(model, images), outputs.movedim(1, -1))
    torch.testing.assert_close(hetxl.predict(model, images).probs, outputs.softmax(1).movedim(1, -1))
    torch.testing.assert_close(mean_logits(model, images[0]), outputs[0].movedim(0, -1))


def test_sequences_as_long_as_there_are_classes():
    model, inputs = hetxl.convert(Changed(lambda logits: logits.mT), "det"), torch.randn(2, 5, 8)
    torch.testing.assert_close(mean_logits(model, inputs).mT, model(inputs))


def test_outputs_that_differ_between_classes_are_refused():
    with pytest.raises(ValueError, match="changes the values"):
        features_of(hetxl.convert(Changed(lambda logits: logits + torch.eye(5)[4])), INPUTS)


def test_outputs_in_half_precision():
    torch.manual_seed(0)
    model, inputs = hetxl.convert(Changed(lambda logits: logits.bfloat16()), "det"), torch.randn(301, 8)
    assert torch.equal(features_of(model, inputs[:128]), inputs[:128])
    with pytest.raises(ValueError, match=r"torch\.bfloat16, which can identify only 128 of 301 rows.*float32"):
        hetxl.fused_loss(model, inputs, torch.zeros(301, dtype=torch.long))
    model.change = lambda logits: logits.bfloat16().float()
    with pytest.raises(ValueError, match="rounding"):
        hetxl.fused_loss(model, inputs, torch.zeros(301, dtype=torch.long))


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.usefixtures("_one_process")
def test_wrapped_models_are_refused():
    with pytest.raises(ValueError, match=r"before you wrap it, as in DistributedDataParallel\(hetxl\.convert"):
        hetxl.convert(nn.Sequential(DistributedDataParallel(network()), nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=r"before you wrap it, as in fully_shard\(hetxl\.convert"):
        hetxl.convert(fully_shard(network()))
    with pytest.raises(ValueError, match=r"before you wrap it, as in FullyShardedDataParallel\(hetxl\.convert"):
        hetxl.convert(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


@pytest.mark.usefixtures("_one_process")
def test_the_fused_loss_of_a_replicated_model():
    model = hetxl.convert(network())
    hetxl.fused_loss(DistributedDataParallel(model), INPUTS, LABELS).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(ValueError, match="wrap the model with find_unused_parameters=False"):
        hetxl.fused_loss(wrapped, INPUTS, LABELS)
    with torch.no_grad():
        assert hetxl.fused_loss(wrapped, INPUTS, LABELS).isfinite()


HetLayer = LAYERS["het"]
HetXLLayer = LAYERS["het-xl"]


class Recording(Adapted):
    calls: typing.ClassVar[list] = []

    @classmethod
    def hetxl_checked(cls, model, options):
        if "refuse" in options:
            raise ValueError("refused")
        return options | {"rank": 3}

    def hetxl_converted(self):
        self.calls.append(dict(self.hetxl_options))


def test_without_an_adapter_only_the_layer_changes():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    assert install(model, None, "het", None, {"rank": 2}) is model
    assert type(model) is nn.Sequential
    assert isinstance(model[1], HetLayer)


def test_adapter_completes_the_options_and_receives_them():
    Recording.calls.clear()
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    install(model, Recording, "het-xl", None, {})
    assert isinstance(model, Recording)
    assert model[1].covariance.rank == 3
    assert Recording.calls == [{"head": "het-xl", "layer": "1", "rank": 3}]


def test_rejected_installation_leaves_the_model_unchanged():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="refused"):
        install(model, Recording, "het-xl", None, {"refuse": True})
    assert type(model) is nn.Sequential
    assert isinstance(model[1], nn.Linear)


def test_install_replaces_a_layer_without_a_model():
    assert isinstance(install(nn.Linear(4, 3), None, "het-xl", None, {}), HetXLLayer)
