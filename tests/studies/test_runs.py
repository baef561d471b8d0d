import json

from hetxl.studies.runs import METRICS, by_label, over_seeds, results_in


def result(label, seed, nll):
    metrics = dict.fromkeys(METRICS, 0.5)
    return {
        "label": label,
        "seed": seed,
        "metrics": {"test": metrics | {"nll": nll}, "validation": metrics | {"nll": nll + 1}},
        "train_seconds": 2.0,
        "steps": 5,
        "temperature": 1.0,
        "parameters": {"total": 7},
    }


def test_results_by_directory(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"name": name}))
    (tmp_path / "unfinished").mkdir()
    assert results_in(tmp_path) == {"a": {"name": "a"}, "b": {"name": "b"}}
    assert results_in(tmp_path / "nothing") == {}


def test_lists_in_the_order_of_the_seeds():
    found = over_seeds([result("DET", 2, 3.0), result("DET", 0, 1.0)])
    assert (found["seeds"], found["nll"], found["validation_nll"]) == ([0, 2], [1.0, 3.0], [2.0, 4.0])
    assert (found["steps"], found["parameters"], found["precision@1"]) == (5, 7, [0.5, 0.5])
    assert over_seeds([result("DET", 2, 3.0)], "validation")["nll"] == [4.0]


def test_labels_in_their_order_and_only_those_that_ran():
    results = {"x": result("HET-XL", 0, 1.0), "y": result("DET", 0, 2.0), "z": result("DET", 1, 3.0)}
    found = by_label(results, ["DET", "HET", "HET-XL", "DET"])
    assert list(found) == ["DET", "HET-XL"]
    assert found["DET"]["nll"] == [2.0, 3.0]
