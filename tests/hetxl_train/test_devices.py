"""A step on a device that is not the CPU: nothing mixes devices, and nothing waits for the device but the log."""

import pytest
import torch
import torch.distributed as dist

from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.distributed import Meeting, World, destroy_process_group
from hetxl_train.loop import Trainer
from hetxl_train.parallel import Alone
from hetxl_train.tasks.classification import ClassificationTask
from support.second_device import DEVICE, SecondDevice, one_backend_group, to_second_device
from support.training import QUIET

DATA = load_synthetic(rows=300, classes=6, features=4)
HEADS = [(head, link, "linear") for head in ("det", "het", "het-h", "het-xl") for link in ("softmax", "sigmoid")]
FEW = [(head, link, classifier) for head in ("det", "het-xl") for link in ("softmax", "sigmoid")
       for classifier in ("sampled", "retrieved")]  # fmt: skip


def trainer_on_the_second_device(folder, processes=1, parallel=None, **options) -> Trainer:
    usual = {"rank": 2, "batch_size": 8, "train_samples": 2, "steps": 4, "backbone": "mlp", "width": 8, "features": 4}
    config = TrainConfig(
        **usual | {"device": "cpu", "temperature": "learned", "negatives": 3, "neighbours": 2} | options
    )
    task = ClassificationTask(config, DATA, World(torch.device("cpu")), QUIET, folder)
    to_second_device(task.model)
    task.world, task.device = World(DEVICE, 0, processes, Meeting(dist.HashStore(), 0, 1)), DEVICE
    return Trainer(task, Checkpoints(folder / "checkpoints"), QUIET, UnreadableExamples(), parallel)


WAITS = {"linear": set(), "sampled": {"_unique2"}}
"""What a classifier reads: the number of different classes. A retrieved one searches its index on the CPU."""


@pytest.mark.parametrize(("head", "link", "classifier"), HEADS + FEW)
def test_a_step_stays_on_its_device_and_reads_nothing(tmp_path, head, link, classifier):
    with SecondDevice() as device:
        trainer = trainer_on_the_second_device(tmp_path, head=head, link=link, classifier=classifier, ema=0.9)
        feed = trainer.feed()
        device.reads.clear()
        trainer.take_step(0, feed)
        loss = trainer.take_step(1, feed)
        assert classifier == "retrieved" or set(device.reads) == WAITS[classifier]
        assert loss.device == DEVICE
        assert float(loss) > 0


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
        assert torch.equal((there + 1).cpu(), torch.tensor([1.0, 2.0, 3.0]))
        assert device.reads == ["_to_copy"]
        assert bool(there.sum() > 2)
        assert device.reads == ["_to_copy", "_local_scalar_dense"]
