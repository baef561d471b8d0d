"""The loop: a killed run against one that was not, and what each option of the recipe does."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import support.killed as killed
from hetxl.optim import learning_rate_at
from hetxl_train.checkpoint import CheckpointError, Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.data.pairs import open_pairs
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.distributed import World
from hetxl_train.log import Log, read_log
from hetxl_train.loop import Trainer, moving_average
from hetxl_train.tasks.classification import ClassificationTask
from hetxl_train.tasks.contrastive import ContrastiveTask
from hetxl_train.training import train
from support.pairs import image_folder, image_shards, small_pairs, vectors_file
from support.training import QUIET, small

TIMES = ("seconds", "examples_per_second", "predict_seconds_per_1000")
TIMES += (
    "checksum",
    "out",
    *(f"{phase}_seconds" for phase in ("train", "validation", "checkpoint", "evaluate", "other")),
)
SEED = 1  # of the moments of the kills
DATA = load_synthetic(rows=600, classes=6, features=4)


def without_times(value):
    """The same without what a clock says."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def same_tensors(first: Path, second: Path) -> None:
    tensors, other = load_file(first), load_file(second)
    assert tensors.keys() == other.keys()
    for name, value in tensors.items():
        assert torch.equal(value, other[name]), name


def killed_run(directory: Path, kills: int, kind: str, processes: int = 1) -> dict[str, Any]:
    """Train in processes of their own that are killed so often; what is known of it."""
    print(f"{kind}: {kills} kills of {processes} process(es), seed {SEED}")
    command = [sys.executable, killed.__file__, str(directory), str(kills), str(SEED), kind, str(processes)]
    paths = os.pathsep.join([str(Path(killed.__file__).parents[1]), *filter(None, sys.path)])
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=3000, env=os.environ | {"PYTHONPATH": paths}
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


def check_same_runs(expected: Path, actual: Path) -> None:
    """Everything but the times is the same, and nothing is left behind."""
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (expected, actual)]
    assert names[0] == names[1]  # neither temporary files nor a lock
    for name in names[0]:
        path, other = expected / name, actual / name
        if name.endswith(".safetensors"):
            same_tensors(path, other)
        elif name.endswith((".json", ".jsonl")):
            texts = [run_file.read_text() for run_file in (path, other)]
            contents = [list(map(json.loads, text.splitlines() if name.endswith("l") else [text])) for text in texts]
            assert without_times(contents[0]) == without_times(contents[1]), name
        elif path.is_file():
            assert path.read_bytes() == other.read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes"), [("mlp", 1), ("none", 1), ("frozen", 1), ("shards", 1), ("pairs", 1), ("mlp", 2)]
)
def test_run_killed_20_times_equals_an_uninterrupted_one(tmp_path, kind, processes):
    image_shards(tmp_path)
    killed_run(tmp_path / "straight", 0, kind, processes)
    about = killed_run(tmp_path / "killed", 20, kind, processes)
    assert about["killed"] == 20
    assert len(set(about["checkpoints"])) > 5
    check_same_runs(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_long_run_keeps_its_memory_and_survives_20_kills(tmp_path, processes):
    samples = np.array(killed_run(tmp_path / "straight", 0, "soak", processes)["samples"], dtype=np.float64)
    # After caches have filled, and before the last evaluation and the end.
    step, memory, files = samples[(samples[:, 0] >= 4000) & (samples[:, 0] < killed.LONG["steps"])].T
    slope = np.polyfit(step, memory, 1)[0] * 1e4 / 2**20
    about = f"{memory.mean() / 2**20:.0f} MB, {slope:+.2f} MB in 10,000 steps, {files.mean():.0f} files"
    print(f"{processes} process(es): {about}")
    assert abs(slope) < 4  # MB
    early, late = np.median(files[: len(files) // 4]), np.median(files[-len(files) // 4 :])
    assert early == late
    assert killed_run(tmp_path / "killed", 20, "soak", processes)["killed"] == 20
    check_same_runs(tmp_path / "straight", tmp_path / "killed")


def build_trainer(tmp_path, steps=6, **options) -> Trainer:
    config = TrainConfig(
        **{"head": "het-xl", "rank": 2, "batch_size": 8, "train_samples": 2, "device": "cpu", "log_every": 1}
        | {"steps": steps, **options}
    )
    task = ClassificationTask(config, DATA, World(torch.device("cpu")), QUIET, tmp_path)
    return Trainer(task, Checkpoints(tmp_path / "checkpoints"), QUIET, UnreadableExamples())


def losses(tmp_path, trainer: Trainer, evaluate=lambda: {"nll": 1.0}) -> list[float]:
    log = Log(tmp_path / "log.jsonl")
    try:
        trainer.train(log, evaluate)
    finally:
        log.close()
    return [line["loss"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_the_loss_falls(tmp_path):
    values = losses(tmp_path, build_trainer(tmp_path, steps=150, batch_size=64, learning_rate=0.03, temperature="1.0"))
    assert sum(values[-10:]) / 10 < sum(values[:10]) / 10 - 0.3


def test_parts_add_up_to_the_batch(tmp_path):
    # DET draws nothing, so a batch in one part and in four are the same but for rounding.
    whole = build_trainer(tmp_path / "a", head="det")
    parts = build_trainer(tmp_path / "b", head="det", accumulate=4)
    first, second = losses(tmp_path / "a", whole), losses(tmp_path / "b", parts)
    assert first == pytest.approx(second, rel=1e-5)
    torch.testing.assert_close(weights(whole), weights(parts), rtol=0, atol=1e-5)


def test_clipping_limits_the_gradient(tmp_path):
    trainer = build_trainer(tmp_path, steps=1, clip=1e-3)
    trainer.train(None, lambda: {"nll": 1.0})
    norm = torch.cat([parameter.grad.flatten() for parameter in trainer.trained]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def temperatures(tmp_path, **options) -> list[float]:
    """τ after every step of a training that moves it."""
    usual = {"temperature": "learned", "temperature_learning_rate": 1.0, "learning_rate": 0.05, "warmup": 0}
    usual |= {"noise_start": 0.0, "standardize": False, "weight_decay": 0.01}
    trainer = build_trainer(tmp_path, **(usual | options))
    losses(tmp_path, trainer)
    return [line["temperature"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]


def test_a_temperature_is_held_for_its_share_of_the_steps(tmp_path):
    held = temperatures(tmp_path / "held", steps=8, temperature_hold=0.5)
    assert held[:4] == [pytest.approx(1.0)] * 4
    assert held[4] != pytest.approx(1.0, abs=1e-3)
    # The first step after it is Adam's first: as long as the learning rate, in the parameter of τ.
    slope = (held[4] - 0.05) * (5 - held[4]) / 4.95
    assert abs(held[4] - 1) == pytest.approx(rate_of_step(4, 8) * slope, rel=0.05)
    assert temperatures(tmp_path / "free", steps=2)[0] != pytest.approx(1.0, abs=1e-3)


def rate_of_step(step, steps):
    return learning_rate_at(step, steps, TrainConfig(learning_rate=0.05, warmup=0).optim)


def test_a_temperature_that_is_held_is_a_fixed_one(tmp_path):
    usual = {"learning_rate": 0.05, "clip": 0.1}
    held = build_trainer(tmp_path / "held", temperature="learned", temperature_hold=1.0, **usual)
    fixed = build_trainer(tmp_path / "fixed", temperature="1.0", **usual)
    for trainer in (held, fixed):
        trainer.train(None, lambda: {"nll": 1.0})
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
    trainer = build_trainer(tmp_path, precision=precision)
    assert all(map(math.isfinite, losses(tmp_path, trainer)))
    assert weights(trainer).dtype == torch.float32
    assert trainer.scaler.is_enabled() == (precision == "float16")


def test_an_evaluation_that_was_interrupted_is_done_when_the_run_resumes(tmp_path):
    options = {"steps": 6, "evaluate_every": 2, "patience": 3}
    values = {2: 3.0, 4: 2.0, 6: 2.5}
    straight, broken = (build_trainer(tmp_path / name, **options) for name in ("straight", "broken"))
    losses(tmp_path / "straight", straight, lambda: {"nll": values[straight.progress.step]})

    def killed_at_four():
        if broken.progress.step == 4:
            raise KeyboardInterrupt
        return {"nll": values[2]}

    with pytest.raises(KeyboardInterrupt):
        losses(tmp_path / "broken", broken, killed_at_four)
    resumed = build_trainer(tmp_path / "broken", **options)
    checkpoint, _ = resumed.checkpoints.latest()
    assert checkpoint.step == 4
    resumed.restore(checkpoint)
    log = Log(tmp_path / "broken" / "log.jsonl", resumed.progress.step, (), resumed.progress.evaluated)
    with contextlib.closing(log):
        resumed.train(log, lambda: {"nll": values[resumed.progress.step]})
    logs = [without_times(read_log(tmp_path / name / "log.jsonl")) for name in ("straight", "broken")]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[1] if line["kind"] == "evaluation"] == [2, 4, 6]
    assert straight.checkpoints.best_step() == resumed.checkpoints.best_step() == 4
    assert (resumed.progress.best_nll, resumed.progress.since_best) == (2.0, 1)


def test_an_evaluation_is_logged_once_when_the_run_is_killed_before_its_outcome_is_saved(tmp_path):
    trainer = build_trainer(tmp_path, steps=4, evaluate_every=2)
    trainer.checkpoints.update = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        losses(tmp_path, trainer)
    assert read_log(tmp_path / "log.jsonl")[-1]["kind"] == "evaluation"
    resumed = build_trainer(tmp_path, steps=4, evaluate_every=2)
    resumed.restore(resumed.checkpoints.load(2))
    log = Log(tmp_path / "log.jsonl", 2, (), resumed.progress.evaluated)
    with contextlib.closing(log):
        resumed.train(log, lambda: {"nll": 1.0})
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "evaluation"] == [2, 4]


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    answers = iter([3.0, 2.0, 2.5, 2.4, 9.0])
    trainer = build_trainer(tmp_path, steps=10, evaluate_every=2, patience=2)
    progress = trainer.train(None, lambda: {"nll": next(answers)})
    assert progress.stopped
    assert progress.step == 8
    assert progress.best_nll == 2.0
    assert trainer.checkpoints.best_step() == 4
    assert trainer.checkpoints.steps() == [4, 6, 8]


def test_non_finite_loss_stops_the_run_with_advice(tmp_path):
    trainer = build_trainer(tmp_path, steps=4)
    with torch.no_grad():
        trainer.model.head.classifier.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step 1.*--learning-rate"):
        losses(tmp_path, trainer)


def test_a_loss_that_is_not_finite_names_the_last_checkpoint_and_what_to_change(tmp_path):
    trainer, values = build_trainer(tmp_path, evaluate_every=1, learning_rate=0.5, clip=2.0), iter([1.0, math.nan])
    message = r"nan after step 2; the last checkpoint is of step 1\. Lower --learning-rate \(now 0.5\).*below 2"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train(None, lambda: {"nll": next(values)})


def test_non_finite_evaluation_stops_the_run_with_advice(tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step .*--learning-rate \(now 1e\+30\)"):
        train(small(tmp_path / "run", learning_rate=1e30, warmup=0, noise_start=0.0), console=QUIET)


def test_the_average_is_what_is_evaluated(tmp_path):
    seen = []
    trainer = build_trainer(tmp_path, ema=0.5, learning_rate=0.1)
    trainer.train(None, lambda: seen.append(weights(trainer).clone()) or {"nll": 1.0})
    assert not torch.equal(seen[-1], weights(trainer))
    averaged = torch.cat([value.detach().flatten() for value in trainer.average.module.parameters()])
    assert torch.equal(seen[-1], averaged)


def test_model_without_trainable_parameters_raises(tmp_path):
    task = build_trainer(tmp_path).task
    task.model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(task, Checkpoints(tmp_path), QUIET, UnreadableExamples())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = build_trainer(tmp_path)
    trainer.train(None, lambda: {"nll": 1.0})
    checkpoint, _ = trainer.checkpoints.latest()
    with pytest.raises(ValueError, match="another model or version"):
        build_trainer(tmp_path, head="det").restore(checkpoint)


def test_draws_outside_are_not_disturbed(tmp_path):
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    build_trainer(tmp_path, dropout=0.5, backbone="mlp", width=8, features=4).train(None, lambda: {"nll": 1.0})
    assert torch.equal(torch.randn(3), expected)


def test_the_moving_average_is_that_of_a_naive_loop():
    model, decay = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), 0.95
    average = moving_average(model, decay)
    expected = {name: value.detach().double().clone() for name, value in model.named_parameters()}
    for step in range(200):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        average.update_parameters(model)
        current = min(decay, (1 + step) / (10 + step))
        for name, value in average.module.named_parameters():
            expected[name] = current * expected[name] + (1 - current) * model.get_parameter(name).detach().double()
            torch.testing.assert_close(value.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_averaged_weights_are_replaced_after_an_error(tmp_path):
    trainer = build_trainer(tmp_path, ema=0.5, learning_rate=0.1)
    trainer.train(None, lambda: {"nll": 1.0})
    before = weights(trainer).clone()
    with trainer.averaged():
        assert not torch.equal(weights(trainer), before)
    with pytest.raises(RuntimeError, match="inside"), trainer.averaged():
        raise RuntimeError("inside")
    assert torch.equal(weights(trainer), before)


def test_resumed_average_equals_that_of_an_uninterrupted_run(tmp_path):
    options = {"ema": 0.9, "learning_rate": 0.1, "evaluate_every": 3}
    whole, resumed = build_trainer(tmp_path / "whole", **options), build_trainer(tmp_path / "resumed", **options)
    whole.train(None, lambda: {"nll": 1.0})
    resumed.restore(whole.checkpoints.load(3))
    resumed.train(None, lambda: {"nll": 1.0})
    assert torch.equal(weights(whole), weights(resumed))
    for expected, actual in zip(whole.average.parameters(), resumed.average.parameters(), strict=True):
        assert torch.equal(expected, actual)


def contrastive_trainer(config, folder, steps=6):
    config = dataclasses.replace(config, steps=steps)
    task = ContrastiveTask(
        config, open_pairs(config.data, transform=ImageTransform(16)), World(torch.device("cpu")), QUIET, folder
    )
    return Trainer(task, Checkpoints(folder / "checkpoints"), QUIET, UnreadableExamples(share=0.5))


def test_parameter_groups_of_two_towers(tmp_path):
    options = {"noise_learning_rate": 0.5, "scale_learning_rate": 7, "link": "sigmoid", "weight_decay": 0.1}
    trainer = contrastive_trainer(small_pairs(vectors_file(tmp_path / "x.npz"), **options), tmp_path)
    groups = trainer.optimizer.param_groups
    of = {name: (group["weight_decay"], group["scale"]) for group in groups for name in group["names"]}
    assert of["image.layer.weight"] == (0.1, 1.0)
    assert of["image.layer.bias"] == (0.0, 1.0)
    assert of["loss.scale.raw"] == of["loss.bias"] == (0.0, 7.0)
    assert all(scale == 0.5 for name, (_, scale) in of.items() if "noise" in name)


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_killed_contrastive_run_equals_an_uninterrupted_one(tmp_path, head):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    config = small_pairs(data, head=head, dropout=0.2, templates="{}|a {}", checkpoint_every=2, evaluate_every=3)
    whole = contrastive_trainer(config, tmp_path / "whole")
    whole.train(None, dict)
    stopped = contrastive_trainer(config, tmp_path / "parts")
    kill_after(stopped, 1)
    taken_up = contrastive_trainer(config, tmp_path / "parts")
    checkpoint, refused = taken_up.checkpoints.latest()
    assert not refused
    assert checkpoint.step == 3  # written before the evaluation that was interrupted
    taken_up.restore(checkpoint)
    taken_up.train(None, dict)
    assert torch.equal(weights(whole), weights(taken_up))


def loss_of(trainer, fetched):
    return trainer.task.loss(trainer.model, fetched, None, 0, 0).value


def kill_after(trainer, step):
    """Train, and be killed at the first evaluation after a step."""

    def killed():
        if trainer.progress.step > step:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        trainer.train(None, killed)


def test_the_contrastive_loss_falls_and_the_scale_is_bounded(tmp_path):
    config = small_pairs(vectors_file(tmp_path / "x.npz"), learning_rate=0.05, max_scale=12.0, head="det", steps=40)
    trainer = contrastive_trainer(config, tmp_path, steps=40)
    fetched = trainer.task.train_pairs.images.fetch(*trainer.task.order.of(0, 16))
    before = float(loss_of(trainer, fetched).detach())
    trainer.train(None, dict)
    assert float(loss_of(trainer, fetched).detach()) < 0.7 * before
    assert trainer.task.status()["scale"] <= 12.0


def test_towers_in_half_precision(tmp_path):
    config = small_pairs(vectors_file(tmp_path / "x.npz"), precision="bfloat16")
    trainer = contrastive_trainer(config, tmp_path, steps=2)
    trainer.train(None, dict)
    assert torch.isfinite(weights(trainer)).all()


def test_unreadable_images_leave_out_their_texts(tmp_path):
    root = image_folder(tmp_path / "shapes")
    config = small_pairs(root, batch_size=18, head="det")
    trainer = contrastive_trainer(config, tmp_path)
    rows, seeds = trainer.task.order.of(0, 18)
    with open(trainer.task.train_pairs.images.show(int(rows[2])).image, "wb") as file:
        file.write(b"not an image")
    fetched = trainer.task.train_pairs.images.fetch(rows, seeds)
    assert len(fetched.rows) == 17
    model = trainer.model
    read = [index for index in range(18) if index != 2]
    texts = trainer.task.table.take(trainer.task.train_pairs.sources[rows[read]])
    expected = model(fetched.inputs, texts)
    assert torch.allclose(loss_of(trainer, fetched), expected, atol=1e-5)
    nothing = fetched._replace(inputs=fetched.inputs[:0], rows=fetched.rows[:0])
    with pytest.raises(ValueError, match="none of 18 images of a batch could be read"):
        loss_of(trainer, nothing)


def test_a_contrastive_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = contrastive_trainer(small_pairs(vectors_file(tmp_path / "x.npz"), log_every=1), tmp_path)
    with torch.no_grad():
        trainer.model.image.layer.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step 1\. Lower --learning-rate"):
        trainer.train(None, dict)


def test_a_checkpoint_of_other_towers_is_refused(tmp_path):
    data = vectors_file(tmp_path / "x.npz")
    contrastive_trainer(small_pairs(data, head="det"), tmp_path, steps=1).train(None, dict)
    other = contrastive_trainer(small_pairs(data), tmp_path, steps=2)
    with pytest.raises(CheckpointError, match="is damaged, or of another model or version"):
        other.restore(other.checkpoints.latest()[0])


def test_a_checkpoint_without_moments_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, steps=1)
    trainer.train(None, lambda: {"nll": 1.0})
    checkpoint = trainer.checkpoints.load(1)
    tensors = {name: value for name, value in checkpoint.tensors.items() if "exp_avg_sq" not in name}
    message = r"step 1 is damaged, or of another model or version: .*exp_avg_sq.*start in another directory"
    with pytest.raises(CheckpointError, match=message):
        trainer.restore(dataclasses.replace(checkpoint, tensors=tensors))
