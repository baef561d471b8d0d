import json
import shutil

import numpy as np
import pytest
import torch

from hetxl._files import write_json
from hetxl.metrics.records import Records
from hetxl_train.console import Console
from hetxl_train.data.open import open_data
from hetxl_train.rescale import SCALED_XL, rescale, rescale_run
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support.training import small

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = {"head": "het-xl", "noise_init": 2.0, "noise_start": 0.0, "noise_scale": 1.0}
    return train(small(tmp_path_factory.mktemp("rescale") / "run", **options), console=QUIET)


@pytest.mark.parametrize("noise", [True, False])
def test_the_run_is_the_same_but_for_its_scales(run, noise, tmp_path, capsys):
    out, dataset = tmp_path / "scaled", open_data(run.config)
    rescale(run, out, dataset, Console(), noise=noise)
    before, after = load_run(run.path), load_run(out)
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, after.model.state_dict()[name])
    result, plain = (json.loads((path / "result.json").read_text()) for path in (out, run.path))
    assert result["derived_from"] == run.path.name
    assert result["label"] == "HET-XL + scaling"
    assert after.model.head.noise_scale == result["noise_scale"]
    assert float(after.model.head.temperature()) == pytest.approx(result["temperature"])
    assert plain["noise_scale"] == 1
    if not noise:
        assert result["noise_scale"] == 1
    else:
        assert result["noise_scale"] < 1  # it began as twice that of the authors, and four steps have not changed that
    assert ("noise ×" in capsys.readouterr().err) == noise
    # τ is known to half a percent.
    assert result["metrics"]["validation"]["nll"] <= plain["metrics"]["validation"]["nll"] + 1e-3


def test_existing_result_is_not_overwritten(run, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    rescale(run, tmp_path, open_data(run.config), QUIET, "again")
    assert (tmp_path / "result.json").read_text() == "{}"


def arrays(path, rng, count=600, names="abcd", labels=None):
    """Rows around four centres, with names as labels."""
    centres, classes = 3 * np.random.default_rng(0).normal(size=(4, 6)), rng.integers(0, 4, count)
    rows = (centres[classes] + rng.normal(size=(count, 6))).astype("float32")
    np.savez(path, features=rows, labels=np.array(list(names))[classes] if labels is None else labels)
    return str(path)


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    data = arrays(directory / "data.npz", np.random.default_rng(1))
    return train(small(directory / "run", data=data, steps=40, learning_rate=0.05, head="het-xl"), console=QUIET)


def test_a_run_is_rescaled_to_other_labels_and_tested_on_the_same_rows(of_files, tmp_path):
    rng = np.random.default_rng(2)
    names = np.array(list("abcd"))[rng.integers(0, 4, 200)]
    random = arrays(tmp_path / "random.npz", rng, 200, labels=names)
    own = rescale_run(of_files.path, tmp_path / "own", console=QUIET)
    other = rescale_run(of_files.path, tmp_path / "other", validation=random, console=QUIET)
    # Labels at random are best told with probabilities that are all alike.
    assert float(other.config.temperature) > 2 * float(own.config.temperature)
    assert other.config.validation is None
    for run, source in ((own, "validation"), (other, random)):
        assert json.loads((run.path / "result.json").read_text())["fitted_to"] == source
        rows, before = (
            Records.load(directory / "records" / "test.safetensors").rows for directory in (run.path, of_files.path)
        )
        assert np.array_equal(rows, before)
    with pytest.raises(ValueError, match="other exists already; remove it, or choose another --out"):
        rescale_run(of_files.path, tmp_path / "other", console=QUIET)


def test_other_classes_are_refused_before_anything_is_written(of_files, tmp_path):
    unknown = arrays(tmp_path / "unknown.npz", np.random.default_rng(2), 50, names="abcz")
    with pytest.raises(ValueError, match="'z'"):
        rescale_run(of_files.path, tmp_path / "out", validation=unknown, console=QUIET)
    assert not (tmp_path / "out").exists()
    few = arrays(tmp_path / "few.npz", np.random.default_rng(2), 50, names="abca")  # not all classes need be there
    rescale_run(of_files.path, tmp_path / "out", validation=few, noise=False, console=QUIET)


def test_rescaled_run_has_its_label(of_files, tmp_path):
    scaled = rescale_run(of_files.path, tmp_path / "once", console=QUIET)
    twice = rescale_run(scaled.path, console=QUIET)
    assert twice.path == tmp_path / "once-scaled"
    for run in (scaled, twice):
        assert json.loads((run.path / "result.json").read_text())["label"] == SCALED_XL


def test_run_in_the_working_directory_is_rescaled(run, tmp_path, monkeypatch):
    copied = tmp_path / "mine"
    shutil.copytree(run.path, copied)
    monkeypatch.chdir(copied)
    scaled = rescale_run(".", noise=False, console=QUIET)
    assert scaled.path == tmp_path / "mine-scaled"
    assert json.loads((scaled.path / "result.json").read_text())["derived_from"] == "mine"


def test_unfinished_run_is_not_rescaled(run, tmp_path):
    (tmp_path / "begun").mkdir()
    write_json(tmp_path / "begun" / "config.json", run.config.to_dict())
    with pytest.raises(ValueError, match="begun has not ended; rerun the command that trained it"):
        rescale_run(tmp_path / "begun")
