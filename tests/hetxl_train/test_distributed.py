"""Several processes: what torchrun starts gives the training of one process that accumulates as many parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.distributed import World, destroy_process_group, find_device, world
from hetxl_train.log import read_log
from hetxl_train.training import train

SUPPORT = Path(__file__).parents[1] / "support"
OPTIONS = {
    "data": "synthetic:rows=1000,classes=10,features=5",
    "backbone": "mlp",
    "width": 16,
    "features": 8,
    "dropout": 0.1,
    "rank": 3,
    "steps": 12,
    "batch_size": 24,
    "learning_rate": 0.01,
    "log_every": 3,
    "evaluate_every": 6,
    "evaluation_examples": 50,
    "test_examples": 50,
    "train_samples": 2,
    "eval_samples": 8,
    "device": "cpu",
}


def flags(options):
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def torchrun(*program):
    """Run a program in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("head", ["het-xl", pytest.param("het-h", marks=pytest.mark.slow)])
def test_two_processes_train_like_one(tmp_path, head):
    options = OPTIONS | {"head": head}
    single = train(TrainConfig(**options, accumulate=4, out=str(tmp_path / "one")), console=Console(quiet=True))
    data = options.pop("data")
    torchrun("-m", "hetxl_train.cli", "train", data, *flags(options), "--accumulate=2", f"--out={tmp_path / 'two'}")
    first, second = load_file(single.path / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    losses = [[line["loss"] for line in read_log(tmp_path / run / "log.jsonl") if line["kind"] == "step"]
              for run in ("one", "two")]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 4


def test_a_program_ends_well_while_something_still_refers_to_its_group():
    torchrun(str(SUPPORT / "leaving.py"))


def test_world_of_one_process_needs_no_group():
    with world("cpu") as alone:
        assert alone == World(torch.device("cpu"), 0, 1)
        assert alone.is_main
        assert alone.on_main(lambda: 3) == 3
        assert alone.gather(lambda: 3) == [3]
        assert alone.share([1, 2]) == [1, 2]
        value = torch.ones(1)
        assert alone.sum(value) is value
        alone.wait()


def test_find_device_accepts_available_devices_only():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda", "mps", "xpu")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda"):
        find_device("gpuu")
    with pytest.raises(ValueError, match="device 'meta' cannot compute"):
        find_device("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device 'cuda' is not available \(.*\); use cpu or auto"):
            find_device("cuda")


def test_collectives_go_through_the_process_group(tmp_path):
    # Two processes by name, one in the group: what is left of the sum and the flag is this process's.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        processes = World(torch.device("cpu"), rank=0, processes=2)
        assert processes.sum(torch.tensor([3.0])).item() == 3
        processes.wait()
        assert processes.on_main(lambda: "result") == "result"
    finally:
        destroy_process_group()
