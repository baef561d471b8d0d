"""Compare prediction through an index of the classes (`RetrievedClassifier`) with prediction over all of them.

    python benchmarks/retrieved.py [--write docs/many_classes.md]   # a million classes: about 10 minutes, 5 GB
    python benchmarks/retrieved.py --classes 20000                  # seconds; too few for an index to be worth it

Both heads have the same weights. Rows of W come in clusters of 50 about a common centre, and features are a row with
noise, so each has a correct answer with 49 near ones. Ends with code 1 if the two agree on the first class of fewer
than 99 in 100 examples, or if the index does not make it five times as fast.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from _meter import interleaved_medians, machine
from _report import HEADER, Bar, Row, markdown_table, missed, replace_between
from torch import Tensor

from hetxl import HetXLHead, Prediction
from hetxl.classifiers.linear import LinearClassifier
from hetxl.classifiers.retrieved import RetrievedClassifier

TOP_K = 5
CLUSTER = 50
SPREAD = 0.5
"""Of the rows about their centre, whose elements have a standard deviation of 1."""
BLUR = 0.7
"""Noise of the features beside the row that they belong to."""
LOGIT = 25.0
"""Of a row's centre by itself: enough to stand out of a million."""
BLOCK = 50_000
AGREEMENT, SPEED = Bar(0.99, at_least=True, unit="%"), Bar(5.0, at_least=True)


class Heads(NamedTuple):
    """Two heads with the same parameters, features to predict, and their right answers.

    Attributes:
        retrieved: head with the index.
        whole: head over all classes.
        features: [n, D]
        labels: [n]
    """

    retrieved: HetXLHead
    whole: HetXLHead
    features: Tensor
    labels: Tensor


def prepare(options: argparse.Namespace) -> Heads:
    """Build the heads, which share W."""
    K, D = options.classes, options.features
    torch.manual_seed(options.seed)
    indexed = RetrievedClassifier(D, K, neighbours=32)
    centres = torch.randn(max(1, K // CLUSTER), D)
    scale = LOGIT / D
    for start in range(0, K, BLOCK):
        some = slice(start, min(start + BLOCK, K))
        own = torch.randint(len(centres), (len(range(K)[some]),))
        indexed.weight[some] = scale * (centres[own] + SPREAD * torch.randn(len(own), D))
    assert indexed.bias is not None
    indexed.bias.normal_(std=0.3)
    linear = LinearClassifier(1, 1)
    linear.in_features, linear.num_classes, linear.weight, linear.bias = D, K, indexed.weight, indexed.bias
    heads = [
        HetXLHead(D, K, rank=options.rank, noise_init=options.noise_init, temperature=1.0, classifier=classifier).eval()
        for classifier in (indexed, linear)
    ]
    heads[1].load_state_dict(heads[0].state_dict())
    labels = torch.randint(K, (options.examples,))
    features = indexed.weight[labels] / scale + BLUR * torch.randn(options.examples, D)
    return Heads(heads[0], heads[1], features, labels)


def predict(head: HetXLHead, features: Tensor, samples: int) -> Prediction:
    """Return the top classes, with the same normals for both heads."""
    return head.predict(features, top_k=TOP_K, num_samples=samples, generator=torch.Generator().manual_seed(0))


def resident() -> float:
    """Return the resident memory in gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def timed(heads: Heads, options: argparse.Namespace) -> Row:
    """Measure the speed-up by the index."""
    few = heads.features[: options.batch]
    tasks = {
        "whole": lambda: predict(heads.whole, few, options.samples),
        "retrieved": lambda: predict(heads.retrieved, few, options.samples),
    }
    times = interleaved_medians(tasks, options.rounds)
    each = {name: 1000 * value / len(few) for name, value in times.items()}
    detail = f"{each['whole']:.0f} ms an example over all classes, {each['retrieved']:.1f} ms through the index"
    return Row("prediction of the top 5, speed", times["whole"] / times["retrieved"], SPEED, detail)


def compared(heads: Heads, options: argparse.Namespace) -> tuple[Row, str]:
    """Count the examples on which the two agree, and describe the rest in one line."""
    same, right, off, left_out = 0, 0, 0.0, 0.0
    for features, labels in zip(heads.features.split(options.batch), heads.labels.split(options.batch), strict=True):
        first, second = (predict(head, features, options.samples) for head in (heads.retrieved, heads.whole))
        same += int((first.top_class == second.top_class).sum())
        right += int((second.top_class == labels).sum())
        off = max(off, float((first.probs[:, 0] - second.probs[:, 0]).abs().max()))
        assert first.left_out is not None
        left_out += float(first.left_out.sum())
    count = len(heads.labels)
    line = (
        f"{right / count:.1%} of the predictions over all classes are right; the first class's probability is at most "
    )
    line += f"{off:.4f} off; {left_out / count:.4f} of the probability lies on classes that the index left out"
    return Row("the same first class", same / count, AGREEMENT, f"{same} of {count} examples"), line


def measure(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measure the rows of the table, and return lines with details."""
    heads = prepare(options)
    indexed = heads.retrieved.classifier
    assert isinstance(indexed, RetrievedClassifier)
    before, begin, busy = resident(), time.perf_counter(), time.process_time()
    indexed.sync(heads.features)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    recall = {k: indexed.recall(heads.features, k) for k in (1, 10)}
    deviation = heads.whole.logit_distribution(heads.features[:1]).covariance(heads.labels[:1, None])
    row, line = compared(heads, options)
    return [timed(heads, options), row], [
        f"The index was built in {seconds:.0f} s ({busy:.0f} s of CPU time) and takes {resident() - before:.2f} GB; it "
        f"finds {recall[1]:.2%} of the first classes by mean logit and {recall[10]:.2%} of the first ten",
        f"{line}. The noise of a logit has a standard deviation of {float(deviation.sqrt()):.2f}",
    ]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1_000_000, help="K")
    parser.add_argument("--features", type=int, default=256, help="D")
    parser.add_argument("--rank", type=int, default=10, help="R")
    parser.add_argument("--samples", type=int, default=64, help="S")
    parser.add_argument("--examples", type=int, default=512, help="that both must agree on")
    parser.add_argument("--batch", type=int, default=32, help="examples of one timed call")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each, in turns")
    parser.add_argument("--noise-init", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1, help="of rows, features and noise; the index was chosen on 0")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rows, lines = measure(options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    sizes = f"K = {options.classes:,}, D = {options.features}, R = {options.rank}, S = {options.samples}"
    text = markdown_table(HEADER, [row.cells() for row in rows], left=2)
    text += "\n\n" + "\n".join(f"- {line}" for line in lines)
    text += f"\n\n{sizes}, seed {options.seed}, {peak:.1f} GB at the peak, on {machine(options.threads)}."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "retrieved.py"))
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
