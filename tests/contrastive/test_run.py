import pytest
import torch

from hetxl.contrastive.model import Specs, build_towers
from hetxl.contrastive.run import default_directory, describe_model, load_run, open_run, save_model, start_run
from hetxl.data.dataset import InputSpec
from support.pairs import small
from support.small_run import small_run

SPECS = Specs(InputSpec("image", (1, 32, 32)), None)


def test_directory():
    assert str(default_directory(small("a/b.npz"))) == "runs/contrastive-b-het-xl"
    assert str(default_directory(small("icons:each=3", head="det"))) == "runs/contrastive-icons-det"


def test_saved_and_read(tmp_path):
    config = small("x", seed=3)
    run = start_run(config, tmp_path / "run")
    assert not run.finished
    describe_model(run, SPECS)
    model = build_towers(config, SPECS)
    with torch.no_grad():
        model.loss.scale.raw.fill_(1.25)
    save_model(run, model)
    found = load_run(tmp_path / "run")
    assert found.run.config == config
    assert found.specs == SPECS
    assert not found.model.training
    for name, value in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
    (tmp_path / "run" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used"):
        load_run(tmp_path / "run")


def test_taken_up_with_the_same_options_only(tmp_path):
    start_run(small("x"), tmp_path)
    start_run(small("x", log_every=3, workers=1), tmp_path)  # these change nothing
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds a run with other options .*seed 0 there, 1 here"):
        start_run(small("x", seed=1), tmp_path)


def test_directories_that_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="has files but no run in it"):
        start_run(small("x"), tmp_path)
    with pytest.raises(ValueError, match=r"is no run: it has no config\.json"):
        open_run(tmp_path)
    other = small_run(tmp_path / "classifier")
    with pytest.raises(ValueError, match="is not of a contrastive run"):
        open_run(other)


def test_no_weights_yet(tmp_path):
    run = start_run(small("x"), tmp_path)
    with pytest.raises(ValueError, match=r"model\.json cannot be read"):
        load_run(tmp_path)
    describe_model(run, SPECS)
    with pytest.raises(ValueError, match="has no weights yet: no checkpoint was written"):
        load_run(tmp_path)
