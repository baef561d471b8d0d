"""Compare the speed of the engine in this checkout with that in another one, step by step.

Each checkout has a worker process with its own package and the steps of this directory, which use only public calls.
The two take turns with one thread each, and time is processor time, so other load affects both alike. The result is
the median of the ratios of single rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _cases import Case, prepare
from _measures import TOP_K, prepare_top_k
from _meter import FULL, QUICK, Sizes

HERE = Path(__file__).parent


def timed_steps(sizes: Sizes) -> dict[str, dict[str, Case | None]]:
    """Return the steps of this package behind each measure that has a time, by their names; None for the top classes
    of a trained head."""
    step = Case("hetxl", sizes.small_batch, sizes.D, sizes.K, sizes.S)
    train = Case("hetxl", sizes.image_batch, 2048, sizes.K, sizes.S, task="train", pixels=sizes.pixels)
    growth = Case("hetxl", sizes.growth_batch, sizes.growth_features, 0, sizes.growth_samples)
    return {
        "softmax": {"HET-XL softmax, loss + backward": step},
        "sigmoid": {"HET-XL sigmoid, loss + backward": replace(step, link="sigmoid")},
        "predict": {"HET-XL softmax, predict": replace(step, task="predict")},
        "one-sample": {"HET-XL softmax, loss + backward, S = 1": replace(step, batch=sizes.batch, samples=1)},
        "training-step": {"ResNet152 training step": train},
        "het": {"HET softmax, loss + backward": replace(step, head="het")},
        "top-k": {f"predict(top_k={TOP_K}) of a trained HET-XL head": None},
        "growth": {f"HET-XL, K = {count:,}": replace(growth, classes=count) for count in sizes.growth_classes},
    }


class Worker:
    """A process that runs steps with the package of a checkout; use it as a context."""

    def __init__(self, checkout: Path):
        package = checkout.resolve() / "src"
        if not (package / "hetxl").is_dir():
            raise ValueError(f"--against must be a checkout of this repository, found {checkout}: no src/hetxl in it")
        paths = filter(None, (str(package), str(HERE), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        if not Path(self._ask({})).is_relative_to(package):
            raise RuntimeError(f"the package of {checkout} was not imported: another one comes first")

    def prepare(self, case: Case | None, sizes: Sizes) -> None:
        """Build the tensors of a step, and free those of the last one."""
        self._ask({"quick": sizes is QUICK, "case": None if case is None else asdict(case)})

    def seconds(self) -> float:
        """Run the step; return its processor time."""
        return self._ask({"step": True})

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker ended with exit code {self._process.wait()}; its output above says why")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def compare(checkout: Path, sizes: Sizes, chosen: Sequence[str], rounds: int) -> Iterator[tuple[str, float, int]]:
    """Yield for each timed step its name, the ratio of its time here to that in the checkout, and the rounds counted.

    The first round is a warm-up and does not count. At least three rounds run; no other starts that would end after
    `sizes.limit` seconds.
    """
    with Worker(HERE.parent) as new, Worker(checkout) as old:
        for name, case in (
            item for key, steps in timed_steps(sizes).items() if key in chosen for item in steps.items()
        ):
            for worker in (new, old):
                worker.prepare(case, sizes)
            ratios = list(_ratios(new.seconds, old.seconds, rounds, sizes.limit))
            yield name, statistics.median(ratios), len(ratios)


def _ratios(
    new: Callable[[], float], old: Callable[[], float], rounds: int, limit: float, least: int = 3
) -> Iterator[float]:
    """Yield the ratio of each round; the order of the two alternates."""
    new()
    old()
    begin = time.perf_counter()
    for number in range(rounds):
        if number % 2:
            below, above = old(), new()
        else:
            above, below = new(), old()
        yield above / below
        spent = time.perf_counter() - begin
        if number + 1 >= least and spent + spent / (number + 1) > limit:
            return


def serve() -> None:
    """Answer the requests of a `Worker`, one line of JSON each: prepare a step, run it, or name the package."""
    torch.set_num_threads(1)
    step: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "step" in request:
            start = time.process_time()
            step()
            answer = time.process_time() - start
        elif "case" in request:
            step = lambda: None  # noqa: E731, frees the memory of the last step before building the next
            step = _build(request["case"], QUICK if request["quick"] else FULL)
        else:
            import hetxl

            answer = hetxl.__file__
        print(json.dumps(answer), flush=True)


def _build(case: dict[str, Any] | None, sizes: Sizes) -> Callable[[], object]:
    if case is not None:
        return prepare(Case(**case))
    predict, *_ = prepare_top_k(sizes)
    return lambda: predict(TOP_K)


if __name__ == "__main__":
    serve()
