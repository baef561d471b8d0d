"""A few broken examples are left out, many end the run."""

import numpy as np
import pytest
import torch

from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import Broken, Fetched


def fetched(good, bad, start=0):
    broken = tuple(Broken(f"{start + number}.jpg", "cut\noff") for number in range(bad))
    return Fetched(torch.zeros(good, 1), np.arange(good), broken)


def test_one_in_a_hundred_is_left_out(tmp_path):
    limit = BrokenLimit(path=tmp_path / "broken.txt")
    for start in range(5):
        limit.add(fetched(99, 1, start))
    limit.finish()
    assert (limit.seen, limit.count, len(limit.broken)) == (500, 5, 5)
    assert (tmp_path / "broken.txt").read_text().splitlines()[4] == "4.jpg\tcut\\noff"


def test_more_ends_the_run_with_a_list(tmp_path):
    limit = BrokenLimit(path=tmp_path / "broken.txt")
    with pytest.raises(
        ValueError, match=r"30 of 120 examples could not be read, more than 1.0%; the full list is in"
    ) as error:
        limit.add(fetched(90, 30))
    lines = str(error.value).splitlines()
    assert (lines[1], lines[20], lines[21:]) == ("  0.jpg: cut\\noff", "  19.jpg: cut\\noff", ["  and 10 more"])
    assert len((tmp_path / "broken.txt").read_text().splitlines()) == 30


def test_the_first_rows_do_not_decide_but_the_end_does():
    limit = BrokenLimit()
    limit.add(fetched(3, 2))
    with pytest.raises(ValueError, match="2 of 5 examples could not be read"):
        limit.finish()


def test_the_same_file_is_listed_once():
    limit = BrokenLimit(share=0.5)
    limit.add(fetched(99, 1))
    limit.add(fetched(99, 1))
    assert (limit.count, len(limit.broken)) == (2, 1)


def test_nothing_broken_writes_nothing(tmp_path):
    limit = BrokenLimit(path=tmp_path / "broken.txt")
    limit.finish()
    assert not (tmp_path / "broken.txt").exists()


def test_bad_share():
    with pytest.raises(ValueError, match="share must be from 0 to 1, found 2"):
        BrokenLimit(share=2)
