"""A trained run as a file for another program."""

import json

import pytest
import torch

from hetxl.integrations.export import exportable
from hetxl.integrations.export.head_file import describe_head, load_head
from hetxl_train.console import Console
from hetxl_train.data.dataset import InputSpec
from hetxl_train.export_run import export_run, predict_difference, random_inputs
from hetxl_train.runs import load_run
from support.small_run import small_run
from support.training import write_images

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_exported_head_predicts_like_the_run(run, tmp_path):
    written = export_run(run, "head", console=QUIET)
    assert written.path == run / "head.safetensors"
    assert written.size == written.path.stat().st_size
    assert written.difference == 0
    assert written.what == "HetXLHead with 6 class names"
    assert describe_head(written.path)["class_names"] == load_run(run).class_names
    features, noise = torch.randn(3, 4), torch.randn(5, 3)
    trained = load_run(run).model.head.predict(features, noise=noise).probs
    assert torch.equal(load_head(written.path).predict(features, noise=noise).probs, trained)
    assert export_run(run, "head", out=tmp_path / "new" / "mine.safetensors", console=QUIET).path.exists()


def test_exported_program_predicts_like_the_run(run, tmp_path):
    written = export_run(
        run, "torch", out=tmp_path / "a.pt2", method="mc", num_samples=5, top_k=2, seed=9, console=QUIET
    )
    assert written.difference <= 1e-6
    assert written.what == "mc with 5 samples, features [B, 4] to probs and classes [B, 2]"
    model, features = load_run(run).model, torch.randn(3, 4)
    noise = exportable(model, num_samples=5, seed=9).noise
    probs, classes = torch.export.load(written.path).module()(features)
    expected = model.head.predict(features, noise=noise).probs.topk(2)
    torch.testing.assert_close(probs, expected.values, rtol=0, atol=1e-6)
    assert torch.equal(classes, expected.indices)


def test_module_of_another_model_raises(run):
    trained = load_run(run)
    module, inputs = exportable(trained.model), random_inputs(trained.spec, 4)
    assert predict_difference(trained.model, module, inputs) <= 1e-6
    with torch.no_grad():
        trained.model.head.classifier.bias.add_(torch.arange(6))
    with pytest.raises(ValueError, match="differ from predict's by"):
        predict_difference(trained.model, module, inputs)


def test_random_inputs_match_their_spec():
    tokens = random_inputs(InputSpec("tokens", (3,), 5), 40)
    assert tokens.dtype == torch.int64
    assert set(tokens.flatten().tolist()) == set(range(5))
    images = random_inputs(InputSpec("image", (1, 8, 8)), 2)
    assert images.shape == (2, 1, 8, 8)
    assert torch.equal(images, random_inputs(InputSpec("image", (1, 8, 8)), 2))


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
        ({"run": "no/such/run"}, "is not a run directory"),
    ],
)
def test_invalid_arguments_raise(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        export_run(**{"run": run, "console": QUIET} | words)
    assert message in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_exported_files_say_how_images_are_made(tmp_path):
    images = write_images(tmp_path / "images", each=10)
    options = {
        "backbone": "cnn",
        "width": 8,
        "depth": 1,
        "features": 4,
        "image_size": 16,
        "workers": 0,
        "batch_size": 4,
    }
    run = small_run(tmp_path / "run", data=str(images), head="det", crop=0.5, image_mean="0.1,0.2,0.3", **options)
    export_run(run, "torch", out=tmp_path / "a.pt2", console=QUIET)
    files = {"hetxl.json": ""}
    torch.export.load(tmp_path / "a.pt2", extra_files=files)
    about = json.loads(files["hetxl.json"])["preprocessing"]
    expected = {"size": 16, "mean": [0.1, 0.2, 0.3], "std": [0.229, 0.224, 0.225], "crop": 0.5}
    assert about == expected | {"interpolation": "bilinear", "resize": "shorter"}
