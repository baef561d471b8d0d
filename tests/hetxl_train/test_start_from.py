"""Starting from weights: another run's, at another resolution or with another head; a file of timm or transformers."""

import csv
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from hetxl_train.cli.options import resolve
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_inputs
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.model import build_model
from hetxl_train.prediction import predict
from hetxl_train.runs import load_run
from hetxl_train.start_from import inherited, start_weights
from hetxl_train.training import train
from support.training import QUIET, Listening, small, write_images

STILL = {"learning_rate": 1e-30, "steps": 1, "batch_size": 4, "workers": 0}
"""A step that changes nothing."""
CNN = {"backbone": "cnn", "width": 8, "depth": 1, "features": 6, "image_size": 16, "batch_size": 4, "workers": 0}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), each=12, size=40)


@pytest.fixture(scope="module")
def det(tmp_path_factory, images):
    config = small(tmp_path_factory.mktemp("runs") / "det", data=str(images), head="det", **CNN)
    return train(config, console=QUIET).path


def start(out, run, **options):
    console = Listening()
    # As the command does: the run's own backbone, below the flags.
    config = resolve(TrainConfig, (None, {"start_from": str(run), "out": str(out), "device": "cpu", **options}))
    return load_run(train(config, console=console).path), [line for line in console.said if "Starting from" in line]


def test_noise_is_added_to_a_det_run(tmp_path, det, images):
    trained, (line,) = start(tmp_path / "run", det, data=str(images), head="het-xl", rank=3, **STILL)
    assert line == f"Starting from {det}: the backbone and the classifier. The rest of the head is new: it was det"
    before = load_run(det).model
    for name, value in before.state_dict().items():
        assert torch.equal(value, trained.model.state_dict()[name]), name
    assert trained.model.head.covariance is not None
    assert (trained.run.config.backbone, trained.run.config.width) == ("cnn", 8)
    # Without its noise it is the run it started from.
    inputs = open_inputs(str(images), trained.spec).fetch(np.arange(5)).inputs
    log_probs = trained.model.head.predict(trained.model.backbone(inputs), method="deterministic").probs.log()
    torch.testing.assert_close(log_probs, before(inputs), atol=1e-5, rtol=0)


def test_other_classes_get_a_new_head(tmp_path, det):
    others = write_images(tmp_path / "images", each=8, classes=("a", "b", "c"))
    trained, (line,) = start(tmp_path / "run", det, data=str(others), head="det", **STILL)
    assert line.endswith(": the backbone. The head is new: the classes are others (3, and 2 there)")
    for name, value in load_run(det).model.backbone.state_dict().items():
        assert torch.equal(value, trained.model.backbone.state_dict()[name])
    assert trained.model.head.classifier.weight.shape == (3, 6)


def test_another_link_gets_a_new_head(tmp_path, det, images):
    _, (line,) = start(tmp_path / "run", det, data=str(images), head="det", link="sigmoid", **STILL)
    assert line.endswith(": the backbone. The head is new: the link is sigmoid, and was softmax")


@pytest.mark.parametrize("temperature", ["0.5", "learned"])
def test_another_temperature_keeps_the_probabilities(tmp_path, det, images, temperature):
    trained, _ = start(tmp_path / "run", det, data=str(images), head="det", temperature=temperature, **STILL)
    inputs = open_inputs(str(images), trained.spec).fetch(np.arange(5)).inputs
    torch.testing.assert_close(trained.model(inputs), load_run(det).model(inputs), atol=1e-5, rtol=0)


def test_the_whole_head_of_the_same_kind_is_kept(tmp_path):
    first = train(small(tmp_path / "first", standardize=True), console=QUIET).path
    trained, (line,) = start(tmp_path / "run", first, data=small().data, rank=3, **STILL)
    assert line == f"Starting from {first}: the backbone and the head"
    for name, value in load_run(first).model.state_dict().items():
        assert torch.equal(value, trained.model.state_dict()[name]), name
    with pytest.raises(
        ValueError, match=r"does not fit this model: covariance.factor has shape \[3, 4\], \[5, 4\] here"
    ):
        start(tmp_path / "other", first, data=small().data, rank=5, **STILL)


def test_a_started_run_that_was_killed_resumes_to_the_same_weights(tmp_path, det, images):
    options = {"data": str(images), "head": "het-xl", "rank": 3, "steps": 4, "batch_size": 4, "checkpoint_every": 2}
    whole, _ = start(tmp_path / "whole", det, **options)
    path = start(tmp_path / "killed", det, **options)[0].run.path
    for name in ("model.safetensors", "result.json"):
        (path / name).unlink()
    for file in (path / "checkpoints" / "step-00000004").iterdir():
        file.unlink()
    (path / "checkpoints" / "step-00000004").rmdir()
    resumed, _ = start(tmp_path / "killed", det, **options)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def build(name, size, classes=2, **options):
    from hetxl_train.data.dataset import InputSpec

    config = small(backbone=name, head="det", **options)
    return build_model(config, InputSpec("image", (3, size, size)), classes, "softmax"), config


@pytest.mark.parametrize(
    ("model", "size", "options"),
    [
        ("test_vit", 160, {}),  # mean and deviation 0.5, bicubic
        pytest.param("resnetv2_50x1_bit", 48, {"image_size": 48}, marks=pytest.mark.slow),  # 24 million weights
        ("test_convnext", 160, {}),
    ],
)
def test_a_timm_model_from_a_file_predicts_what_timm_predicts(tmp_path, model, size, options):
    images = write_images(tmp_path / "images", each=4, size=90)
    torch.manual_seed(1)
    theirs = timm.create_model(model, num_classes=2).eval()
    with torch.no_grad():
        for parameter in theirs.get_classifier().parameters():  # as new, the classifier of some is zero
            parameter.normal_(std=0.1)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    trained, (line,) = start(
        tmp_path / "run", tmp_path / "weights.safetensors", data=str(images), head="det", backbone=f"timm:{model}",
        frozen=True, **STILL, **options,
    )  # fmt: skip
    assert line.endswith("the backbone and the classifier, its classes taken to be in this order")
    configuration = resolve_model_data_config(theirs) | {"input_size": (3, size, size)}
    transform = create_transform(**configuration, is_training=False)
    paths = sorted(images.glob("*/*.png"))
    with torch.no_grad():
        logits = theirs(torch.stack([transform(Image.open(path).convert("RGB")) for path in paths]))
    expected = torch.log_softmax(logits, -1)
    # hetxl predict
    predict(tmp_path / "run", str(images), tmp_path / "out.csv", top_k=2, workers=0, device="cpu", console=QUIET)
    with open(tmp_path / "out.csv") as file:
        for row, log_probs in zip(csv.DictReader(file), expected, strict=True):
            by_name = {row["class_1"]: row["probability_1"], row["class_2"]: row["probability_2"]}
            np.testing.assert_allclose(
                [float(by_name["blue"]), float(by_name["red"])], log_probs.exp().numpy(), atol=1e-5
            )
    # hetxl evaluate
    targets = torch.tensor([int(path.parent.name == "red") for path in paths])
    metrics = evaluate_run(tmp_path / "run", str(images), device="cpu")
    assert metrics["nll"] == pytest.approx(float(torch.nn.functional.nll_loss(expected, targets)), abs=1e-5)
    # The logits themselves.
    inputs = open_inputs(str(images), trained.spec).fetch(np.arange(len(paths))).inputs
    with torch.no_grad():
        ours = trained.model.head.classifier(trained.model.backbone(inputs))
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=0)


def test_position_embeddings_are_resized_as_timm_does(tmp_path):
    torch.manual_seed(1)
    theirs = timm.create_model("test_vit", num_classes=0).eval()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    model, config = build("timm:test_vit", 96, start_from=str(tmp_path / "weights.safetensors"))
    start_weights(model, config, ("a", "b"), "softmax")
    theirs.set_input_size(img_size=96)
    inputs = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().backbone(inputs), theirs(inputs))


def test_a_model_of_transformers_from_a_file(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    configuration = ViTConfig(**options, image_size=32, patch_size=8, num_labels=2)
    ViTModel(configuration).save_pretrained(tmp_path / "empty")
    theirs = ViTModel(configuration).eval()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    model, config = build(f"hf:{tmp_path / 'empty'}", 32, start_from=str(tmp_path / "weights.safetensors"))
    assert start_weights(model, config, ("a", "b"), "softmax").text.endswith("the backbone. The head is new")
    inputs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().backbone(inputs), theirs(pixel_values=inputs).pooler_output)
    # A classifier's weights have the network's name in front of theirs, and no pooler.
    save_file(ViTForImageClassification(configuration).state_dict(), tmp_path / "classifier.safetensors")
    with pytest.raises(ValueError, match=r"does not fit this model: pooler.dense.weight is missing"):
        start_weights(model, small(start_from=str(tmp_path / "classifier.safetensors")), ("a", "b"), "softmax")


def test_mismatches_are_refused_in_one_line(tmp_path, det, images):
    (tmp_path / "weights.pth").write_bytes(b"")
    (tmp_path / "weights.safetensors").write_bytes(b"nothing")
    model, _ = build("cnn", 16, width=8, depth=1, features=6)
    for start, message in [
        (tmp_path / "weights.pth", "must be a run directory or a .safetensors file; convert it first"),
        (tmp_path / "weights.safetensors", "is not a safetensors file"),
        (tmp_path / "nowhere", "is not a run directory (no config.json)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            start_weights(model, small(start_from=str(start)), ("a", "b"), "softmax")
        assert "\n" not in str(error.value)
    wide, _ = build("cnn", 16, width=16, depth=1, features=6)
    with pytest.raises(ValueError, match=r"does not fit this model: body.0.weight has shape \[8, 3, 3, 3\], \[16, 3"):
        start_weights(wide, small(start_from=str(det)), ("blue", "red"), "softmax")


def test_a_run_takes_over_the_backbone_and_flags_override_it(det):
    assert inherited(str(det)) == {"backbone": "cnn", "width": 8, "depth": 1, "features": 6, "image_size": 16}
    config = resolve(TrainConfig, (None, {"start_from": str(det), "image_size": 24}))
    assert (config.backbone, config.image_size) == ("cnn", 24)
    assert inherited(str(det / "model.safetensors")) == {}
