"""`hetxl embed`: the vectors of data, what is trained on them, and the same bytes however they were computed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hetxl_train import embeddings
from hetxl_train.cli.commands import app
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_dataset
from hetxl_train.data.pairs import open_pairs
from hetxl_train.embed import embed
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support import sharded
from support.pairs import QUIET, image_folder, small_pairs
from support.small_encoder import write_encoder
from support.training import small, write_images

NETWORK = "timm:test_resnet"
OPTIONS = {"weights": "random", "image_size": 32, "workers": 0, "console": QUIET}
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "images", each=20)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    """A run on these images."""
    out = tmp_path_factory.mktemp("run") / "run"
    return train(small(data=str(images), backbone="cnn", width=8, depth=1, image_size=16, steps=2, out=str(out)),
                 console=QUIET)  # fmt: skip


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def embed_on_rank(rank: int, ranks: int, model: str, data: str, out: Path) -> None:
    """What a process of several does."""
    os.environ["WORLD_SIZE"] = str(ranks)
    embeddings.PIECE = 8
    embed(model, data, out, workers=0, console=QUIET, device="cpu")


def test_vectors_of_a_run_are_its_features_and_train_a_head(images, run, tmp_path):
    out = tmp_path / "vectors"
    result = RUNNER.invoke(app, ["embed", str(run.path), str(images), "--out", str(out), "--workers", "0"])
    assert result.exit_code == 0, result.output
    trained = load_run(run.path)
    before = open_dataset(str(images), transform=trained.spec.transform)
    after = open_dataset(str(out))
    assert list(after.class_names) == list(before.class_names)
    assert set(after.splits) == set(before.splits)
    for name, split in before.splits.items():
        rows = np.arange(len(split))
        with torch.no_grad():
            expected = trained.model.backbone(split.fetch(rows).inputs)
        torch.testing.assert_close(after.splits[name].fetch(rows).inputs, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(after.splits[name].labels.ids, split.labels.ids)
    head = train(
        TrainConfig(data=str(out), steps=2, batch_size=8, out=str(tmp_path / "head"), device="cpu"), console=QUIET
    )
    assert load_run(head.path).spec.shape == (trained.model.backbone.out_features,)


def test_an_interrupted_call_is_continued_to_the_same_bytes(images, run, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "PIECE", 8)
    straight = embed(str(run.path), str(images), tmp_path / "straight", workers=0, console=QUIET)
    write, written = embeddings._write_piece, []

    def interrupted(file, *arguments):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file)
        write(file, *arguments)

    with monkeypatch.context() as context:
        context.setattr(embeddings, "_write_piece", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embed(str(run.path), str(images), tmp_path / "stopped", workers=0, console=QUIET)
    assert len(written) == 2
    damaged = written.pop()  # a piece that cannot be read is computed again
    damaged.write_bytes(b"")
    intact = written[0]

    def noted(file, *arguments):
        assert file != intact
        write(file, *arguments)

    monkeypatch.setattr(embeddings, "_write_piece", noted)
    embed(str(run.path), str(images), tmp_path / "stopped", workers=0, console=QUIET)
    assert contents(tmp_path / "stopped") == contents(straight)
    monkeypatch.setattr(embeddings, "_write_piece", None)  # all is there
    embed(str(run.path), str(images), tmp_path / "stopped", workers=0, console=QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_write_the_bytes_of_one(images, run, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(embeddings, "PIECE", 8)
    embed(str(run.path), str(images), tmp_path / "one", workers=0, console=QUIET)
    sharded.run(embed_on_rank, ranks, tmp_path, str(run.path), str(images), tmp_path / "several")
    assert contents(tmp_path / "several") == contents(tmp_path / "one")


KILLED = """
import os, sys
from pathlib import Path
from hetxl_train import embeddings
from hetxl_train.embed import embed

embeddings.PIECE, calls, write = 8, [], embeddings._write_piece


def killing(*arguments):
    calls.append(0)
    if len(calls) == 2 and os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), 9)
    write(*arguments)


embeddings._write_piece = killing
embed(sys.argv[1], sys.argv[2], Path(sys.argv[3]), workers=0, device="cpu")
"""
"""Embeds data, and kills its only process, or that of rank 1, before its second piece is written."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_call_is_continued_to_the_same_bytes(images, run, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(embeddings, "PIECE", 8)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    embed(str(run.path), str(images), straight, workers=0, console=QUIET)
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    several = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    command = [sys.executable, *several, str(program), str(run.path), str(images), str(killed)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert process.returncode == (1 if several else -signal.SIGKILL), process.stderr[-3000:]
    assert not several or "Signal 9 (SIGKILL)" in process.stderr
    pieces = [path for path in killed.rglob("*") if path.is_file()]
    assert pieces
    if several:
        sharded.run(embed_on_rank, ranks, tmp_path, str(run.path), str(images), killed)
    else:
        embed(str(run.path), str(images), killed, workers=0, console=QUIET)
    assert contents(killed) == contents(straight)


def test_vectors_of_pairs_train_two_towers(tmp_path):
    shapes, words = image_folder(tmp_path / "shapes", each=8), tmp_path / "words"
    write_encoder(words)
    with_texts = embed(NETWORK, str(shapes), tmp_path / "kept", pairs=True, **OPTIONS)
    pairs = open_pairs(with_texts)
    before = open_pairs(shapes)
    assert pairs.text is None
    assert {name: split.captions() for name, split in pairs.splits.items()} == {
        name: split.captions() for name, split in before.splits.items()
    }
    both = embed(NETWORK, str(shapes), tmp_path / "both", pairs=True, text=f"hf:{words}", text_length=16, **OPTIONS)
    pairs = open_pairs(both)
    assert pairs.text.shape == (24,)
    assert pairs.splits["train"].captions() == before.splits["train"].captions()
    run = train(small_pairs(both, tmp_path / "run"), console=QUIET)
    towers = embed(str(run.path), str(both), tmp_path / "towers", pairs=True, workers=0, console=QUIET)
    assert np.load(towers / "images.npy").shape == np.load(towers / "texts.npy").shape == (48, 8)


def test_vectors_of_data_without_labels(tmp_path):
    shapes = image_folder(tmp_path / "shapes", each=2)
    out = embed(NETWORK, str(shapes), tmp_path / "out", labels=False, **OPTIONS)
    assert np.load(out / "features.npy").shape[0] == 12


def test_pairs_of_a_hub_dataset(tmp_path):
    image_folder(tmp_path / "shapes", each=8)
    paths = sorted((tmp_path / "shapes").glob("*.png"))
    columns = {
        "image": [str(path) for path in paths],
        "caption": [path.with_suffix(".txt").read_text() for path in paths],
    }
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": table.select(range(40)), "test": table.select(range(40, 48))}).save_to_disk(
        tmp_path / "hub"
    )
    pairs = open_pairs(f"hf:{tmp_path / 'hub'}")
    assert {name: len(split) for name, split in pairs.splits.items()} == {"train": 36, "validation": 4, "test": 8}
    assert pairs.splits["test"].caption(0) == columns["caption"][40].strip()
