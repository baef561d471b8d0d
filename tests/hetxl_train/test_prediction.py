"""Predictions in files: the same content in every format, written atomically."""

import csv
import json
import os
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch

from hetxl._files import read_json, write_checked, write_json
from hetxl_train.data import open_dataset
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.distributed import World
from hetxl_train.prediction import predict
from hetxl_train.runs import load_run, save_model, start_run
from hetxl_train.tasks.classification import ClassificationTask
from support.training import QUIET, Listening, small, write_images

NAMES = ["a, b", 'say "hi"', "two\nlines", "semi;colon\ttab", "世界", " spaces ", "'", "plain\r\nend"]
ROWS = 150


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    """A run whose class names are hard to write."""
    path = shutil.copytree(finished, tmp_path_factory.mktemp("predict") / "run")
    write_checked(path / "model.json", read_json(path / "model.json") | {"class_names": NAMES})
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / "inputs.npy"
    np.save(path, 3 * np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32))
    return str(path)


def predicted(run, inputs, out, **options):
    assert predict(run, inputs, out, device="cpu", console=QUIET, **options) == ROWS
    return out


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_records_are_the_heads_predictions(run, inputs, tmp_path):
    records = lines_of(predicted(run, inputs, tmp_path / "a.jsonl", top_k=3, method="deterministic"))
    trained = load_run(run)
    features = torch.from_numpy(np.load(inputs))
    expected = trained.model.head.predict(features, top_k=3, method="deterministic")
    assert [record["row"] for record in records] == list(range(ROWS))
    for row, record in enumerate(records):
        assert [name for name, _ in record["top"]] == [NAMES[label] for label in expected.indices[row]]
        np.testing.assert_allclose([p for _, p in record["top"]], expected.probs[row], atol=2e-6)
        assert record["entropy"] == pytest.approx(float(expected.entropy[row]), abs=1e-4)
        assert record["confused_with"] == record["top"][1][0]
        assert record["correlation"] == pytest.approx(float(expected.correlation[row, 0, 1]), abs=1e-3)
        assert record["source"] is None


def test_every_format_has_the_same_content(run, inputs, tmp_path):
    records = lines_of(predicted(run, inputs, tmp_path / "a.jsonl", top_k=4))
    with open(predicted(run, inputs, tmp_path / "a.csv", top_k=4), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(predicted(run, inputs, tmp_path / "a.parquet", top_k=4)).to_pylist()
    assert len(records) == len(rows) == len(table) == ROWS
    assert list(rows[0]) == list(table[0])
    for record, text, row in zip(records, rows, table, strict=True):
        flat = {key: value for key, value in record.items() if key != "top"}
        for rank, (name, p) in enumerate(record["top"], 1):
            flat |= {f"class_{rank}": name, f"probability_{rank}": p}
        assert row == flat
        assert text == {key: "" if value is None else str(value) for key, value in flat.items()}
    assert {record["top"][0][0] for record in records} > {NAMES[0]}
    assert {name for record in records for name, _ in record["top"]} == set(NAMES)


def test_the_same_seed_gives_the_same_file(run, inputs, tmp_path):
    files = [predicted(run, inputs, tmp_path / f"{n}.csv", seed=seed) for n, seed in enumerate((0, 0, 1))]
    first, same, other = (path.read_bytes() for path in files)
    assert first == same
    assert first != other


def test_top_k_is_at_most_all_classes(run, inputs, tmp_path):
    assert all(len(record["top"]) == 8 for record in lines_of(predicted(run, inputs, tmp_path / "a.jsonl", top_k=50)))
    alone = lines_of(predicted(run, inputs, tmp_path / "b.jsonl", top_k=1))
    assert all(len(record["top"]) == 1 for record in alone)
    assert alone[0]["confused_with"] is None
    assert alone[0]["correlation"] is None


def test_number_of_samples_changes_the_predictions(run, inputs, tmp_path):
    few = predicted(run, inputs, tmp_path / "a.csv", num_samples=2)
    many = predicted(run, inputs, tmp_path / "b.csv", num_samples=64)
    assert few.read_bytes() != many.read_bytes()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_no_file_after_an_error(run, inputs, tmp_path, suffix):
    out = tmp_path / f"a{suffix}"
    with pytest.raises(ValueError, match="num_samples"):
        predicted(run, inputs, out, num_samples=0)
    with pytest.raises(ValueError, match="method"):
        predicted(run, inputs, out, method="guess")
    assert os.listdir(tmp_path) == []
    out.write_text("old")
    with pytest.raises(ValueError, match="num_samples"):
        predicted(run, inputs, out, num_samples=0)
    assert out.read_text() == "old"
    assert os.listdir(tmp_path) == [out.name]


def test_invalid_input_raises(run, inputs, tmp_path):
    with pytest.raises(ValueError, match=r"--out must end with .csv, .jsonl, .parquet, found .*a.txt"):
        predicted(run, inputs, tmp_path / "a.txt")
    with pytest.raises(ValueError, match="top_k must be at least 1, found 0"):
        predicted(run, inputs, tmp_path / "a.csv", top_k=0)
    with pytest.raises(FileNotFoundError, match=r"missing\.npy"):
        predicted(run, str(tmp_path / "missing.npy"), tmp_path / "a.csv")
    np.save(tmp_path / "wide.npy", np.zeros((3, 5), dtype=np.float32))
    with pytest.raises(ValueError, match=r"has shape \[3, 5\], but the model takes \[n, 4\]"):
        predicted(run, str(tmp_path / "wide.npy"), tmp_path / "a.csv")
    with pytest.raises(ValueError, match="is not a run directory"):
        predicted(tmp_path, inputs, tmp_path / "a.csv")
    assert os.listdir(tmp_path) == ["wide.npy"]


@pytest.fixture
def images(tmp_path):
    """A run on images, not trained, and a folder of them: one broken, one with a name of another encoding."""
    root = write_images(tmp_path / "images")
    dataset = open_dataset(str(root), transform=ImageTransform(16))
    config = small(data=str(root), backbone="cnn", width=8, depth=1, features=4, image_size=16)
    run = start_run(config, tmp_path / "run")
    task = ClassificationTask(config, dataset, World(torch.device("cpu")), QUIET, run.path)
    write_json(run.path / "model.json", task.describe())
    save_model(run, task.model)
    (root / "red" / "000.png").rename(root / "red" / b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    (root / "blue" / "002.png").write_text("not an image")
    return run.path, root


def test_unreadable_images_are_left_out(images, tmp_path, capsys):
    run, root = images
    sources = {}
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert predict(run, str(root), tmp_path / name, device="cpu") == 11
        assert "1 of 12 inputs could not be read and are left out" in capsys.readouterr().err
    records = lines_of(tmp_path / "a.jsonl")
    sources["jsonl"] = [record["source"] for record in records]
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        sources["csv"] = [row["source"] for row in csv.DictReader(file)]
    sources["parquet"] = pyarrow.parquet.read_table(tmp_path / "a.parquet")["source"].to_pylist()
    assert sources["csv"] == sources["jsonl"] == sources["parquet"]
    assert str(root / "red" / "caf\\udce9.png") in sources["csv"]
    assert str(root / "blue" / "002.png") not in sources["csv"]
    assert [record["row"] for record in records] == [0, 1, *range(3, 12)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_file_without_readable_images_has_no_rows(images, tmp_path, suffix):
    run, root = images
    out = tmp_path / f"a{suffix}"
    assert predict(run, str(root / "blue" / "002.png"), out, device="cpu", console=QUIET, top_k=1) == 0
    if suffix == ".csv":
        columns = ["row", "source", "class_1", "probability_1", "entropy", "from_noise", "confused_with", "correlation"]
        assert out.read_text() == ",".join(columns) + "\n"
    elif suffix == ".jsonl":
        assert out.read_text() == ""
    else:
        assert pyarrow.parquet.read_table(out).num_rows == 0


@pytest.mark.parametrize("method", ["mc", "deterministic", "mean_field", "probit", "taylor"])
def test_largest_finite_features_give_finite_records(run, tmp_path, method):
    np.save(tmp_path / "x.npy", np.array([[1e20] * 4, [-1e30, 1, 2, 3], [3e38, -3e38, 3e38, 0]], dtype=np.float32))
    predict(run, str(tmp_path / "x.npy"), tmp_path / "a.jsonl", method=method, device="cpu", console=QUIET)
    for line in lines_of(tmp_path / "a.jsonl"):
        numbers = [p for _, p in line["top"]] + [line["entropy"], line["from_noise"], line["correlation"]]
        assert np.isfinite(numbers).all()


def overflowing_run(run, path):
    """A copy of a run whose weights are finite and overflow for large features."""
    shutil.copytree(run, path)
    trained = load_run(path)
    with torch.no_grad():
        trained.model.head.get_parameter("classifier.weight").fill_(3e37)
        trained.model.head.get_parameter("classifier.weight")[0].neg_()
    save_model(trained.run, trained.model)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_that_are_not_finite_are_an_error_or_empty(run, tmp_path, suffix):
    copied, out = overflowing_run(run, tmp_path / "run"), tmp_path / f"a{suffix}"
    features = np.zeros((5, 4), dtype=np.float32)
    features[3] = 100
    np.save(tmp_path / "x.npy", features)
    with pytest.raises(ValueError, match=r"of row 3 are NaN or infinite; .*--skip-invalid"):
        predict(copied, str(tmp_path / "x.npy"), out, device="cpu", console=QUIET)
    assert not out.exists()
    console = Listening()
    assert predict(copied, str(tmp_path / "x.npy"), out, device="cpu", skip_invalid=True, console=console) == 5
    assert console.said == ["1 of 5 inputs give NaN or infinite values; their rows are empty"]
    if suffix == ".jsonl":
        top = [line["top"][0] for line in lines_of(out)]
        assert top[3] == [None, None]
        assert None not in top[2]
    elif suffix == ".parquet":
        assert pyarrow.parquet.read_table(out)["probability_1"].to_pylist()[3] is None
    else:
        with open(out, newline="", encoding="utf-8") as file:
            assert [row["class_1"] == "" for row in csv.DictReader(file)] == [False, False, False, True, False]
