import json

import numpy as np
import pytest
import torch

from hetxl.training.progress import Narrator
from hetxl.training.rescale import rescale, rescale_run
from hetxl.training.run import load_run
from hetxl.training.train import open_data, train
from support.training import small

QUIET = Narrator(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(small(tmp_path_factory.mktemp("rescale") / "run", head="het-xl", noise_init=2.0), narrator=QUIET)


@pytest.mark.parametrize("noise", [True, False])
def test_the_run_is_the_same_but_for_its_scales(run, noise, tmp_path, capsys):
    place, dataset = tmp_path / "scaled", open_data(run.config)
    rescale(run, place, dataset, Narrator(), "HET-XL + scaling", noise=noise)
    before, after = load_run(run.path), load_run(place)
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, after.model.state_dict()[name])
    result, plain = (json.loads((path / "result.json").read_text()) for path in (place, run.path))
    assert result["derived_from"] == run.path.name
    assert result["label"] == "HET-XL + scaling"
    assert after.model.head.noise_scale == result["noise_scale"]
    assert float(after.model.head.temperature()) == pytest.approx(result["temperature"])
    assert plain["noise_scale"] == 1
    if not noise:
        assert result["noise_scale"] == 1
    told = capsys.readouterr().err
    assert ("noise ×" in told) == (result["noise_scale"] != 1)
    # τ is known to half a percent.
    assert result["metrics"]["validation"]["nll"] <= plain["metrics"]["validation"]["nll"] + 1e-3


def test_what_is_there_stays(run, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    rescale(run, tmp_path, open_data(run.config), QUIET, "again")
    assert (tmp_path / "result.json").read_text() == "{}"


def test_a_run_is_rescaled_to_other_labels(tmp_path):
    rng = np.random.default_rng(0)
    centres, classes = 3 * rng.normal(size=(4, 6)), rng.integers(0, 4, 600)
    rows = (centres[classes] + rng.normal(size=(600, 6))).astype("float32")
    np.savez(tmp_path / "data.npz", features=rows, labels=classes)
    np.savez(tmp_path / "random.npz", features=rows[:200], labels=rng.integers(0, 4, 200))
    config = small(tmp_path / "run", data=str(tmp_path / "data.npz"), steps=40, learning_rate=0.05)
    run = train(config, narrator=QUIET)
    own = rescale_run(run.path, narrator=QUIET)
    assert own.path == tmp_path / "run-scaled"
    other = rescale_run(run.path, tmp_path / "other", validation=str(tmp_path / "random.npz"), narrator=QUIET)
    assert json.loads((own.path / "result.json").read_text())["label"] == "HET-XL + scaling"
    # Labels at random are best told with probabilities that are all alike.
    assert float(other.config.temperature) > 2 * float(own.config.temperature)
    with pytest.raises(ValueError, match="other is there already; remove it, or choose another --out"):
        rescale_run(run.path, tmp_path / "other", narrator=QUIET)


def test_what_cannot_be_rescaled(run, tmp_path):
    (tmp_path / "begun").mkdir()
    run.config.save(tmp_path / "begun" / "config.json")
    with pytest.raises(ValueError, match="begun has not ended; give the command again that trained it"):
        rescale_run(tmp_path / "begun")
