"""Measure images per second: of the loader alone, of the model alone and of both, and of timm's own loader.

    python benchmarks/loader.py [--quick] [--write docs/benchmarks.md]

The images are JPEG files of 256 × 256 pixels in a directory of classes, the same in tar shards and in a parquet file.
Ours and timm's loader decode them in the same number of worker processes, with random crops to 224 × 224, flips and
normalisation, into float32 batches of the same size in memory. They take turns, and seconds are those of the processor,
workers included, so that what else the machine does counts little.
"""

import argparse
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _meter import interleaved_medians, machine, processor_seconds
from _report import HEADER, Bar, Row, markdown_table, replace_between
from PIL import Image

from hetxl_train.backbones import build_backbone
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import InputSpec, Split
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.loaders import Order, Parts, batches

SHARE = 0.9  # least share of timm's images per second
CLASSES = 10


def write_images(folder: Path, count: int, side: int) -> dict[str, Path]:
    """Write the same smooth images as files, in shards and in a table; return their paths."""
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        stream = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        name = f"class{number % CLASSES}"
        rows.append((f"{number:06d}", name, stream.getvalue()))
        path = folder / "folder" / name / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())
    with tarfile.open(folder / "a.tar", "w") as archive:
        for key, name, content in rows:
            for extension, member in (("jpg", content), ("cls", name.encode())):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(member)
                archive.addfile(info, io.BytesIO(member))
    pq.write_table(
        pa.table({"image": [row[2] for row in rows], "label": [row[1] for row in rows]}), folder / "a.parquet"
    )
    return {"image folder": folder / "folder", "tar shard": folder / "a.tar", "parquet": folder / "a.parquet"}


def our_loader(split: Split, batch: int, workers: int) -> Callable[[], int]:
    """Return a function that reads an epoch by the loader of `hetxl train` and counts the images."""
    steps = len(split) // batch

    def read() -> int:
        feed = batches(split, Order(len(split), 0), Parts(batch, 1), 0, steps, workers)
        return sum(len(fetched.rows) for fetched, _ in feed)

    return read


def timm_loader(folder: Path, batch: int, workers: int, size: int) -> Callable[[], int]:
    """Return the same with timm's loader, as its training script creates it for the CPU."""
    from timm.data import create_dataset, create_loader

    dataset: Any = create_dataset("", root=str(folder), is_training=True)
    loader: Any = create_loader(
        dataset, (3, size, size), batch, is_training=True, num_workers=workers, use_prefetcher=False,
        persistent_workers=False, color_jitter=0.0, interpolation="bilinear", pin_memory=False,
    )  # fmt: skip
    return lambda: sum(len(images) for images, _ in loader)


def model_step(batch: int, size: int) -> Callable[[torch.Tensor], None]:
    """Return a forward and backward step of a small network."""
    config = TrainConfig(backbone="cnn", width=8, depth=1)
    network = build_backbone(config, InputSpec("image", (3, size, size)))
    return lambda images: network(images).square().mean().backward()


def measure(folder: Path, count: int, side: int, size: int, batch: int, workers: int, rounds: int) -> list[Row]:
    """Measure all, taking turns."""
    places = write_images(folder, count, side)
    images = count // batch * batch
    options: dict[str, Any] = {"whole": True, "transform": ImageTransform(size), "cache": folder}
    splits = {name: open_dataset(path, **options).splits["test"] for name, path in places.items()}
    tasks: dict[str, Callable[[], object]] = {"timm": timm_loader(places["image folder"], batch, workers, size)}
    tasks |= {name: our_loader(split, batch, workers) for name, split in splits.items()}
    step, example = model_step(batch, size), torch.zeros(batch, 3, size, size)
    steps = max(1, count // batch // 4)  # steps of the model, which takes much longer
    tasks["model"] = lambda: [step(example) for _ in range(steps)]

    def both(split: Split) -> Callable[[], object]:
        feed = lambda: batches(split, Order(len(split), 0), Parts(batch, 1), 0, steps, workers)  # noqa: E731
        return lambda: [step(fetched.inputs) for fetched, _ in feed()]

    tasks |= {f"{name} and model": both(splits[name]) for name in ("image folder", "tar shard")}
    seconds = interleaved_medians(tasks, rounds, clock=processor_seconds)
    rate = {name: (steps * batch if "model" in name else images) / value for name, value in seconds.items()}
    bar, timm = Bar(SHARE, at_least=True), f"{rate['timm']:.0f} images per second of the processor"
    rows = [
        Row(
            f"loader alone, {name}: speed over timm's",
            rate[name] / rate["timm"],
            bar,
            f"{rate[name]:.0f} against {timm}",
        )
        for name in splits
    ]
    for name in ("image folder", "tar shard"):
        # A machine without a free core can reach at best the sum of the times.
        alone = 1 / (1 / rate[name] + 1 / rate["model"])
        together = rate[f"{name} and model"]
        detail = f"{together:.0f} images/s together; loader alone {rate[name]:.0f}, model alone {rate['model']:.0f}"
        rows.append(
            Row(
                f"loader and model, {name}: over one after the other",
                together / alone,
                Bar(SHARE, at_least=True),
                detail,
            )
        )
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few images; the bar cannot be missed")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of each loader")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sizes = (64, 64, 32, 16) if options.quick else (512, 256, 224, 64)
        rows = measure(Path(folder), *sizes, workers=options.workers, rounds=1 if options.quick else 3)
    spent = time.perf_counter() - begin
    text = markdown_table(HEADER, [row.cells() for row in rows], left=2)
    text += f"\n\nOn {machine(torch.get_num_threads())}, {options.workers} worker each; {spent:.0f} s."
    print(text)
    if options.write is not None:
        options.write.write_text(replace_between(options.write.read_text(), text, "loader.py"))
    return int(any(row.verdict == "fail" for row in rows) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
