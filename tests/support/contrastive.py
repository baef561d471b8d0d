"""Pairs spread over several processes, and what they run, by name, so that a new process finds it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hetxl.contrastive import ContrastiveLoss
from support.distributed import gradients

B, D, S = 12, 6, 2
EVEN, UNEVEN = "even", "uneven"

CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, all on every process": {"local_loss": False},
    "softmax, several samples": {"num_samples": S},
    "softmax, several samples, all on every process": {"num_samples": S, "local_loss": False},
    "softmax, more samples than rows": {"num_samples": 7},
    "softmax, more samples than rows, all on every process": {"num_samples": 7, "local_loss": False},
    "softmax, normalised after": {"normalize": "after", "num_samples": S},
    "softmax, images only": {"noise": "image", "covariance": "efficient"},
    "softmax, texts only": {"noise": "text", "normalize": "both", "local_loss": False},
    "softmax, no noise": {"noise": "none"},
    "softmax, no noise, all on every process": {"noise": "none", "local_loss": False},
    "sigmoid": {"link": "sigmoid", "num_samples": S},
    "sigmoid, all on every process": {"link": "sigmoid", "local_loss": False},
    "sigmoid, chunks": {"link": "sigmoid", "chunk": 5, "num_samples": S},
    "sigmoid, ring": {"link": "sigmoid", "gather": "ring"},
    "sigmoid, ring of chunks": {"link": "sigmoid", "gather": "ring", "chunk": 2, "num_samples": S},
    "sigmoid, ring, normalised after": {"link": "sigmoid", "gather": "ring", "normalize": "after", "noise": "text"},
    "sigmoid, no noise": {"link": "sigmoid", "noise": "none"},
    "sigmoid, no noise, ring": {"link": "sigmoid", "noise": "none", "gather": "ring"},
}
"""What is special about a loss."""

UNDER_DDP = ("softmax", "softmax, all on every process", "sigmoid, ring")
"""Those that also run under DDP itself; the others take its mean by hand, which is faster."""


class Pairs(nn.Module):
    """Two towers of one layer and their loss."""

    def __init__(self, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Linear(D, D, dtype=torch.float64)
        self.text = nn.Linear(D, D, dtype=torch.float64)
        options = {"rank": 3, "noise_init": 0.7, "bias_init": -1.0} | options
        self.loss = ContrastiveLoss(D, dtype=torch.float64, **options)

    def forward(self, image: Tensor, text: Tensor, **options: Any) -> Tensor:
        return self.loss(torch.tanh(self.image(image)), torch.tanh(self.text(text)), **options)


def inputs() -> tuple[Tensor, Tensor]:
    """The whole batch: what the image tower and the text tower get, [B, D] each."""
    generator = torch.Generator().manual_seed(1)
    image, text = torch.randn(2, B, D, dtype=torch.float64, generator=generator)
    return image, text


def normals(model: Pairs, samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Normals of the whole batch, for images and for texts."""
    generator = torch.Generator().manual_seed(2)
    modules = model.loss.image_noise, model.loss.text_noise
    draws = [None if module is None else module.draw(B, samples, generator) for module in modules]
    return draws[0], draws[1]


def rows_of(rank: int, ranks: int, split: str) -> slice:
    """This process's pairs of the batch; uneven: the last process has what is left."""
    if split == EVEN:
        return slice(rank * B // ranks, (rank + 1) * B // ranks)
    size = -(-B // ranks) + 1
    return slice(min(rank * size, B), min((rank + 1) * size, B))


def step(model: nn.Module, part: slice, noise: Any = None, **options: Any) -> dict[str, Any]:
    """The loss and all gradients of some pairs."""
    image, text = inputs()
    if noise is not None:
        noise = tuple(None if z is None else z[part] for z in noise)
    loss = model(image[part], text[part], noise=noise, **options)
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def whole(name: str, **options: Any) -> dict[str, Any]:
    """A case in one process with the whole batch, without torch.distributed."""
    model = Pairs(**CASES[name])
    return step(model, slice(0, B), normals(model, model.loss.num_samples), **options)


def averaged(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The mean over the processes of their gradients, as DDP takes it, in one message; the loss does not change."""
    names = [name for name in values if name != "loss"]
    packed = torch.cat([values[name].flatten() for name in names])
    dist.all_reduce(packed)
    parts = (packed / ranks).split([values[name].numel() for name in names])
    means = {name: part.view_as(values[name]) for name, part in zip(names, parts, strict=True)}
    return {"loss": values["loss"]} | means


def everything(rank: int, ranks: int) -> dict[str, Any]:
    """Every case, and what is special."""
    results: dict[str, Any] = {}
    for split in (EVEN, UNEVEN) if ranks > 2 else (EVEN,):
        part = rows_of(rank, ranks, split)
        for name, options in CASES.items():
            model = Pairs(**options)
            noise = normals(model, model.loss.num_samples)
            results[f"{name}, {split}"] = averaged(step(model, part, noise), ranks)
    for name in UNDER_DDP:
        model = Pairs(**CASES[name])
        wrapped = DistributedDataParallel(model)
        results[f"{name}, DDP"] = step(wrapped, rows_of(rank, ranks, EVEN), normals(model, model.loss.num_samples))
    part = rows_of(rank, ranks, EVEN)
    results["no samples"] = step(DistributedDataParallel(Pairs()), part, num_samples=0)
    results["generator"] = step(DistributedDataParallel(Pairs()), part, generator=torch.Generator().manual_seed(5))
    results["alone"] = step(Pairs(gather=False, noise="none"), part)
    groups = [dist.new_group([member]) for member in range(ranks)]
    results["own group"] = step(Pairs(group=groups[rank], noise="none"), part)
    with torch.no_grad():
        image, text = inputs()
        model = Pairs(link="sigmoid", gather="ring")
        z_image, z_text = normals(model, 1)
        assert z_image is not None
        assert z_text is not None
        results["evaluated"] = model(image[part], text[part], noise=(z_image[part], z_text[part]))
    return results
