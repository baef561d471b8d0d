"""Small pairs and configurations for the tests of contrastive learning."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from hetxl_train.config import ContrastiveConfig
from hetxl_train.console import Console
from hetxl_train.training import train

QUIET = Console(quiet=True)
COLOURS = ("red", "green", "blue")
SIZES = ("small", "large")


def vectors_file(
    path: Path, count: int = 80, size: int = 6, captions: bool | list[str] = False, **arrays: object
) -> Path:
    """A .npz file of pairs of vectors that are the same up to a rotation and a little noise."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((count, size)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((size, size)))[0]
    texts = (images @ turn + 0.1 * rng.standard_normal((count, size))).astype(np.float32)
    contents = {"images": images}
    names = captions if isinstance(captions, list) else [f"number {row}" for row in range(count)]
    contents |= {"captions": np.array(names)} if captions else {"texts": texts}
    np.savez(path, **(contents | arrays))
    return path


def image_folder(folder: Path, each: int = 4, size: int = 16, suffix: str = ".png") -> Path:
    """Images of a colour and a size of square, each with its caption beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for channel, colour in enumerate(COLOURS):
        for inside, name in zip((4, 10), SIZES, strict=True):
            for number in range(each):
                pixels = rng.integers(0, 60, (size, size, 3), dtype=np.uint8)
                pixels[:inside, :inside, channel] = 255
                Image.fromarray(pixels).save(folder / f"{colour}-{name}-{number}{suffix}")
                (folder / f"{colour}-{name}-{number}.txt").write_text(f"a {name} {colour} square number {number}\n")
    return folder


def image_shards(folder: Path, each: int = 12) -> str:
    """Tar shards of such images, with a class and a caption each: two to train on, one for each other split."""
    images = sorted(image_folder(folder / "files", each).glob("*.png"))
    (folder / "tars").mkdir()
    shares = {"train-0": images[::3], "train-1": images[1::3], "validation": images[2::6], "test": images[5::6]}
    for name, share in shares.items():
        with tarfile.open(folder / "tars" / f"{name}.tar", "w") as archive:
            for image in share:
                label = image.stem.rpartition("-")[0].encode()
                members = {".png": image.read_bytes(), ".cls": label, ".txt": image.with_suffix(".txt").read_bytes()}
                for suffix, content in members.items():
                    member = tarfile.TarInfo(f"{image.stem}{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return str(folder / "tars" / "*.tar")


def train_on_rank(folder: str, data: str, rank: int) -> dict[str, list[float]]:
    """Train on one of two processes; gives the losses of the log."""
    os.environ["WORLD_SIZE"] = "2"
    run = train(small_pairs(data, f"{folder}/run", log_every=1), console=QUIET)
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    return {"losses": [line["loss"] for line in lines if line["kind"] == "step"]}


def small_pairs(data: Path | str, out: Path | str | None = None, **options: object) -> ContrastiveConfig:
    """A configuration that trains in a second."""
    usual = {
        "data": str(data),
        "steps": 4,
        "batch_size": 16,
        "features": 8,
        "rank": 2,
        "buckets": 64,
        "embedding": 8,
        "text_width": 16,
        "image_size": 16,
        "workers": 0,
        "device": "cpu",
        "out": None if out is None else str(out),
    }
    return ContrastiveConfig(**(usual | options))
