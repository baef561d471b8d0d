import numpy as np
import pytest
import torch

from hetxl.data.synthetic import load_synthetic
from hetxl.studies.views import apply_view, check_view

DATA = load_synthetic(rows=400, classes=11, features=4)


def test_known_and_unknown_classes_part_the_data():
    known, unknown = apply_view(DATA, "known:5"), apply_view(DATA, "unknown:5")
    assert list(unknown.class_names) == ["4", "9"]
    assert len(known.class_names) == 9
    assert not set(known.class_names) & set(unknown.class_names)
    for name, split in DATA.splits.items():
        parts = known.splits[name], unknown.splits[name]
        assert sum(map(len, parts)) == len(split)
        for dataset, part in zip((known, unknown), parts, strict=True):
            names = [dataset.class_names[one] for one in part.labels.ids]
            assert names == [DATA.class_names[one] for one in split.labels.ids[part.rows]]


def test_rows_are_those_of_the_source():
    part = apply_view(DATA, "unknown:5").splits["train"]
    rows = np.array([3, 0, 3])
    found = part.fetch(rows)
    assert found.rows.tolist() == [3, 0, 3]
    assert torch.equal(found.inputs, DATA.splits["train"].features[torch.from_numpy(part.rows[rows])])
    assert part.show(0) == DATA.splits["train"].show(int(part.rows[0]))


def test_no_view_is_all_of_it():
    assert apply_view(DATA, "") is DATA
    assert check_view("") is None
    assert check_view("known:5") == ("known", 5)


@pytest.mark.parametrize("text", ["known", "known:1", "seen:5", "known:x"])
def test_mistakes(text):
    with pytest.raises(ValueError, match=f"view must be known:N or unknown:N .*found '{text}'"):
        check_view(text)


def test_a_view_needs_single_labels_and_classes():
    with pytest.raises(ValueError, match="one label for each row"):
        apply_view(load_synthetic(rows=100, classes=4, features=2, multi_label=True), "known:2")
    with pytest.raises(ValueError, match="leaves none of the 11 classes"):
        apply_view(DATA, "unknown:50")
