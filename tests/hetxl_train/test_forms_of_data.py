"""The same images as files, in shards and in a table train to the same weights, also when the run is killed."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file

from hetxl._files import read_json

COUNT, CLASSES = 240, 6
OPTIONS = {"image_size": 16, "width": 8, "depth": 1, "features": 16, "rank": 2, "steps": 60, "batch_size": 32}
OPTIONS |= {"checkpoint_every": 10, "evaluate_every": 30, "eval_samples": 8, "workers": 2, "device": "cpu"}


def write_forms(folder):
    rng, rows = np.random.default_rng(0), []
    for number in range(COUNT):
        label = number * CLASSES // COUNT
        pixels = rng.integers(0, 120, (20, 20, 3), dtype=np.uint8) + np.uint8(20 * label)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "png")
        path = folder / "folder" / f"class{label}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())
        rows.append((f"{number:04d}", f"class{label}", stream.getvalue()))
    for shard in range(4):
        with tarfile.open(folder / f"images-{shard:03d}.tar", "w") as archive:
            for key, label, content in rows[shard * COUNT // 4 : (shard + 1) * COUNT // 4]:
                for extension, member in (("png", content), ("cls", label.encode())):
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(member)
                    archive.addfile(info, io.BytesIO(member))
    table = pa.table({"image": [row[2] for row in rows], "label": [row[1] for row in rows]})
    pq.write_table(table, folder / "images.parquet", row_group_size=50)
    return {"shards": folder / "images-{000..003}.tar", "parquet": folder / "images.parquet"}


def start(data, out, cache):
    flags = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "hetxl_train.cli", "train", str(data), *flags, "--out", str(out)]
    return subprocess.Popen(command, env={**os.environ, "HETXL_CACHE": str(cache)}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_runs_on_shards_and_tables_equal_the_run_on_files(tmp_path):
    forms, cache = write_forms(tmp_path), tmp_path / "cache"
    assert start(tmp_path / "folder", tmp_path / "whole", cache).wait() == 0
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    nll = read_json(tmp_path / "whole" / "result.json")["metrics"]["test"]["nll"]
    for name, data in forms.items():
        out = tmp_path / name
        process = start(data, out, cache)
        while not list(out.glob("checkpoints/step-*20")) and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "result.json").exists()
        assert start(data, out, cache).wait() == 0
        weights = load_file(out / "model.safetensors")
        assert all(weights[key].equal(value) for key, value in expected.items())
        assert read_json(out / "result.json")["metrics"]["test"]["nll"] == nll
