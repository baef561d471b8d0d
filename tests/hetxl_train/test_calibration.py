"""`hetxl calibrate` and what `hetxl predict` makes of it: sets, answers, thresholds of several labels."""

import csv
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hetxl_train.calibration import calibrate_run
from hetxl_train.cli.commands import app
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.prediction import predict
from hetxl_train.training import train

QUIET = Console(quiet=True)
OPTIONS = {"steps": 150, "batch_size": 64, "rank": 4, "train_samples": 4, "eval_samples": 16}


def write_data(path: Path, rows: int, seed: int, multi: bool = False) -> None:
    """Write features of six overlapping classes; several labels: that of the row and, for half of them, the next."""
    generator = np.random.default_rng(seed)
    centres, labels = np.random.default_rng(9).normal(size=(6, 5)), generator.integers(6, size=rows)
    features = (centres[labels] + generator.normal(size=(rows, 5))).astype(np.float32)
    if not multi:
        np.savez(path, features=features, labels=labels)
        return
    lists = [[k, (k + 1) % 6] if extra else [k] for k, extra in zip(labels, generator.random(rows) < 0.5, strict=True)]
    offsets = np.cumsum([0, *map(len, lists)])
    np.savez(path, features=features, labels=np.concatenate(lists), label_offsets=offsets)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration")
    write_data(directory / "train.npz", 1500, seed=0)
    write_data(directory / "calibration.npz", 2000, seed=1)
    write_data(directory / "new.npz", 4000, seed=2)
    train(TrainConfig(data=str(directory / "train.npz"), out=str(directory / "run"), **OPTIONS), console=QUIET)
    return directory


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("score", "grouping"), [("raps", "marginal"), ("aps", "class"), ("lac", "clustered")])
def test_predicted_sets_cover_new_examples(directory: Path, score: str, grouping: str):
    """Within 2 % of 90 %: calibration and new examples have standard errors of 0.7 and 0.5 %."""
    about = calibrate_run(
        directory / "run",
        str(directory / "calibration.npz"),
        coverage=0.9,
        score=score,
        grouping=grouping,
        console=QUIET,
    )
    assert about["examples"] == 2000
    out = directory / f"{score}.csv"
    predict(directory / "run", str(directory / "new.npz"), out, coverage=0.9, console=QUIET)
    labels = np.load(directory / "new.npz")["labels"]
    sets = [row["set"].split("|") for row in rows_of(out)]
    hits = [str(label) in chosen for label, chosen in zip(labels, sets, strict=True)]
    assert np.mean(hits) == pytest.approx(0.9, abs=0.02)
    assert [int(row["set_size"]) for row in rows_of(out)] == [len([c for c in chosen if c]) for chosen in sets]


def test_own_splits_show_the_coverage(directory: Path):
    about = calibrate_run(directory / "run", coverage=0.8, console=QUIET)
    assert about["data"] == "validation split"
    assert about["test"]["coverage"] == pytest.approx(0.8, abs=0.12)  # 150 examples each
    assert 1 <= about["test"]["set_size"] <= 6
    assert {"coverage_head", "coverage_tail"} <= set(about["test"])


def test_answers_keep_the_risk(directory: Path):
    about = calibrate_run(directory / "run", str(directory / "calibration.npz"), risk=0.2, console=QUIET)
    assert 0 < about["answered"] < 1
    predict(directory / "run", str(directory / "new.npz"), directory / "risk.csv", risk=0.2, console=QUIET)
    labels = np.load(directory / "new.npz")["labels"]
    rows = rows_of(directory / "risk.csv")
    answers = [(row["answer"], str(label)) for row, label in zip(rows, labels, strict=True) if row["answer"]]
    assert len(answers) / len(rows) == pytest.approx(about["answered"], abs=0.06)
    assert np.mean([answer != label for answer, label in answers]) < 0.22


def test_commands_calibrate_and_predict(directory: Path):
    calibration = str(directory / "calibration.npz")
    result = CliRunner().invoke(app, ["calibrate", str(directory / "run"), calibration, "--coverage", "0.9"])
    assert result.exit_code == 0, result.output
    arguments = ["predict", str(directory / "run"), calibration, "--out", str(directory / "p.parquet")]
    result = CliRunner().invoke(app, [*arguments, "--coverage", "0.9"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, [*arguments, "--coverage", "0.95"])
    assert result.exit_code == 2
    assert "calibrated for coverage 0.9, got 0.95; run hetxl calibrate" in result.output


def test_missing_calibration_names_the_command(directory: Path, tmp_path: Path):
    config = TrainConfig(data=str(directory / "train.npz"), out=str(tmp_path / "run"), **OPTIONS | {"steps": 5})
    train(config, console=QUIET)
    with pytest.raises(FileNotFoundError, match="not calibrated; run hetxl calibrate"):
        predict(tmp_path / "run", str(directory / "new.npz"), tmp_path / "p.csv", coverage=0.9, console=QUIET)
    with pytest.raises(ValueError, match="pass --coverage for prediction sets"):
        calibrate_run(tmp_path / "run", console=QUIET)


def test_several_labels_get_thresholds(tmp_path: Path):
    write_data(tmp_path / "train.npz", 1200, seed=0, multi=True)
    write_data(tmp_path / "calibration.npz", 1500, seed=1, multi=True)
    train(TrainConfig(data=str(tmp_path / "train.npz"), out=str(tmp_path / "run"), **OPTIONS), console=QUIET)
    calibration = str(tmp_path / "calibration.npz")
    calibrate_run(tmp_path / "run", calibration, precision=0.7, console=QUIET)
    predict(tmp_path / "run", calibration, tmp_path / "p.csv", console=QUIET)
    stored = np.load(calibration)
    offsets, ids = stored["label_offsets"], stored["labels"]
    rights = [
        label in {str(k) for k in ids[offsets[row] : offsets[row + 1]]}
        for row, entry in enumerate(rows_of(tmp_path / "p.csv"))
        for label in filter(None, entry["set"].split("|"))
    ]
    assert len(rights) > 100
    assert np.mean(rights) > 0.67  # each label is right in 70 % of its calibration examples, but for the draws
    with pytest.raises(ValueError, match="with several labels, pass only --precision"):
        calibrate_run(tmp_path / "run", calibration, coverage=0.9, console=QUIET)
