"""The loop: a killed run against one that was not, and what each option of the recipe does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import support.killed as killed
from hetxl.data.broken import BrokenLimit
from hetxl.data.synthetic import load_synthetic
from hetxl.training.checkpoint import Checkpoints
from hetxl.training.config import TrainConfig
from hetxl.training.distributed import World
from hetxl.training.log import Log, read_log
from hetxl.training.loop import Trainer
from hetxl.training.model import build_model
from hetxl.training.progress import Narrator
from hetxl.training.schedule import learning_rate_at
from hetxl.training.train import train
from support.training import QUIET, small

TIMES = ("seconds", "examples_per_second", "train_seconds", "evaluate_seconds", "predict_seconds_per_1000")
DATA = load_synthetic(rows=600, classes=6, features=4)


def without_times(value):
    """The same without what a clock says."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def same_tensors(first: Path, second: Path) -> None:
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "killed"
    script = [sys.executable, killed.__file__]
    subprocess.run([*script, str(straight), "0", "0"], check=True, capture_output=True, timeout=300)
    done = subprocess.run([*script, str(broken), "20", "1"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] == 20
    same_tensors(straight / "model.safetensors", broken / "model.safetensors")
    steps = Checkpoints(straight / "checkpoints").steps()
    assert steps == Checkpoints(broken / "checkpoints").steps()
    for step in steps:
        place = Path("checkpoints") / f"step-{step:08d}"
        same_tensors(straight / place / "tensors.safetensors", broken / place / "tensors.safetensors")
        one, other = (json.loads((run / place / "state.json").read_text()) for run in (straight, broken))
        for state in (one, other):
            assert state.pop("checksum")
        assert without_times(one) == without_times(other)
    assert without_times(read_log(straight / "log.jsonl")) == without_times(read_log(broken / "log.jsonl"))
    one, other = (json.loads((run / "result.json").read_text()) for run in (straight, broken))
    assert without_times(one) == without_times(other)
    assert not list(broken.glob("checkpoints/.step-*"))


def trainer(tmp_path, steps=6, **options) -> Trainer:
    config = TrainConfig(
        **{"head": "het-xl", "rank": 2, "batch_size": 8, "train_samples": 2, "device": "cpu", "log_every": 1} | options
    )
    model = build_model(config, DATA.input, DATA.num_classes, options.get("link", "softmax"))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    world = World(torch.device("cpu"))
    return Trainer(config, model, DATA.splits["train"], steps, checkpoints, world, Narrator(quiet=True), BrokenLimit())


def losses(tmp_path, made: Trainer, evaluate=lambda: {"nll": 1.0}) -> list[float]:
    log = Log(tmp_path / "log.jsonl")
    try:
        made.train(log, evaluate)
    finally:
        log.close()
    return [line["loss"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])


def test_the_loss_falls(tmp_path):
    found = losses(tmp_path, trainer(tmp_path, steps=150, batch_size=64, learning_rate=0.03, temperature="1.0"))
    assert sum(found[-10:]) / 10 < sum(found[:10]) / 10 - 0.3


def test_parts_add_up_to_the_batch(tmp_path):
    # DET draws nothing, so a batch in one part and in four are the same but for rounding.
    whole = trainer(tmp_path, head="det")
    parts = trainer(tmp_path, head="det", accumulate=4)
    first, second = losses(tmp_path / "a", whole), losses(tmp_path / "b", parts)
    assert first == pytest.approx(second, rel=1e-5)
    torch.testing.assert_close(weights(whole), weights(parts), rtol=0, atol=1e-5)


def test_clipping_limits_the_gradient(tmp_path):
    made = trainer(tmp_path, steps=1, clip=1e-3)
    made.train(None, lambda: {"nll": 1.0})
    norm = torch.cat([parameter.grad.flatten() for parameter in made.trained]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def temperatures(tmp_path, **options) -> list[float]:
    """τ after every step of a training that moves it."""
    usual = {"temperature": "learned", "temperature_learning_rate": 1.0, "learning_rate": 0.05, "warmup": 0}
    made = trainer(tmp_path, **(usual | options))
    losses(tmp_path, made)
    return [line["temperature"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]


def test_a_temperature_is_held_for_its_share_of_the_steps(tmp_path):
    found = temperatures(tmp_path / "held", steps=8, temperature_hold=0.5)
    assert found[:4] == [pytest.approx(1.0)] * 4
    assert found[4] != pytest.approx(1.0, abs=1e-3)
    # The first step after it is Adam's first: as long as the learning rate, in the parameter of τ.
    slope = (found[4] - 0.05) * (5 - found[4]) / 4.95
    assert abs(found[4] - 1) == pytest.approx(rate_of_step(4, 8) * slope, rel=0.05)
    assert temperatures(tmp_path / "free", steps=2)[0] != pytest.approx(1.0, abs=1e-3)


def rate_of_step(step, steps):
    return learning_rate_at(step, steps, TrainConfig(learning_rate=0.05, warmup=0))


def test_a_temperature_that_is_held_is_a_fixed_one(tmp_path):
    usual = {"learning_rate": 0.05, "clip": 0.1}
    held = trainer(tmp_path, temperature="learned", temperature_hold=1.0, **usual)
    fixed = trainer(tmp_path, temperature="1.0", **usual)
    for made in (held, fixed):
        made.train(None, lambda: {"nll": 1.0})
    other = held.model.state_dict()
    for name, value in fixed.model.state_dict().items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_prior_draws_the_temperature_to_one_and_leaves_the_loss_alone(tmp_path, precision):
    usual = {"steps": 60, "temperature_init": 2.0, "precision": precision, "clip": 0.0}
    free = temperatures(tmp_path / "free", **usual)
    drawn = temperatures(tmp_path / "drawn", temperature_prior=100.0, **usual)
    assert abs(drawn[-1] - 1) < 0.1 < abs(free[-1] - 1)
    first = [read_log(tmp_path / name / "log.jsonl")[0]["loss"] for name in ("free", "drawn")]
    assert first[0] == first[1]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_trains_and_keeps_its_weights_wide(tmp_path, precision):
    made = trainer(tmp_path, precision=precision)
    found = losses(tmp_path, made)
    assert all(map(math.isfinite, found))
    assert weights(made).dtype == torch.float32
    assert made.scaler.is_enabled() == (precision == "float16")


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    answers = iter([3.0, 2.0, 2.5, 2.4, 9.0])
    made = trainer(tmp_path, steps=10, evaluate_every=2, patience=2)
    progress = made.train(None, lambda: {"nll": next(answers)})
    assert progress.stopped
    assert progress.step == 8
    assert progress.best_nll == 2.0
    assert made.checkpoints.best_step() == 4
    assert made.checkpoints.steps() == [4, 6, 8]


def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_to_do(tmp_path):
    made = trainer(tmp_path, steps=4)
    with torch.no_grad():
        made.model.head.classifier.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step 1.*--learning-rate"):
        losses(tmp_path, made)


def test_an_evaluation_that_is_not_finite_says_the_same(tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step .*--learning-rate \(now 1e\+30\)"):
        train(small(tmp_path / "run", learning_rate=1e30, warmup=0), narrator=QUIET)


def test_the_average_is_what_is_evaluated(tmp_path):
    seen = []
    made = trainer(tmp_path, ema=0.5, learning_rate=0.1)
    made.train(None, lambda: seen.append(weights(made).clone()) or {"nll": 1.0})
    assert not torch.equal(seen[-1], weights(made))
    averaged = torch.cat([made.average.values[name].flatten() for name, _ in made.model.named_parameters()])
    assert torch.equal(seen[-1], averaged)


def test_nothing_to_train(tmp_path):
    config = TrainConfig(device="cpu")
    model = build_model(config, DATA.input, DATA.num_classes, "softmax").requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(config, model, DATA.splits["train"], 1, Checkpoints(tmp_path), World(torch.device("cpu")),
                Narrator(quiet=True), BrokenLimit())  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    made = trainer(tmp_path)
    made.train(None, lambda: {"nll": 1.0})
    checkpoint, _ = made.checkpoints.latest()
    with pytest.raises(ValueError, match="another model or version"):
        trainer(tmp_path, head="det").restore(checkpoint)


def test_draws_outside_are_not_disturbed(tmp_path):
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    trainer(tmp_path, dropout=0.5, backbone="mlp", width=8, features=4).train(None, lambda: {"nll": 1.0})
    assert torch.equal(torch.randn(3), expected)
