"""Runs in 2 and 4 processes, on vectors and on tar shards: the weights of one process that accumulates, and its
evaluations exactly."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hetxl_train.config import TrainConfig
from hetxl_train.distributed import World
from hetxl_train.loaders import Parts
from hetxl_train.log import read_log
from support import killed_process, processes, sharded
from support.pairs import image_shards, small_pairs

LEARNED = {"temperature": "learned", "temperature_learning_rate": 1.0, "steps": 3}
CLASSIFIERS = {
    "classifier": {},
    "gradient": {"temperature_method": "gradient", **LEARNED},
    "held-out": {"temperature_method": "gradient", "temperature_held_out": 0.34, **LEARNED},
    "bilevel": {"temperature_method": "bilevel", **LEARNED},
    "fsdp": {"data_parallel": "fsdp", "temperature": "learned", "ema": 0.0},
    "frozen": {"frozen": True, "steps": 4, "noise_start": 0.5},
    "images": {"backbone": "cnn", "width": 8, "depth": 1, "dropout": 0.0, "image_size": 16, "workers": 0, "steps": 4},
}

PAIRS = {
    "pairs": {"accumulate": 1},
    "pairs-parts": {"dropout": 0.1, "samples": 3},
    "pairs-parts-sigmoid": {"link": "sigmoid", "noise": "text"},
    "pairs-fsdp": {"data_parallel": "fsdp", "dropout": 0.1},
    "pairs-fsdp-whole": {"data_parallel": "fsdp", "accumulate": 1, "head": "det"},
}
LOCKED = {"image": "timm:test_resnet", "image_weights": "random", "image_size": 32}
TOWERS = {
    "mapped": {**LOCKED, "image_lock": "mapped"},
    "locked-fsdp": {**LOCKED, "image_lock": "locked", "data_parallel": "fsdp"},
}
"""With towers of another library, whose batch norms see no part of a batch."""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A classifier and two towers, trained in one process."""
    folder = tmp_path_factory.mktemp("single")
    image_shards(folder)
    for config in configurations(folder, folder, 1):
        processes.train_in_double(config)
    return folder


def configurations(folder, data, ranks):
    """Configurations with a run each in a folder, some on the tar shards of another."""
    accumulate, shards = processes.PARTS // ranks, str(data / "tars" / "*.tar")
    classifiers = [
        TrainConfig(
            **processes.CLASSIFIER | ({"data": shards} if name == "images" else {}) | options,
            accumulate=accumulate,
            out=str(folder / name),
        )
        for name, options in CLASSIFIERS.items()
    ]
    return [*classifiers, *pair_configurations(folder, data, ranks, PAIRS)]


def pair_configurations(folder, data, ranks, kinds):
    """As `configurations`, of runs on pairs."""
    usual, shards = {"evaluate_every": 2, "accumulate": processes.PARTS // ranks}, str(data / "tars" / "*.tar")
    return [small_pairs(shards, folder / name, **usual | options) for name, options in kinds.items()]


def same_weights(first, second):
    expected, actual = (load_file(run / "model.safetensors") for run in (first, second))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.dtype in (torch.float64, torch.int64), name
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_like_one_that_accumulates(tmp_path, single, ranks):
    sharded.run(processes.trained, ranks, tmp_path, configurations(tmp_path, single, ranks))
    for name in (*CLASSIFIERS, *PAIRS):
        same_weights(single / name, tmp_path / name)
    for file in sorted((single / "frozen" / "features").glob("*.npy")):
        np.testing.assert_array_equal(np.load(tmp_path / "frozen" / "features" / file.name), np.load(file))
    # One process takes up what several have begun with divided weights.
    resumed = tmp_path / "fsdp"
    for path in (resumed / "model.safetensors", resumed / "result.json"):
        path.unlink()
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    processes.train_in_double(TrainConfig(**processes.CLASSIFIER | CLASSIFIERS["fsdp"], accumulate=4, out=str(resumed)))
    same_weights(single / "fsdp", resumed)
    metrics = [json.loads((folder / "images" / "result.json").read_text())["metrics"] for folder in (single, tmp_path)]
    assert metrics[0].keys() == {"validation", "test"}
    for split, values in metrics[0].items():
        assert metrics[1][split] == pytest.approx(values, rel=1e-9, abs=1e-12)
    temperatures = [read_log(single / name / "log.jsonl")[-2]["temperature"] for name in ("gradient", "bilevel")]
    assert all(abs(value - 1) > 1e-3 for value in temperatures)  # τ has moved


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_locked_towers_train_in_several_processes_like_in_one(tmp_path, single, ranks):
    for config in pair_configurations(tmp_path / "one", single, 1, TOWERS):
        processes.train_in_double(config)
    sharded.run(processes.trained, ranks, tmp_path, pair_configurations(tmp_path, single, ranks, TOWERS))
    for name in TOWERS:
        same_weights(tmp_path / "one" / name, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_runs_resume_in_another_number_of_processes(tmp_path, single, before, after):
    names = ("classifier", "fsdp", "images", "pairs", "pairs-parts", "pairs-fsdp")
    for ranks in (before, after):
        configs = [config for config in configurations(tmp_path, single, ranks) if Path(config.out).name in names]
        sharded.run(processes.trained, ranks, tmp_path, configs)
        if ranks == before:  # as if they had been stopped before their last checkpoint
            for name in names:
                for path in (tmp_path / name / "model.safetensors", tmp_path / name / "result.json"):
                    path.unlink()
                shutil.rmtree(max((tmp_path / name / "checkpoints").glob("step-*")))
                assert list((tmp_path / name / "checkpoints").glob("step-*"))
    for name in names:
        same_weights(single / name, tmp_path / name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluations_in_several_processes_equal_those_of_one_to_the_last_digit(tmp_path, single, ranks):
    runs = (single / "images", single / "pairs")
    with processes.in_double():
        alone = processes.evaluations(World(torch.device("cpu")), *runs)
    main, *_ = sharded.run(processes.evaluated, ranks, tmp_path, *runs)
    for name, column in alone["records"].items():
        np.testing.assert_array_equal(main["records"][name], column, err_msg=name)
    assert main["pairs"] == alone["pairs"]
    assert main["contrastive"] == alone["contrastive"]


def test_waiting_outlasts_the_time_out_and_notices_errors_and_lost_processes(tmp_path):
    first, second = sharded.run(processes.meetings, 2, tmp_path, 12.0, timeout=5)
    assert first[0] == "[[0, 1, 2], [3, 4, 5, 6]]"
    assert second[0] == "[]"
    assert first[1:3] == second[1:3] == ["IndexError: list index out of range"] * 2
    assert first[3].startswith("rank 0: no response from rank 1 for 1.2 s (--timeout)")
    assert len(second) == 3


@pytest.mark.slow
def test_long_phases_of_one_process_outlast_the_time_out(tmp_path):
    config = TrainConfig(
        **processes.CLASSIFIER | {"accumulate": processes.PARTS // 2, "timeout": 3.0}, out=str(tmp_path / "run")
    )
    sharded.run(processes.with_long_phases, 2, tmp_path, config, 6.0, 30.0, timeout=3)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == config.steps


def test_resuming_in_other_parts_states_what_differs():
    assert Parts(8, 2, 0, 2).difference(2, 2) == ""
    equal = Parts(8, 1, 0, 4).difference(2, 2)
    assert equal == ", in 4 × 1 (processes × accumulate) instead of 2 × 2: equal up to the rounding of sums"
    assert "other draws follow" in Parts(8, 2, 0, 4).difference(2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("images", 2), ("images", 4), ("pairs", 2), ("pairs", 4), ("towers", 2), ("sharded", 4)],
)
def test_a_process_killed_at_any_moment_loses_no_step_before_the_last_checkpoint(tmp_path, kind, ranks):
    kills = 10
    image_shards(tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(killed_process.__file__).parents[1]), *filter(None, sys.path)]
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    for name, count in (("straight", 0), ("killed", kills)):
        program = [killed_process.__file__, str(tmp_path / name), str(count), "0", kind]
        command = [*launcher, f"--max-restarts={count}", *program]
        process = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
        assert process.returncode == 0, process.stderr[-3000:]
    notes = [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()]
    deaths = [note for note in notes if "killed" in note]
    assert len(deaths) == kills
    assert len({death["killed"] for death in deaths}) >= 3  # steps, evaluations, checkpoints and waiting
    for death, after in itertools.pairwise(notes):
        if "resumed" in after and "killed" in death:
            assert after["resumed"] >= max(death["checkpoints"], default=0)
    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "killed"))
    rounded = killed_process.rounded(ranks)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6 if rounded else 0)
    logs = [
        [
            {key: value for key, value in line.items() if "second" not in key}
            for line in read_log(tmp_path / name / "log.jsonl")
        ]
        for name in ("straight", "killed")
    ]
    assert len(logs[0]) == len(logs[1])
    for first, second in zip(*logs, strict=True):
        near = {name: pytest.approx(value, rel=1e-6) for name, value in first.items() if isinstance(value, float)}
        assert second == (first | near if rounded else first)
