"""Measure predictions of the top classes and of labels relative to DET's, and their distance from all classes.

    python benchmarks/top_classes.py [--quick] [--write docs/benchmarks.md] [--runs DIR] [--only pycode wide]

`pycode` and `words` are heads of 300 steps that `hetxl train` trains, with the default noise and with that of the
authors' start at τ = 0.3; `wide` and `million` are heads at the class centres of a made-up problem. Predictions by
HET-XL and by DET, over one classifier, take turns. With one thread the time is that of the processor, with two the
elapsed time.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from _measures import FIRST_LOGIT, TOP_K, Problem, total_variation
from _meter import interleaved_medians, machine, processor_seconds
from _report import HEADER, Bar, Row, markdown_table, replace_between
from torch import Tensor

from hetxl import DetHead, HetXLHead
from hetxl._checks import one_of
from hetxl.nn import Head
from hetxl_train.evaluate_runs import data_for
from hetxl_train.runs import load_run

STEPS, SAMPLES, NLL_SAMPLES = 300, 256, 64
OPTIONS = ("--head", "het-xl", "--rank", "50", "--train-samples", "4", "--eval-samples", "64", "--test-examples", "500")
LARGE_NOISE = ("--noise-init", "1", "--temperature", "0.3")
MEASURES = ("pycode", "words", "wide", "million")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a benchmark run: steps of training, test examples whose error is measured, rounds of a timing, and
    (classes, features, batch) of the two made-up heads."""

    steps: int = STEPS
    examples: int = 5000
    rounds: int = 7
    wide: tuple[int, int, int] = (21_843, 2048, 64)
    million: tuple[int, int, int] = (1_000_000, 256, 32)
    batch: int = 256


QUICK = Sizes(steps=5, examples=20, rounds=1, wide=(2000, 64, 8), million=(4000, 16, 8), batch=16)


def det_over(head: Head) -> DetHead:
    """Return a DET with the classifier and τ of a head."""
    temperature = float(head.temperature())
    det = DetHead(head.in_features, head.num_classes, temperature=temperature, classifier=head.classifier)
    return det.eval()


def trained(data: str, large_noise: bool, sizes: Sizes, runs: Path) -> tuple[Head, Tensor, Tensor]:
    """Train a head, or load an existing run; return it with features [n, D] and labels [n] of test examples."""
    run_dir = runs / (data + ("-large" if large_noise else ""))
    if not (run_dir / "result.json").exists():
        options = (*OPTIONS, *(LARGE_NOISE if large_noise else ()), "--steps", str(sizes.steps), "--out", str(run_dir))
        command = (sys.executable, "-m", "hetxl_train.cli", "train", data, *options)
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    run = load_run(run_dir)
    split = data_for(run).splits["test"]
    rows = np.sort(np.random.default_rng(0).permutation(len(split))[: sizes.examples])
    labels = split.labels.take(rows)
    assert isinstance(labels, Tensor)
    features = [run.model.backbone(part) for part in split.fetch(rows).inputs.split(500)]
    return run.model.head.eval(), torch.cat(features), labels


def over_det(name: str, bar: Bar, head: Head, step: Callable[[Head], object], sizes: Sizes) -> Row:
    """Compare the time of a step by a head with that by DET."""
    det, clock = det_over(head), processor_seconds if torch.get_num_threads() == 1 else time.perf_counter
    step(head)  # computes the cached values of W, which are reused
    seconds = interleaved_medians({"det": lambda: step(det), "head": lambda: step(head)}, sizes.rounds, clock=clock)
    detail = f"{1e3 * seconds['head']:.3g} ms against {1e3 * seconds['det']:.3g} ms"
    return Row(name, seconds["head"] / seconds["det"], bar, detail)


def top_k_row(name: str, bar: Bar, head: Head, features: Tensor, sizes: Sizes) -> Row:
    """Compare the time of the top classes."""
    what = f"predict(top_k={TOP_K}), S = {SAMPLES}, D = {head.in_features:,}, K = {head.num_classes:,}"
    name = f"{name}: {what}, B = {len(features)}: time over DET's"
    return over_det(name, bar, head, lambda some: some.predict(features, top_k=TOP_K, num_samples=SAMPLES), sizes)


def labels_row(name: str, head: Head, features: Tensor, labels: Tensor, sizes: Sizes) -> Row:
    """Compare the time of the NLL of labels."""
    parts = list(zip(features.split(sizes.batch), labels.unsqueeze(-1).split(sizes.batch), strict=True))

    def step(some: Head) -> None:
        for part, ids in parts:
            some.predict(part, classes=ids, num_samples=NLL_SAMPLES)

    name = f"{name}: NLL of {len(labels):,} labels, predict(classes=labels), S = {NLL_SAMPLES}: time over DET's"
    return over_det(name, Bar(3, 1.5), head, step, sizes)


def trained_rows(data: str, sizes: Sizes, runs: Path) -> Iterator[Row]:
    """Measure the heads of one dataset."""
    for large_noise in (False, True):
        head, features, labels = trained(data, large_noise, sizes, runs)
        name = data + (", large noise" if large_noise else "")
        if not large_noise:
            yield top_k_row(name, Bar(5, 2.5), head, features[: sizes.batch], sizes)
        if data == "pycode" and not large_noise:
            yield labels_row(name, head, features, labels, sizes)
        if torch.get_num_threads() == 1:  # it does not depend on the number of threads
            yield distance_row(name, head, features)


def distance_row(name: str, head: Head, features: Tensor) -> Row:
    """Compare the top classes with a prediction of all, by the same draws."""
    distances, whole = [], 0
    for part in features.split(64):
        top = head.predict(part, top_k=TOP_K, num_samples=SAMPLES)
        assert top.indices is not None
        assert top.left_out is not None
        distances.append(total_variation(top.probs, top.indices, head.predict(part, num_samples=SAMPLES).probs))
        whole += int((top.left_out == 0).sum())
    worst = torch.cat(distances)
    detail = f"median {float(worst.median()):.1e}; {whole / len(worst):.1%} sample all classes"
    name = f"{name}: total variation of predict(top_k={TOP_K}) from predict, worst of {len(worst):,} examples"
    return Row(name, float(worst.max()), Bar(1e-3, 1e-4, unit=""), detail)


def made_up_row(name: str, bar: Bar, shape: tuple[int, int, int], sizes: Sizes) -> Row:
    """Measure a head at the class centres, with the authors' initial noise."""
    classes, width, batch = shape
    torch.manual_seed(0)
    problem = Problem(classes + classes % 2, width)
    features, _, _ = problem.draw(batch)
    head = HetXLHead(width, classes, noise_init=1.0, temperature=1.0).eval()
    head.get_parameter("classifier.weight").copy_(problem.centres[:classes].mul_(FIRST_LOGIT / width))
    del problem
    return top_k_row(name, bar, head, features, sizes)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small sizes; no bar can be missed")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the trained runs here, and use those there")
    parser.add_argument("--only", nargs="+", default=MEASURES, metavar="NAME", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--examples", type=int, metavar="N", help="test examples of each trained head [5,000]")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.examples is not None:
        sizes = replace(sizes, examples=options.examples)
    for name in options.only:
        one_of("--only", name, MEASURES)
    texts, failed = [], False
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows = []
            for row in measured(options.only, sizes, options.runs or Path(folder)):
                rows.append(row)
                print(" | ".join(row.cells()), flush=True)
                failed |= row.verdict == "fail"
            texts.append(f"On {machine(threads)}:\n\n{markdown_table(HEADER, [row.cells() for row in rows], left=2)}")
    if options.write is not None:
        page = options.write.read_text()
        options.write.write_text(replace_between(page, "\n\n".join(texts), "top_classes.py"))
    return int(failed and not options.quick)


def measured(chosen: list[str], sizes: Sizes, runs: Path) -> Iterator[Row]:
    """Run the chosen measures, row by row."""
    for data in ("pycode", "words"):
        if data in chosen:
            yield from trained_rows(data, sizes, runs)
    if "wide" in chosen:
        yield made_up_row("made-up", Bar(2, 1.3), sizes.wide, sizes)
    if "million" in chosen:
        yield made_up_row("made-up", Bar(1.5, 1.1), sizes.million, sizes)


if __name__ == "__main__":
    sys.exit(main())
