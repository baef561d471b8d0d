"""Exported files give torch's probabilities for any batch size, tell what they are, and repeat to the bit."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import hetxl
from hetxl.integrations import export
from hetxl.integrations.export import export_program, exportable, to_onnx, to_torch
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import InputSpec
from hetxl_train.model import build_model
from support.cases import make

NAMES = [f"Klasse {number} ü" for number in range(7)]


def small(variant, **options):
    return make(variant, dtype=torch.float32, noise_init=1.0, eval_samples=6, **options).eval()


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(path, name, values):
    return session(path).run(None, {name: values.numpy()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A head, the module that was made of it, and the file that was made of that."""
    torch.manual_seed(0)
    head = small("het-xl", temperature=hetxl.LearnedTemperature(init=0.7))
    path, module = tmp_path_factory.mktemp("onnx") / "deep" / "head.onnx", exportable(head, seed=3)
    difference = to_onnx(module, path, torch.randn(2, 5), input_names=["features"], class_names=NAMES)
    assert 0 <= difference <= 1e-5
    return head, module, path


def test_onnx_of_a_head_matches_predict(exported):
    head, module, path = exported
    for count in (1, 2, 7):
        features = torch.randn(count, 5)
        (probs,) = run(path, "features", features)
        assert probs.dtype == np.float32
        np.testing.assert_allclose(probs, head.predict(features, noise=module.noise).probs, rtol=0, atol=1e-5)


def test_onnx_file_has_metadata(exported):
    path = exported[2]
    about = session(path).get_modelmeta().custom_metadata_map
    assert json.loads(about["class_names"]) == NAMES
    assert (about["method"], about["num_samples"], about["seed"]) == ("mc", "6", "3")
    assert about["hetxl_version"] == hetxl.__version__
    assert float(about["temperature"]) == pytest.approx(0.7)
    graph = onnx.load(path).graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["features", "probs"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for words in (b"site-packages", b"integrations"):  # no paths of the machine that wrote it
        assert words not in path.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_onnx_export_is_reproducible_and_needs_no_onnxruntime(exported, tmp_path, monkeypatch):
    head, _, path = exported
    again = tmp_path / "again.onnx"
    (tmp_path / "again.onnx.data").write_text("of a larger model that had this name")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    module = exportable(head, seed=3)
    assert to_onnx(module, again, torch.randn(3, 5), input_names=["features"], class_names=NAMES) is None
    assert again.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [again]


def test_missing_onnx_package_raises_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install onnx onnxruntime onnxscript"):
        to_onnx(exportable(small("det")), tmp_path / "head.onnx", torch.randn(2, 5))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "link", "method", "options"),
    [
        ("het-h", "softmax", "mean_field", {"residual": "diagonal"}),
        ("het-xl-own", "sigmoid", "mc", {"covariance": "low_rank"}),
    ],
)
def test_onnx_of_every_head_and_method_matches_predict(variant, link, method, options, tmp_path):
    head, path = small(variant, link=link, **options), tmp_path / "head.onnx"
    module = exportable(head, method)
    assert to_onnx(module, path, torch.randn(1, 5)) <= 1e-5
    features = torch.randn(4, 5)
    expected = head.predict(features, method=method, noise=module.noise).probs
    np.testing.assert_allclose(run(path, "inputs", features)[0], expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="probabilities of onnxruntime differ from torch's by"):
        export._onnx_difference(exportable(small(variant, link=link), method), path, [features], ["inputs"])


def test_onnx_of_a_token_model_with_external_weights(tmp_path, monkeypatch):
    config = TrainConfig(rank=2, width=8, features=4, eval_samples=6, frozen=True, normalize_features=True)
    model = build_model(config, InputSpec("tokens", (3,), 11), 7, "softmax").eval()
    path, tokens = tmp_path / "model.onnx", torch.randint(11, (5, 3))
    monkeypatch.setattr(export, "ONE_FILE", 100)  # bytes
    assert to_onnx(exportable(model, top_k=2), path, tokens, input_names=["tokens"]) <= 1e-5
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    probs, classes = run(path, "tokens", tokens)
    expected = model.head.predict(model.backbone(tokens), noise=exportable(model).noise).probs.topk(2)
    np.testing.assert_allclose(probs, expected.values, rtol=0, atol=1e-5)
    assert np.array_equal(classes, expected.indices)


def test_torch_export_equals_predict(tmp_path):
    head, path, features = small("het"), tmp_path / "head.pt2", torch.randn(4, 5)
    module = exportable(head, top_k=3)
    expected = head.predict(features, noise=module.noise).probs.topk(3)
    values, classes = export_program(module, features[:1]).module()(features)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-6)
    assert torch.equal(classes, expected.indices)
    assert to_torch(module, path, features, class_names=NAMES) <= 1e-5
    assert list(tmp_path.iterdir()) == [path]
    about = {"hetxl.json": ""}
    read = torch.export.load(path, extra_files=about).module()
    assert torch.equal(read(features[:1])[1], classes[:1])
    assert json.loads(about["hetxl.json"])["class_names"] == NAMES
    assert json.loads(about["hetxl.json"])["top_k"] == 3
    assert b"site-packages" not in path.read_bytes()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = small("het-xl")

    def forward(self, inputs, scale):
        return self.head(inputs * scale)


class OneBatchSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = small("det")

    def forward(self, inputs):
        return self.head(inputs.reshape(3, 5))


def test_export_accepts_several_inputs():
    module, inputs, scale = exportable(TwoInputs()), torch.randn(4, 5), torch.rand(4, 1)
    actual = export_program(module, (inputs[:2], scale[:2])).module()(inputs, scale)
    torch.testing.assert_close(actual, module(inputs, scale))


def test_a_model_of_one_batch_size_is_refused():
    with pytest.raises(ValueError, match="cannot be exported for any batch size") as raised:
        export_program(exportable(OneBatchSize()), torch.randn(3, 5))
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("end", [nn.Softmax(-1), nn.LogSoftmax(-1)])
@pytest.mark.parametrize(("write", "name"), [(to_onnx, "model.onnx"), (to_torch, "model.pt2")])
def test_a_model_that_changes_the_probabilities_is_refused(write, name, end, tmp_path):
    model = hetxl.convert(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), end), layer="2", rank=2)
    with pytest.raises(ValueError, match="changes the values"):
        write(exportable(model), tmp_path / name, torch.randn(2, 5))
    assert list(tmp_path.iterdir()) == []


def test_differences_that_are_found():
    features = torch.randn(3, 5)

    def difference(head, change, top_k=None):
        module = exportable(head, top_k=top_k)

        def run(inputs):
            outputs = module(*inputs)
            return change([outputs] if top_k is None else list(outputs))

        return export._difference(module, run, [features], "it")

    tied = small("det", bias=False)
    with torch.no_grad():
        tied.classifier.weight.zero_()
    assert difference(tied, lambda outputs: outputs) == 0
    # All classes are as probable as each other: which two are returned does not matter.
    assert difference(tied, lambda outputs: [outputs[0], (outputs[1] + 1) % 7], top_k=2) == 0
    head = small("det")
    with pytest.raises(ValueError, match="it differ"):
        difference(head, lambda outputs: [outputs[0], (outputs[1] + 1) % 7], top_k=2)
    for change in (lambda probs: probs + 2e-5, lambda probs: probs * torch.nan):
        with pytest.raises(ValueError, match="it differ"):
            difference(head, lambda outputs, change=change: [change(outputs[0])])
    with pytest.raises(ValueError, match="returns shape"):
        difference(head, lambda outputs: [outputs[0].expand(3, 7)])


@pytest.mark.parametrize("width", [5, 7])
def test_top_classes_of_images_are_compared(width):
    model = hetxl.convert(nn.Sequential(nn.Conv2d(3, 7, 1)), rank=2, eval_samples=6)
    module = exportable(model, top_k=2)
    images = torch.randn(2, 3, 4, width)
    assert export._difference(module, lambda inputs: list(module(*inputs)), [images], "it") == 0
    assert module(images)[1].shape == (2, 2, 4, width)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: export_program(small("det"), torch.randn(2, 5)), TypeError, "the result of exportable"),
        (lambda: to_onnx(small("det"), "a.onnx", torch.randn(2, 5)), TypeError, "the result of exportable"),
        (lambda: export_program(exportable(small("det")), torch.randn(0, 5)), TypeError, "with B at least 1"),
        (lambda: export_program(exportable(small("det")), []), TypeError, "with B at least 1"),
        (lambda: export_program(exportable(TwoInputs()), (torch.ones(2, 5), torch.ones(3, 1))), ValueError, "same B"),
        (lambda: export_program(exportable(small("det")), torch.randn(2, 4)), ValueError, "[..., 5]"),
        (lambda: to_onnx(exportable(small("det")), "a.pb", torch.randn(2, 5)), ValueError, "end in .onnx"),
        (lambda: to_torch(exportable(small("det")), "a.pt", torch.randn(2, 5)), ValueError, "end in .pt2"),
        (
            lambda: to_onnx(exportable(small("det")), "a.onnx", torch.randn(2, 5), input_names=["a", "b"]),
            ValueError,
            "input_names must name each of the 1 inputs",
        ),
        (
            lambda: to_onnx(exportable(small("det")), "a.onnx", torch.randn(2, 5), class_names=["a"]),
            ValueError,
            "class_names must be 7 strings",
        ),
    ],
)
def test_invalid_arguments_raise(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert list(tmp_path.iterdir()) == []
