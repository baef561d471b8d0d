import json

import pytest
import torch

from hetxl.training.progress import Narrator
from hetxl.training.rescale import rescale
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
