"""`hetxl train --noise-only`: a trained run gets noise, or stays as it is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hetxl._files import read_json
from hetxl_train.cli.commands import app
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.noise_only import LABEL, add_noise_to_run
from hetxl_train.runs import load_run
from hetxl_train.training import train


def write_rows(path: Path, noise: float, seed: int) -> Path:
    """Write rows whose label is that of the row moved along two directions; small noise makes it nearly certain."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(1500, 6)).astype(np.float32)
    moved = features.copy()
    moved[:, :2] += noise * generator.normal(size=(1500, 2))
    weights = np.random.default_rng(9).normal(size=(6, 5))
    np.savez(path, features=features, labels=(moved @ weights).argmax(1))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noise-only")
    options = {"data": str(write_rows(directory / "train.npz", 0.05, 0)), "head": "det", "steps": 100}
    train(TrainConfig(**options, out=str(directory / "run")), console=Console(quiet=True))
    return directory


def test_noise_is_added_and_the_weights_stay(directory: Path):
    noisy_rows = write_rows(directory / "noisy.npz", 1.5, 1)
    run = add_noise_to_run(directory / "run", data=str(noisy_rows), console=Console(quiet=True))
    before, after = load_run(directory / "run").model, load_run(run.path).model
    assert run.path == directory / "run-noise"
    assert read_json(run.path / "result.json")["label"] == LABEL
    old_weights = before.head.state_dict()
    assert all(torch.equal(value, old_weights.get(name, value)) for name, value in after.head.state_dict().items())
    assert "classifier.weight" in old_weights
    fresh = np.load(write_rows(directory / "new.npz", 1.5, 2))
    features, labels = torch.from_numpy(fresh["features"]), torch.from_numpy(fresh["labels"])
    with torch.no_grad():
        old, new = (model.head.loss(model.backbone(features), labels) for model in (before, after))
    assert new < old - 0.1
    with pytest.raises(ValueError, match="exists already"):
        add_noise_to_run(directory / "run")
    with pytest.raises(ValueError, match="already has a head with noise"):
        add_noise_to_run(run.path)


def test_run_stays_as_it_is_where_noise_does_not_help(directory: Path):
    out = directory / "not-written"
    result = CliRunner().invoke(
        app, ["train", "--noise-only", "--start-from", str(directory / "run"), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "Noise does not help" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "needs --start-from RUN"), (["--start-from", "x", "--steps", "5"], "found --steps")],
)
def test_options_without_effect_are_refused(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["train", "--noise-only", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception) + result.output
