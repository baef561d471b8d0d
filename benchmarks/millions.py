"""Measure time and memory of a training step with millions of classes, DET and HET-XL over the same classifier.

    python benchmarks/millions.py [--quick] [--write docs/many_classes.md]

The classes are the most frequent runs of words in the sources of Python and of the packages beside it, the input is the
four words before. The two heads share one classifier and take turns, so that they differ in nothing else. The peak
memory of each is that of a process of its own: W, gradients, moments, index and all, beside what
`hetxl.profiling.memory` says before.
"""

import argparse
import multiprocessing
import re
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from _meter import interleaved_medians, machine, reset_peak, status
from _report import HEADER, Bar, Row, markdown_table, replace_between
from torch import Tensor, nn

from hetxl import DetHead, HetXLHead
from hetxl.classifiers import LinearClassifier, RetrievedClassifier, SampledClassifier
from hetxl.nn import Head
from hetxl.profiling.memory import training_memory

CONTEXT = 4
BUCKETS = 2**16  # hashes of the words of the context

WORD = re.compile(r"\w+|[^\w\s]")


def words(libraries: tuple[str, ...], most: int) -> np.ndarray:
    """Return ids of the words of Python sources, [n] int32, in the order of their files; a file begins with −1.

    Args:
        libraries: paths of sysconfig: "stdlib", "purelib".
        most: stop after the file that reaches this number of words.
    """
    known: dict[str, int] = {}
    ids = array("i")
    for library in libraries:
        root = Path(sysconfig.get_paths()[library])
        for file in sorted(root.rglob("*.py")):
            if library == "stdlib" and "site-packages" in file.parts:
                continue
            ids.append(-1)
            ids.extend(known.setdefault(word, len(known)) for word in WORD.findall(file.read_text("utf-8", "replace")))
            if len(ids) >= most:
                return np.array(ids, dtype=np.int32)
    return np.array(ids, dtype=np.int32)


def ngrams(ids: np.ndarray, length: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return contexts and classes: the words before a run of words, and its index among the most frequent runs.

    Args:
        ids: [n], ids of words.
        length: number of words of a run.
        num_classes: K; the most frequent runs, most frequent first.

    Returns:
        contexts: [m, CONTEXT] int64, hashed to `BUCKETS`
        classes: [m] int64
    """
    count = len(ids) - length - CONTEXT + 1
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(length):  # identify a run by a hash of its words; collisions are rare among ten million
        part = ids[CONTEXT + offset : CONTEXT + offset + count].astype(np.uint64)
        keys = (keys ^ part) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    _, classes, times = np.unique(keys, return_inverse=True, return_counts=True)
    if len(times) < num_classes:
        raise SystemExit(f"The sources hold {len(times):,} distinct runs of {length} words, fewer than {num_classes:,}")
    order = np.argsort(-times, kind="stable")
    rank = np.empty(len(times), dtype=np.int64)
    rank[order] = np.arange(len(times))
    classes = rank[classes.reshape(-1)]
    rows = np.flatnonzero(classes < num_classes)
    contexts = np.stack([ids[rows + offset] for offset in range(CONTEXT)], axis=1).astype(np.int64)
    return (contexts * 2654435761 + np.arange(CONTEXT)) % BUCKETS, classes[rows]


RANK, SAMPLES = 10, 4
NEGATIVES, NEIGHBOURS, OTHERS = 8192, 16, 4096
HELD_OUT = 128
TIMES = {"linear": 5.0, "sampled": 3.0, "retrieved": 2.0}
"""Of a step of DET, at most: S = 4 samples go through W instead of one vector, and not through anything else."""
ERROR = 0.1
"""Largest relative error of the formula for the peak."""


@dataclass(frozen=True)
class Setting:
    """One size and classifier.

    Attributes:
        kind: "linear", "sampled" or "retrieved"
        K: classes.
        D: feature size.
        B: batch.
        length: number of words of a class.
        libraries: paths of sysconfig whose sources are read.
        steps: number of training steps that show that the loss falls.
    """

    kind: str
    K: int
    D: int
    B: int
    length: int
    libraries: tuple[str, ...]
    steps: int

    @property
    def name(self) -> str:
        """Return its name in the table."""
        return f"{self.kind}, K = {self.K:,}, D = {self.D}, B = {self.B}"


FULL = (
    Setting("linear", 1_000_000, 256, 64, 3, ("stdlib",), 12),
    Setting("sampled", 1_000_000, 256, 256, 3, ("stdlib",), 300),
    Setting("retrieved", 1_000_000, 256, 256, 3, ("stdlib",), 60),
    Setting("sampled", 10_000_000, 64, 256, 4, ("stdlib", "purelib"), 300),
)
QUICK = tuple(Setting(kind, 3000, 16, 16, 2, ("stdlib",), 4) for kind in ("linear", "sampled", "retrieved"))


class Context(nn.Module):
    """Map the previous words, [B, CONTEXT] hashes, to features [B, D]."""

    def __init__(self, features: int):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, 32)
        self.last = nn.Sequential(nn.Linear(32 * CONTEXT, features), nn.LayerNorm(features))

    def forward(self, words: Tensor) -> Tensor:
        """Return features [B, D] of contexts [B, CONTEXT]."""
        return self.last(self.table(words).flatten(1))


class Training:
    """A classifier with both heads over it, and the optimisers of its parameters."""

    def __init__(self, setting: Setting, heads: tuple[str, ...] = ("det", "het-xl")):
        torch.manual_seed(0)
        size = (setting.D, setting.K)
        if setting.kind == "linear":
            self.classifier = LinearClassifier(*size)
        elif setting.kind == "sampled":
            # The classes are in the order of their frequency.
            self.classifier = SampledClassifier(*size, negatives=NEGATIVES, proposal="log-uniform", sparse=True)
        else:
            self.classifier = RetrievedClassifier(*size, neighbours=NEIGHBOURS, others=OTHERS, sparse=True)
        self.backbone = Context(setting.D)
        options = {"rank": RANK, "train_samples": SAMPLES, "eval_samples": 16, "temperature": 1.0}
        head_types = {"det": DetHead, "het-xl": HetXLHead}
        self.heads: dict[str, Head] = {
            name: head_types[name](*size, classifier=self.classifier, **options) for name in heads
        }
        own = [value for head in self.heads.values() if head.covariance for value in head.covariance.parameters()]
        rest = [*self.backbone.parameters(), *own]
        if setting.kind == "linear":
            self.optimisers = [torch.optim.AdamW([*rest, *self.classifier.parameters()], lr=1e-3, fused=True)]
        else:
            sparse = torch.optim.SparseAdam(list(self.classifier.parameters()), lr=1e-2)
            self.optimisers = [torch.optim.AdamW(rest, lr=1e-3), sparse]

    def step(self, name: str, inputs: Tensor, targets: Tensor) -> None:
        """Run one training step of one head."""
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        self.heads[name].loss(self.backbone(inputs), targets).backward()
        for optimiser in self.optimisers:
            optimiser.step()

    @torch.no_grad()
    def nll(self, name: str, inputs: Tensor, targets: Tensor) -> float:
        """Return the mean loss over all classes."""
        head = self.heads[name].eval()
        loss = float(head.loss(self.backbone(inputs), targets))
        head.train()
        return loss


def batches(contexts: Tensor, classes: Tensor, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function whose calls give the batches of a shuffled order."""
    order, start = torch.randperm(len(classes), generator=torch.Generator().manual_seed(1)), 0

    def following() -> tuple[Tensor, Tensor]:
        nonlocal start
        rows = order[start % (len(order) - size) :][:size]
        start += size
        return contexts[rows], classes[rows]

    return following


def peak_of(setting: Setting, name: str, file: str) -> int:
    """Measure the bytes of two steps of one head, with W, in a separate process."""
    data = np.load(file)
    following = batches(torch.from_numpy(data["contexts"]), torch.from_numpy(data["classes"]), setting.B)
    tiny = replace(setting, K=500, D=8)
    Training(tiny, (name,)).step(name, following()[0], torch.arange(setting.B))  # load libraries
    before = reset_peak()
    training = Training(setting, (name,))
    for _ in range(2):  # the first step creates the optimiser's state
        training.step(name, *following())
    return status("VmHWM") - before


def predicted(setting: Setting, name: str) -> int:
    """Return the bytes that the formula predicts."""
    noisy = name == "het-xl"
    active = {"linear": 0, "sampled": NEGATIVES, "retrieved": OTHERS + NEIGHBOURS * setting.B}
    memory = training_memory(
        setting.D,
        setting.K,
        classifier=setting.kind,
        batch=setting.B,
        samples=SAMPLES if noisy else 1,
        size=RANK + 1 if noisy else 0,
        active=active[setting.kind],
        sparse=setting.kind != "linear",
    )
    backbone = 4 * 4 * (BUCKETS * 32 + (32 * CONTEXT + 3) * setting.D)
    return memory.total + backbone


def measure(setting: Setting, ids: np.ndarray, folder: Path, rounds: int) -> list[Row]:
    """Measure the rows of the table."""
    contexts, classes = ngrams(ids, setting.length, setting.K)
    # Shuffle, because rows are in the order of the files and those held out would come from a single file.
    shuffled = np.random.default_rng(0).permutation(len(classes))
    contexts, classes = contexts[shuffled], classes[shuffled]
    file = folder / "rows.npz"
    np.savez(file, contexts=contexts[:100_000], classes=classes[:100_000])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetxl.profiling"])
    peaks = {}
    for name in ("det", "het-xl"):
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
            peaks[name] = executor.submit(peak_of, setting, name, str(file)).result()
    inputs, targets = torch.from_numpy(contexts), torch.from_numpy(classes)
    following = batches(inputs[HELD_OUT:], targets[HELD_OUT:], setting.B)
    held_out = inputs[:HELD_OUT], targets[:HELD_OUT]
    training = Training(setting)
    before = training.nll("het-xl", *held_out)
    for _ in range(setting.steps):
        training.step("het-xl", *following())
    after = training.nll("het-xl", *held_out)
    tasks = {name: (lambda name=name: training.step(name, *following())) for name in training.heads}
    seconds = interleaved_medians(tasks, rounds)
    share = f"{seconds['het-xl']:.2f} against {seconds['det']:.2f} s"
    limit = Bar(TIMES[setting.kind])
    rows = [Row(f"{setting.name}: HET-XL step over DET's", seconds["het-xl"] / seconds["det"], limit, share)]
    for name, label in (("det", "DET"), ("het-xl", "HET-XL")):
        said = predicted(setting, name)
        detail = f"{peaks[name] / 1e6:,.0f} MB measured, {said / 1e6:,.0f} MB predicted"
        missed = abs(said / peaks[name] - 1)
        rows.append(
            Row(f"{setting.name}: {label}, peak memory, error of the formula", missed, Bar(ERROR, unit=""), detail)
        )
    label = f"{setting.name}: NLL of {HELD_OUT} held-out rows over all classes after {setting.steps} steps of HET-XL"
    rows.append(Row(label, after / before, Bar(1.0), f"{before:.2f} → {after:.2f}"))
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small sizes; the bars cannot be missed")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    begin = time.perf_counter()
    rows: list[Row] = []
    read: dict[tuple[str, ...], np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting in QUICK if options.quick else FULL:
            if setting.libraries not in read:
                read = {setting.libraries: words(setting.libraries, 200_000 if options.quick else 40_000_000)}
            print(setting.name, file=sys.stderr, flush=True)
            rows += measure(setting, read[setting.libraries], Path(folder), 1 if options.quick else 5)
    spent = time.perf_counter() - begin
    text = markdown_table(HEADER, [row.cells() for row in rows], left=2)
    text += f"\n\nOn {machine(torch.get_num_threads())}; {spent:.0f} s."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "millions.py"))
    return int(any(row.verdict == "fail" for row in rows) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
