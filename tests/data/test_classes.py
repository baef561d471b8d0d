"""Labels to class ids: ids kept or mapped, names in order, and a trained run's classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.data import classes as module
from hetxl.data.classes import LabelBuilder, RawLabels, match_classes, printable, some, sort_names


def ids(values, offsets=None):
    return RawLabels(np.array(values), "labels.npy", offsets=None if offsets is None else np.array(offsets))


def named(rows, separator=None):
    builder = LabelBuilder("labels.txt", separator)
    for row in rows:
        builder.add(row)
    return builder.build()


def test_ids_from_zero_stay_where_they_are():
    values = np.array([2, 0, 1, 2])
    names, labels = match_classes({"train": RawLabels(values, "f")})
    assert names == ["0", "1", "2"]
    assert labels["train"].ids is values  # not copied: it may be on disk


def test_ids_beyond_the_table(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    values = [10**15, 4, 10**12, 4, 10**15, 0, 4]
    names, labels = match_classes({"train": ids(values)})
    assert names == ["0", "4", str(10**12), str(10**15)]
    assert labels["train"].ids.tolist() == [3, 1, 2, 1, 3, 0, 1]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_other_ids_become_names_in_the_order_of_numbers(dtype):
    names, labels = match_classes({"train": ids(np.array([100, 9, 20], dtype)), "test": ids(np.array([20], dtype))})
    assert names == ["9", "20", "100"]
    assert labels["train"].ids.tolist() == [2, 0, 1]
    assert labels["test"].ids.tolist() == [1]
    assert labels["test"].ids.dtype == np.int64


def test_names_are_sorted_over_all_splits():
    names, labels = match_classes({"train": named(["b", "a"]), "test": named(["ä", "a"])})
    assert names == ["a", "b", "ä"]
    assert labels["train"].ids.tolist() == [1, 0]
    assert labels["test"].ids.tolist() == [2, 0]


def test_sort_names():
    assert sort_names(["10", "9", "1", "01"]) == ["01", "1", "9", "10"]
    assert sort_names(["10", "9", "x"]) == ["10", "9", "x"]


@given(st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=20), st.integers(1, 7))
def test_lists_against_plain_python(rows, chunk):
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    raw = ids(np.array([label for row in rows for label in row], dtype=np.int64), offsets)
    before, module.CHUNK = module.CHUNK, chunk
    try:
        names, labels = match_classes({"train": raw})
    finally:
        module.CHUNK = before
    found = labels["train"]
    assert names == [str(label) for label in sorted({label for row in rows for label in row})]
    for row, (start, stop) in enumerate(zip(found.offsets[:-1], found.offsets[1:], strict=True)):
        assert sorted(names[label] for label in found.ids[start:stop]) == sorted({str(label) for label in rows[row]})


def test_some_rows_of_labels():
    part = named(["a", "b", "a"]).subset(np.array([2, 1]))
    assert [part.names[value] for value in part.values] == ["a", "b"]
    lists = ids([5, 6, 7], [0, 2, 2, 3]).subset(np.array([0, 1]))
    assert (lists.values.tolist(), lists.offsets.tolist(), lists.source) == ([5, 6], [0, 2, 2], "labels.npy")


def test_one_split_with_lists_makes_lists_of_all():
    _, labels = match_classes({"train": named(["a|b", "a"], "|"), "test": named(["b"], "|")})
    assert labels["test"].offsets.tolist() == [0, 1]
    assert labels["train"].offsets.tolist() == [0, 2, 3]


def test_class_names_of_the_data():
    names, labels = match_classes({"train": ids([0, 2])}, class_names=["x", "y", "z"])
    assert names == ["x", "y", "z"]  # y has no example and stays
    assert labels["train"].ids.tolist() == [0, 2]
    names, labels = match_classes({"train": named(["z", "x"])}, class_names=["x", "y", "z"])
    assert labels["train"].ids.tolist() == [2, 0]
    names, labels = match_classes({"train": named(["2", "0"])}, class_names=["x", "y", "z"])  # ids in a text file
    assert labels["train"].ids.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"class id 3, and there are names for 3 classes, ids 0 to 2"):
        match_classes({"train": ids([3])}, class_names=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"none of the 3 classes: 'q'"):
        match_classes({"train": named(["q"])}, class_names=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"class_names must differ .* more than once: 'x'"):
        match_classes({"train": ids([0])}, class_names=["x", "x"])
    with pytest.raises(ValueError, match="classes must name at least one class"):
        match_classes({"train": ids([0])}, classes=[])


STARS = ["1", "2", "3", "4", "5"]


def test_all_splits_decide_whether_numbers_are_ids_or_names():
    _, labels = match_classes({"train": named(["0", "4", "1"]), "test": named(["3", "1"])}, class_names=STARS)
    assert (labels["train"].ids.tolist(), labels["test"].ids.tolist()) == ([0, 4, 1], [3, 1])
    _, labels = match_classes({"train": named(["5", "1"]), "test": named(["3", "1"])}, class_names=STARS)
    assert (labels["train"].ids.tolist(), labels["test"].ids.tolist()) == ([4, 0], [2, 0])
    with pytest.raises(ValueError, match="class id 5, and there are names for 5 classes"):
        match_classes({"train": named(["0", "1"]), "test": named(["5"])}, class_names=STARS)


def test_numbers_that_may_be_ids_or_names():
    message = (
        r"^labels.txt: the label '1' may be the class of that name, or the class id 1, which is '2'; "
        r"save ids as whole numbers in a .npy file, or, if they are names, give no class_names"
    )
    with pytest.raises(ValueError, match=message):
        match_classes({"train": named(["4", "1"]), "test": named(["3"])}, class_names=STARS)
    # Both ways out, other names beside them, and names whose ids are the same.
    assert match_classes({"train": ids([4, 1])}, class_names=STARS)[1]["train"].ids.tolist() == [4, 1]
    assert match_classes({"train": named(["4", "1"])})[1]["train"].ids.tolist() == [1, 0]
    raw = {"train": named(["none", "1"]), "test": named(["1"])}
    assert match_classes(raw, class_names=["1", "2", "none"])[1]["test"].ids.tolist() == [0]
    digits = ["0", "1", "2"]
    assert match_classes({"train": named(["2", "1"])}, class_names=digits)[1]["train"].ids.tolist() == [2, 1]


def test_one_file_may_have_ids_and_another_names():
    raw = {"train": named(["0", "1"]), "test": named(["b"]), "validation": ids([1])}
    _, labels = match_classes(raw, class_names=["a", "b"])
    assert {split: found.ids.tolist() for split, found in labels.items()} == {
        "train": [0, 1],
        "test": [1],
        "validation": [1],
    }


def test_classes_of_a_trained_run():
    # By name, by ids that are names, by ids of names of the data, and by place.
    run = ["cat", "dog", "eel"]
    assert match_classes({"test": named(["eel", "cat"])}, classes=run)[1]["test"].ids.tolist() == [2, 0]
    assert match_classes({"test": ids([17, 5])}, classes=["5", "17"])[1]["test"].ids.tolist() == [1, 0]
    assert match_classes({"test": ids([0, 1])}, ["eel", "cat"], run)[1]["test"].ids.tolist() == [2, 0]
    names, labels = match_classes({"test": ids([2, 1])}, classes=run)
    assert (names, labels["test"].ids.tolist()) == (run, [2, 1])
    with pytest.raises(ValueError, match=r"labels.txt has labels that are none of the 3 classes: 'fox', 'gnu'"):
        match_classes({"test": named(["fox", "gnu", "cat"])}, classes=run)
    with pytest.raises(ValueError, match="none of the 2 classes: '6'"):
        match_classes({"test": ids([5, 6])}, classes=["5", "17"])


def test_negative_ids(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    with pytest.raises(ValueError, match=r"labels.npy has the label -1 in place 3 .* must not be negative"):
        match_classes({"train": ids([0, 1, 2, -1])})


def test_builder():
    raw = named(["a|b", "", "c", "|"], "|")
    assert raw.offsets.tolist() == [0, 2, 2, 3, 3]
    assert [raw.names[value] for value in raw.values] == ["a", "b", "c"]
    assert named(["a|b", " a"]).names == ["a|b", " a"]  # names, where lists have their own form
    assert named([" cat", "cat", "a b\t"], "|").names == ["cat", "a b"]
    assert named([" ", "a|b"], "|").offsets.tolist() == [0, 0, 2]
    assert named([["a"], [3], None]).offsets.tolist() == [0, 1, 2, 2]
    assert named([3, "x\ny"]).names == ["3", "x\ny"]
    for blank in ("", " "):
        with pytest.raises(ValueError, match=r"labels.txt has no label in row 2 \(counted from 1\)"):
            named(["a", blank], "|")
    for bad in (1.5, True, {"a": 1}):
        with pytest.raises(TypeError, match=r"in row 2 .* labels are names or whole numbers"):
            named(["a", [bad]])


def test_names_in_messages():
    assert printable("a\nb\x1b[31m\udcff é") == "a\\nb\\x1b[31m\\udcff é"
    assert some(["a", "b"], 1) == "'a' and 1 more"
