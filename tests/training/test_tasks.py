"""Several trainings: the same here and in other processes, each once, and which of them may fail."""

import dataclasses
import json

import pytest

from hetxl.data import describe
from hetxl.training import memory, tasks
from hetxl.training.parallel import one_thread
from hetxl.training.tasks import DIVERGED, Task, run_tasks
from hetxl.training.train import open_data
from support.training import QUIET, Listening, small


@pytest.fixture(scope="module")
def data():
    dataset = open_data(small())
    return dataset, describe(dataset)


def task(place, seed=0, **options):
    return Task(small(place, head="het-xl", seed=seed), "ours", **options)


def metrics(place):
    return json.loads((place / "result.json").read_text())["metrics"]


def test_other_processes_find_what_this_one_finds(tmp_path, data, monkeypatch):
    monkeypatch.setattr(memory, "peak_memory", lambda: 0)  # what the tests before it have had
    here, there = (
        [task(tmp_path / name / f"{seed}", seed, scaled=tmp_path / name / f"{seed}-scaled") for seed in (0, 1)]
        for name in ("here", "there")
    )
    narrator = Listening()
    with one_thread():
        run_tasks(here, *data, narrator=QUIET)
    run_tasks(there, *data, jobs=2, narrator=narrator)
    for one, other in zip(here, there, strict=True):
        assert one.finished
        assert other.finished
        assert metrics(one.place) == metrics(other.place)
        assert metrics(one.scaled) == metrics(other.scaled)
    told = sorted(text.partition("] ")[2].partition(":")[0] for text in narrator.said)
    assert told == ["ours, seed 0", "ours, seed 1"]
    assert all("test NLL" in text and "rescaled" in text for text in narrator.said)
    run_tasks(there, *data, jobs=2, narrator=narrator)
    assert len(narrator.said) == 2  # nothing was left to do


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (1, None),
        (10**9, "Trainings at a time: 2, up to 1.0 GB each, the largest DET"),
        (3 * 10**9, "Trainings at a time: 1 (memory has no room for 2), up to 3.0 GB each, the largest DET"),
    ],
)
def test_memory_has_room(tmp_path, data, monkeypatch, needed, expected):
    calls, used = [], []

    def needs(config, dataset):
        calls.append((config.head, config.train_samples))
        return needed + (config.head == "det")

    def here(work, items, *, jobs):
        used.append(jobs)
        return ((item, "done") for item in items)

    monkeypatch.setattr(tasks, "needed_memory", needs)
    monkeypatch.setattr(tasks, "each", here)
    monkeypatch.setattr(memory, "available_memory", lambda: 5 * 10**9)
    heads = {"DET": {"head": "det"}, "HET": {"head": "het"}, "more": {"head": "het", "train_samples": 9}}
    wanted = [Task(small(tmp_path / name, **options), name) for name, options in heads.items()]
    narrator = Listening()
    run_tasks(wanted, *data, jobs=2, narrator=narrator)
    assert sorted(calls) == [("det", small().train_samples), ("het", 9)]  # one of each head, the largest
    assert used == [1 if expected and "no room" in expected else 2]
    assert [text for text in narrator.said if "at a time" in text] == [expected] * (expected is not None)


def test_a_blind_one_has_not_seen_the_test_split(tmp_path, data):
    one, narrator = task(tmp_path / "one", blind=True), Listening()
    run_tasks([one], *data, jobs=1, narrator=narrator)
    assert set(metrics(one.place)) == {"validation"}
    assert "validation NLL" in narrator.said[0]


def test_a_run_of_other_options_in_its_place_is_an_error(tmp_path, data):
    one = task(tmp_path / "one")
    run_tasks([one], *data, jobs=1, narrator=QUIET)
    other = dataclasses.replace(one, config=dataclasses.replace(one.config, rank=2))
    for jobs in (None, 1):
        with pytest.raises(ValueError, match="rank"):
            run_tasks([other], *data, jobs=jobs, narrator=QUIET)


@pytest.mark.parametrize("jobs", [None, 1])
def test_losses_that_are_not_finite(tmp_path, data, monkeypatch, jobs):
    calls = []

    def failing(config, **options):
        calls.append(config)
        one.place.mkdir(exist_ok=True)
        raise FloatingPointError("the loss is nan after step 2")

    monkeypatch.setattr(tasks, "train", failing)
    one = task(tmp_path / "one", may_diverge=True)
    for _ in range(2):
        run_tasks([one], *data, jobs=jobs, narrator=QUIET)
    assert len(calls) == 1  # a finding is kept
    assert one.diverged
    assert one.finished
    assert json.loads((one.place / DIVERGED).read_text()) == {"message": "the loss is nan after step 2"}
    with pytest.raises(FloatingPointError):  # where it is none it is an error, again and again
        run_tasks([dataclasses.replace(one, may_diverge=False)], *data, jobs=jobs, narrator=QUIET)
