"""A trained run as a file for another program."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from hetxl.integrations.export import exportable
from hetxl.integrations.export.head_file import describe_head, load_head
from hetxl_train.calibration import Calibration, calibrate_run
from hetxl_train.cli.commands import app
from hetxl_train.console import Console
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.export_run import export_run, fit_novelty, predict_difference, random_inputs
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


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_onnx_of_a_calibrated_run_has_its_prediction_sets(run, tmp_path):
    features = torch.randn(9, 4)
    calibrate_run(run, coverage=0.6, score="aps", console=QUIET)
    try:
        written = export_run(run, out=tmp_path / "a.onnx", console=QUIET)
        other = export_run(run, out=tmp_path / "b.onnx", method="mean_field", console=QUIET)
        conformal = Calibration.load(run).conformal
    finally:
        (run / "calibration.json").unlink()
    assert "with entropy, expected_entropy" in written.what
    assert "prediction_set" not in other.what  # the thresholds were chosen for the probabilities of mc
    model = session(written.path)
    names = [output.name for output in model.get_outputs()]
    outputs = dict(zip(names, map(np.asarray, model.run(None, {"features": features.numpy()})), strict=True))
    assert names[0] == "probs"
    assert model.get_modelmeta().custom_metadata_map["coverage"] == "0.6"
    assert json.loads(model.get_modelmeta().custom_metadata_map["outputs"]) == names
    trained = load_run(run).model
    prediction = trained.head.predict(features, noise=exportable(trained).noise)
    np.testing.assert_allclose(outputs["mutual_information"], prediction.mutual_information, rtol=0, atol=1e-4)
    sets = conformal.sets(prediction.probs, torch.zeros(9))
    assert [set(np.flatnonzero(row)) for row in outputs["prediction_set"]] == [set(ids) for ids in sets]


def test_novelty_is_the_distance_to_the_training_data(run, tmp_path):
    written = export_run(run, out=tmp_path / "a.onnx", novelty=True, console=QUIET)
    trained, near = load_run(run), torch.randn(200, 4)
    fit_novelty(trained)
    far = near + 20
    novelties = []
    for features in (near, far):
        values = session(written.path).run(["novelty"], {"features": features.numpy()})[0]
        expected = trained.model.head.predict(features).novelty
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
        novelties.append(np.asarray(values))
    assert novelties[0].max() < novelties[1].min()


def test_command_leaves_uncertainty_out_on_request(run, tmp_path):
    path = tmp_path / "a.onnx"
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(path), "--no-uncertainty"])
    assert result.exit_code == 0, result.output
    assert [output.name for output in session(path).get_outputs()] == ["probs"]


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
        ({"to": "head", "method": "mc", "seed": 0}, "--method, --seed: not supported by --to head"),
        ({"to": "torch", "out": "model.onnx"}, "--out must end in .pt2 for --to torch, found model.onnx"),
        ({"to": "onnx", "out": "model"}, "--out must end in .onnx"),
        ({"novelty": True, "uncertainty": False}, "pass only one of them"),
        ({"to": "head", "novelty": True}, "--novelty: not supported by --to head"),
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
    written = export_run(run, out=tmp_path / "a.onnx", console=QUIET)
    assert written.preprocess == tmp_path / "a.preprocess.onnx"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    inputs = np.asarray(session(written.preprocess).run(None, {"image": pixels})[0])
    spec = load_run(run).spec
    needed = ImageTransform(16, spec.image)(Image.fromarray(pixels))
    np.testing.assert_allclose(inputs[0], needed, rtol=0, atol=2 / 255 / 0.224)
    probs = np.asarray(session(written.path).run(["probs"], {"image": inputs})[0])
    assert probs.sum() == pytest.approx(1, abs=1e-5)
