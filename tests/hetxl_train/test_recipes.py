"""Recipes by name: the paper's values, what overrides them, and whole runs."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from hetxl_train.cli.commands import app
from hetxl_train.cli.options import resolve
from hetxl_train.config import CompareConfig, ContrastiveConfig, TrainConfig
from hetxl_train.data.dataset import InputSpec
from hetxl_train.recipes import recipe_names, recipe_options, recipe_text
from hetxl_train.towers import Specs, build_towers
from support.training import write_images

RUNNER = CliRunner()
VECTORS = InputSpec("features", (4,))
SHARED = {
    # Typed from the appendix "Experimental details and hyperparameters": "1,000 MC samples", "R = 50", "β1 = 0.9,
    # β2 = 0.999", "10,000 linear warm-up phase starting at 10^-5"; bounds and start of τ from the appendix on τ.
    "head": "het-xl", "train_samples": 1000, "eval_samples": 1000, "rank": 50, "covariance": "efficient",
    "sampler": "iid", "temperature": "learned", "temperature_low": 0.05, "temperature_high": 5.0,
    "temperature_init": 2.525, "optimizer": "adamw", "beta1": 0.9, "beta2": 0.999, "warmup": 10000, "warmup_from": 1e-5,
    "residual": "rank1", "link": "sigmoid", "bias_init": -10.0, "pretrained": False,
}  # fmt: skip
PAPER = {  # backbone, epochs, weight decay, learning rate, batch size
    "imagenet21k-resnet152": ("resnet152", 90, 0.03, 1e-3, 1024),
    "imagenet21k-vit-l32": ("vit-l/32", 90, 0.1, 1e-3, 4096),
    "jft300m-resnet152": ("resnet152", 7, 0.1, 6e-4, 4096),
    "jft300m-vit-l32": ("vit-l/32", 7, 0.1, 6e-4, 4096),
    "jft4b-resnet152": ("resnet152", 1, 0.1, 6e-4, 4096),
    "jft4b-vit-l32": ("vit-l/32", 1, 0.1, 6e-4, 4096),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_have_the_papers_values(name):
    config = resolve(TrainConfig, (None, {"recipe": name}))
    expected = dict(
        zip(("backbone", "epochs", "weight_decay", "learning_rate", "batch_size"), PAPER[name], strict=True)
    )
    printed = TrainConfig.parse_toml(RUNNER.invoke(app, ["recipes", name]).output, name)
    for option, value in (SHARED | expected).items():
        assert (getattr(config, option), printed[option]) == (value, value), option
    assert (config.recipe, config.noise_weight_decay, config.noise_start) == (name, None, 0)


def test_the_recipe_of_lit_has_the_papers_values():
    config = resolve(ContrastiveConfig, (None, {"recipe": "lit"}))
    # Typed from the appendix, "Contrastive learning": 18 billion examples in batches of 16,384.
    expected = {
        "head": "het-xl", "covariance": "low_rank", "rank": 15, "samples": 1, "eval_samples": 0, "normalize": "before",
        "noise": "both", "image_lock": "mapped", "text_lock": "free", "schedule": "cosine", "learning_rate": 1e-3,
        "warmup": 10000, "weight_decay": 1e-4, "batch_size": 16384, "steps": round(18e9 / 16384),
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    starts = [
        build_towers(dataclasses.replace(config, head=head, features=4), Specs(VECTORS, VECTORS)).loss.scale().item()
        for head in ("het-xl", "det")
    ]
    assert starts == pytest.approx([3, 10])


def test_every_recipe_is_listed_and_printed():
    listed = RUNNER.invoke(app, ["recipes"]).output
    assert set(recipe_names()) == {*PAPER, "lit", "webvision-finetune"}
    for name in recipe_names():
        assert f"{name} " in listed
        assert RUNNER.invoke(app, ["recipes", name]).output == recipe_text(name)
    assert "learning_rate = 1e-3" in recipe_text("imagenet21k-resnet152")
    unknown = RUNNER.invoke(app, ["train", "--recipe", "imagenet22k-resnet152"])
    assert unknown.exit_code == 2
    assert "imagenet21k-resnet152" in unknown.output


def test_flags_and_files_beat_the_recipe_and_the_recipe_beats_defaults(tmp_path):
    (tmp_path / "options.toml").write_text("[training]\nbatch_size = 8\nweight_decay = 0.5\n[head]\nrank = 3\n")
    flags = {"recipe": "imagenet21k-resnet152", "rank": 2, "steps": 2}
    config = resolve(TrainConfig, (tmp_path / "options.toml", flags))
    assert (config.rank, config.batch_size, config.weight_decay, config.learning_rate) == (2, 8, 0.5, 1e-3)
    assert (config.steps, config.epochs) == (2, None)
    (tmp_path / "options.toml").write_text('[training]\nrecipe = "jft4b-vit-l32"\n')
    assert resolve(TrainConfig, (tmp_path / "options.toml", {})).batch_size == 4096
    # A comparison chooses the heads itself; presets of built-in data are below a recipe.
    options = {"defaults": {"rank": 10, "steps": 300}, "instead": {"head": "--heads"}}
    compared = resolve(CompareConfig, (None, {"recipe": "webvision-finetune"}), **options)
    assert (compared.rank, compared.steps, compared.epochs) == (50, None, 10)


def test_our_own_recipe_names_a_published_model():
    import timm

    options = recipe_options("webvision-finetune", TrainConfig)
    assert options["backbone"].removeprefix("timm:") in timm.list_pretrained()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imagenet21k-resnet152", "imagenet21k-vit-l32"])
def test_the_papers_recipes_run_end_to_end(tmp_path, name):
    images = write_images(tmp_path / "images", each=10, size=64)
    flags = ["--steps", "2", "--batch-size", "2", "--out", str(tmp_path / "run"), "--device", "cpu", "--workers", "0"]
    result = RUNNER.invoke(app, ["train", str(images), "--recipe", name, *flags])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["training"]["recipe"], config["head"]["train_samples"]) == (name, 1000)
