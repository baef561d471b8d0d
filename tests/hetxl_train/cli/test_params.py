"""The command as it is typed: what it prints where, and how it ends."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetxl_train import plugins
from hetxl_train.cli.commands import app


def run(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments, prog_name="hetxl")


@pytest.fixture
def paper(monkeypatch):
    """The lab's table, whether or not it is installed."""
    entry = EntryPoint("paper", "hetxl_lab.paper_parameters:show_paper", "hetxl.parameter_tables")
    monkeypatch.setattr(plugins, "entries", lambda group: {"paper": entry} if group == "parameter_tables" else {})


def test_help_of_params_names_every_option():
    result = run("params", "--help")
    assert result.exit_code == 0
    options = ["backbone", "features", "classes", "rank", "covariance", "residual", "noise-features", "buckets", "json"]
    assert [option for option in options if f"--{option}" not in result.stdout] == []


@pytest.mark.usefixtures("paper")
def test_params_without_options_prints_the_papers_table():
    result = run("params")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["JFT-300M", "DET", "95.62", "95.6", "+0.02", "325.31", "325.3", "+0.01"] in lines
    assert ["K", "=", "29,593", "HET", "241.53", "241.6", "-0.07", "399.04", "399.1", "-0.06"] in lines
    assert ["HET-H", "127.27", "–", "–", "339.04", "–", "–"] in lines
    assert "…" not in result.stdout


@pytest.mark.usefixtures("paper")
def test_the_papers_table_as_json():
    result = run("params", "--json")
    assert result.exit_code == 0
    cells = json.loads(result.stdout)
    assert len(cells) == 24
    assert cells[0] == {
        "backbone": "resnet152",
        "dataset": "JFT-300M",
        "classes": 18_291,
        "head": "det",
        "parameters": 95_622_067,
        "paper_millions": 95.6,
        "difference_millions": pytest.approx(0.022067),
    }


def test_params_counts_a_head_without_backbone():
    result = run("params", "--features", "64", "--classes", "1000", "--rank", "10")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    noise = 2 * (64 * 64 + 64) + 10 * 64 + 1
    total = 65_000 + noise
    assert ["DET", "0", "65,000", "0", "65,000", "65,000", "–"] in lines
    share = f"+{noise / 65_000:.2%}"
    assert ["HET-XL", "0", "65,000", f"{noise:,}", f"{total:,}", f"{total:,}", share] in lines
    single, double = f"{4 * total / 2**10:.2f}", f"{8 * total / 2**10:.2f}"
    all_four = [f"{16 * total / 2**20:.2f}", "MiB", f"{16 * total:,}"]
    assert ["HET-XL", single, "KiB", single, "KiB", double, "KiB", *all_four] in lines


def test_a_backbone_of_the_users():
    result = run("params", "--backbone", "vit-l/32", "--classes", "21843")
    assert result.exit_code == 0
    assert "vit-l/32, D = 1,024, K = 21,843" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["HET-XL", "306.56M", "22.39M", "2.15M", "24.54M", "331.10M", "+0.65%"] in lines


def test_json_of_a_case_with_every_option():
    sizes = ["--features", "8", "--classes", "10", "--rank", "3", "--noise-features", "2", "--buckets", "5"]
    result = run("params", *sizes, "--covariance", "low_rank", "--residual", "diagonal", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    case = json.loads(result.stdout)
    assert (case["backbone"], case["features"], case["classes"]) == (None, 8, 10)
    assert case["options"] == {
        "rank": 3,
        "covariance": "low_rank",
        "residual": "diagonal",
        "noise_features": 2,
        "buckets": 5,
    }
    heads = {row["head"]: row["parameters"] for row in case["heads"]}
    assert heads["det"]["total"] == 8 * 10 + 10
    assert heads["het-h"]["covariance"] == (8 + 1) * 5 * 3 + (8 + 1) * 5
    assert heads["het-xl"]["covariance"] == (8 + 1) * 2 * 3 + (8 + 1) * 2
    assert heads["het-xl"]["projection"] == 10 * 2


def test_a_json_backbone_is_counted():
    result = run("params", "--backbone", "timm:resnet50", "--classes", "7", "--json")
    case = json.loads(result.stdout)
    assert (case["backbone"], case["features"]) == ("timm:resnet50", 2048)
    assert case["heads"][0]["parameters"]["total"] == 25_557_032 - (2048 * 1000 + 1000) + 2048 * 7 + 7


def test_a_refused_covariance_is_a_dash_and_a_reason():
    result = run("params", "--features", "64", "--classes", "5000", "--covariance", "full")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split() for line in lines if line.startswith(" HET ")] == [["HET", *["–"] * 6], ["HET", *["–"] * 5]]
    assert [line for line in lines if line.startswith('HET: covariance="full" with 64 features')]


def test_large_numbers_are_not_cut_short():
    result = run("params", "--features", "2048", "--classes", "10000000")
    assert "…" not in result.stdout
    total = 16 * (2048 * 10_000_000 + 10_000_000)
    assert f"{total:,}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--classes 0", "--classes needs --backbone NAME or --features D"),
        ("--classes 10", "--classes needs --backbone NAME or --features D"),
        ("--rank 10", "--rank needs --backbone NAME or --features D"),
        ("--noise-features 10 --json", "--noise-features needs --backbone NAME or --features D"),
        ("--features 64", "--classes is missing"),
        ("--backbone resnet152", "--classes is missing"),
        ("--features 64 --backbone resnet152 --classes 10", "--backbone and --features exclude each other"),
        ("--features 64 --classes 0", "--classes must be at least 1, found 0"),
        ("--backbone resnet152 --classes 0", "--classes must be at least 1, found 0"),
        ("--features 0 --classes 10", "--features must be at least 1, found 0"),
        ("--features 64 --classes 10 --rank -1", "--rank must be at least 0, found -1"),
        ("--features 64 --classes 10 --buckets 0", "--buckets must be at least 1, found 0"),
        ("--features 64 --classes 10 --noise-features 0", "--noise-features must be at least 1, found 0"),
        ("--features 64 --classes 1000000000", "--classes must be at most 100,000,000, found 1,000,000,000"),
        ("--features 64 --classes 10 --covariance ful", "did you mean 'full'?"),
        ("--features 64 --classes 10 --residual rank2", "did you mean 'rank1'?"),
        ("--backbone resnet15 --classes 10", "did you mean 'resnet152'?"),
        ("--backbone timm:resnet5 --classes 10", "did you mean 'timm:resnet50'?"),
        ("--backbone hf:bertt --classes 10", "did you mean 'hf:bert'?"),
        ("--backbone hf:clip --classes 10", "count only its head with --features D"),
    ],
)
def test_bad_input_is_one_line_on_stderr(arguments, message):
    result = run("params", *arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_library_is_one_line_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("params", "--backbone", "timm:resnet50", "--classes", "10")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: backbone 'timm:resnet50' needs timm: pip install timm\n"


@pytest.mark.parametrize("arguments", [["params", "--classes", "many"], ["params", "--colour", "red"], ["parms"]])
def test_invalid_arguments_exit_without_a_traceback(arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_installed_script_prints_errors():
    script = Path(sys.executable).parent / "hetxl"
    process = subprocess.run([script, "params", "--features", "8"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "Error: --classes is missing; pass the number of classes\n"
