import numpy as np

from hetxl.data import open_dataset
from hetxl.data.synthetic import load_synthetic
from hetxl.studies.tau_settings import QUICK, SETTINGS, commonest_classes


def test_the_commonest_classes_of_a_dataset(tmp_path):
    dataset = load_synthetic(rows=600, classes=9, features=4)
    path = commonest_classes(dataset, 3, tmp_path / "new" / "some.npz", rows=50)
    found = open_dataset(str(path))
    counts = dataset.splits["train"].labels.counts(9)
    order = np.argsort(-counts, kind="stable")[:3]
    assert list(found.class_names) == [dataset.class_names[int(old)] for old in order]
    assert len(found.splits["train"]) == 50
    test = np.isin(dataset.splits["test"].labels.ids, order)
    assert len(found.splits["test"]) == test.sum()
    # The same rows with the same labels.
    first = int(np.flatnonzero(test)[0])
    expected = dataset.splits["test"].fetch(np.array([first])).inputs
    assert found.splits["test"].fetch(np.array([0])).inputs.tolist() == expected.tolist()
    assert order[found.splits["test"].labels.ids[0]] == dataset.splits["test"].labels.ids[first]
    before = path.stat().st_mtime_ns
    assert commonest_classes(dataset, 3, path).stat().st_mtime_ns == before


def test_runs_are_evaluated_at_their_end_alone(tmp_path):
    for setting in QUICK.values():
        config = setting.config(tmp_path, head="det", seed=2)
        assert config.evaluate_every > config.steps
        assert (config.head, config.seed, config.temperature_learning_rate) == ("det", 2, 1.0)
    assert SETTINGS["pycode"].config(tmp_path).data == "pycode:classes=1024"
