"""Measure what a client of `hetxl serve` waits for, beside one prediction of as many examples as there are clients.

    python benchmarks/serve.py [--quick] [--write docs/benchmarks.md]

16 clients send 1,000 requests of one example each; the server predicts together what arrives together. The heads have
256 features and 256 samples. Rounds of requests and rounds of predictions of 16 examples, without a server, take turns;
the clients and the server share the machine.
"""

import argparse
import http.client
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from _meter import machine, seconds_of
from _report import HEADER, Bar, Row, markdown_table, replace_between

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.prediction import Predictor
from hetxl_train.serve import Answers
from hetxl_train.training import train

MOST = 3.0  # largest time of 19 of 20 requests, in predictions without a server


@dataclass(frozen=True)
class Load:
    """The requests to the server; the defaults are those of the page."""

    classes: int = 20_000
    features: int = 256
    samples: int = 256
    requests: int = 1000
    clients: int = 16
    rounds: int = 5


def measure(folder: Path, load: Load) -> Row:
    """Measure the requests; raise an error if one of them fails or the server answers each by itself."""
    data = f"synthetic:rows=2000,classes={load.classes},features={load.features}"
    options = {"eval_samples": load.samples, "steps": 1, "batch_size": 8, "train_samples": 2, "device": "cpu"}
    options |= {"test_examples": 8, "evaluation_examples": 8, "prior": 1.0}
    run = train(TrainConfig(data=data, out=str(folder / "run"), **options), console=Console(quiet=True)).path
    inputs = np.random.default_rng(0).standard_normal((load.requests, load.features), dtype=np.float32)
    answers, batch = Answers(Predictor(run, device="cpu")), torch.from_numpy(inputs[: load.clients])
    command = [sys.executable, "-m", "hetxl_train.cli", "serve", str(run), "--port", "0", "--device", "cpu"]
    seconds, alone = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            (address,) = re.findall(r"http://(\S+)", server.stdout.readline())
            with ThreadPoolExecutor(load.clients) as pool:
                for part in np.array_split(inputs, load.rounds):
                    alone += [seconds_of(lambda: answers(batch)) for _ in range(8)]
                    shares = [part[number :: load.clients] for number in range(load.clients)]
                    for times in pool.map(lambda share: client(address, share), shares):
                        seconds += times
            with urlopen(f"http://{address}/metrics") as response:
                (batches,) = re.findall(r"hetxl_batches_total (\d+)", response.read().decode())
        finally:
            server.terminate()
    if len(seconds) != load.requests or int(batches) > load.requests / 2:
        raise RuntimeError(f"{len(seconds)} answers in {batches} batches for {load.requests} requests")
    high, bare = np.quantile(seconds, 0.95), np.median(alone)
    return Row(
        f"{load.classes:,} classes, {load.clients} clients: 95 % quantile of requests over a prediction",
        float(high / bare),
        Bar(MOST),
        f"{1000 * high:.0f} against {1000 * bare:.0f} ms; median {1000 * np.median(seconds):.0f} ms, {batches} batches",
    )


def client(address: str, inputs: np.ndarray) -> list[float]:
    """Send a request for each row, one after the other; return their seconds. Any refusal is an error."""
    seconds = []
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        for row in inputs:
            body = json.dumps({"features": [row.tolist()]})
            seconds.append(seconds_of(lambda body=body: request(connection, body)))
    return seconds


def request(connection: http.client.HTTPConnection, body: str) -> None:
    """Send one request and read its answer."""
    connection.request("POST", "/predict", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200 or len(answer["predictions"]) != 1:
        raise RuntimeError(f"status {response.status}: {answer}")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few requests; the bar cannot be missed")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    loads = [Load(), Load(classes=100_000)]
    if options.quick:
        loads = [Load(classes=50, features=8, samples=8, requests=64, clients=4, rounds=2)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder, str(load.classes)), load) for load in loads]
    text = markdown_table(HEADER, [row.cells() for row in rows], left=2)
    text += f"\n\nOn {machine(torch.get_num_threads())}."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "serve.py"))
    return int(any(row.verdict == "fail" for row in rows) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
