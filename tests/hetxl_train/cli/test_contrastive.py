import json

from typer.testing import CliRunner

from hetxl_train.cli.commands import app
from support.pairs import image_folder, vectors_file

SIZES = {"steps": 3, "batch-size": 16, "features": 8, "rank": 2, "buckets": 64, "embedding": 8, "text-width": 16}
SMALL = [word for name, size in (SIZES | {"image-size": 16, "workers": 0}).items() for word in (f"--{name}", size)]


def invoke(*words):
    return CliRunner().invoke(app, ["contrastive", *map(str, words)])


def test_train_evaluate_report(tmp_path):
    data, out = image_folder(tmp_path / "shapes"), tmp_path / "run"
    trained = invoke("train", data, *SMALL, "--device", "cpu", "--out", out, "--swap", "0.2")
    assert trained.exit_code == 0, trained.output
    assert f"hetxl contrastive report {out}" in trained.stdout
    assert "test zero-shot top-1" in trained.stderr
    shown = invoke("evaluate", out, "--num-samples", 2, "--out", tmp_path / "found.json")
    assert shown.exit_code == 0, shown.output
    assert "mean over draws" in shown.stdout
    assert "swaps" in json.loads((tmp_path / "found.json").read_text())
    printed = invoke("evaluate", out, data, "--json")
    assert set(json.loads(printed.stdout)["metrics"]) == {"test"}
    report = invoke("report", out)
    assert report.exit_code == 0, report.output
    assert (out / "report.html").exists()


def test_flags_override_the_options_file(tmp_path):
    data = vectors_file(tmp_path / "x.npz")
    file = tmp_path / "options.toml"
    file.write_text(f'[head]\nhead = "det"\n[data]\ndata = "{data}"\n[training]\nepochs = 2\nseed = 4\n')
    trained = invoke("train", "--config", file, *SMALL, "--device", "cpu", "--seed", 5, "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["head"]["head"], config["training"]["seed"], config["training"]["steps"]) == ("det", 5, 3)


def test_bad_input_is_one_line(tmp_path):
    for words, message in (
        (("train", "icon"), "nor an existing path"),
        (("train", "icons", "--head", "het"), "head must be one of det, het-xl"),
        (("train", "icons", "--steps", 3, "--epochs", 2), "--steps and --epochs exclude each other"),
        (("train", "icons", "--config", tmp_path / "no.toml"), "no such file"),
        (("evaluate", tmp_path), "is not a run directory (no config.json)"),
        (("report", tmp_path / "none"), "does not exist"),
    ):
        result = invoke(*words, *(["--out", tmp_path / "run"] if words[0] == "train" else []))
        assert result.exit_code == 2, words
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_help_lists_options_and_commands():
    assert "--swap-within" in invoke("train", "--help").stdout
    assert "report" in invoke("--help").stdout
