import numpy as np
import pytest
import torch

from hetxl.data.dataset import Dataset, InputSpec
from hetxl.data.labels import Labels
from hetxl.data.synthetic import FeatureSplit
from hetxl.training.length import passes_of, steps_of, told_length, with_length
from support.training import small


def data(rows):
    split = FeatureSplit(torch.zeros(rows, 1), Labels(np.zeros(rows, dtype=np.int64)))
    return Dataset("rows", InputSpec("features", (1,)), ["a", "b"], {"train": split})


@pytest.mark.parametrize("options", [{"backbone": "mlp"}, {"backbone": "none"}, {"backbone": "auto"}, {"frozen": True}])
@pytest.mark.parametrize(
    ("rows", "batch", "steps", "alone"),
    [
        (1_000_000, 256, 3906, 3906),  # one pass
        (256_000, 256, 1000, 1000),
        (50_000, 250, 1000, 1000),  # five
        (1_600, 256, 312, 500),  # fifty, or more of a head alone
        (10, 256, 2, 500),
    ],
)
def test_where_nobody_says_how_long(rows, batch, steps, alone, options):
    config = small(**{"backbone": "mlp", "steps": None, "batch_size": batch} | options)
    assert config.epochs is None
    expected = steps if options == {"backbone": "mlp"} else alone
    assert steps_of(config, data(rows)) == expected
    fixed = with_length(config, data(rows))  # so many passes from then on
    assert steps_of(fixed, data(2 * rows)) == pytest.approx(2 * expected, abs=1)


def test_what_is_said_counts():
    assert steps_of(small(steps=7), data(10**6)) == 7
    assert steps_of(small(steps=7, epochs=3.0), data(10**6)) == 7
    assert passes_of(small(steps=None, epochs=0.5), data(100)) == 0.5
    assert steps_of(small(steps=None, epochs=0.5, batch_size=10), data(100)) == 5
    assert with_length(small(steps=7), data(100)) == small(steps=7)


def test_in_words():
    config = small(steps=None, batch_size=256, backbone="mlp")
    assert told_length(config, data(1600)) == "312 steps of 256, 49.9 times the data"
