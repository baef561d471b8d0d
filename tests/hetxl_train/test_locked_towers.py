"""Towers of other libraries, free, locked or mapped: gradients, embeddings, and the same loss through open_clip."""

import json

import numpy as np
import open_clip
import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from safetensors.torch import load_file
from typer.testing import CliRunner

from hetxl.contrastive import ContrastiveLoss
from hetxl.integrations.open_clip import loss_for, wrap
from hetxl_train import embeddings
from hetxl_train.cli.commands import app
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.loop import Trainer
from hetxl_train.tasks.contrastive import ContrastiveTask
from hetxl_train.tower_networks import ClipText
from hetxl_train.towers import TextReader, Tower, TwoTowers, embed_pairs
from hetxl_train.training import train
from support.pairs import QUIET, image_folder, small_pairs
from support.small_encoder import write_encoder

TIMM = {"image": "timm:test_resnet", "image_weights": "random"}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("shapes") / "images", each=8)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A small language model in a directory, as transformers saves it."""
    directory = tmp_path_factory.mktemp("words") / "model"
    write_encoder(directory)
    return f"hf:{directory}"


def losses(run):
    lines = map(json.loads, (run.path / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def small_clip():
    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    return CLIP(16, vision, CLIPTextCfg(context_length=8, vocab_size=40, width=32, heads=2, layers=1), output_dict=True)


def test_the_loss_with_a_locked_tower_is_that_of_open_clip():
    images, texts = torch.randn(12, 3, 16, 16), torch.randint(1, 40, (12, 8))
    model = wrap(small_clip(), scale_init=3.0, rank=3)
    model.lock_image_tower()
    theirs = loss_for(model)(**model(images, texts), output_dict=True)["contrastive_loss"]
    theirs.backward()
    assert all(parameter.grad is None for parameter in model.visual.parameters())
    config = small_pairs("none", features=16, rank=3, scale_init=3.0, projections="text")
    ours = small_clip()
    ours.visual.requires_grad_(False)
    loss = ContrastiveLoss(16, rank=3, scale_init=config.scale_init)
    for side in ("image_noise", "text_noise"):
        getattr(loss, side).load_state_dict(getattr(model.hetxl_noise, side).state_dict())
    image = Tower(ours.visual, 16, 16, project=False)
    towers = TwoTowers(image, Tower(ClipText(ours), 16, 16, project=False), loss)
    normals = [torch.randn(12, 1, noise.size) for noise in (loss.image_noise, loss.text_noise)]
    value = towers(images, texts, noise=normals)
    features = model(images, texts)
    expected = model.hetxl_noise.loss_at(
        features["image_features"], features["text_features"], features["logit_scale"], noise=normals
    )
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    value.backward()
    assert all(parameter.grad is None for parameter in image.body.parameters())
    # Their losses without noise, too.
    plain = open_clip.ClipLoss()(**model(images, texts))
    assert towers(images, texts, num_samples=0).item() == pytest.approx(plain.item(), abs=1e-6)


def test_a_mapped_tower_gives_the_embeddings_of_a_locked_one(shapes, words, tmp_path):
    mapped = {"image_lock": "mapped", "text_lock": "mapped"}
    config = small_pairs(
        shapes, tmp_path / "run", **TIMM, text=words, text_length=16, **mapped, templates="{}|an icon of {}"
    )
    run = train(config, console=QUIET)
    trained = load_contrastive_run(run.path)
    assert isinstance(trained.model.image, Tower)
    pairs = ContrastiveTask.open(config)
    split = pairs.splits["test"]
    reader = TextReader.of(config)
    whole = embed_pairs(trained.model, split, reader.table(split.texts))
    vectors = np.load(run.path / "embeddings" / "test-images.npy")
    torch.testing.assert_close(trained.model.image.layer(torch.from_numpy(vectors)), whole.images, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        inputs = split.images.fetch(np.arange(len(split))).inputs
        torch.testing.assert_close(trained.model.image.body(inputs), torch.from_numpy(vectors), rtol=1e-4, atol=1e-5)
    # The weights of the networks are in the run, as they were.
    seeded = train(
        small_pairs(shapes, tmp_path / "other", **TIMM, text=words, text_length=16, **mapped, steps=1), console=QUIET
    )
    for side in ("image", "text"):
        before = getattr(load_contrastive_run(seeded.path).model, side).body.state_dict()
        after = getattr(trained.model, side).body.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    # A call that finds the vectors does not compute them again.
    result = json.loads((run.path / "result.json").read_text())
    assert result["metrics"]["test"]["zero_shot"]["classes"] == len(set(split.captions()))


def test_a_locked_tower_has_no_gradients_and_a_free_one_has(shapes, words, tmp_path):
    for lock in ("locked", "free"):
        config = small_pairs(
            shapes, tmp_path / lock, **TIMM, text=words, text_length=16, image_lock=lock, text_lock=lock, steps=2
        )
        run = train(config, console=QUIET)
        checkpoint = load_contrastive_run(run.path).model
        initial = train(small_pairs(shapes, tmp_path / f"{lock}-1", **TIMM, text=words, text_length=16, image_lock=lock,
                                    text_lock=lock, steps=1, learning_rate=1e-12), console=QUIET)  # fmt: skip
        start = load_contrastive_run(initial.path).model
        for side in ("image", "text"):
            pairs = zip(
                getattr(start, side).body.parameters(), getattr(checkpoint, side).body.parameters(), strict=True
            )
            moved = [not torch.allclose(before, after, atol=1e-6) for before, after in pairs]
            assert any(moved) is (lock == "free"), (side, lock)


@pytest.mark.parametrize("options", [{}, {"link": "sigmoid"}, {"samples": 3}])
def test_a_batch_in_parts_gives_the_losses_of_a_whole_one(shapes, tmp_path, options):
    runs = [
        train(small_pairs(shapes, tmp_path / str(parts), log_every=1, accumulate=parts, **options), console=QUIET)
        for parts in (1, 4)
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=2e-5)


class StoppedError(Exception):
    """Stands for the end of a process."""


def test_a_stopped_run_on_mapped_towers_resumes_to_the_same_weights(shapes, words, tmp_path, monkeypatch):
    options = {**TIMM, "text": words, "text_length": 16, "image_lock": "mapped", "text_lock": "mapped", "accumulate": 2}
    options |= {"steps": 6, "checkpoint_every": 2, "ema": 0.9}
    train(small_pairs(shapes, tmp_path / "straight", **options), console=QUIET)
    step = Trainer.take_step

    def stopping(trainer, number, feed):
        if number == 3:
            raise StoppedError
        return step(trainer, number, feed)

    config = small_pairs(shapes, tmp_path / "stopped", **options)
    with monkeypatch.context() as context:
        context.setattr(Trainer, "take_step", stopping)
        with pytest.raises(StoppedError):
            train(config, console=QUIET)
    monkeypatch.setattr(embeddings, "_write_piece", None)  # the vectors are there
    train(config, console=QUIET)
    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "stopped"))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_averaged_weights_and_float16_are_those_of_the_one_loop(shapes, tmp_path):
    plain, averaged = (
        load_contrastive_run(train(small_pairs(shapes, tmp_path / str(ema), ema=ema), console=QUIET).path).model
        for ema in (0.0, 0.9)
    )
    assert not torch.equal(plain.text.table.weight, averaged.text.table.weight)
    half = train(small_pairs(shapes, tmp_path / "half", precision="float16"), console=QUIET)
    assert np.isfinite(losses(half)).all()


def test_images_of_a_tower_are_those_that_it_was_trained_on(shapes):
    config = small_pairs(shapes, image="open_clip:ViT-B-32", image_weights="random", image_size=32)
    spec = ContrastiveTask.open(config).image
    assert spec.shape == (3, 32, 32)
    assert spec.image.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert ContrastiveTask.open(small_pairs(shapes)).image.image == ImageTransform().preprocessing


def test_towers_that_do_not_go_together_raise(shapes, tmp_path):
    with pytest.raises(ValueError, match="image must be one of cnn, timm:NAME"):
        small_pairs(shapes, image="resnet")
    with pytest.raises(ValueError, match="image_lock = locked needs a pre-trained tower, found image = cnn"):
        train(small_pairs(shapes, tmp_path / "c", image_lock="locked"), console=QUIET)
    with pytest.raises(
        ValueError, match="must name its weights, as in open_clip:ViT-B-32/openai; or use --image-weights"
    ):
        train(small_pairs(shapes, tmp_path / "a", image="open_clip:ViT-B-32", image_size=32), console=QUIET)
    with pytest.raises(ValueError, match=r"a tower without a projection has \d+ features; set features ="):
        train(small_pairs(shapes, tmp_path / "b", **TIMM, projections="text"), console=QUIET)


@pytest.mark.slow
def test_the_recipe_of_lit_runs_end_to_end(tmp_path):
    data, out = image_folder(tmp_path / "shapes", each=16), tmp_path / "run"
    flags = ["--recipe", "lit", "--image", "timm:resnet18", "--image-weights", "random", "--features", "512"]
    flags += ["--image-size", "64", "--steps", "2", "--batch-size", "32", "--warmup", "0", "--workers", "0"]
    result = CliRunner().invoke(app, ["contrastive", "train", str(data), *flags, "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    config = load_contrastive_run(out).run.config
    assert (config.recipe, config.optimizer, config.rank, config.projections) == ("lit", "adafactorbv", 15, "text")


@pytest.mark.slow
def test_a_mapped_tower_takes_a_fifth_of_the_time_of_a_locked_one(tmp_path):
    data, seconds = image_folder(tmp_path / "shapes", each=16), {}
    tower = {"image": "timm:resnet18", "image_weights": "random", "image_size": 64, "steps": 8, "batch_size": 32}
    for lock in ("locked", "mapped"):
        run = train(small_pairs(data, tmp_path / lock, **tower, image_lock=lock), console=QUIET)
        seconds[lock] = json.loads((run.path / "result.json").read_text())["train_seconds"]
    assert seconds["locked"] > 5 * seconds["mapped"], seconds
