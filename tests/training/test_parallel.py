"""Work in several processes: what is done, in which order it comes, and what a failure ends."""

import os

import pytest
import torch

from hetxl.training.parallel import check_jobs, default_jobs, each, one_thread


def square(number):
    return number**2, torch.get_num_threads(), os.getpid()


def fragile(number):
    if number == 2:
        raise ArithmeticError("two")
    return number


def test_threads_come_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_here_in_turn_on_one_thread():
    before = torch.get_num_threads()
    found = list(each(square, [3, 1, 2], jobs=1))
    assert found == [(item, (item**2, 1, os.getpid())) for item in (3, 1, 2)]
    assert torch.get_num_threads() == before
    assert list(each(square, [], jobs=4)) == []


def test_elsewhere_on_one_thread_each():
    found = dict(each(square, [1, 2, 3], jobs=2))
    assert {item: value for item, (value, _, _) in found.items()} == {1: 1, 2: 4, 3: 9}
    assert {threads for _, threads, _ in found.values()} == {1}
    assert os.getpid() not in {process for _, _, process in found.values()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_is_raised(jobs):
    with pytest.raises(ArithmeticError, match="two"):
        list(each(fragile, [1, 2, 3], jobs=jobs))


def test_jobs():
    assert default_jobs() >= 1
    check_jobs(None)
    with pytest.raises(ValueError, match="jobs must be at least 1, found 0"):
        check_jobs(0)
    with pytest.raises(ValueError, match="jobs must be at least 1, found -2"):
        next(each(square, [1], jobs=-2))
