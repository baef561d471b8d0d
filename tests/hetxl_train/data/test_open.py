"""Data by name or path, and the errors for unknown names, paths and options."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hetxl_train.config import TrainConfig
from hetxl_train.data import BUILT_IN, InputSpec, open_dataset, open_inputs
from hetxl_train.data import open as module
from hetxl_train.data.label_noise import NoisySplit
from hetxl_train.data.open import open_data, split_spec
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import ImageTransform, Preprocessing

FEATURES = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def arrays(folder):
    np.savez(folder / "data.npz", features=FEATURES, labels=np.array(["cat", "dog"] * 20))
    return folder / "data.npz"


def images(folder, names=("cat", "dog")):
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8)).save(folder / name / f"{number}.png")
    return folder


def test_a_seed_behind_the_name_takes_precedence():
    data = "synthetic:rows=40,classes=3,features=4"
    named, options = open_data(TrainConfig(data=f"{data},seed=1")), TrainConfig(data=data, data_seed=1)
    inputs = [dataset.splits["test"].fetch(np.arange(2)).inputs for dataset in (named, open_data(options))]
    assert torch.equal(*inputs)


def test_arrays_and_images(tmp_path):
    path = arrays(tmp_path)
    for data in (path, str(path)):
        dataset = open_dataset(data, seed=1)
        assert (dataset.name, dataset.input, dataset.class_names) == (
            "data",
            InputSpec("features", (3,)),
            ["cat", "dog"],
        )
    preprocessing = Preprocessing((0, 0, 0), (1, 1, 1))
    dataset = open_dataset(images(tmp_path / "images"), transform=ImageTransform(4, preprocessing))
    assert dataset.input == InputSpec("image", (3, 4, 4), image=preprocessing)
    assert dataset.splits["train"].fetch(np.array([0])).inputs.abs().max() == 0


def test_parquet_of_either_kind(tmp_path):
    pq.write_table(pa.table({"features": list(FEATURES), "label": ["a", "b"] * 20}), tmp_path / "a.parquet")
    assert open_dataset(tmp_path / "a.parquet", cache=tmp_path).input.kind == "features"
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    pq.write_table(pa.table({"path": ["x.png"] * 20, "label": ["a", "b"] * 10}), tmp_path / "b.parquet")
    assert open_dataset(tmp_path / "b.parquet").input.kind == "image"


def test_array_directory_and_label_file(tmp_path):
    np.save(tmp_path / "features.npy", FEATURES)
    np.save(tmp_path / "labels.npy", np.arange(40) % 5)
    assert open_dataset(tmp_path).num_classes == 5
    np.save(tmp_path / "other.npy", np.arange(40) % 7)
    assert open_dataset(tmp_path / "features.npy", labels=tmp_path / "other.npy").num_classes == 7


def test_classes_of_a_run(tmp_path):
    dataset = open_dataset(arrays(tmp_path), classes=["ant", "cat", "dog"], whole=True)
    assert dataset.splits["test"].labels.ids.tolist() == [1, 2] * 20
    with pytest.raises(ValueError, match="not among the 2 classes: 'cat', 'dog'"):
        open_dataset(arrays(tmp_path), classes=["ant", "bee"])
    with pytest.raises(
        TypeError, match=r"classes must be names for data from files, found 5; a number is for pycode, .* and "
    ):
        open_dataset(arrays(tmp_path), classes=5)


def test_built_in_data_by_name():
    dataset = open_dataset("synthetic", rows=400, classes=10, features=4, rank=2, seed=3)
    assert (dataset.num_classes, dataset.input.shape) == (10, (4,))
    again = open_dataset("synthetic", rows=400, classes=dataset.num_classes, features=4, rank=2, seed=3)
    rows = np.arange(5)
    assert torch.equal(dataset.splits["test"].fetch(rows).inputs, again.splits["test"].fetch(rows).inputs)


def test_built_in_data_with_the_classes_of_a_run():
    with pytest.raises(
        ValueError, match=r"classes of 'synthetic' as opened now \(100\) differ from the 2 classes of the run"
    ):
        open_dataset("synthetic", rows=400, features=4, rank=2, classes=["a", "b"])


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ("synthetic", {"feature": 3}, TypeError, "'synthetic' has no option 'feature', only .*did you mean 'features'"),
        ("pycode", {"contxt": 3}, TypeError, "did you mean 'context'"),
        ("synthetic", {"labels": "a.npy"}, ValueError, "labels=a.npy is only for files; 'synthetic' is built in"),
        (
            "sinthetic",
            {},
            FileNotFoundError,
            r"neither a built-in dataset \(pycode, synthetic, .*\) nor an existing path.*mean 'synthetic'",
        ),
        ("", {}, FileNotFoundError, "data='' is neither a built-in dataset"),
        ("no\nsuch", {}, FileNotFoundError, r"data='no\\\\nsuch'"),
    ],
)
def test_unknown_names_and_options_raise(data, options, error, message):
    with pytest.raises(error, match=message):
        open_dataset(data, **options)


def test_unknown_paths_raise(tmp_path):
    path = arrays(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"did you mean '.*data.npz'"):
        open_dataset(tmp_path / "date.npz")
    with pytest.raises(FileNotFoundError, match=r"test=.*no.npz does not exist"):
        open_dataset(path, test=tmp_path / "no.npz")
    (tmp_path / "a.xls").write_text("")
    with pytest.raises(ValueError, match=r"a.xls is not a known kind of data: looked for arrays \(.npy"):
        open_dataset(tmp_path / "a.xls")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="is a single image; give a directory"):
        open_dataset(tmp_path / "x.png")


def test_options_of_other_data_raise(tmp_path):
    with pytest.raises(TypeError, match="has no option 'chek', only check, whole; did you mean 'check'"):
        open_dataset(arrays(tmp_path), chek=False)
    with pytest.raises(ValueError, match=r"is only for .npy files of features"):
        open_dataset(images(tmp_path / "p"), labels=arrays(tmp_path))


def test_features_are_opened_without_labels(tmp_path):
    np.save(tmp_path / "a.npy", FEATURES)
    for path in (tmp_path / "a.npy", arrays(tmp_path)):
        split = open_inputs(path, InputSpec("features", (3,)))
        assert split.labels.ids.tolist() == [-100] * 40
        np.testing.assert_array_equal(split.fetch(np.array([7, 1])).inputs, FEATURES[[7, 1]])
    with pytest.raises(ValueError, match=r"has shape \[40, 3\], but the model takes \[n, 5\]"):
        open_inputs(tmp_path / "a.npy", InputSpec("features", (5,)))
    np.save(tmp_path / "b.npy", np.full((2, 3), np.nan))
    with pytest.raises(ValueError, match="NaN"):
        open_inputs(tmp_path / "b.npy", InputSpec("features", (3,)))
    np.save(tmp_path / "c.npy", np.zeros((2, 3), dtype=int))
    with pytest.raises(TypeError, match="must hold floating-point features, found int64"):
        open_inputs(tmp_path / "c.npy", InputSpec("features", (3,)))
    with pytest.raises(ValueError, match="must hold inputs of kind features, as the model takes; found image"):
        open_inputs(images(tmp_path / "p"), InputSpec("features", (3,)))


def test_all_rows_of_a_table_are_predicted(tmp_path):
    table = {"features": list(FEATURES), "split": ["train", "test"] * 20}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    split = open_inputs(tmp_path / "a.parquet", InputSpec("features", (3,)), cache=tmp_path)
    np.testing.assert_array_equal(split.fetch(np.arange(40)).inputs, FEATURES)


def test_images_are_opened_without_labels(tmp_path):
    split = open_inputs(images(tmp_path / "p"), InputSpec("image", (3, 6, 6)))
    assert (len(split), split.workers) == (20, True)
    assert split.fetch(np.arange(2)).inputs.shape == (2, 3, 6, 6)
    assert split.labels.ids.tolist() == [-100] * 20
    assert len(open_inputs(tmp_path / "p" / "cat" / "0.png", InputSpec("image", (3, 6, 6)))) == 1
    grey = open_inputs(tmp_path / "p", InputSpec("image", (1, 6, 6)))
    assert torch.equal(grey.fetch(np.arange(2)).inputs, torch.full((2, 1, 6, 6), -1.0))  # black


def test_tokens_are_opened_without_labels(tmp_path):
    tokens = np.arange(12, dtype=np.int16).reshape(4, 3)
    np.save(tmp_path / "a.npy", tokens)
    np.savez(tmp_path / "a.npz", tokens=tokens)
    for name in ("a.npy", "a.npz"):
        inputs = open_inputs(tmp_path / name, InputSpec("tokens", (3,), 12)).fetch(np.array([3, 0])).inputs
        assert inputs.dtype == torch.int64
        assert inputs.tolist() == [[9, 10, 11], [0, 1, 2]]
    with pytest.raises(ValueError, match="ids of tokens outside 0 to 9 in row 3"):
        open_inputs(tmp_path / "a.npy", InputSpec("tokens", (3,), 10))
    np.save(tmp_path / "b.npy", FEATURES)
    with pytest.raises(TypeError, match="must hold whole numbers, ids of tokens, found float32"):
        open_inputs(tmp_path / "b.npy", InputSpec("tokens", (3,), 10))
    np.savez(tmp_path / "b.npz", x=tokens)
    with pytest.raises(ValueError, match="must have a key tokens, found 'x'"):
        open_inputs(tmp_path / "b.npz", InputSpec("tokens", (3,), 10))


def test_options_have_their_types():
    name, options = split_spec("synthetic:noise=0.5,rows=50000,multi-label=True,kind=plain, seed = 3")
    assert name == "synthetic"
    assert options == {"noise": 0.5, "rows": 50000, "multi_label": True, "kind": "plain", "seed": 3}
    assert type(options["rows"]) is int
    assert type(options["multi_label"]) is bool
    assert split_spec("synthetic:flag=FALSE")[1] == {"flag": False}
    assert split_spec("synthetic:rate=1e-3")[1] == {"rate": 1e-3}


@pytest.mark.parametrize(
    "data", ["pycode", "synthetic:", "folder/synthetic:rows=5", "s3:bucket,a=b", "features.npy", ""]
)
def test_names_and_paths_without_options(data):
    assert split_spec(data) == ("synthetic" if data == "synthetic:" else data, {})


def test_malformed_options_raise():
    for part in ("rows", "=5", " =5"):
        with pytest.raises(ValueError, match=f"write options as synthetic:option=value,option=value, found '{part}'"):
            split_spec(f"synthetic:noise=1,{part}")
    with pytest.raises(ValueError, match="multi_label is given twice; keep one"):
        split_spec("synthetic:multi-label=true,multi_label=false")


def load_toy(*, labels="kinds", seed=0):
    return dataclasses.replace(load_synthetic(rows=20, seed=seed), name=labels)


def test_loaders_declare_their_options(monkeypatch):
    monkeypatch.setitem(BUILT_IN, "toy", f"{__name__}:load_toy")
    assert open_dataset("toy").name == "kinds"
    assert open_dataset("toy", labels="colours").name == "colours"
    with pytest.raises(ValueError, match=r"test=x.npy is only for files; 'toy' is built in and has its own"):
        open_dataset("toy", test="x.npy")
    with pytest.raises(TypeError, match="'toy' has no option 'rows', only labels, seed"):
        open_dataset("toy", rows=5)


def test_open_data_of_a_configuration(monkeypatch):
    options = TrainConfig(data="synthetic:rows=200", data_seed=3, label_noise="symmetric", label_noise_rate=0.5)
    train = open_data(options).splits["train"]
    assert isinstance(train, NoisySplit)
    assert (len(train), train.noise.seed, train.noise.rate) == (180, 3, 0.5)
    monkeypatch.setattr(
        module, "open_dataset", lambda *_, **__: dataclasses.replace(load_toy(), not_for_training="use pairs")
    )
    with pytest.raises(ValueError, match="data 'synthetic:rows=200': use pairs"):
        open_data(options)
