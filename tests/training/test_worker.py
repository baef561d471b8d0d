"""A process that works for another: what is told of its errors, and when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetxl.training.worker import Worker


class UnsendableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def unsendable(number):
    raise UnsendableError(number, "more")


def killed(number):
    os.kill(os.getpid(), signal.SIGKILL)


def ticking(place):
    """Leave a sign of life, again and again."""
    for number in range(6000):
        Path(place).write_text(str(number))
        time.sleep(0.05)


def ask(work, item):
    with Worker(work) as worker:
        worker.give(item)
        return worker.take()


def failing(number):
    raise ArithmeticError("two")


def test_an_error_tells_where_it_came_from():
    with pytest.raises(ArithmeticError) as found:
        ask(failing, 2)
    assert 'raise ArithmeticError("two")' in str(found.value.__cause__)


def test_an_error_that_cannot_be_sent_is_told():
    with pytest.raises(RuntimeError, match="UnsendableError: 1 and more"):
        ask(unsendable, 1)


def test_a_process_that_is_killed_is_told():
    with pytest.raises(ChildProcessError, match=r"ended with code -9 .*take fewer jobs"):
        ask(killed, 1)


def signs(places):
    """The last sign of life in each place that has one."""
    return [place.read_text() for place in places if place.exists()]


def stopped(places):
    """Whether no sign of life has come for a second."""
    before = signs(places)
    time.sleep(1)
    return signs(places) == before


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("by", ["Ctrl-C", "a kill"])
def test_work_under_way_ends_with_the_one_who_asks(tmp_path, by):
    script = tmp_path / "script.py"
    places = [tmp_path / name for name in ("one", "two", "three")]
    script.write_text(
        "import signal\n"
        "from test_worker import ticking\n"
        "from hetxl.training.parallel import each\n"
        "if __name__ == '__main__':\n"
        # What a shell starts in the background ignores Ctrl-C, and so would this.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    list(each(ticking, {list(map(str, places))}, jobs=2))\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        try:
            until(lambda: asking.poll() is not None or len(signs(places)) == 2)
            assert asking.poll() is None
            # Ctrl-C is for all of a terminal.
            os.killpg(asking.pid, signal.SIGINT) if by == "Ctrl-C" else asking.kill()
            _, told = asking.communicate(timeout=30)
            until(lambda: stopped(places))
        finally:
            asking.kill()
    assert asking.returncode != 0
    assert told.count("Traceback") == (by == "Ctrl-C")  # its own, and none of its workers'
    assert not places[2].exists()
