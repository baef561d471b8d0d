import dataclasses

import numpy as np
import pytest

from hetxl._files import read_json
from hetxl_lab.studies import tau
from hetxl_lab.studies.run import run_study
from hetxl_lab.studies.tau import (
    CLAIMS,
    MAIN,
    OURS,
    PAPER,
    SETTINGS,
    SLOW_LABEL,
    Claim,
    claims_table,
    commonest_classes,
    compared,
    conclusion,
    holds,
    page,
    plot,
    table,
    write_paths,
)
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.report.statistics import PairedTest


def test_the_commonest_classes_of_a_dataset(tmp_path):
    dataset = load_synthetic(rows=600, classes=9, features=4)
    path = commonest_classes(dataset, 3, tmp_path / "new" / "some.npz", rows=50)
    subset = open_dataset(str(path))
    counts = dataset.splits["train"].labels.counts(9)
    order = np.argsort(-counts, kind="stable")[:3]
    assert list(subset.class_names) == [dataset.class_names[int(old)] for old in order]
    assert len(subset.splits["train"]) == 50
    test = np.isin(dataset.splits["test"].labels.ids, order)
    assert len(subset.splits["test"]) == test.sum()
    # The same rows with the same labels.
    first = int(np.flatnonzero(test)[0])
    expected = dataset.splits["test"].fetch(np.array([first])).inputs
    assert subset.splits["test"].fetch(np.array([0])).inputs.tolist() == expected.tolist()
    assert order[subset.splits["test"].labels.ids[0]] == dataset.splits["test"].labels.ids[first]
    before = path.stat().st_mtime_ns
    assert commonest_classes(dataset, 3, path).stat().st_mtime_ns == before


def test_runs_are_evaluated_at_their_end_alone(tmp_path):
    for setting in SETTINGS["quick"]:
        config = setting.config(tmp_path, head="det", seed=2)
        assert config.evaluate_every > config.steps
        assert (config.head, config.seed, config.temperature_learning_rate) == ("det", 2, 1.0)
    assert SETTINGS["full"][0].config(tmp_path).data == "pycode:classes=1024"


def methods(**nll):
    """Rows with these losses; those of other labels are 2."""
    results = {}
    for number, label in enumerate((*PAPER, *OURS)):
        values = nll.get(label, [2.0 + 0.01 * number, 2.1 + 0.01 * number, 2.0 + 0.011 * number])
        results[label] = {
            "seeds": [0, 1, 2],
            "nll": values,
            "precision@1": [0.4, 0.41, 0.42],
            "temperature": [0.8, 0.9, 1.0],
            "trainings": [1, 1, 1],
            "seconds": [10.0, 12.0, 14.0],
        }
    return results


def summary(**nll):
    about = {"told": "Some data.", "num_classes": 1000, "training_rows": 5000, "steps": 100, "batch_size": 32}
    return {
        "head": "het-xl",
        "seeds": [0, 1, 2],
        "settings": [{"setting": "pycode", **about, "methods": methods(**nll)}],
    }


def test_rows_have_our_numbers_and_the_papers():
    lines = table(methods(), MAIN).splitlines()
    assert len(lines) == 2 + len(MAIN)
    row = next(line for line in lines if line.startswith("| Simple training |"))
    assert "| ✓ | ✓ | 0.90 ± 0.06 | 12 s | 5.99 ± 0.04 | 0.435 ± 0.001 |" in row
    grid = next(line for line in lines if line.startswith("| Grid search |"))
    assert "| 2.033 ± 0.033 | 0.410 ± 0.006 | × | × |" in grid
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    fitted = table(methods(), ("Fitted afterwards", "never run"))
    assert "| ✓ | × | 0.90" in fitted
    assert fitted.endswith("– | – |\n")


def test_the_papers_rows_are_all_there():
    text = page(summary())
    for label in (*PAPER, *OURS):
        assert f"| {label} |" in text
    assert text.count("| Grid search |") == 2  # in both tables
    for claim in CLAIMS:
        assert claim.text in text


def test_claims_hold_by_sign_and_significance():
    good, worse = Claim("", "a", "b"), Claim("", "a", "b", worse=True)
    higher, lower, unsure = (PairedTest(d, 0.01, p, 3) for d, p in ((0.1, 0.01), (-0.1, 0.01), (0.1, 0.3)))
    assert [holds(good, test) for test in (higher, lower, unsure)] == [
        "does not hold",
        "holds, and better",
        "no difference seen",
    ]
    assert [holds(worse, test) for test in (higher, lower, unsure)] == ["holds", "the contrary", "not seen"]
    assert holds(good, PairedTest(0.1, None, None, 1)) == "no difference seen"


def test_differences_are_paired_over_the_seeds_that_both_have():
    results = methods(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [2.0, 2.1, 2.0]})
    test = compared(results, "Simple training", "Grid search")
    assert round(test.difference, 3) == 0.5
    assert test.p < 0.001
    results["Grid search"] |= {"seeds": [5, 1, 7]}
    assert compared(results, "Simple training", "Grid search").pairs == 1
    assert compared(results, "Simple training", "nothing") is None
    results["Grid search"] |= {"seeds": [5, 6, 7]}
    assert compared(results, "Simple training", "Grid search") is None


def test_claims_table_names_failed_claims():
    bad = summary(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [2.0, 2.1, 2.0]})
    assert "| Simple training costs nothing against grid search | does not hold: +0.500" in claims_table(
        bad["settings"]
    )


def test_the_papers_numbers_are_those_of_its_table():
    assert len(PAPER) == 13
    assert PAPER["Simple training"] == (5.99, 0.04, 0.435, 0.001)
    assert PAPER["Luketina et al. (12.5 %)"].nll == 6.19


def test_conclusion_names_methods_and_differences():
    bad = summary(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [1.9, 2.0, 1.9], "τ = 1": [2.2, 2.3, 2.2]})
    text = conclusion(bad["settings"][0])
    assert "with an NLL of 2.533; the better search, grid search, chooses 0.90 ± 0.06, with 1.933 after 1" in text
    assert "does not hold (+0.600" in text
    assert "the best first: Luketina" in text
    assert text.index("τ = 1;") < text.index("Simple training (+0.300")
    good = summary(**{"Simple training": [1.8, 1.91, 1.8], "Grid search": [1.9, 2.0, 1.9]})
    assert "costs nothing, holds: it gains (−0.097" in conclusion(good["settings"][0])
    alone = {"setting": "x", "told": "Data.", "methods": {"τ = 1": bad["settings"][0]["methods"]["τ = 1"]}}
    assert conclusion(alone) == "**x.** Data."
    assert conclusion(bad["settings"][0]) in page(bad)


def test_the_image_names_every_method(tmp_path):
    text = plot(summary(), tmp_path / "tau.svg").read_text()
    assert text.count("<text") > 20
    assert ">Grid search (2 folds)</text>" in text


@pytest.mark.slow
def test_tau_study_runs_every_method(studied, tmp_path):
    _, summary = studied("tau")
    [setting] = summary["settings"]
    methods = setting["methods"]
    assert set(methods) == {*PAPER, *OURS}
    assert SLOW_LABEL in OURS
    assert methods["τ = 1"]["temperature"] == [1.0]
    assert methods["τ = 1"]["nll"] != methods["Fitted afterwards"]["nll"]
    assert methods["Grid search"]["temperature"][0] in (0.4, 1.5)
    assert methods["Grid search"]["trainings"] == [2]
    assert methods["Grid search (+ retrain)"]["trainings"] == [3]
    assert methods["Bayesian optimization"]["trainings"] == [2]
    # By the test split itself, nothing among the same runs can be better.
    assert methods["Grid search (2 folds)"]["nll"] <= methods["Grid search"]["nll"]
    # A slower τ is nearer to where it began.
    fast, slow = (abs(methods[label]["temperature"][0] - 1) for label in ("Simple training", SLOW_LABEL))
    assert 0 < slow < fast
    assert (studied.root / "tau" / "tau.html").exists()
    # What is finished is kept.
    page = studied.run("tau", studied.root / "tau")
    assert read_json(page.with_suffix(".json"))["settings"] == summary["settings"]


@pytest.mark.slow
def test_longer_runs_are_a_setting_more(tmp_path, monkeypatch):
    setting = dataclasses.replace(SETTINGS["miniature"][0], name="tiny one, longer", searches=False)
    monkeypatch.setitem(tau.SETTINGS, "full", ())
    monkeypatch.setitem(tau.SIZES, "full", tau.SIZES["miniature"])
    monkeypatch.setattr(tau, "LONGER", setting)
    options = {"seeds": (3,), "out": tmp_path / "out", "jobs": 1, "console": Console(quiet=True)}
    page = run_study("tau", options={"longer": True}, **options)
    [summary] = read_json(page.with_suffix(".json"))["settings"]
    assert summary["setting"] == "tiny one, longer"
    assert set(summary["methods"]) == {"Simple training", SLOW_LABEL, "Fitted afterwards", "τ = 1"}
    assert (tmp_path / "out" / "tiny-one-longer").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"longer": True}, "leave out --quick or --longer"), ({"head": "hat"}, "head must be one of")],
)
def test_invalid_options_raise_before_any_run(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_study("tau", profile="quick", options=options, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths_of_a_study_leave_out_what_stays(tmp_path):
    methods = {
        "Simple training": {"seeds": [0, 1], "path": [[[1, 1.0], [2, 0.9]], [[1, 1.0], [2, 0.8]]]},
        "Grid search": {"seeds": [0], "path": [[[1, 0.4], [2, 0.4]]]},
    }
    text = write_paths([{"setting": "pycode", "methods": methods}], tmp_path / "study.html").read_text()
    assert "pycode" in text
    assert "Simple training" in text
    assert "Grid search" not in text
