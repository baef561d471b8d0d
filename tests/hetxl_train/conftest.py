"""Trained runs that many tests read and none changes."""

import shutil

import pytest

from hetxl_train.training import train
from support.training import QUIET, small


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The directory of a finished HET-XL run; copy it to change it."""
    return train(small(tmp_path_factory.mktemp("runs") / "het-xl", ema=0.5), console=QUIET).path


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "copied")
