"""Samples-first against factors-first: the time of loss and backward, in one process, the two taking turns.

python benchmarks/orders.py
"""

from collections.abc import Callable
from typing import get_args

import torch
from _timing import interleaved_medians, machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hetxl
from hetxl.functional import Order, choose_order

B, D, K, R = 8, 512, 5000, 50
SAMPLES = (1, 4, 16, 64, 256)
REPEATS = 5


def step(head: hetxl.nn.Head, features: Tensor, labels: Tensor, samples: int, order: Order) -> Callable[[], None]:
    """Loss and backward of one batch, as a task to be timed."""

    def run() -> None:
        head.zero_grad(set_to_none=True)
        head(features, labels, num_samples=samples, order=order).backward()

    return run


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features, labels = torch.randn(B, D), torch.randint(K, (B,))
    det, head = hetxl.DetHead(D, K), hetxl.HetXLHead(D, K, rank=R)
    table = Table(title=f"Loss and backward, HET-XL, B={B} D={D} K={K} R={R}: milliseconds", title_justify="left")
    for column in ("S", "DET", "samples first", "factors first", "samples ÷ factors", "best ÷ DET", "chosen"):
        table.add_column(column, justify="right")
    for samples in SAMPLES:
        tasks = {order: step(head, features, labels, samples, order) for order in get_args(Order)}
        tasks["det"] = step(det, features, labels, 1, "samples")
        seconds = interleaved_medians(tasks, REPEATS)
        best = min(seconds["samples"], seconds["factors"])
        table.add_row(
            str(samples),
            *(f"{1000 * seconds[name]:,.1f}" for name in ("det", "samples", "factors")),
            f"{seconds['samples'] / seconds['factors']:.2f}",
            f"{best / seconds['det']:.1f}",
            choose_order(head.logit_distribution(features), samples),
        )
    console = Console()
    console.print(table)
    console.print(f"Medians of {REPEATS}, {machine()}. 'chosen' is the order the head takes by itself.")


if __name__ == "__main__":
    main()
