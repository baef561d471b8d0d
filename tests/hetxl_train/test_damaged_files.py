"""Damaged files of every format that is read: the outcome is the same content or an error that names the file.

Each format is mutated at random: flipped bits, cut ends, blocks that are removed, repeated or overwritten. A few
mutations run always, `MUTATIONS` of each format among the slow tests, others by HETXL_FUZZ_SEED; a failure prints the
seed of its mutation.
"""

import json
import os
import random
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import hetxl
from hetxl._files import read_json
from hetxl._tensors import read_tensors, write_tensors
from hetxl.integrations.export.head_file import load_head, save_head
from hetxl.integrations.flax import read_params
from hetxl.metrics import Records
from hetxl_train.checkpoint import Checkpoint, Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_dataset
from hetxl_train.data.label_noise import LabelNoise
from hetxl_train.runs import load_run
from support.training import write_images

MUTATIONS, ALWAYS = 2000, 40
ROWS = 60
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(ROWS, 4)).astype(np.float32), RNG.integers(0, 3, ROWS)


def opened(path: Path, **options):
    """All that a run reads of a dataset."""
    dataset = open_dataset(str(path), **options)
    splits = dataset.splits.values()
    return [(split.fetch(np.arange(len(split))).inputs, split.labels.take(np.arange(len(split)))) for split in splits]


def npz(directory):
    np.savez(directory / "a.npz", features=FEATURES, labels=LABELS)
    return directory / "a.npz", opened


def npz_compressed(directory):
    np.savez_compressed(directory / "a.npz", features=FEATURES, labels=LABELS)
    return directory / "a.npz", opened


def npy(directory):
    np.save(directory / "y.npy", LABELS)
    np.save(directory / "a.npy", FEATURES)
    return directory / "a.npy", lambda path: opened(path, labels=str(path.with_name("y.npy")))


def safetensors(directory):
    tensors = {"features": torch.from_numpy(FEATURES), "labels": torch.from_numpy(LABELS)}
    write_tensors(directory / "a.safetensors", tensors)
    return directory / "a.safetensors", opened


def parquet(directory):
    columns = {"features": list(FEATURES), "label": [f"class {label}" for label in LABELS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "a.parquet")
    return directory / "a.parquet", opened


def csv(directory):
    np.save(directory / "a.npy", FEATURES)
    (directory / "y.csv").write_text("label\n" + "".join(f"class {label}\n" for label in LABELS))
    return directory / "y.csv", lambda path: opened(path.with_name("a.npy"), labels=str(path))


def toml(directory):
    path = directory / "a.toml"
    path.write_text('[data]\ndata = "synthetic"\n[head]\nhead = "het-xl"\nrank = 7\n[training]\nsteps = 30\n')
    return path, lambda path: TrainConfig(**TrainConfig.read_toml(path))


def head_file(directory):
    save_head(hetxl.HetXLHead(5, 7, rank=2), directory / "a.safetensors")
    return directory / "a.safetensors", lambda path: list(load_head(path).state_dict().values())


def tensors(directory):
    write_tensors(directory / "a.safetensors", {"a": torch.randn(5, 4), "b": torch.arange(3)}, {"about": "x"})
    return directory / "a.safetensors", lambda path: list(read_tensors(path).tensors.values())


def records(directory):
    Records.empty(3).save(directory / "a.safetensors")
    return directory / "a.safetensors", Records.load


def label_noise(directory):
    rows = np.arange(5)
    LabelNoise(rows, rows % 3, (rows + 1) % 3, "symmetric", 0.1, 0).save(directory / "a.npz")
    return directory / "a.npz", LabelNoise.load


def flax(directory):
    np.savez(directory / "a.npz", W=FEATURES[:4], b=FEATURES[0])
    return directory / "a.npz", read_params


def json_file(directory):
    (directory / "a.json").write_text(json.dumps({"a": [1, 2.5, "x", None, {"b": [[[]]]}], "c": 1e300}))
    return directory / "a.json", lambda path: read_json(path, dict)


def checkpoint_state(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(Checkpoint(3, {"weight": torch.randn(4)}, {"progress": {"step": 3}}))
    return directory / "step-00000003" / "state.json", lambda _: [checkpoints.load(3).state]


FORMATS = (
    npz, npz_compressed, npy, safetensors, parquet, csv, toml, head_file, tensors, records, label_noise, flax,
    json_file, checkpoint_state,
)  # fmt: skip
CHECKED = (head_file, tensors, checkpoint_state)
"""Formats with a checksum: what is read of a changed file is an error or the same."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with one to three changes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        position, length = draw.randrange(len(changed) + 1), min(draw.choice((1, 1, 4, 16, 64)), len(changed))
        kind = draw.randrange(6)
        if kind == 0 and position < len(changed):
            changed[position] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[position:]
        elif kind == 2:
            del changed[position : position + length]
        elif kind == 3:
            changed[position:position] = changed[:length]
        elif kind == 4:
            changed[position : position + length] = draw.randbytes(length)
        else:
            changed[position : position + 1] = draw.choice(
                (b"\xff" * 8, b"\0" * 8, b"-1", b"9" * 30, b"[" * 2000, b"1e999")
            )
        if not changed:
            break
    return bytes(changed)


def same(first, second):
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def check(make, directory, seeds):
    """Mutate a file and read it; return what went wrong, with the seeds."""
    path, read = make(directory)
    content = path.read_bytes()
    original, wrong = read(path), []
    for seed in seeds:
        damaged = mutated(content, random.Random(seed))
        path.write_bytes(damaged)
        try:
            actual = read(path)
        except (ValueError, OSError, TypeError) as error:
            if not str(error):
                wrong.append((seed, repr(error)))
        except Exception as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"))
        else:
            if make in CHECKED and not all(map(same, actual, original)):
                wrong.append((seed, "read as something else"))
    return wrong


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__)
def test_damaged_files_are_read_or_refused(make, tmp_path):
    assert check(make, tmp_path, range(ALWAYS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__)
def test_many_damaged_files_are_read_or_refused(make, tmp_path):
    seed = int(os.environ.get("HETXL_FUZZ_SEED", "1000"))
    print(f"{make.__name__}: {MUTATIONS} mutations from seed {seed}")
    assert check(make, tmp_path, range(seed, seed + MUTATIONS)) == []


@pytest.mark.parametrize("name", ["config.json", "model.json", "model.safetensors", "log.jsonl"])
def test_damaged_run_directories_are_read_or_refused(finished, tmp_path, name):
    run = shutil.copytree(finished, tmp_path / "run")
    content, wrong = (run / name).read_bytes(), []
    for seed in range(ALWAYS // 2):
        (run / name).write_bytes(mutated(content, random.Random(seed)))
        try:
            load_run(run)
        except (ValueError, OSError, TypeError) as error:
            wrong += [(seed, repr(error))] if not str(error) else []
        except Exception as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"))
    assert wrong == []


def test_file_that_changes_while_it_is_in_use_is_an_error_that_names_it(tmp_path):
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=LABELS)
    split = open_dataset(str(tmp_path / "a.npz")).splits["train"]
    split.fetch(np.arange(3))
    with open(tmp_path / "a.npz", "r+b") as file:
        file.truncate(100)  # read through a map, the missing pages would end the process by SIGBUS
    with pytest.raises(OSError, match=r"a\.npz was changed while it was in use"):
        split.fetch(np.arange(3))


def header(shape: str, descr: str = "'<i8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header("(-3,)"),
        header("(1000000000000,)", "'<U0'"),
        header("(10000000000000000000000,)"),
        header("-" * 9000 + "1"),
        header("(1e999,)"),
        b"",
    ],
)
def test_forged_headers_are_refused_before_anything_is_allocated(tmp_path, content):
    np.save(tmp_path / "a.npy", FEATURES)
    (tmp_path / "y.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"y\.npy"):
        open_dataset(str(tmp_path / "a.npy"), labels=str(tmp_path / "y.npy"))


def test_array_that_is_stored_twice_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
            archive.writestr("labels.npy", archive.read("labels.npy"))
    with pytest.raises(ValueError, match=r"a\.npz holds labels twice"):
        open_dataset(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("spec", [{"kind": "audio"}, {"shape": []}, {"shape": [10**13]}, {"vocabulary": "x"}])
def test_model_of_impossible_inputs_is_one_line(finished, tmp_path, spec):
    run = shutil.copytree(finished, tmp_path / "run")
    about = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(about | {"input": about["input"] | spec}))
    with pytest.raises(ValueError, match=r"model\.json cannot be read") as raised:
        load_run(run)
    assert "\n" not in str(raised.value)


def test_parameters_that_hold_themselves_are_refused():
    params: dict = {"W": FEATURES}
    params["again"] = params
    with pytest.raises(ValueError, match="nested more than 100 deep, or holds itself"):
        read_params(params)


# ---- labels are never guessed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label,label\n" + "a,b\n" * ROWS, r"several columns called 'label'"),
        ("species\n" + "a\nb\n" * (ROWS // 2), r"the first line, 'species', is no label of another row"),
    ],
)
def test_label_files_that_could_mean_two_things_are_refused(tmp_path, text, message):
    np.save(tmp_path / "a.npy", FEATURES)
    (tmp_path / "y.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / "a.npy"), labels=str(tmp_path / "y.csv"))


def test_tables_with_two_columns_of_a_name_are_refused(tmp_path):
    columns = [pyarrow.array(list(FEATURES)), pyarrow.array(LABELS), pyarrow.array(LABELS)]
    table = pyarrow.Table.from_arrays(columns, names=["features", "label", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has several columns called 'label'"):
        open_dataset(str(tmp_path / "a.parquet"))


def test_links_to_the_directory_of_all_classes_are_left_out(tmp_path):
    write_images(tmp_path / "images")
    (tmp_path / "images" / "blue" / "loop").symlink_to("..")
    dataset = open_dataset(str(tmp_path / "images"))
    assert sum(map(len, dataset.splits.values())) == 12
    assert "left out links that lead back to a parent directory: 1" in dataset.notes
