import os
import signal
import threading
import time

import pytest

from hetxl.training.files import read_json
from hetxl.tuning.trial import Trial
from hetxl.tuning.workers import Worker, Workers
from support.training import QUIET, small


def trial(tmp_path, name, **options):
    return Trial(name, small(tmp_path / name, temperature="0.5", steps=2, **options), "whole")


def test_one_that_fails_does_not_stop_the_others(tmp_path):
    # The second has no such data; the third puts its weights where they are no numbers.
    trials = [
        trial(tmp_path, "good"),
        trial(tmp_path, "lost", validation="nowhere.npz"),
        trial(tmp_path, "hot", learning_rate=1e30, warmup=0.0, clip=0.0),
        trial(tmp_path, "last", seed=1),
    ]
    with Workers(2, tmp_path / "logs") as workers:
        needed = workers.measure(trials[0])
        assert needed > 2**20
        assert workers.measure(trials[1]) is None
        found = workers.run(trials, QUIET)
        assert [outcome.trial.name for outcome in found] == ["good", "lost", "hot", "last"]
        assert [outcome.error is None for outcome in found] == [True, False, False, True]
        assert "nowhere" in found[1].error
        assert "the loss is nan" in found[2].error
        assert "Traceback" in (tmp_path / "logs" / "lost.txt").read_text()
        # What is finished is not done again.
        before = (tmp_path / "good" / "result.json").stat().st_mtime_ns
        workers.run(trials[:1], QUIET)
        assert (tmp_path / "good" / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(tmp_path):
    long = trial(tmp_path, "long")
    long = Trial("long", small(tmp_path / "long", temperature="0.5", steps=100_000, checkpoint_every=10), "whole")
    with Workers(1, tmp_path / "logs") as workers:
        [worker] = workers._all

        def kill() -> None:
            while not (tmp_path / "long" / "checkpoints").exists():
                time.sleep(0.05)
            os.kill(worker._process.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        [lost] = workers.run([long], QUIET)
        thread.join()
        assert "ended" in lost.error
        # What it had forked is ended too: nothing writes any more.
        steps = sorted(path.name for path in (tmp_path / "long" / "checkpoints").glob("step-*"))
        time.sleep(0.5)
        assert sorted(path.name for path in (tmp_path / "long" / "checkpoints").glob("step-*")) == steps
        [good] = workers.run([trial(tmp_path, "good")], QUIET)
        assert good.error is None
        assert read_json(tmp_path / "good" / "result.json")["steps"] == 2


def test_an_interruption_ends_the_processes(tmp_path):
    long = Trial("long", small(tmp_path / "long", temperature="0.5", steps=100_000), "whole")

    class Interrupted(type(QUIET)):
        def bar(self, title, total, done=0):
            raise KeyboardInterrupt

    with Workers(1, tmp_path / "logs") as workers, pytest.raises(KeyboardInterrupt):
        workers.run([long], Interrupted(quiet=True))
    Worker().end()  # one that never began
