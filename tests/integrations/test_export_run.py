"""A trained run as a file for another program."""

import pytest
import torch

from hetxl.data.dataset import InputSpec
from hetxl.integrations.export import exportable
from hetxl.integrations.export_run import export_run, made_up_inputs, predict_difference
from hetxl.integrations.head_file import describe_head, load_head
from hetxl.training.progress import Narrator
from hetxl.training.run import load_run
from support.small_run import small_run

QUIET = Narrator(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_the_head_alone(run, tmp_path):
    written = export_run(run, "head", narrator=QUIET)
    assert written.path == run / "head.safetensors"
    assert written.size == written.path.stat().st_size
    assert written.difference == 0
    assert written.what == "HetXLHead with 6 class names"
    assert describe_head(written.path)["class_names"] == load_run(run).class_names
    features, noise = torch.randn(3, 4), torch.randn(5, 3)
    wanted = load_run(run).model.head.predict(features, noise=noise).probs
    assert torch.equal(load_head(written.path).predict(features, noise=noise).probs, wanted)
    assert export_run(run, "head", out=tmp_path / "new" / "mine.safetensors", narrator=QUIET).path.exists()


def test_a_program(run, tmp_path):
    written = export_run(
        run, "torch", out=tmp_path / "a.pt2", method="mc", num_samples=5, top_k=2, seed=9, narrator=QUIET
    )
    assert written.difference <= 1e-6
    assert written.what == "mc with 5 samples, features [B, 4] to probs and classes [B, 2]"
    model, features = load_run(run).model, torch.randn(3, 4)
    noise = exportable(model, num_samples=5, seed=9).noise
    probs, classes = torch.export.load(written.path).module()(features)
    wanted = model.head.predict(features, noise=noise).probs.topk(2)
    torch.testing.assert_close(probs, wanted.values, rtol=0, atol=1e-6)
    assert torch.equal(classes, wanted.indices)


def test_a_module_of_another_model_is_found_out(run):
    trained = load_run(run)
    module, inputs = exportable(trained.model), made_up_inputs(trained.spec, 4)
    assert predict_difference(trained.model, module, inputs) <= 1e-6
    with torch.no_grad():
        trained.model.head.classifier.bias.add_(torch.arange(6))
    with pytest.raises(ValueError, match="differ from predict's by"):
        predict_difference(trained.model, module, inputs)


def test_made_up_inputs():
    tokens = made_up_inputs(InputSpec("tokens", (3,), 5), 40)
    assert tokens.dtype == torch.int64
    assert set(tokens.flatten().tolist()) == set(range(5))
    pictures = made_up_inputs(InputSpec("image", (1, 8, 8)), 2)
    assert pictures.shape == (2, 1, 8, 8)
    assert torch.equal(pictures, made_up_inputs(InputSpec("image", (1, 8, 8)), 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"to": "onxx"}, "did you mean 'onnx'"),
        ({"to": "head", "method": "mc", "seed": 0}, "--method, --seed: not for --to head"),
        ({"to": "torch", "out": "model.onnx"}, "--out must end in .pt2 for --to torch, found model.onnx"),
        ({"to": "onnx", "out": "model"}, "--out must end in .onnx"),
        ({"method": "magic"}, "method must be one of"),
        ({"top_k": 7}, "top_k must be at most the number of classes, 6"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"run": "no/such/run"}, "is no run"),
    ],
)
def test_bad_arguments(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        export_run(**{"run": run, "narrator": QUIET} | words)
    assert message in str(raised.value)
    assert list(tmp_path.iterdir()) == []
