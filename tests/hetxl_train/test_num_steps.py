import numpy as np
import pytest
import torch

from hetxl_train.data.dataset import Dataset, InputSpec
from hetxl_train.data.labels import Labels
from hetxl_train.data.synthetic import FeatureSplit
from hetxl_train.num_steps import describe_length, epochs_for, steps_for, with_length
from support.training import small


def data(rows):
    split = FeatureSplit(torch.zeros(rows, 1), Labels(np.zeros(rows, dtype=np.int64)))
    return Dataset("rows", InputSpec("features", (1,)), ["a", "b"], {"train": split})


@pytest.mark.parametrize("options", [{"backbone": "mlp"}, {"backbone": "none"}, {"backbone": "auto"}, {"frozen": True}])
@pytest.mark.parametrize(
    ("rows", "batch", "steps", "alone"),
    [
        (1_000_000, 256, 3906, 3906),  # one pass
        (256_000, 256, 1000, 2000),
        (50_000, 250, 1000, 2000),  # five epochs, or ten of a head alone
        (1_600, 256, 312, 2000),  # fifty, or more of a head alone
        (10, 256, 2, 2000),
    ],
)
def test_default_steps_scale_with_dataset_size(rows, batch, steps, alone, options):
    config = small(**{"backbone": "mlp", "steps": None, "batch_size": batch} | options)
    assert config.epochs is None
    expected = steps if options == {"backbone": "mlp"} else alone
    assert steps_for(config, data(rows)) == expected
    fixed = with_length(config, data(rows))  # that many epochs from then on
    assert steps_for(fixed, data(2 * rows)) == pytest.approx(2 * expected, abs=1)


def test_configured_length_is_used():
    assert steps_for(small(steps=7), data(10**6)) == 7
    assert steps_for(small(steps=7, epochs=3.0), data(10**6)) == 7
    assert epochs_for(small(steps=None, epochs=0.5), data(100)) == 0.5
    assert steps_for(small(steps=None, epochs=0.5, batch_size=10), data(100)) == 5
    assert with_length(small(steps=7), data(100)) == small(steps=7)


def test_length_is_described_in_steps_and_epochs():
    config = small(steps=None, batch_size=256, backbone="mlp")
    assert describe_length(config, data(1600)) == "312 steps of 256, 49.9 epochs"
