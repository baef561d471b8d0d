"""The five walks of a new user, by the commands that the README prints: swap a head, train, audit, export, serve.

The Python block of "Your model" runs with the other blocks of the pages (test_docs.py). Here are the commands of "Your
data", in their order, in a directory with the files that they name.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.slow
README = (Path(__file__).parents[2] / "README.md").read_text()
CLASSES = ("cat", "dog", "fox")


def commands() -> dict[str, list[str]]:
    """The commands of "Your data" by their second word, without comments."""
    (block,) = re.findall(r"^## Your data\n\n```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return {line[1] if line[0] == "hetxl" else line[0]: line for line in lines}


def write_image(path: Path, shade: int, generator: np.random.Generator) -> None:
    pixels = np.clip(generator.normal(80 + 60 * shade, 30, (48, 64, 3)), 0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_published_weights(hub: Path) -> None:
    """A copy of the hub's cache with weights for the backbone that the README names, random ones."""
    import timm

    name = timm.get_pretrained_cfg("resnet18").hf_hub_id
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    save_file(timm.create_model("resnet18").state_dict(), folder / "snapshots" / "1" / "model.safetensors")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A directory with the user's files."""
    home = tmp_path_factory.mktemp("home")
    generator = np.random.default_rng(0)
    for shade, name in enumerate(CLASSES):
        for number in range(5):
            write_image(home / "photos" / name / f"{number}.jpg", shade, generator)
        write_image(home / "new_photos" / f"{name}.jpg", shade, generator)
    write_image(home / "photo.jpg", 1, generator)
    centres, classes = generator.normal(size=(4, 8)), generator.integers(4, size=400)
    labels = np.where(generator.random(400) < 0.1, classes ^ 1, classes)
    np.savez(home / "data.npz", features=(centres[classes] + 0.3 * generator.normal(size=(400, 8))), labels=labels)
    np.save(home / "wrong.npy", np.flatnonzero(labels != classes))
    write_published_weights(home / "hub")
    return home


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def walk(home: Path, name: str) -> str:
    """Run one of the commands as it is printed and return what it prints."""
    done = subprocess.run(commands()[name], cwd=home, env=environment(home), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    walk(home, "train")
    return home


def test_every_command_has_its_walk():
    assert list(commands()) == ["compare", "train", "predict", "audit", "export", "serve", "curl"]


def test_compare_reports_every_head(home: Path):
    text = walk(home, "compare")
    assert "HET-XL" in text
    assert "report.html" in text


def test_predict_names_the_class_of_every_new_photo(trained: Path):
    walk(trained, "predict")
    with open(trained / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(CLASSES)
    assert all(set(row.values()) & set(CLASSES) for row in rows)


def test_audit_ranks_wrong_labels_first(home: Path):
    walk(home, "audit")
    with open(home / "audit" / "audit.csv", newline="") as file:
        first = [int(row["row"]) for row in csv.DictReader(file)][:20]
    assert len(set(first) & set(np.load(home / "wrong.npy").tolist())) >= 15
    assert (home / "audit" / "audit.html").exists()


def test_export_writes_a_model_that_onnxruntime_reads(trained: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    walk(trained, "export")
    (path,) = (path for path in trained.rglob("*.onnx") if "preprocess" not in path.name)
    assert "probs" in [output.name for output in onnxruntime.InferenceSession(path).get_outputs()]


def test_serve_answers_the_printed_request(trained: Path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(commands()["serve"], cwd=trained, env=environment(trained), **quiet)
    try:
        _, url, _, photo = commands()["curl"]
        request = urllib.request.Request(f"http://{url}", data=(trained / photo.removeprefix("@")).read_bytes())
        deadline, answer = time.monotonic() + 120, None
        while answer is None and server.poll() is None and time.monotonic() < deadline:
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
            except OSError:  # it does not listen yet
                time.sleep(0.5)
        assert answer is not None
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert set(CLASSES) & set(json.dumps(answer).replace('"', " ").split())
