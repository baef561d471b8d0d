"""Labels of a split and their encoding, against plain Python lists."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import LabelLists
from hetxl_train.data import labels as module
from hetxl_train.data.labels import LabelBuilder, Labels, RawLabels, match_classes, printable, some, sort_names

K = 9
single = st.lists(st.integers(0, K - 1), min_size=1, max_size=30)
multi = st.lists(st.lists(st.integers(0, K - 1), max_size=5), min_size=1, max_size=30)
picks = st.lists(st.integers(0, 10_000), max_size=12)


def of_lists(rows):
    values = np.array([label for row in rows for label in row], dtype=np.int64)
    return Labels(values, np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64))


def to_lists(lists):
    return [lists.classes[lists.examples == row].tolist() for row in range(lists.batch)]


@given(single, picks)
def test_single_labels_are_selected_by_row(ids, picked):
    labels = Labels(np.array(ids, dtype=np.int32))
    rows = np.array([pick % len(ids) for pick in picked], dtype=np.int64)
    expected = [ids[row] for row in rows]
    assert not labels.multi
    assert len(labels) == len(ids)
    assert labels.take(rows).dtype == torch.int64
    assert labels.take(rows).tolist() == expected
    assert labels.subset(rows).ids.tolist() == expected
    assert labels.counts(K).tolist() == [ids.count(number) for number in range(K)]


@given(multi, picks)
def test_label_lists_are_selected_by_row(lists, picked):
    labels = of_lists(lists)
    rows = np.array([pick % len(lists) for pick in picked], dtype=np.uint32)
    expected = [lists[row] for row in rows]
    assert labels.multi
    assert len(labels) == len(lists)
    taken = labels.take(rows)
    assert isinstance(taken, LabelLists)
    assert to_lists(taken) == expected
    subset = labels.subset(rows)
    assert len(subset) == len(rows)
    assert to_lists(subset.take(np.arange(len(rows)))) == expected
    flat = [label for row in lists for label in row]
    assert labels.counts(K).tolist() == [flat.count(number) for number in range(K)]


def test_unlabelled_rows_are_not_counted():
    assert Labels(np.array([-100, 1, -100])).counts(3).tolist() == [0, 1, 0]


def test_memory_mapped_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10))
    labels = Labels(np.load(tmp_path / "ids.npy", mmap_mode="r"))
    assert labels.take(np.array([9, 0])).tolist() == [9, 0]
    assert labels.counts(10).tolist() == [1] * 10


def ids(values, offsets=None):
    return RawLabels(np.array(values), "labels.npy", offsets=None if offsets is None else np.array(offsets))


def named(rows, separator=None):
    builder = LabelBuilder("labels.txt", separator)
    for row in rows:
        builder.add(row)
    return builder.build()


def test_ids_from_zero_stay_on_disk():
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
def test_other_ids_become_names_in_numeric_order(dtype):
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


def test_sort_names_is_numeric_when_all_names_are_numbers():
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
    encoded = labels["train"]
    assert names == [str(label) for label in sorted({label for row in rows for label in row})]
    for row, (start, stop) in enumerate(zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)):
        assert sorted(names[label] for label in encoded.ids[start:stop]) == sorted({str(label) for label in rows[row]})


def test_subset_of_raw_labels():
    part = named(["a", "b", "a"]).subset(np.array([2, 1]))
    assert [part.names[value] for value in part.values] == ["a", "b"]
    lists = ids([5, 6, 7], [0, 2, 2, 3]).subset(np.array([0, 1]))
    assert (lists.values.tolist(), lists.offsets.tolist(), lists.source) == ([5, 6], [0, 2, 2], "labels.npy")


def test_one_multi_label_split_makes_all_multi_label():
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
    with pytest.raises(ValueError, match=r"class id 3, but names are given for 3 classes, ids 0 to 2"):
        match_classes({"train": ids([3])}, class_names=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"not among the 3 classes: 'q'"):
        match_classes({"train": named(["q"])}, class_names=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"class_names must be distinct, found more than once: 'x'"):
        match_classes({"train": ids([0])}, class_names=["x", "x"])
    with pytest.raises(ValueError, match="classes must name at least one class"):
        match_classes({"train": ids([0])}, classes=[])


STARS = ["1", "2", "3", "4", "5"]


def test_all_splits_decide_whether_numbers_are_ids_or_names():
    _, labels = match_classes({"train": named(["0", "4", "1"]), "test": named(["3", "1"])}, class_names=STARS)
    assert (labels["train"].ids.tolist(), labels["test"].ids.tolist()) == ([0, 4, 1], [3, 1])
    _, labels = match_classes({"train": named(["5", "1"]), "test": named(["3", "1"])}, class_names=STARS)
    assert (labels["train"].ids.tolist(), labels["test"].ids.tolist()) == ([4, 0], [2, 0])
    with pytest.raises(ValueError, match="class id 5, but names are given for 5 classes"):
        match_classes({"train": named(["0", "1"]), "test": named(["5"])}, class_names=STARS)


def test_ambiguous_numbers_raise():
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
    assert {split: encoded.ids.tolist() for split, encoded in labels.items()} == {
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
    with pytest.raises(ValueError, match=r"labels.txt has labels that are not among the 3 classes: 'fox', 'gnu'"):
        match_classes({"test": named(["fox", "gnu", "cat"])}, classes=run)
    with pytest.raises(ValueError, match="not among the 2 classes: '6'"):
        match_classes({"test": ids([5, 6])}, classes=["5", "17"])


def test_negative_ids_raise(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    with pytest.raises(ValueError, match=r"labels.npy has the label -1 at index 3 .* must not be negative"):
        match_classes({"train": ids([0, 1, 2, -1])})


def test_builder_collects_names_and_lists():
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


def test_printable_names_escape_control_characters():
    assert printable("a\nb\x1b[31m\udcff é") == "a\\nb\\x1b[31m\\udcff é"
    assert some(["a", "b"], 1) == "'a' and 1 more"
