import json

import pytest
from typer.testing import CliRunner

from hetxl.cli import app
from hetxl.studies.forms import FORMS
from hetxl.studies.registry import ENTRIES, listing
from hetxl.studies.settings import Setting
from support.pairs import vectors_file


def test_the_list():
    result = CliRunner().invoke(app, ["study", "--list"])
    assert result.exit_code == 0
    assert result.stdout.strip() == listing()


def test_every_entry_is_a_command():
    text = CliRunner().invoke(app, ["study", "--help"]).stdout
    for name in ENTRIES:
        assert f" {name} " in text


def test_a_study_of_the_registry(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMS, "quick", FORMS["miniature"])
    places = {name: tmp_path / name for name in ("out", "write", "cache")}
    options = [part for name, place in places.items() for part in (f"--{name}", str(place))]
    result = CliRunner().invoke(app, ["study", "alignment", "--quick", "--seeds", "5,", "--jobs", "1", *options])
    assert result.exit_code == 0, result.output
    page = (places["out"] / "alignment.md").read_text()
    assert page in result.stdout
    assert (places["write"] / "alignment.md").read_text() == page
    assert "hetxl study alignment --quick --seeds 5," in page
    assert [place.name.split("-seed")[1][0] for place in places["cache"].iterdir() if place.is_dir()] == ["5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["main", "--seeds", "none"], "--seeds"), (["residual", "--quick", "--jobs", "0"], "jobs must be at least 1")],
)
def test_mistakes_of_the_registry(arguments, message, tmp_path):
    options = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(app, ["study", *arguments, *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_defaults(tmp_path, monkeypatch):
    options = {"steps": 4, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4, "evaluate_every": 2}
    setting = Setting("tiny", "synthetic:rows=400,classes=8,features=6", options=options)
    monkeypatch.setattr("hetxl.studies.defaults.QUICK", {"tiny": setting})
    monkeypatch.setattr("hetxl.studies.tune.WEIGHT_DECAYS", ())
    arguments = ["study", "defaults", "--quick", "--heads", "det,het-xl", "--seeds", "2", "--jobs", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--write", str(tmp_path / "pages")])
    assert result.exit_code == 0, result.output
    assert "HET-XL against DET in 1 settings" in result.stdout
    assert (tmp_path / "study.md").read_text() in result.stdout
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["seeds"] == [0, 1]
    page = (tmp_path / "pages" / "defaults.md").read_text()
    assert "## tiny" in page
    assert "(defaults.svg)" in page
    assert "HET-XL" in (tmp_path / "pages" / "defaults.svg").read_text()


def test_a_study_on_pairs(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMS, "quick", FORMS["miniature"])
    data = str(vectors_file(tmp_path / "x.npz", captions=True))
    places = [part for name in ("out", "write", "cache") for part in (f"--{name}", str(tmp_path / name))]
    arguments = ["study", "test-noise", data, "--quick", "--seeds", "3,", "--jobs", "1", *places]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "test-noise.md").read_text()
    assert page in result.stdout
    assert (tmp_path / "write" / "test-noise.md").read_text() == page
    assert f"hetxl study test-noise {data} --quick --seeds 3,\n" in page
    assert {place.name for place in (tmp_path / "cache").iterdir() if place.is_dir()} == {
        f"het-xl-swap{swap}-seed3" for swap in (0, 20, 40)
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [("contrastiv", "; did you mean 'contrastive'? "), ("tau-rang", "; did you mean 'tau-range'? "), ("nothing", "; ")],
)
def test_a_study_that_does_not_exist(name, hint):
    result = CliRunner().invoke(app, ["study", name, "--quick"])
    assert result.exit_code == 2
    assert result.stderr == f"Error: there is no study {name!r}{hint}hetxl study --list shows all\n"


SMALL = {"steps": 3, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4, "evaluate_every": 3}


def test_recovery(tmp_path, monkeypatch):
    monkeypatch.setattr("hetxl.studies.recovery.QUICK", SMALL | {"data": "synthetic:rows=400,classes=8,features=6"})
    places = ["--out", str(tmp_path / "out"), "--write", str(tmp_path / "pages")]
    result = CliRunner().invoke(app, ["study", "recovery", "--quick", "--seeds", "3,", "--jobs", "1", *places])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "study.md").read_text() in result.stdout
    assert "HET-XL closes" in result.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["seeds"] == [3]
    assert (tmp_path / "out" / "recovery.png").exists()
    assert "(recovery.png)" in (tmp_path / "pages" / "recovery.md").read_text()


def test_levers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hetxl.studies.levers.preset_for", lambda data: SMALL)
    arguments = ["study", "levers", "synthetic:rows=400,classes=8,features=6", "--levers", "residual", "--seeds", "2"]
    result = CliRunner().invoke(app, [*arguments, "--jobs", "2"])
    assert result.exit_code == 0, result.output
    out = tmp_path / "runs" / "study-levers-synthetic"
    assert (out / "study.md").read_text() in result.stdout
    assert list(json.loads((out / "summary.json").read_text())["levers"]) == ["residual"]
    assert (out / "levers.png").exists()


def test_tau(tmp_path, monkeypatch):
    def run_study(**options):
        (tmp_path / "study.md").write_text("# Choosing τ\n")
        asked.append(options)
        return tmp_path / "summary.json"

    asked = []
    monkeypatch.setattr("hetxl.studies.tau.study", run_study)
    arguments = ["study", "tau", "--quick", "--head", "det", "--seeds", "4,5", "--jobs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "# Choosing τ" in result.stdout
    assert asked == [{"seeds": (4, 5), "out": tmp_path, "head": "det", "quick": True, "longer": False, "jobs": 1}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tau", "--quick", "--head", "hat"], "head must be one of"),
        (["recovery", "pycode"], "data must be synthetic"),
        (["recovery", "--seeds", "0"], "--seeds"),
        (["levers", "--levers", "rank,ranks"], "ranks"),
        (["levers", "--jobs", "0"], "jobs must be at least 1"),
        (["recovery", "--jobs", "0"], "jobs must be at least 1"),
        (["levers", "no-such-file.npz"], "no-such-file.npz"),
    ],
)
def test_mistakes_of_the_other_studies(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "pycodes"], "pycodes"),
        (["--seeds", "none"], "--seeds"),
        (["--heads", "hetxl", "--quick"], "hetxl"),
        (["--quick", "--jobs", "0"], "jobs must be at least 1"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["study", "defaults", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
