"""Many runs: the same results here and in other processes, each done once, within the memory of the machine."""

import dataclasses
import json

import pytest
import torch

from hetxl_train import distributed, runner
from hetxl_train.data import describe
from hetxl_train.data.open import open_data
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.distributed import accelerators
from hetxl_train.process_pool import one_thread
from hetxl_train.runner import (
    CACHED,
    PlannedRun,
    available_memory,
    cached_dataset,
    data_source,
    jobs_for,
    needed_memory,
    peak_memory,
    run_planned,
)
from support.training import QUIET, Listening, small


@pytest.fixture(scope="module")
def data():
    dataset = open_data(small())
    return dataset, describe(dataset)


def planned(directory, seed=0, **options):
    return PlannedRun("ours", small(directory, head="het-xl", seed=seed), **options)


def metrics(directory):
    return json.loads((directory / "result.json").read_text())["metrics"]


def test_results_are_the_same_in_other_processes(tmp_path, data, monkeypatch):
    monkeypatch.setattr(runner, "peak_memory", lambda: 0)  # what the tests before it have had
    here, there = (
        [planned(tmp_path / name / f"{seed}", seed, scaled=tmp_path / name / f"{seed}-scaled") for seed in (0, 1)]
        for name in ("here", "there")
    )
    console = Listening()
    with one_thread():
        run_planned(here, *data, console=QUIET)
    run_planned(there, *data, jobs=2, console=console)
    for local, remote in zip(here, there, strict=True):
        assert local.finished
        assert remote.finished
        assert metrics(local.directory) == metrics(remote.directory)
        assert metrics(local.scaled) == metrics(remote.scaled)
    titles = sorted(text.partition("] ")[2].partition(":")[0] for text in console.said)
    assert titles == ["ours, seed 0", "ours, seed 1"]
    assert all("test NLL" in text and "rescaled" in text for text in console.said)
    run_planned(there, *data, jobs=2, console=console)
    assert len(console.said) == 2  # nothing was left to do


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (1, None),
        (10**9, "Runs at a time: 2, up to 1.0 GB each, the largest DET"),
        (3 * 10**9, "Runs at a time: 1 (2 do not fit into memory), up to 3.0 GB each, the largest DET"),
    ],
)
def test_runs_at_a_time_are_limited_by_memory(tmp_path, data, monkeypatch, needed, expected):
    calls, used = [], []

    def needs(config, dataset):
        calls.append((config.head, config.train_samples))
        return needed + (config.head == "det")

    def here(work, items, *, jobs, devices):
        used.append(jobs)
        return ((item, "done") for item in items)

    monkeypatch.setattr(runner, "needed_memory", needs)
    monkeypatch.setattr(runner, "parallel_map", here)
    monkeypatch.setattr(runner, "available_memory", lambda: 5 * 10**9)
    heads = {"DET": {"head": "det"}, "HET": {"head": "het"}, "more": {"head": "het", "train_samples": 19}}
    runs = [PlannedRun(name, small(tmp_path / name, **options)) for name, options in heads.items()]
    console = Listening()
    run_planned(runs, *data, jobs=2, console=console)
    assert sorted(calls) == [("det", small().train_samples), ("het", 19)]  # one of each head, the largest
    assert used == [1 if expected and "do not fit" in expected else 2]
    assert [text for text in console.said if "at a time" in text] == [expected] * (expected is not None)


def test_a_run_with_other_options_in_the_directory_is_an_error(tmp_path, data):
    run = planned(tmp_path / "one")
    run_planned([run], *data, jobs=1, console=QUIET)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, rank=2))
    for jobs in (None, 1):
        with pytest.raises(ValueError, match="rank"):
            run_planned([other], *data, jobs=jobs, console=QUIET)


def test_available_memory_is_the_least_of_system_and_container(tmp_path):
    system, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_memory(system, group) is None
    system.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    assert available_memory(system, group) == 2000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    assert available_memory(system, group) == 2000 * 1024
    (group / "memory.max").write_text("1100\n")
    assert available_memory(system, group) == 1000


def test_jobs_fit_into_memory_and_do_not_exceed_the_request(monkeypatch):
    monkeypatch.setattr(runner, "available_memory", lambda: 1000)
    assert jobs_for(8, 100, 20, "cpu") == 8
    assert jobs_for(20, 100, 20, "cpu") == 8  # four fifths of it
    assert jobs_for(8, 100, 3, "cpu") == 3
    assert jobs_for(8, 5000, 3, "cpu") == 1
    assert jobs_for(8, None, 5, "cpu") == 5
    assert jobs_for(8, 1, None, "cpu") >= 1
    monkeypatch.setattr(runner, "available_memory", lambda: None)
    assert jobs_for(8, 100, 5, "cpu") == 5
    # One for each accelerator, unless told otherwise.
    monkeypatch.setattr(distributed, "find_device", torch.device)
    monkeypatch.setattr(runner, "find_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert jobs_for(8, 1, None, "cuda") == 3
    assert jobs_for(8, 1, None, "cuda:1") == 1
    assert jobs_for(8, 1, 2, "cuda") == 2


def test_runs_are_handed_to_visible_accelerators_unless_they_name_one(monkeypatch):
    monkeypatch.setattr(distributed, "find_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerators("cuda") == ["0", "1"]
    assert accelerators("cuda:1") == accelerators("cpu") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-8f3a")
    assert accelerators("cuda") == ["2", "GPU-8f3a"]


def test_runs_on_several_accelerators_run_at_the_same_time_on_one_each(tmp_path, monkeypatch):
    # Processes that see "devices" which are not there compute on the CPU.
    monkeypatch.setattr(runner, "accelerators", lambda device: ["0", "1"])
    monkeypatch.setattr(runner, "fitting_jobs", lambda runs, dataset, jobs, console: jobs)
    runs = [PlannedRun(name, small(tmp_path / name)) for name in ("a", "b")]
    dataset, listening = open_data(runs[0].config), Listening()
    run_planned(runs, dataset, describe(dataset), console=listening)
    assert all(run.finished for run in runs)
    assert sorted(line.partition(":")[0][6:] for line in listening.said) == ["a, seed 0", "b, seed 0"]


@pytest.mark.parametrize("method", ["train", "bilevel"])
def test_a_run_needs_at_least_the_peak_of_its_process(tmp_path, method):
    config = small(tmp_path, temperature="learned", temperature_method=method)
    needed = needed_memory(config, open_data(config))
    assert peak_memory() <= needed < peak_memory() + 2**28


def test_the_last_datasets_stay_open(monkeypatch):
    monkeypatch.setattr(runner, "_datasets", {})
    asked = []

    def open_it(name):
        asked.append(name)
        return load_synthetic(rows=60, classes=3, features=2)

    first = cached_dataset(0, lambda: open_it(0))
    assert cached_dataset(0, lambda: open_it(0)) is first
    assert first[1].as_dict() == describe(first[0]).as_dict()
    for name in range(1, CACHED + 1):
        cached_dataset(name, lambda name=name: open_it(name))
    assert asked == list(range(CACHED + 1))
    assert cached_dataset(0, lambda: open_it(0)) is not first
    assert asked[-1] == 0


@pytest.mark.parametrize(
    "change",
    [{"data_seed": 1}, {"data": "synthetic:rows=50"}, {"label_noise": "symmetric", "label_noise_rate": 0.2}],
)
def test_the_data_source_holds_what_the_data_depends_on(change):
    config = small()
    same = dataclasses.replace(config, head="det", seed=7, steps=3, workers=2, out="elsewhere")
    assert data_source(same) == data_source(config)
    assert data_source(dataclasses.replace(config, **change)) != data_source(config)
