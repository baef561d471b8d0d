"""Work in several processes: results, errors, and what ends when."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hetxl_train.process_pool import Pool, Worker, check_jobs, default_jobs, one_thread, parallel_map, picklable


def square(number):
    return number**2, torch.get_num_threads(), os.getpid()


def fragile(number):
    if number == 2:
        raise ArithmeticError("two")
    return number


def test_one_thread_restores_the_number_of_threads():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_one_job_runs_here_in_order_on_one_thread():
    before = torch.get_num_threads()
    results = list(parallel_map(square, [3, 1, 2], jobs=1))
    assert results == [(item, (item**2, 1, os.getpid())) for item in (3, 1, 2)]
    assert torch.get_num_threads() == before
    assert list(parallel_map(square, [], jobs=4)) == []


def test_parallel_map_runs_in_other_processes_on_one_thread():
    results = dict(parallel_map(square, [1, 2, 3], jobs=2))
    assert {item: value for item, (value, _, _) in results.items()} == {1: 1, 2: 4, 3: 9}
    assert {threads for _, threads, _ in results.values()} == {1}
    assert os.getpid() not in {process for _, _, process in results.values()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_the_work_is_raised(jobs):
    with pytest.raises(ArithmeticError, match="two"):
        list(parallel_map(fragile, [1, 2, 3], jobs=jobs))


def test_jobs_must_be_positive():
    assert default_jobs() >= 1
    check_jobs(None)
    with pytest.raises(ValueError, match="jobs must be at least 1, found 0"):
        check_jobs(0)
    with pytest.raises(ValueError, match="jobs must be at least 1, found -2"):
        next(parallel_map(square, [1], jobs=-2))


class UnsendableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def unsendable(number):
    raise UnsendableError(number, "more")


def killed(number):
    os.kill(os.getpid(), signal.SIGKILL)


def ticking(path):
    """Write a heartbeat repeatedly."""
    for number in range(6000):
        Path(path).write_text(str(number))
        time.sleep(0.05)


def ask(work, item):
    with Worker(work) as worker:
        worker.submit(item)
        return worker.result()


def failing(number):
    raise ArithmeticError("two")


def test_an_error_carries_the_traceback_of_its_process():
    with pytest.raises(ArithmeticError) as caught:
        ask(failing, 2)
    assert 'raise ArithmeticError("two")' in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_message():
    with pytest.raises(RuntimeError, match="UnsendableError: 1 and more"):
        ask(unsendable, 1)


def test_a_killed_process_raises_an_error():
    with pytest.raises(ChildProcessError, match=r"ended with code -9 .*use fewer jobs"):
        ask(killed, 1)


def signs(paths):
    """Return the last heartbeat in each file that exists."""
    return [path.read_text() for path in paths if path.exists()]


def stopped(paths):
    """Return whether no heartbeat has come for a second."""
    before = signs(paths)
    time.sleep(1)
    return signs(paths) == before


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("by", ["Ctrl-C", "a kill"])
def test_work_ends_with_the_parent(tmp_path, by):
    script = tmp_path / "script.py"
    tick_files = [tmp_path / name for name in ("one", "two", "three")]
    script.write_text(
        "import signal\n"
        "from test_process_pool import ticking\n"
        "from hetxl_train.process_pool import parallel_map\n"
        "if __name__ == '__main__':\n"
        # What a shell starts in the background ignores Ctrl-C, and so would this.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    list(parallel_map(ticking, {list(map(str, tick_files))}, jobs=2))\n"
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
            until(lambda: asking.poll() is not None or len(signs(tick_files)) == 2)
            assert asking.poll() is None
            # Ctrl-C is for all of a terminal.
            os.killpg(asking.pid, signal.SIGINT) if by == "Ctrl-C" else asking.kill()
            _, stderr = asking.communicate(timeout=30)
            until(lambda: stopped(tick_files))
        finally:
            asking.kill()
    assert asking.returncode != 0
    assert stderr.count("Traceback") == (by == "Ctrl-C")  # its own, and none of its workers'
    assert not tick_files[2].exists()


def visible(seconds):
    time.sleep(seconds)
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_process_sees_one_of_the_devices():
    with Pool(visible, 2, ("3", "GPU-8f3a")) as pool:
        seen = {result for _, result in pool.map([0.3, 0.3, 0.0, 0.0]) if not isinstance(result, Exception)}
    assert sorted(device for _, device in seen) == ["3", "GPU-8f3a"]
    assert len({process for process, _ in seen}) == 2


def killed_at_two(number):
    if number == 2:
        killed(number)
    return fragile(number) if number < 5 else os.getpid()


def test_a_pool_survives_failures_and_keeps_its_processes():
    with Pool(killed_at_two, 2) as pool:
        results = dict(pool.map([1, 2, 3, 4]))
        assert isinstance(results[2], ChildProcessError)
        assert "ended with code -9" in str(results[2])
        assert [results[number] for number in (1, 3, 4)] == [1, 3, 4]
        processes = {result for _ in range(3) for _, result in pool.map([5, 6])}
        assert len(processes) == 2
        pool.jobs = 1
        assert len({result for _, result in pool.map([5, 6])} - processes) == 0


def test_a_script_without_a_guard_can_start_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import math\n"
        "from hetxl_train.process_pool import parallel_map\n"
        "print(sorted(result for _, result in parallel_map(math.sqrt, [1.0, 4.0], jobs=2)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[1.0, 2.0]"


def test_errors_that_cannot_be_sent_keep_their_message():
    sent = picklable(ValueError("wrong"))
    assert isinstance(sent, ValueError)
    assert str(sent) == "wrong"
    assert str(picklable(UnsendableError("a", "b"))) == "UnsendableError: a and b"


def device_of(word):
    if word == "kill":
        killed(0)
    time.sleep(0.5)  # so that every process gets an item
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_every_process_sees_a_device_of_its_own_also_one_that_replaces_another():
    with Pool(device_of, 2, ["4", "7"]) as pool:
        assert {result for _, result in pool.map(["", "", ""])} == {"4", "7"}
        assert isinstance(dict(pool.map(["kill"]))["kill"], ChildProcessError)
        assert {result for _, result in pool.map(["", "", ""])} == {"4", "7"}
