"""Next-token prediction: windows, targets, splits and options."""

from collections import Counter

import numpy as np
import pytest
import torch

from hetxl.data.corpus import file_tokens, source_files, split_of
from hetxl.data.pycode import load_pycode
from hetxl.data.tokens import OTHER

FILES = 80


@pytest.fixture
def source(tmp_path):
    """Small files in all splits: names that all share, some that a few share, and one of its own for each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "source"
    for number in range(FILES):
        path = folder / f"p{number % 3}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"own_{number} = name_{rng.integers(20)}.name_{rng.integers(40)}" for _ in range(rng.integers(1, 9))]
        path.write_text("def f(x):\n    return x\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def load(source, tmp_path):
    return lambda **options: load_pycode(**({"source": source, "cache": tmp_path / "cache"} | options))


def files_of(source, split):
    return [list(file_tokens(source / file)) for file in source_files(source) if split_of(file) == split]


def everything(split):
    return split.fetch(np.arange(len(split))).inputs


@pytest.mark.parametrize("context", [1, 5, 40])
@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_windows_and_targets_against_the_plain_way(load, source, name, context):
    dataset = load(classes=30, context=context)
    ids = {token: number for number, token in enumerate(dataset.class_names)}
    other, padding, start = 30, 31, 32
    inputs, targets = [], []
    for tokens in files_of(source, name):
        before = [padding] * (context - 1) + [start]
        for token in tokens:
            if token in ids:
                inputs.append(before[-context:])
                targets.append(ids[token])
            before.append(ids.get(token, other))
    assert torch.equal(everything(dataset.splits[name]), torch.tensor(inputs))
    assert dataset.splits[name].labels.ids.tolist() == targets
    assert dataset.input.kind == "tokens"
    assert dataset.input.shape == (context,)
    assert dataset.input.vocabulary == 33


def test_classes_are_the_most_frequent_tokens_of_training_files(load, source):
    counts = Counter(token for tokens in files_of(source, "train") for token in tokens)
    expected = sorted(counts, key=lambda token: (-counts[token], token))
    dataset = load(classes=30)
    assert list(dataset.class_names) == expected[:30]
    found = dataset.splits["train"].labels.counts(30)
    assert found.tolist() == [counts[token] for token in dataset.class_names]


def test_other_is_context_and_never_a_target(load):
    dataset = load(classes=30)
    assert OTHER not in dataset.class_names
    for split in dataset.splits.values():
        assert split.labels.ids.max() < 30
        assert (everything(split) == 30).any()


def test_splits_share_no_file(load, source):
    dataset = load(classes=10_000)
    assert any("10,000 classes were asked for" in note for note in dataset.notes)
    own = {name for name in dataset.class_names if name.startswith("own_")}
    train = {f"own_{file.split('/m')[1][:-3]}" for file in source_files(source) if split_of(file) == "train"}
    # The names of the other splits' files were never seen, so they are not even classes.
    assert own == train
    for name in ("validation", "test"):
        split = dataset.splits[name]
        seen = {dataset.class_names[label] for label in split.labels.ids}
        assert not seen & own
        assert (everything(split) == dataset.num_classes).any()


def test_the_same_call_gives_the_same_bits(load, source, tmp_path):
    first = load(limit=50, seed=3)
    assert len(first.splits["train"]) == 50
    for again in (load(limit=50, seed=3), load(limit=50, seed=3, cache=tmp_path / "elsewhere")):
        assert list(first.class_names) == list(again.class_names)
        assert first.notes == again.notes
        for name, split in first.splits.items():
            assert torch.equal(everything(split), everything(again.splits[name]))
            np.testing.assert_array_equal(split.labels.ids, again.splits[name].labels.ids)


def test_an_example_is_shown_as_code(load):
    split = load(classes=10_000).splits["train"]
    assert split.show(0).text == "→ ?"
    assert split.show(2).text == "def f → ?"
    # def f ( x ) : NEWLINE INDENT return: the target of row 9 comes after that.
    assert split.show(9).text == "def f(x):\n    return → ?"
    assert split.show(8).text == "def f(x):\n    → ?"
    deep = load(classes=10_000, context=4).splits["train"]
    assert deep.show(6).text == "… (x): → ?"
    assert OTHER in load(classes=20).splits["test"].show(14).text


def test_files_that_are_not_python_are_counted(load, source):
    (source / "p0" / "bad.py").write_text("x = (\n")
    (note,) = [note for note in load().notes if "left out" in note]
    assert note.startswith("1 file is not Python and left out, such as p0/bad.py: ")
    (source / "p0" / "worse.py").write_text("x = (\n")
    assert any(note.startswith("2 files are not Python") for note in load().notes)


@pytest.mark.parametrize(
    ("files", "missing"),
    [({}, "train"), ({"typing.py": "x\n", "os.py": "x\n"}, "test"), ({"typing.py": "", "os.py": "x\n"}, "train")],
    ids=["none", "no test file", "an empty file"],
)
def test_a_source_with_too_few_files(tmp_path, files, missing):
    for name, content in files.items():  # typing.py is a training file, os.py one for validation
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"source must have code for every split, found none for '{missing}' in the"):
        load_pycode(source=tmp_path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": 1}, ValueError, "classes must be at least 2, found 1"),
        ({"classes": 8.0}, TypeError, "classes must be an integer"),
        ({"context": 0}, ValueError, "context must be at least 1, found 0"),
        ({"limit": 0}, ValueError, "limit must be at least 1, found 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
        ({"source": "nowhere"}, FileNotFoundError, "found no folder nowhere"),
    ],
)
def test_bad_options(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_pycode(**({"cache": tmp_path} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_standard_library(tmp_path):
    dataset = load_pycode(cache=tmp_path)
    assert dataset.num_classes == 8192
    assert len(dataset.splits["train"]) > 1_000_000
    for name in ("validation", "test"):
        assert 0.02 < len(dataset.splits[name]) / len(dataset.splits["train"]) < 0.12
    assert {"self", "(", "<newline>", "<indent>", "<dedent>"} < set(dataset.class_names)
    assert "standard library of Python" in dataset.notes[0]
