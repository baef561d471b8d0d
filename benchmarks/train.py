"""Compare the speed of `hetxl train` with that of a bare PyTorch loop with the same head.

    python benchmarks/train.py [--quick] [--write docs/benchmarks.md]

200,000 rows of 384 features and 20,000 classes, in a .npz file that is mapped. Both loops train one head with AdamW on
batches of the same size; that of `hetxl train` also orders and reads the data, schedules the learning rate, clips,
seeds every draw, writes a log and, at its end, a checkpoint. A round is a tenth of an epoch, 63 steps, as between the
checkpoints of such a run. The two take turns.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _meter import interleaved_medians, machine
from _report import HEADER, Bar, Row, markdown_table, replace_between

import hetxl
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.distributed import World
from hetxl_train.log import Log
from hetxl_train.loop import Trainer
from hetxl_train.tasks.classification import ClassificationTask

SHARE = 0.9  # least share of the bare loop's speed


def measure(folder: Path, rows: int, features: int, classes: int, steps: int, rounds: int) -> Row:
    """Measure the speed of the loop of `hetxl train` relative to the bare loop's."""
    generator = np.random.default_rng(0)
    np.savez(
        folder / "data.npz",
        features=generator.standard_normal((rows, features), dtype=np.float32),
        labels=np.concatenate([np.arange(classes), generator.integers(0, classes, rows - classes)]),
    )
    dataset = open_dataset(folder / "data.npz")
    config = TrainConfig(head="het-xl", steps=steps, evaluate_every=steps, temperature="1.0", device="cpu")
    number = iter(range(10**6))

    def ours() -> None:
        run_dir = folder / f"run{next(number)}"
        checkpoints, console = Checkpoints(run_dir / "checkpoints"), Console(quiet=True)
        task = ClassificationTask(config, dataset, World(torch.device("cpu")), console, run_dir)
        trainer = Trainer(task, checkpoints, console, UnreadableExamples())
        log = Log(run_dir / "log.jsonl")
        trainer.train(log, lambda: {"nll": 0.0})
        log.close()

    everything = torch.from_numpy(np.load(folder / "data.npz")["features"])
    labels = torch.from_numpy(np.load(folder / "data.npz")["labels"])

    def bare() -> None:
        torch.manual_seed(0)
        head = hetxl.HetXLHead(features, classes, train_samples=config.train_samples)
        optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
        order = torch.randperm(rows)
        for step in range(steps):
            batch = order[step * config.batch_size : (step + 1) * config.batch_size]
            loss = head(everything[batch], labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    seconds = interleaved_medians({"ours": ours, "bare": bare}, rounds)
    name = f"hetxl train, {rows:,} × {features} features, K = {classes:,}, B = {config.batch_size}, S = "
    name += f"{config.train_samples}: speed over a bare loop's"
    detail = f"{steps / seconds['ours']:.2f} against {steps / seconds['bare']:.2f} steps/s"
    return Row(name, seconds["bare"] / seconds["ours"], Bar(SHARE, at_least=True), detail)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small sizes; the bar cannot be missed")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sizes = (2000, 16, 50, 4, 1) if options.quick else (200_000, 384, 20_000, 63, 2)
        row = measure(Path(folder), *sizes)
    spent = time.perf_counter() - begin
    text = markdown_table(HEADER, [row.cells()], left=2)
    text += f"\n\nOn {machine(torch.get_num_threads())}; {spent:.0f} s."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "train.py"))
    return int(row.verdict == "fail" and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
