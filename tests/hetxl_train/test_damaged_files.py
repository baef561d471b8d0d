"""Damaged files of every format that is read: the outcome is the same content or an error that names the file.

Each format is changed at random: its bytes, and where it holds JSON, single values with new checksums. A few
changes run always, `MUTATIONS` of each format among the slow tests, others by HETXL_FUZZ_SEED; hypothesis shrinks what
fails. Memory grows by less than `MEMORY`.
"""

import json
import resource
import shutil
import warnings
import zipfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import strategies as st

import hetxl
from hetxl._files import read_json, write_checked
from hetxl._tensors import read_tensors, write_tensors
from hetxl.integrations.export.head_file import KEY, load_head, save_head
from hetxl.integrations.flax import read_params
from hetxl.metrics import Records
from hetxl_train.calibration import calibrate_run
from hetxl_train.checkpoint import Checkpoint, Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_dataset
from hetxl_train.data.label_noise import LabelNoise
from hetxl_train.prediction import Predictor
from hetxl_train.report.card import model_card
from hetxl_train.report.html import report_html
from hetxl_train.report.read import read_run
from hetxl_train.runs import load_run, open_run
from support.damage import BYTE_CHANGES, ERRORS, VALUE_CHANGES, changed_bytes, changed_values, for_all
from support.pairs import image_shards
from support.training import QUIET, write_images

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


def arrow(directory, write=pyarrow.ipc.new_file):
    table = pyarrow.table({"features": list(FEATURES), "label": [f"class {label}" for label in LABELS]})
    with write(directory / "a.arrow", table.schema) as file:
        file.write_table(table)
    return directory / "a.arrow", opened


def arrow_stream(directory):
    return arrow(directory, pyarrow.ipc.new_stream)


def jsonl(directory):
    write_images(directory, each=3)
    lines = [{"image": f"{name}/{row:03d}.png", "label": name} for name in ("blue", "red") for row in range(3)]
    (directory / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 5))
    return directory / "a.jsonl", opened


def tar(directory):
    image_shards(directory, each=6)
    return directory / "tars" / "train-0.tar", opened


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
    shapes = {name: (5, 3) if name.startswith("top_") else (5,) for name in Records.TYPES}
    Records(**{name: np.ones(shape) for name, shape in shapes.items()}).save(directory / "a.safetensors")
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
    npz, npz_compressed, npy, safetensors, parquet, arrow, arrow_stream, csv, jsonl, tar, toml, head_file, tensors,
    records, label_noise, flax, json_file, checkpoint_state,
)  # fmt: skip
CHECKED = (head_file, tensors, records, checkpoint_state)
"""Formats with a checksum: what is read of a changed file is an error or the same."""

MEMORY = 400 * 2**20
"""Bytes by which reading damaged files may raise the peak of memory."""


def same(first, second):
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def read_or_refused(read, expected=None):
    """Read, or fail in one line; with `expected`, whatever is read is that."""
    try:
        actual = read()
    except ERRORS as error:
        assert str(error)  # noqa: PT017, one of two right outcomes
        assert "\n" not in str(error)  # noqa: PT017
    else:
        if expected is not None:
            assert len(actual) == len(expected)
            assert all(map(same, actual, expected))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_format(make, directory, examples):
    path, read = make(directory)
    content, original, before = path.read_bytes(), read(path), peak()
    expected = columns_of(original) if make in CHECKED else None

    def check(changes):
        path.write_bytes(changed_bytes(content, changes))
        read_or_refused(lambda: columns_of(read(path)), expected)

    for_all(BYTE_CHANGES, examples, check)
    assert peak() - before < MEMORY


def columns_of(content):
    """What can be compared one by one."""
    return [getattr(content, name) for name in Records.TYPES] if isinstance(content, Records) else content


def forged_head(directory):
    """A head file whose configuration was changed by someone who knows the checksum."""
    path, read = head_file(directory)
    stored = read_tensors(path, KEY)

    def forge(changes):
        write_tensors(path, stored.tensors, changed_values(stored.about, changes), KEY)

    return forge, lambda: read(path)


def forged_checkpoint(directory):
    """A checkpoint whose state was changed by someone who knows the checksum."""
    path, read = checkpoint_state(directory)
    state = json.loads(path.read_text())
    state.pop("checksum")

    def forge(changes):
        write_checked(path, changed_values(state, changes))

    return forge, lambda: read(path)


def check_forged(make, directory, examples):
    forge, read = make(directory)

    def check(changes):
        forge(changes)
        read_or_refused(read)

    for_all(VALUE_CHANGES, examples, check)


READERS = {
    "config.json": ("predictions", "report", "best", "card"),
    "model.json": ("predictions", "card"),
    "result.json": ("report", "card"),
    "curves.json": ("report", "card"),
    "confusions.json": ("report", "card"),
    "examples.json": ("report", "card"),
    "calibration.json": ("predictions", "card"),
    "log.jsonl": ("report",),
    "model.safetensors": ("predictions",),
    "records/test.safetensors": ("comparison",),
    "checkpoints/best.json": ("best",),
    "checkpoints/step-00000004/state.json": ("best",),
    "checkpoints/step-00000004/tensors.safetensors": ("best",),
}
"""Files of a run, and what reads each."""


@pytest.fixture(scope="module")
def calibrated(finished, tmp_path_factory):
    """A copy of the finished run with everything that a run can have."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("calibrated") / "run")
    calibrate_run(run, coverage=0.8, risk=0.5)
    return run


def readers_of(run, whole):
    """What uses a run: every function returns what it read, or raises an error that says what is wrong."""
    features = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    other = read_run(whole)
    other = replace(other, config={}, result=other.result | {"label": "other"})

    def predictions():
        predictor = Predictor(run, coverage=0.8, console=QUIET)
        return predictor.records(features, np.arange(2), ["a", "b"])

    pages: dict[str, str] = {}

    def report(*others):
        damaged = read_run(run)
        content = repr(damaged)
        if others or content not in pages:  # drawn once for the same content
            pages[content] = report_html([damaged, *others], created=datetime(2026, 1, 1))
        if damaged.problems:
            raise ValueError(f"the page says {damaged.problems[0]}")
        return pages[content]

    def best():
        checkpoint, refused = open_run(run).checkpoints.best()
        if refused:
            raise ValueError(refused[0])
        return checkpoint.step, checkpoint.state, [value.tolist() for value in checkpoint.tensors.values()]

    functions = {"predictions": predictions, "report": report, "best": best}
    return functions | {"comparison": lambda: report(other), "card": lambda: model_card(run)}


def check_run(calibrated, directory, name, examples):
    """Use a run with a damaged file: every outcome is that of the whole run, or an error that says what is wrong."""
    run = shutil.copytree(calibrated, directory / "run")
    content, readers = (run / name).read_bytes(), readers_of(run, calibrated)
    expected = {reader: readers[reader]() for reader in READERS[name]}

    def check(changes):
        by_bytes, by_values = changes
        damaged = changed_bytes(content, by_bytes)
        if name.endswith(".json") and by_values:
            damaged = json.dumps(changed_values(json.loads(content), by_values)).encode()
        (run / name).write_bytes(damaged)
        for reader, whole in expected.items():
            read_or_refused(readers[reader], whole)

    for_all(st.tuples(BYTE_CHANGES, st.one_of(st.just([]), VALUE_CHANGES)), examples, check)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "cache"))


def name_of(make):
    return make if isinstance(make, str) else make.__name__


@pytest.mark.parametrize("make", FORMATS, ids=name_of)
def test_damaged_files_are_read_or_refused(make, tmp_path):
    check_format(make, tmp_path, ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize("make", FORMATS, ids=name_of)
def test_many_damaged_files_are_read_or_refused(make, tmp_path):
    check_format(make, tmp_path, MUTATIONS)


@pytest.mark.parametrize("make", [forged_head, forged_checkpoint], ids=name_of)
def test_forged_files_are_read_or_refused(make, tmp_path):
    check_forged(make, tmp_path, ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize("make", [forged_head, forged_checkpoint], ids=name_of)
def test_many_forged_files_are_read_or_refused(make, tmp_path):
    check_forged(make, tmp_path, MUTATIONS)


@pytest.mark.parametrize("name", READERS)
def test_damaged_run_directories_are_read_or_refused(calibrated, tmp_path, name):
    check_run(calibrated, tmp_path, name, ALWAYS // 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_run_directories_are_read_or_refused(calibrated, tmp_path, name):
    check_run(calibrated, tmp_path, name, MUTATIONS)


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
    about = read_json(run / "model.json")
    write_checked(run / "model.json", about | {"input": about["input"] | spec})
    with pytest.raises(ValueError, match=r"model\.json cannot be read") as raised:
        load_run(run)
    assert "\n" not in str(raised.value)


def test_parameters_that_hold_themselves_are_refused():
    params: dict = {"W": FEATURES}
    params["again"] = params
    with pytest.raises(ValueError, match="nested more than 100 deep, or contains itself"):
        read_params(params)


# ---- labels are never guessed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label,label\n" + "a,b\n" * ROWS, r"several columns called 'label'"),
        ("species\n" + "a\nb\n" * (ROWS // 2), r"the first line, 'species', is not a label of another row"),
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
