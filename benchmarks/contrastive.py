"""Time and memory of the contrastive losses with HET-XL noise beside those without.

    python benchmarks/contrastive.py [--quick] [--write docs/benchmarks.md]

One batch of pairs, loss and gradients of embeddings and parameters. The losses take turns for their times; each peak of
memory is measured in a process of its own: all that a step takes beyond embeddings and parameters, their gradients
included. Beside them are CLIP's loss as it is usually written, two products with all logits and two calls of
cross_entropy, and SigLIP's with all logits.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _meter import MEGABYTE, interleaved_medians, machine, reset_peak, status
from _report import HEADER, Bar, Row, markdown_table, missed, replace_between
from torch import Tensor

from hetxl.contrastive import ContrastiveLoss

THREADS = 1
TIME, MEMORY, SHARE = 1.3, 1.2, 0.5
"""HET-XL over deterministic, at most; and memory as a share of that of all sampled logits."""
INDEPENDENT = 3.5
"""The same for the time with draws that no examples share."""


@dataclass(frozen=True)
class Batch:
    """Pairs of embeddings, and a loss for them.

    Attributes:
        pairs: B
        features: D
        link: "softmax", "sigmoid", or a name of `PLAIN` for all logits at once.
        noise: "both" or "none".
        samples: S
        group: examples that share the coefficients of a draw, 1 for none; None for the default.
    """

    pairs: int
    features: int
    link: str = "softmax"
    noise: str = "none"
    samples: int = 1
    group: int | None = None

    def prepare(self) -> Callable[[], None]:
        """Create embeddings and parameters without gradients, as zero_grad leaves them, and return the step."""
        generator = torch.Generator().manual_seed(0)
        image, text = (torch.randn(self.pairs, self.features, generator=generator) for _ in range(2))
        loss: Callable[[Tensor, Tensor], Tensor]
        parameters: list[Tensor] = []
        if self.link in PLAIN:
            loss = PLAIN[self.link]
        else:
            options: dict[str, Any] = {"link": self.link, "noise": self.noise, "num_samples": self.samples}
            if self.group is not None:
                options["noise_group"] = self.group
            loss = ContrastiveLoss(self.features, **options)
            parameters = list(loss.parameters())

        tensors = image.requires_grad_(), text.requires_grad_(), *parameters

        def step() -> None:
            for tensor in tensors:
                tensor.grad = None
            loss(image, text).backward()

        return step


def _plain_softmax(image: Tensor, text: Tensor) -> Tensor:
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    own = torch.arange(len(image))
    return (F.cross_entropy(10 * image @ text.T, own) + F.cross_entropy(10 * text @ image.T, own)) / 2


def _plain_sigmoid(image: Tensor, text: Tensor) -> Tensor:
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    signs = 2 * torch.eye(len(image)) - 1
    return -F.logsigmoid(signs * (10 * image @ text.T - 10)).sum() / len(image)


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain softmax": _plain_softmax,
    "plain sigmoid": _plain_sigmoid,
}


def peak(batch: Batch) -> float:
    """Return the peak memory of one step in MB, beyond embeddings and parameters."""
    # Return freed blocks at once: an allocator that keeps some of them makes runs differ by a third.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetxl.contrastive"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_peak, batch).result() / MEGABYTE


def _peak(batch: Batch) -> int:
    torch.set_num_threads(THREADS)
    replace(batch, pairs=64, features=8).prepare()()
    step = batch.prepare()
    before = reset_peak()
    step()
    return status("VmHWM") - before


def measure(pairs: int, features: int, samples: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Measure every row of the table."""
    many = Batch(pairs, features, noise="both", samples=samples)
    where = f"B = {pairs:,}, D = {features}"

    say("times")
    cases = {
        "det": Batch(pairs, features),
        "het": Batch(pairs, features, noise="both"),
        "plain": Batch(pairs, features, "plain softmax"),
        "sigmoid": Batch(pairs, features, "sigmoid"),
        "sigmoid het": Batch(pairs, features, "sigmoid", "both"),
        "sigmoid plain": Batch(pairs, features, "plain sigmoid"),
        "independent": Batch(pairs, features, noise="both", group=1),
    }
    seconds = interleaved_medians({name: case.prepare() for name, case in cases.items()}, rounds, least=1)
    say("memory")
    peaks = {name: peak(case) for name, case in cases.items()}
    rows = []

    def compare(name: str, method: str, other: str, bar: float = TIME) -> None:
        detail = f"{seconds[method]:.2f} against {seconds[other]:.2f} s"
        rows.append(Row(f"{name}, S = 1, {where}: time", seconds[method] / seconds[other], Bar(bar), detail))

    def weigh(name: str, method: str, other: str) -> None:
        detail = f"{peaks[method]:,.0f} against {peaks[other]:,.0f} MB"
        rows.append(Row(f"{name}, S = 1, {where}: memory", peaks[method] / peaks[other], Bar(MEMORY), detail))

    compare("softmax, HET-XL over deterministic", "het", "det")
    weigh("softmax, HET-XL over deterministic", "het", "det")
    compare("softmax, HET-XL over cross_entropy of all logits", "het", "plain")
    weigh("softmax, HET-XL over cross_entropy of all logits", "het", "plain")
    compare("softmax, HET-XL with independent draws over deterministic", "independent", "det", INDEPENDENT)
    compare("sigmoid, HET-XL over deterministic", "sigmoid het", "sigmoid")
    weigh("sigmoid, HET-XL over deterministic", "sigmoid het", "sigmoid")
    compare("sigmoid, HET-XL over SigLIP's loss of all logits", "sigmoid het", "sigmoid plain")
    weigh("sigmoid, HET-XL over SigLIP's loss of all logits", "sigmoid het", "sigmoid plain")
    say(f"S = {samples}")
    measured, every = peak(many), 4 * samples * pairs**2 / MEGABYTE
    name = f"softmax, HET-XL, S = {samples}, {where}: memory over that of one [B, S, B] tensor"
    rows.append(Row(name, measured / every, Bar(SHARE), f"{measured:,.0f} against {every:,.0f} MB"))
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small sizes; no bar can be missed")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    begin = time.perf_counter()
    sizes = (512, 32, 4, 1) if options.quick else (8192, 512, 8, 5)
    rows = measure(*sizes, lambda what: print(f"measuring {what}", file=sys.stderr))
    spent = time.perf_counter() - begin
    text = markdown_table(HEADER, [row.cells() for row in rows], left=2)
    text += f"\n\nOn {machine(THREADS)}; {spent:.0f} s."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "contrastive.py"))
    return int(bool(missed(rows)) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
