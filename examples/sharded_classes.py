"""Train with classes and data split over processes, and resume after a crash.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/sharded_classes.py --replicas 2 --out run

Four processes form a mesh of 2 × 2 here: two replicas with half of every batch each, and in each two processes with
half of the classes. Without torchrun there is one process. The variable makes torchrun forget the addresses of
processes that have ended; otherwise a restart may fail on them.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hetxl import HetXLHead
from hetxl.classifiers.sharded import ShardedClassifier
from hetxl_train.data.synthetic import FeatureSplit, load_synthetic
from hetxl_train.distributed import destroy_process_group

B, D, K = 128, 16, 30


class Model(nn.Module):
    """A small backbone with a head whose classes are split."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.backbone = nn.Linear(D, D)
        nn.init.eye_(self.backbone.weight)
        self.head = HetXLHead(D, K, rank=8, classifier=ShardedClassifier(D, K, mesh=mesh["classes"]))
        # FSDP also splits everything over the replicas, and gathers it for each call.
        fully_shard(self.head, mesh=mesh["data"])
        fully_shard(self, mesh=mesh["data"])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        return self.head(self.backbone(inputs), targets)


def tensors_of(split: object) -> tuple[Tensor, Tensor]:
    """Return inputs [n, D] and class ids [n]."""
    assert isinstance(split, FeatureSplit)
    return split.features, torch.from_numpy(split.labels.ids)


def train(
    mesh: DeviceMesh, out: Path, steps: int, every: int, after_step: Callable[[int], None] = lambda step: None
) -> None:
    """Train from the last checkpoint, or from the start."""
    torch.manual_seed(0)  # all processes start from the same backbone and covariance
    data = load_synthetic(features=D, classes=K, rows=5000)
    inputs, labels = tensors_of(data.splits["train"])
    model = Model(mesh)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    replica, replicas = mesh["data"].get_local_rank(), mesh["data"].size()
    first = 1
    # Metadata is written last, so a checkpoint with metadata is complete.
    whole = sorted(int(path.parent.name) for path in out.glob("*/.metadata"))
    if whole:
        values, moments = get_state_dict(model, optimiser)
        state = {"model": values, "optimiser": moments}
        dcp.load(state, checkpoint_id=out / str(whole[-1]))
        set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
        first = whole[-1] + 1
    for step in range(first, steps + 1):
        # A batch is a function of its step, so that a resumed run sees the same batches.
        rows = torch.randint(len(inputs), (B,), generator=torch.Generator().manual_seed(step))[replica::replicas]
        loss = model(inputs[rows], labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean = loss.detach() / replicas
        dist.all_reduce(mean, group=mesh["data"].get_group())
        if dist.get_rank() == 0:
            with (out / "log.jsonl").open("a") as log:
                print(json.dumps({"step": step, "loss": mean.item()}), file=log)
        if step % every == 0 or step == steps:
            values, moments = get_state_dict(model, optimiser)
            dcp.save({"model": values, "optimiser": moments}, checkpoint_id=out / str(step))
        after_step(step)
    model.eval()
    with torch.no_grad():
        loss = model(*tensors_of(data.splits["test"])).item()
    if dist.get_rank() == 0:
        print(f"after {steps} steps: test NLL {loss:.3f}; at best it could be {data.best_nll:.3f}")


def main(after_step: Callable[[int], None] = lambda step: None) -> None:
    """Join the process group, and train."""
    parser = argparse.ArgumentParser(description="Train with the classes split over processes.")
    parser.add_argument("--replicas", type=int, default=1, help="over which the data is split")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--out", type=Path, help="directory of the checkpoints and the log")
    options = parser.parse_args()
    if options.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("several processes need --out, one directory for all of them")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = options.replicas, dist.get_world_size() // options.replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "classes"))
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        train(mesh, out, options.steps, options.every, after_step)
    destroy_process_group()


if __name__ == "__main__":
    main()
