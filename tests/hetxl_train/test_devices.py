"""Steps and evaluations on a device that is not the CPU: nothing mixes devices, and only the log waits for it."""

import math

import pytest
import torch
import torch.distributed as dist

from hetxl_train import loop
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.distributed import Meeting, World, destroy_process_group
from hetxl_train.loop import Trainer
from hetxl_train.parallel import Alone
from hetxl_train.tasks.classification import ClassificationTask
from hetxl_train.tasks.contrastive import ContrastiveTask
from support.pairs import small_pairs, vectors_file
from support.second_device import DEVICE, SecondDevice, one_backend_group, to_second_device
from support.training import QUIET

DATA, LISTS = (load_synthetic(rows=300, classes=6, features=4, multi_label=multi) for multi in (False, True))
HEADS = [{"head": head, "link": link} for head in ("det", "het", "het-h", "het-xl") for link in ("softmax", "sigmoid")]
LEAST = {"covariance": "low_rank", "residual": "diagonal", "accumulate": 2, "dropout": 0.1}
ALONE = {
    "backbone": "none",
    "width": None,
    "features": None,
    "dropout": 0.0,
    "prior": 1.0,
    "noise_start": 0.5,
    "steps": 12,
}
WAITS = {"_unique2": {"classifier": "sampled"}, "nonzero": {"label_smoothing": 0.1}}
"""What a step reads: the number of different classes, and whether the mean of the samples has underflowed."""
STEPS = [
    *HEADS,
    *({"head": head, "link": link, "classifier": classifier} for head in ("det", "het-xl")
      for link in ("softmax", "sigmoid") for classifier in ("sampled", "retrieved", "sharded")),
    *({"temperature_method": method} for method in ("gradient", "bilevel")),
    {"temperature_method": "gradient", "temperature_held_out": 0.25},
    *({"covariance": covariance} for covariance in ("full", "diagonal")), LEAST, ALONE, WAITS["nonzero"],
    {"head": "det", "mc_dropout": 0.1}, {"activation_checkpointing": True}, {"data": LISTS},
]  # fmt: skip


def on_the_second_device(task, folder, processes=1, parallel=None) -> Trainer:
    to_second_device(task.model)
    task.world, task.device = World(DEVICE, 0, processes, Meeting(dist.HashStore(), 0, 1)), DEVICE
    task.noise = torch.Generator(DEVICE)
    return Trainer(task, Checkpoints(folder / "checkpoints"), QUIET, UnreadableExamples(), parallel)


def trainer_on_the_second_device(folder, processes=1, parallel=None, data=DATA, **options) -> Trainer:
    usual = {"rank": 2, "batch_size": 8, "train_samples": 2, "steps": 4, "backbone": "mlp", "width": 8, "features": 4}
    config = TrainConfig(
        **usual | {"device": "cpu", "temperature": "learned", "negatives": 3, "neighbours": 2} | options
    )
    task = ClassificationTask(config, data, World(torch.device("cpu")), QUIET, folder)
    return on_the_second_device(task, folder, processes, parallel)


def reads_of_a_step(device, trainer) -> list[str]:
    """The reads of a step that is not the first."""
    feed = trainer.feed()
    trainer.take_step(0, feed)
    device.reads.clear()
    loss = trainer.take_step(1, feed)
    assert loss.device == DEVICE
    reads = list(device.reads)
    assert math.isfinite(loss)
    return reads


def name_of(options):
    """The name of a case, the same in every process: a dataset shows an address otherwise."""
    return ", ".join(f"{option}={getattr(value, 'name', value)}" for option, value in options.items()) or "defaults"


@pytest.mark.parametrize("options", STEPS, ids=name_of)
def test_a_step_stays_on_its_device_and_reads_nothing(tmp_path, options):
    with SecondDevice() as device:
        reads = reads_of_a_step(device, trainer_on_the_second_device(tmp_path, ema=0.9, **options))
    # A retrieved classifier searches its index on the CPU.
    assert options.get("classifier") == "retrieved" or set(reads) == {
        name for name, cause in WAITS.items() if cause.items() <= options.items()
    }


@pytest.mark.parametrize("options", [*HEADS, LEAST, {"data": LISTS}], ids=name_of)
def test_an_evaluation_on_the_device_gives_the_metrics_of_the_cpu(tmp_path, options):
    config = {"data": DATA, "eval_samples": 8} | options
    with SecondDevice():
        trainer = trainer_on_the_second_device(tmp_path, **config)
        trainer.model.eval()
        there = trainer.task.validate()
        weights = {name: value.to("cpu") for name, value in trainer.model.state_dict().items()}
    alone = ClassificationTask(trainer.config, config["data"], World(torch.device("cpu")), QUIET, tmp_path)
    alone.model.load_state_dict(weights)
    assert there.pop("split") == "validation"
    assert there == pytest.approx({name: alone.validate()[name] for name in there}, rel=1e-6)


@pytest.mark.parametrize("options", [{"head": "det"}, {}, {"link": "sigmoid"}, {"noise": "text"}], ids=str)
def test_two_towers_train_and_are_evaluated_on_the_device(tmp_path, options):
    config = small_pairs(vectors_file(tmp_path / "pairs.npz", captions=True), tmp_path, **options)
    pairs = ContrastiveTask.open(config)
    with SecondDevice() as device:
        task = ContrastiveTask(config, pairs, World(torch.device("cpu")), QUIET, tmp_path)
        assert reads_of_a_step(device, on_the_second_device(task, tmp_path)) == []
        task.model.eval()
        result = task.result(tmp_path, stopped=False, validate=True)
        assert 0 < result["metrics"]["test"]["zero_shot"]["top5"] <= 1
        assert math.isfinite(task.validate()["loss"])


def test_the_loop_waits_for_the_device_at_the_log_and_the_checkpoint_only(tmp_path):
    with SecondDevice() as device:
        trainer = trainer_on_the_second_device(
            tmp_path, log_every=3, steps=7, checkpoint_every=5, evaluate_every=7, ema=0.9
        )
        take_step, reads = trainer.take_step, {}

        def counted(step, feed):
            before = len(device.reads)
            loss = take_step(step, feed)
            assert len(device.reads) == before
            reads[step] = before
            return loss

        trainer.take_step = counted
        trainer.train(None, lambda: {"nll": 1.0})
    read = [step + 1 for step in range(6) if reads[step + 1] > reads[step]]
    assert read == [3, 5, 6]


@pytest.mark.parametrize(
    ("device", "options", "pins"),
    [("cuda", {}, True), ("cuda", {"pin_memory": False}, False), ("cpu", {}, False)],
    ids=str,
)
def test_batches_are_pinned_for_cuda_devices(tmp_path, monkeypatch, device, options, pins):
    chosen = []
    monkeypatch.setattr(loop, "batches", lambda *arguments: chosen.append(arguments[-1]))
    with SecondDevice():
        trainer = trainer_on_the_second_device(tmp_path, **options)
        trainer.world = World(torch.device(device))
        trainer.feed()
    assert chosen == [pins]


def test_collectives_of_a_run_are_on_its_device(tmp_path):
    # As NCCL, the group has a backend for one device; a collective on a tensor of the CPU fails.
    group = one_backend_group(tmp_path / "store")
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            World(torch.device("cpu"), 0, 2).sum(torch.ones(1))
        with SecondDevice(group):
            trainer = trainer_on_the_second_device(tmp_path, processes=2, parallel=Alone(), log_every=1)
            progress = trainer.train(None, lambda: {"nll": 1.0})
        assert progress.step == 4
    finally:
        destroy_process_group()


def test_the_second_device_fails_where_a_device_would():
    with SecondDevice() as device:
        there = torch.arange(3.0, device=DEVICE)
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            torch.add(there, torch.ones(3))
        with pytest.raises(RuntimeError, match="expected a generator on meta, but found one on cpu"):
            torch.randn(3, device=DEVICE, generator=torch.Generator())
        assert torch.equal((there + 1).cpu(), torch.tensor([1.0, 2.0, 3.0]))
        assert device.reads == ["_to_copy"]
        assert bool(there.sum() > 2)
        assert device.reads == ["_to_copy", "_local_scalar_dense"]
