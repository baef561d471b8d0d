"""Exported files carry entropies, top classes, prediction sets and novelty, equal to those of `head.predict`."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import hetxl
from hetxl.integrations import export
from hetxl.integrations.export import export_program, exportable, to_onnx, to_torch
from hetxl.metrics.conformal import Conformal, ScoreOptions
from hetxl.nn import fit_density
from support.cases import LINKS, VARIANTS, make

UNCERTAINTY = ["entropy", "expected_entropy", "mutual_information", "top_probs", "top_classes", "novelty"]


def head_with_density(variant, link="softmax", **options):
    torch.manual_seed(1)
    head = make(variant, dtype=torch.float32, noise_init=1.0, eval_samples=6, link=link, **options).eval()
    head.density = fit_density([torch.randn(60, 5)], torch.arange(60) % 7, 7)
    return head


def thresholds(link, kind="raps"):
    limits = np.linspace(0.3, 0.9, 7)
    limits[3] = np.inf
    return Conformal(0.8, ScoreOptions(kind), limits, "class", 100) if link == "softmax" else limits


def run(path, features):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"inputs": features.numpy()}), strict=True))


def check(outputs, prediction, sets):
    """Compare with a prediction over all classes: probabilities within 1e-5, entropies and novelty within 1e-4."""
    for name in ("entropy", "expected_entropy", "mutual_information", "novelty"):
        np.testing.assert_allclose(outputs[name], getattr(prediction, name), rtol=1e-4, atol=1e-4, err_msg=name)
    top = prediction.probs.topk(5)
    np.testing.assert_allclose(outputs["top_probs"], top.values, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(outputs["top_classes"], top.indices)
    if isinstance(sets, Conformal):
        members = sets.sets(prediction.probs, torch.zeros(len(prediction.probs)))
    else:
        members = [np.flatnonzero(row >= sets) for row in prediction.probs.numpy()]
    for row, ids in zip(np.asarray(outputs["prediction_set"]), members, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), np.sort(ids))
    assert outputs["set_size"].tolist() == [len(ids) for ids in members]


ALL = [(variant, link) for variant in VARIANTS for link in LINKS]
FAST = [("det", "softmax"), ("het", "softmax"), ("het-h", "sigmoid"), ("het-xl", "softmax"), ("het-xl", "sigmoid")]


@pytest.mark.parametrize(
    ("variant", "link"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL]
)
def test_onnx_has_the_uncertainty_of_predict(variant, link, tmp_path):
    head, sets = head_with_density(variant, link), thresholds(link)
    module = exportable(head, uncertainty=True, sets=sets)
    to_onnx(module, tmp_path / "a.onnx", torch.randn(2, 5))
    features = 2 * torch.randn(9, 5)
    outputs = run(tmp_path / "a.onnx", features)
    assert list(outputs) == ["probs", *UNCERTAINTY, "prediction_set", "set_size"]
    prediction = head.predict(features, noise=module.noise)
    np.testing.assert_allclose(outputs["probs"], prediction.probs, rtol=0, atol=1e-5)
    check(outputs, prediction, sets)
    assert len(set(outputs["set_size"].tolist())) > 1


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("method", ["mc", "mean_field", "probit", "taylor"])
def test_module_has_the_uncertainty_of_predict(method, link):
    for kind, rate in (("lac", 0.0), ("aps", 0.1)):
        head, sets = head_with_density("het-xl", link), thresholds(link, kind)
        head.flip_rate = rate if link == "softmax" else 0.0
        module = exportable(head, method, uncertainty=True, sets=sets)
        features = 2 * torch.randn(9, 5)
        outputs = dict(zip(module.output_names, module(features), strict=True))
        check(outputs, head.predict(features, method=method, noise=module.noise), sets)


def test_torch_export_has_the_outputs_after_the_top_classes(tmp_path):
    head, sets = head_with_density("het-xl"), thresholds("softmax")
    module = exportable(head, top_k=2, uncertainty=True, sets=sets)
    to_torch(module, tmp_path / "a.pt2", torch.randn(2, 5))
    files, features = {"hetxl.json": ""}, torch.randn(4, 5)
    program = torch.export.load(tmp_path / "a.pt2", extra_files=files)
    names = json.loads(files["hetxl.json"])["outputs"]
    assert names == ["probs", "classes", *UNCERTAINTY[:3], "novelty", "prediction_set", "set_size"]
    outputs = dict(zip(names, program.module()(features), strict=True))
    prediction = head.predict(features, noise=module.noise)
    torch.testing.assert_close(outputs["probs"], prediction.probs.topk(2).values, rtol=0, atol=1e-5)
    assert torch.equal(outputs["classes"], prediction.probs.topk(2).indices)
    torch.testing.assert_close(outputs["mutual_information"], prediction.mutual_information, rtol=0, atol=1e-4)
    assert outputs["prediction_set"].shape == (4, 7)


class LastToken(nn.Module):
    """Probabilities of the last token of each sequence."""

    def __init__(self):
        super().__init__()
        self.head = head_with_density("het-xl")

    def forward(self, tokens):
        return self.head(tokens)[:, -1]


def test_uncertainty_follows_the_rows_that_a_model_chooses():
    model, tokens = LastToken(), torch.randn(3, 4, 5)
    module = exportable(model, uncertainty=True)
    outputs = dict(zip(module.output_names, export_program(module, tokens).module()(tokens), strict=True))
    prediction = model.head.predict(tokens[:, -1], noise=module.noise)
    for name in ("entropy", "expected_entropy", "novelty"):
        torch.testing.assert_close(outputs[name], getattr(prediction, name), rtol=1e-4, atol=1e-4)


def test_convolutions_have_uncertainty_for_every_pixel():
    model = hetxl.convert(nn.Sequential(nn.Conv2d(3, 7, 1)), rank=2, eval_samples=6, noise_init=1.0).eval()
    module, images = exportable(model, uncertainty=True, sets=thresholds("softmax")), torch.randn(2, 3, 4, 5)
    outputs = dict(zip(module.output_names, module(images), strict=True))
    prediction = hetxl.predict(model, images, noise=module.noise)
    torch.testing.assert_close(outputs["entropy"], prediction.entropy, rtol=0, atol=1e-4)
    assert outputs["prediction_set"].shape == (2, 7, 4, 5)
    assert outputs["set_size"].shape == (2, 4, 5)


def test_a_wrong_entropy_is_found():
    module, features = exportable(head_with_density("het-xl"), uncertainty=True), torch.randn(3, 5)
    at = module.output_names.index("entropy")

    def wrong(inputs):
        outputs = list(module(*inputs))
        outputs[at] = outputs[at] + 1e-3
        return outputs

    with pytest.raises(ValueError, match="entropy of it differs from torch's"):
        export._difference(module, wrong, [features], "it")


@pytest.mark.parametrize(
    ("link", "sets", "error", "message"),
    [
        ("softmax", np.zeros(7), TypeError, "sets must be a Conformal, from calibrate, for the softmax link"),
        ("sigmoid", thresholds("softmax"), TypeError, "sets must be an array, from label_thresholds"),
        ("sigmoid", np.zeros(6), ValueError, "sets must have 7 thresholds, one for each class, found (6,)"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(link, sets, error, message):
    with pytest.raises(error) as raised:
        exportable(head_with_density("det", link), sets=sets)
    assert message in str(raised.value)


def test_without_options_the_outputs_are_those_of_before(tmp_path):
    module = exportable(head_with_density("het-xl"))
    to_onnx(module, tmp_path / "a.onnx", torch.randn(2, 5))
    assert [output.name for output in onnx.load(tmp_path / "a.onnx").graph.output] == ["probs"]
    assert isinstance(module(torch.randn(2, 5)), torch.Tensor)
