import json

import pytest
from typer.testing import CliRunner

from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import ENTRIES, listing
from hetxl_train.cli.commands import app
from support.pairs import vectors_file


def test_study_list_is_printed():
    result = CliRunner().invoke(app, ["study", "--list"])
    assert result.exit_code == 0
    assert result.stdout.strip() == listing()


def test_every_entry_is_a_command():
    text = CliRunner().invoke(app, ["study", "--help"]).stdout
    for name in ENTRIES:
        assert f" {name} " in text


def test_a_study_of_the_registry(tmp_path, monkeypatch):
    monkeypatch.setitem(PROFILES, "quick", PROFILES["miniature"])
    directories = {name: tmp_path / name for name in ("out", "write", "cache")}
    options = [part for name, directory in directories.items() for part in (f"--{name}", str(directory))]
    result = CliRunner().invoke(app, ["study", "alignment", "--quick", "--seeds", "5,", "--jobs", "1", *options])
    assert result.exit_code == 0, result.output
    page = (directories["out"] / "alignment.md").read_text()
    assert page in result.stdout
    assert (directories["write"] / "alignment.md").read_text() == page
    assert "hetxl study alignment --quick --seeds 5," in page
    assert [
        directory.name.split("-seed")[1][0] for directory in directories["cache"].iterdir() if directory.is_dir()
    ] == ["5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["main", "--seeds", "none"], "--seeds"), (["residual", "--quick", "--jobs", "0"], "jobs must be at least 1")],
)
def test_invalid_study_arguments_exit_with_a_message(arguments, message, tmp_path):
    options = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(app, ["study", *arguments, *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_study_on_pairs_writes_its_page(tmp_path, monkeypatch):
    monkeypatch.setitem(PROFILES, "quick", PROFILES["miniature"])
    data = str(vectors_file(tmp_path / "x.npz", captions=True))
    directory_options = [part for name in ("out", "write", "cache") for part in (f"--{name}", str(tmp_path / name))]
    arguments = ["study", "test-noise", data, "--quick", "--seeds", "3,", "--jobs", "1", *directory_options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "test-noise.md").read_text()
    assert page in result.stdout
    assert (tmp_path / "write" / "test-noise.md").read_text() == page
    assert f"hetxl study test-noise {data} --quick --seeds 3,\n" in page
    assert {directory.name for directory in (tmp_path / "cache").iterdir() if directory.is_dir()} == {
        f"het-xl-swap{swap}-seed3" for swap in (0, 20, 40)
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [("contrastiv", "; did you mean 'contrastive'? "), ("tau-rang", "; did you mean 'tau-range'? "), ("nothing", "; ")],
)
def test_a_study_that_does_not_exist(name, hint):
    result = CliRunner().invoke(app, ["study", name, "--quick"])
    assert result.exit_code == 2
    assert result.stderr == f"Error: unknown study {name!r}{hint}hetxl study --list shows all\n"


def test_options_that_a_study_declares_reach_it(tmp_path, monkeypatch):
    monkeypatch.setitem(PROFILES, "quick", PROFILES["miniature"])
    directory_options = [part for name in ("out", "cache") for part in (f"--{name}", str(tmp_path / name))]
    arguments = ["study", "defaults", "--quick", "--settings", "synthetic", "--heads", "det,het", "--no-equal-time"]
    result = CliRunner().invoke(app, [*arguments, "--seeds", "1", "--jobs", "1", *directory_options])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "defaults.json").read_text())
    assert summary["command"] == (
        "hetxl study defaults --quick --seeds 1 --settings synthetic --heads det,het --no-equal-time"
    )
    [setting] = summary["settings"]
    assert set(setting["heads"]) == {"DET", "DET + temperature scaling", "HET"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tau", "--quick", "--head", "hat"], "head must be one of"),
        (["recovery", "pycode"], "data must be synthetic"),
        (["recovery", "--seeds", "0"], "--seeds"),
        (["recovery", "--data-seed", "-1"], "--data-seed"),
        (["levers", "--levers", "rank,ranks"], "ranks"),
        (["levers", "--jobs", "0"], "jobs must be at least 1"),
        (["levers", "no-such-file.npz"], "no-such-file.npz"),
        (["levers", "--quick"], "--quick"),
        (["defaults", "--settings", "pycodes"], "pycodes"),
        (["defaults", "--heads", "hetxl", "--quick"], "hetxl"),
    ],
)
def test_invalid_options_exit_before_any_run(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
