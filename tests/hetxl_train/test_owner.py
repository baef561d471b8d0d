"""A directory has one owner at a time, and a killed owner leaves nothing behind for the next."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from hetxl_train.owner import LOCK, OwnedError, owned
from hetxl_train.training import train
from support.training import QUIET, small

HOLD = """
import sys, time
from pathlib import Path
from hetxl_train.owner import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that owns tmp_path / "run"."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_owner_is_told_who_the_first_is(tmp_path, holder):
    with pytest.raises(OwnedError, match=rf"run is in use by process {holder.pid} on \S+; wait until it ends"):
        train(small(tmp_path / "run"), console=QUIET)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    train(small(tmp_path / "run"), console=QUIET)
    assert (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / LOCK).exists()


def test_killed_owners_leave_nothing_behind(tmp_path):
    for name in (".model.json.sfke2dy1", "features/.test.npy.abcd_123", "checkpoints/.step-00000005.k2j3h4g5"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "part").write_text("half")
    for name in ("checkpoints/step-00000005", ".hidden", "a.b.abcdefgh"):
        (tmp_path / name).mkdir(parents=True)
    with owned(tmp_path):
        left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
        assert left == [".hidden", LOCK, "a.b.abcdefgh", "checkpoints", "checkpoints/step-00000005", "features"]


def test_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), owned(tmp_path):
        raise RuntimeError
    with owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_holds_on_a_full_disk_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with owned(tmp_path):
        assert (tmp_path / LOCK).read_text() == ""
    assert list(tmp_path.iterdir()) == []


def test_children_of_a_killed_owner_do_not_hold_its_lock(tmp_path):
    script = HOLD.replace("time.sleep(60)", "import os; os.fork() or print('child', flush=True); time.sleep(3)")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    assert process.stdout.readline() == "child\n"
    process.kill()
    process.wait()
    with owned(tmp_path):
        pass
    process.stdout.close()
