"""Runs of a search: here and in processes, and training on the validation rows as well."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from hetxl._files import read_json
from hetxl_train.data.dataset import Fetched, Shown, Split, Unreadable
from hetxl_train.data.labels import Labels
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.runner import PlannedRun
from hetxl_train.search.trial import (
    Joined,
    TrialPool,
    drop_weights,
    outcome_of,
    run_trial,
    with_validation_joined,
)
from support.training import QUIET, small


def test_a_blind_trial_never_sees_the_test_split(tmp_path):
    trial = PlannedRun("one", small(tmp_path / "one", temperature="0.5", log_every=2), "blind")
    assert outcome_of(trial).error == "it did not end"
    assert outcome_of(trial, "why").error == "why"
    assert outcome_of(trial).seconds == 0
    run_trial(trial)
    outcome = outcome_of(trial)
    assert set(outcome.result["metrics"]) == {"validation"}
    assert outcome.temperature == 0.5
    assert outcome.nll("validation") > 0
    assert outcome.path() == [[2, 0.5], [4, 0.5]]
    assert not (trial.directory / "checkpoints").exists()
    before = (trial.directory / "result.json").stat().st_mtime_ns
    run_trial(trial)
    assert (trial.directory / "result.json").stat().st_mtime_ns == before
    drop_weights(outcome)
    assert not (trial.directory / "model.safetensors").exists()


def test_one_with_all_rows_and_one_that_is_fitted_afterwards(tmp_path):
    joined = PlannedRun("joined", small(tmp_path / "joined", temperature="1.0"), "joined")
    run_trial(joined)
    assert set(outcome_of(joined).result["metrics"]) == {"test"}
    fitted = PlannedRun("fitted", small(tmp_path / "fitted", temperature="1.0"), "whole", tmp_path / "fitted-fitted")
    run_trial(fitted)
    outcome = outcome_of(fitted)
    assert (tmp_path / "fitted-fitted" / "result.json").exists()
    assert outcome.temperature != 1.0
    assert set(outcome.result["metrics"]) == {"validation", "test"}


def test_a_directory_with_another_run_is_refused(tmp_path):
    run_trial(PlannedRun("one", small(tmp_path / "one", temperature="0.5", steps=1)))
    assert PlannedRun("one", small(tmp_path / "one", temperature="0.5", steps=1)).finished
    assert not PlannedRun("new", small(tmp_path / "new")).finished
    with pytest.raises(ValueError, match=r"temperature '0.5' there, '0.7' here"):
        _ = PlannedRun("one", small(tmp_path / "one", temperature="0.7", steps=1)).finished


def trial(tmp_path, name, **options):
    return PlannedRun(name, small(tmp_path / name, temperature="0.5", steps=2, **options), "whole")


def test_a_trial_that_fails_does_not_stop_the_others(tmp_path):
    # The second has no such data; the third puts its weights where they are no numbers.
    trials = [
        trial(tmp_path, "good"),
        trial(tmp_path, "lost", validation="nowhere.npz"),
        trial(tmp_path, "hot", learning_rate=1e30, warmup=0.0, clip=0.0),
        trial(tmp_path, "last", seed=1),
    ]
    with TrialPool(tmp_path / "logs", 2) as pool:
        needed = pool.measure(trials[0])
        assert needed > 2**20
        assert pool.measure(trials[1]) is None
        outcomes = pool.run(trials, QUIET)
        assert [outcome.trial.name for outcome in outcomes] == ["good", "lost", "hot", "last"]
        assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
        assert "nowhere" in outcomes[1].error
        assert "the loss is nan" in outcomes[2].error
        assert "Traceback" in (tmp_path / "logs" / "lost.txt").read_text()
        # What is finished is not done again.
        before = (tmp_path / "good" / "result.json").stat().st_mtime_ns
        pool.run(trials[:1], QUIET)
        assert (tmp_path / "good" / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(tmp_path):
    long = trial(tmp_path, "long")
    long = PlannedRun("long", small(tmp_path / "long", temperature="0.5", steps=100_000, checkpoint_every=10), "whole")
    with TrialPool(tmp_path / "logs") as pool:

        def kill() -> None:
            while not (tmp_path / "long" / "checkpoints").exists():
                time.sleep(0.05)
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        [lost] = pool.run([long], QUIET)
        thread.join()
        assert "ended" in lost.error
        # Nothing writes any more.
        steps = sorted(path.name for path in (tmp_path / "long" / "checkpoints").glob("step-*"))
        time.sleep(0.5)
        assert sorted(path.name for path in (tmp_path / "long" / "checkpoints").glob("step-*")) == steps
        [good] = pool.run([trial(tmp_path, "good")], QUIET)
        assert good.error is None
        assert read_json(tmp_path / "good" / "result.json")["steps"] == 2


def test_an_interrupt_ends_the_processes(tmp_path):
    long = PlannedRun("long", small(tmp_path / "long", temperature="0.5", steps=100_000), "whole")

    class Interrupted(type(QUIET)):
        def bar(self, title, total, done=0):
            raise KeyboardInterrupt

    with TrialPool(tmp_path / "logs") as pool, pytest.raises(KeyboardInterrupt):
        pool.run([long], Interrupted(quiet=True))
    assert not multiprocessing.active_children()


class Numbers(Split):
    """Row i is the number first + i; some cannot be read."""

    def __init__(self, first: int, count: int, broken: tuple[int, ...] = (), lists: bool = False):
        self.first, self.broken = first, broken
        ids = np.arange(first, first + count)
        self.labels = Labels(np.repeat(ids, 2), 2 * np.arange(count + 1)) if lists else Labels(ids)

    def fetch(self, rows, seeds=None):
        read = np.array([row for row in rows if row not in self.broken], dtype=np.int64)
        bad = [Unreadable(str(row), "broken") for row in rows if row in self.broken]
        return Fetched(torch.from_numpy(self.first + read).float().unsqueeze(1), read, bad)

    def show(self, row):
        return Shown(text=str(self.first + row))


def test_rows_come_from_where_they_are_in_the_order_asked():
    joined = Joined(Numbers(0, 5), Numbers(100, 4))
    rows = np.array([8, 0, 5, 3, 5, 0])
    batch = joined.fetch(rows, np.arange(6))
    assert batch.rows.tolist() == rows.tolist()
    assert batch.inputs.flatten().tolist() == [103, 0, 100, 3, 100, 0]
    assert joined.labels.take(batch.rows).tolist() == [103, 0, 100, 3, 100, 0]
    assert len(joined) == 9
    assert (joined.show(4).text, joined.show(5).text) == ("4", "100")


@pytest.mark.parametrize("rows", [[0, 2], [6, 7]])
def test_rows_of_one_split_alone(rows):
    joined = Joined(Numbers(0, 5), Numbers(100, 4))
    batch = joined.fetch(np.array(rows))
    assert batch.rows.tolist() == rows
    assert batch.inputs.flatten().tolist() == [row if row < 5 else 95 + row for row in rows]


def test_rows_that_cannot_be_read_are_left_out():
    joined = Joined(Numbers(0, 5, broken=(3,)), Numbers(100, 4, broken=(0,)))
    batch = joined.fetch(np.array([5, 4, 3, 8, 3, 1]))
    assert batch.rows.tolist() == [4, 8, 1]
    assert batch.inputs.flatten().tolist() == [4, 103, 1]
    assert len(batch.unreadable) == 3


def test_joined_splits_need_labels_of_one_kind():
    joined = Joined(Numbers(0, 2, lists=True), Numbers(7, 2, lists=True))
    assert joined.labels.take(np.array([3, 0])).classes.tolist() == [8, 8, 0, 0]
    with pytest.raises(ValueError, match="both"):
        Joined(Numbers(0, 2), Numbers(7, 2, lists=True))


def test_a_dataset_without_its_validation_split():
    dataset = load_synthetic(rows=200, classes=6, features=4)
    joined = with_validation_joined(dataset)
    assert set(joined.splits) == {"train", "test"}
    assert len(joined.splits["train"]) == len(dataset.splits["train"]) + len(dataset.splits["validation"])
    blind = dataclasses.replace(dataset, splits={"train": dataset.splits["train"]})
    with pytest.raises(ValueError, match="no validation split"):
        with_validation_joined(blind)
    assert set(with_validation_joined(
        dataclasses.replace(dataset, splits={k: v for k, v in dataset.splits.items() if k != "test"})
    ).splits) == {"train"}  # fmt: skip
