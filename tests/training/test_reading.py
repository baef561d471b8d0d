"""Reading for an evaluation: the same with and without workers."""

import numpy as np
import torch

from hetxl.data.images import ImageSplit, Paths
from hetxl.data.labels import Labels
from hetxl.data.synthetic import load_synthetic
from hetxl.training.reading import as_it_is, reader
from support.training import write_pictures


def test_workers_read_in_order_and_leave_the_generator_alone(tmp_path):
    paths = sorted(map(str, write_pictures(tmp_path).rglob("*.png")))
    split = ImageSplit(Paths(paths), Labels(np.zeros(len(paths), dtype=np.int64)), size=16)
    requests = [np.arange(start, min(start + 5, len(paths))) for start in range(0, len(paths), 5)]
    read = reader(split, 2)
    assert read is not None
    before = torch.get_rng_state()
    found = list(read(iter(requests)))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(found) == len(requests)
    for fetched, rows in zip(found, requests, strict=True):
        np.testing.assert_array_equal(fetched.rows, rows)
        assert torch.equal(fetched.inputs, split.fetch(rows).inputs)
    assert list(read([])) == []


def test_this_process_reads_what_is_quick_to_read(tmp_path):
    paths = [str(next(write_pictures(tmp_path, each=1).rglob("*.png")))]
    assert reader(ImageSplit(Paths(paths), Labels(np.zeros(1, dtype=np.int64))), 0) is None
    assert reader(load_synthetic(rows=40, classes=3, features=2).splits["test"], 4) is None


def test_items_stay_as_they_are():
    item = object()
    assert as_it_is(item) is item
