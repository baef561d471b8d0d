import json

import numpy as np
from typer.testing import CliRunner

from hetxl_train.cli.commands import app
from support.packages import cache_with_packages, needs_debian


def test_describe_prints_json_or_a_table(tmp_path):
    np.savez(tmp_path / "x.npz", features=np.eye(30, dtype="float32"), labels=np.arange(30) % 3)
    result = CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz"), "--json"])
    assert result.exit_code == 0, result.output
    description = json.loads(result.stdout)
    assert description["classes"] == 3
    assert sum(description["rows"].values()) == 30
    assert "classes" in CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz")]).stdout


def test_describe_with_label_noise():
    line = ["data", "describe", "synthetic:rows=400,classes=5,features=3", "--json", "--label-noise", "symmetric"]
    result = CliRunner().invoke(app, [*line, "--rate", "0.5"])
    assert result.exit_code == 0, result.output
    assert any(note.startswith("label noise: symmetric, rate 0.5") for note in json.loads(result.stdout)["notes"])
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "label_noise_rate 0; give a rate" in result.stderr


def test_invalid_data_exits_with_a_message(tmp_path):
    np.savez(tmp_path / "x.npz", features=np.full((4, 2), np.nan, dtype="float32"), labels=np.arange(4))
    result = CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz")])
    assert result.exit_code == 2
    assert "NaN" in result.stderr


def test_build_without_a_name_lists_the_datasets():
    result = CliRunner().invoke(app, ["data", "build"])
    assert result.exit_code == 0, result.output
    assert "words: Next-word prediction" in result.stdout
    result = CliRunner().invoke(app, ["data", "build", "wrds"])
    assert result.exit_code == 2
    assert "did you mean 'words'?\n  glyphs: Images of" in result.stderr


def test_build_twice_and_describe(tmp_path, monkeypatch):
    needs_debian("dict-gcide")
    monkeypatch.setenv("HETXL_CACHE", str(cache_with_packages(tmp_path)))
    before = CliRunner().invoke(app, ["data", "describe", "words:entries=1500,classes=50"])
    assert before.exit_code == 2
    assert "build it with: hetxl data build words:entries=1500" in before.stderr
    first, second = (CliRunner().invoke(app, ["data", "build", "words:entries=1500,classes=50"]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.stdout.startswith(f"words: built in {tmp_path}")
    assert "; 50 classes\nsource: dict-gcide " in first.stdout
    assert second.stdout.startswith("words exists already: ")
    assert "built in" in CliRunner().invoke(app, ["data", "build", "words:entries=1500", "--force"]).stdout
    after = CliRunner().invoke(app, ["data", "describe", "words:entries=1500,classes=50", "--json"])
    assert json.loads(after.stdout)["classes"] == 50


def test_build_names_a_missing_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(app, ["data", "build", "words"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: apt-get, which downloads the Debian package dict-gcide, is not available")
