import json

import pytest

from hetxl_train.report import find_runs, read_run
from support.runs import FILES, write_comparison, write_json, write_run


def test_a_finished_run_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path / "het-xl-0", "HET-XL", 3, steps=40))
    assert (run.name, run.label, run.head, run.seed, run.dataset) == ("het-xl-0", "HET-XL", "het-xl", 3, "pycode")
    assert run.problems == ()
    assert run.finished
    assert [record["step"] for record in run.steps] == list(range(2, 41, 2))
    assert len(run.evaluations) == 20
    assert run.metrics("test")["nll"] == run.result["metrics"]["test"]["nll"]
    assert run.parameters() == 1_350_401
    assert run.parameters("backbone") == 600_000
    assert run.value("train_seconds") > 0
    assert run.data["classes"] == 8192


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_is_read(tmp_path, name):
    folder = write_run(tmp_path / "run", "HET", steps=40)
    (folder / name).unlink()
    run = read_run(folder)
    assert run.problems == (f"{name} is missing",)
    assert run.label == "HET"
    assert run.finished == (name != "result.json")


@pytest.mark.parametrize("name", [name for name in FILES if name != "log.jsonl"])
@pytest.mark.parametrize("text", ["", '{"label": "HE', "[1, 2", "3", "\x80"])
def test_a_file_that_is_cut_short_is_named(tmp_path, name, text):
    folder = write_run(tmp_path / "run", "HET", steps=40)
    (folder / name).write_text(text, encoding="latin-1")
    (problem,) = read_run(folder).problems
    assert name in problem


def test_a_log_that_is_cut_short_keeps_its_whole_lines(tmp_path):
    folder = write_run(tmp_path / "run", steps=40)
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log[:-10] + '\n[1]\n3\n{"kind": ["x"], "step": 1}\n')
    run = read_run(folder)
    assert len(run.evaluations) == 19
    assert run.problems == ("log.jsonl has 4 lines that could not be read",)


def test_steps_repeated_after_a_resume_count_once(tmp_path):
    records = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0))]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert [(record["step"], record["loss"]) for record in read_run(tmp_path).steps] == [(1, 9.0), (2, 6.0), (3, 7.0)]


def test_values_of_the_wrong_kind_are_as_good_as_missing(tmp_path):
    metrics = {"test": {"nll": "4", "brier": float("nan"), "aurc": None, "auroc": 0.5}, "validation": 3}
    wrong = {"seed": "x", "head": None, "dataset": 5, "data": [], "parameters": 7, "metrics": metrics}
    write_json(tmp_path / "result.json", wrong)
    run = read_run(tmp_path)
    assert (run.seed, run.head, run.dataset, run.data, run.parameters()) == (None, None, None, {}, None)
    assert run.metrics("test") == {"auroc": 0.5}
    assert run.metrics("validation") == {}
    assert run.label == tmp_path.name


def test_the_label_comes_from_the_configuration_while_the_run_is_going(tmp_path):
    write_json(tmp_path / "config.json", {"head": {"kind": "het-h"}, "seed": 2})
    run = read_run(tmp_path)
    assert (run.label, run.seed, run.finished) == ("HET-H", 2, False)
    write_json(tmp_path / "config.json", {"head": {"head": "het-xl"}, "training": {"seed": 3}})
    run = read_run(tmp_path)
    assert (run.label, run.seed) == ("HET-XL", 3)


@pytest.mark.parametrize(("name", "label"), [("det-seed0", "DET"), ("det-smoothed-seed0", "det-smoothed")])
def test_runs_of_an_unfinished_comparison_are_labelled_by_name(tmp_path, name, label):
    (tmp_path / name).mkdir()
    write_json(tmp_path / name / "config.json", {"head": {"head": "det"}, "training": {"seed": 0}})
    assert read_run(tmp_path / name).label == label


def test_a_derived_run_misses_no_log(tmp_path):
    folder = write_run(tmp_path / "run", steps=20, derived_from="det-seed0")
    assert not (folder / "log.jsonl").exists()
    assert read_run(folder).problems == ()


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run directory \(it has none of result\.json"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is a file"):
        read_run(tmp_path / "file")
    with pytest.raises(ValueError, match="at least one run"):
        find_runs([])


def test_a_comparison_gives_its_runs_once_each(tmp_path):
    folder = write_comparison(tmp_path / "out", ("DET", "HET-XL"), seeds=2, steps=20)
    (folder / "runs" / "notes").mkdir()
    single = folder / "runs" / "det-seed0"
    runs = find_runs([single, folder, str(folder)])
    assert [run.name for run in runs] == ["det-seed0", "det-seed1", "het-xl-seed0", "het-xl-seed1"]
    assert all(run.comparison.baseline == "DET" and run.comparison.heads == ("DET", "HET-XL") for run in runs)


def test_a_comparison_without_its_file_or_its_runs(tmp_path):
    folder = write_comparison(tmp_path / "out", ("DET",), seeds=1, steps=20)
    (folder / "compare.json").write_text('{"baseline": 3, "heads": "DET"}')
    assert find_runs(folder)[0].comparison.heads == ()
    (folder / "compare.json").unlink()
    assert len(find_runs(folder)) == 1
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no runs yet"):
        find_runs(tmp_path / "empty")
