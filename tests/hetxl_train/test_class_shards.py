"""`--classifier sharded`: classes split over processes, with the weights of one process that has all of them."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.distributed import World
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.export_run import export_run
from hetxl_train.log import read_log
from hetxl_train.parallel import sharing_classes
from hetxl_train.prediction import predict
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support import processes, sharded
from support.training import QUIET, Listening, small

ALONE = {"backbone": "none", "features": None, "width": None, "dropout": 0.0, "steps": 4}
CASES = {
    "het-xl": {"temperature": "learned", "temperature_learning_rate": 1.0},
    "few-classes": {"data": "synthetic:rows=900,classes=3,features=5", "covariance": "low_rank", "ema": 0.0},
    "sigmoid": {"link": "sigmoid", "optimizer": "sgd", "normalize_features": True, "steps": 4},
    "head-alone": {**ALONE, "noise_start": 0.5, "evaluate_every": 2},
    "det-alone": {**ALONE, "head": "det", "patience": 3, "ema": 0.0},
}
ON_FOUR = ("het-xl", "few-classes")
LAYOUTS = {2: {"accumulate": 4}, 4: {"accumulate": 2, "class_shards": 2}}
"""Options by the number of processes, all with the parts of one process that accumulates four."""


def configuration(folder, case, **options):
    if case == "few-classes" and "class_shards" in options:
        options = {"accumulate": 4}  # all processes share the three classes: one of four has none
    return TrainConfig(**processes.CLASSIFIER | {"classifier": "sharded"} | CASES[case] | options, out=str(folder))


def run_on(ranks, folder, configs):
    """Train configurations on a number of processes, in double precision."""
    if ranks == 1:
        for config in configs:
            processes.train_in_double(config)
        return
    folder.mkdir(exist_ok=True)
    sharded.run(processes.trained, ranks, folder, configs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same runs on 1, 2 and 4 processes, by their number."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks, options in {1: {"accumulate": 4}, **LAYOUTS}.items():
        cases = ON_FOUR if ranks == 4 else CASES
        configs = [configuration(folder / f"{case}-{ranks}", case, **options) for case in cases]
        run_on(ranks, folder / f"meeting-{ranks}", configs)
    return folder


def weights(run):
    return load_file(run / "model.safetensors")


def assert_same_weights(actual, expected, atol):
    expected, actual = weights(expected), weights(actual)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("case", "ranks"), [*((case, 2) for case in CASES), *((case, 4) for case in ON_FOUR)])
def test_processes_that_share_the_classes_train_and_evaluate_like_one(runs, case, ranks):
    single, several = runs / f"{case}-1", runs / f"{case}-{ranks}"
    assert_same_weights(several, single, 1e-9)
    first, second = (json.loads((run / "result.json").read_text()) for run in (single, several))
    assert first["parameters"] == second["parameters"]
    assert first["noise_kept"] == second["noise_kept"]
    for split, metrics in first["metrics"].items():
        assert second["metrics"][split] == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    losses = [
        [line["loss"] for line in read_log(run / "log.jsonl") if line["kind"] == "step"] for run in (single, several)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    if case == "het-xl":
        assert abs(second["temperature"] - 1) > 1e-3  # τ has moved


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 2), (2, 2)])
def test_a_run_resumes_on_another_number_of_processes(runs, tmp_path, before, after):
    resumed = tmp_path / "run"
    shutil.copytree(runs / f"het-xl-{before}", resumed)
    for name in ("model.safetensors", "result.json"):
        (resumed / name).unlink()
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    assert (resumed / "checkpoints" / "step-00000003" / "tensors").is_dir() is (before > 1)
    options = LAYOUTS.get(after, {"accumulate": 4})
    run_on(after, tmp_path / "meeting", [configuration(resumed, "het-xl", **options)])
    assert [line["step"] for line in read_log(resumed / "log.jsonl") if line["kind"] == "evaluation"] == [3, 6]
    assert_same_weights(resumed, runs / f"het-xl-{after}", 0.0 if before == after else 1e-9)


def test_a_damaged_part_is_refused_and_an_earlier_checkpoint_is_used(runs, tmp_path):
    shutil.copytree(runs / "het-xl-2" / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    whole = checkpoints.load(6)
    assert whole.tensors["model.head.classifier.weight"].shape == (10, 8)
    assert {value.dtype for name, value in whole.tensors.items() if "exp_avg" in name} == {torch.float64}
    part = sorted((tmp_path / "checkpoints" / "step-00000006" / "tensors").iterdir())[1]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    checkpoint, refused = checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert f"tensors/{part.name} was changed or cut short" in refused[0]
    part.unlink()
    assert f"tensors/{part.name} cannot be read" in checkpoints.latest()[1][0]


def test_a_finished_run_is_read_in_one_process_as_any_other(runs, tmp_path):
    run = runs / "het-xl-4"
    trained = load_run(run)
    assert type(trained.model.head.classifier) is torch.nn.Linear
    with processes.in_double():
        metrics = evaluate_run(run, limit=50, device="cpu")
    assert metrics == pytest.approx(json.loads((run / "result.json").read_text())["metrics"]["test"], rel=1e-9)
    written = export_run(run, "head", out=tmp_path / "head.safetensors", console=QUIET)
    assert written.difference == 0
    np.save(tmp_path / "features.npy", np.zeros((7, 5), dtype=np.float32))
    assert (
        predict(run, str(tmp_path / "features.npy"), tmp_path / "predictions.jsonl", device="cpu", console=QUIET) == 7
    )
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "model.safetensors").unlink()
    shutil.rmtree(unfinished / "checkpoints" / "step-00000003")
    assert torch.equal(load_run(unfinished).model.head.classifier.weight, trained.model.head.classifier.weight)


def test_a_resumed_run_says_that_the_classes_are_split_otherwise(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "het-xl-2", run)
    (run / "result.json").unlink()
    console = Listening()
    with processes.in_double():
        train(configuration(run, "het-xl", accumulate=4), console=console)
    assert any("classes over 1 instead of 2 processes: other rounding" in line for line in console.said)


def test_a_sharded_run_starts_from_a_linear_one_and_the_other_way(tmp_path):
    linear = train(small(tmp_path / "linear"), console=QUIET)
    again = train(
        small(tmp_path / "sharded", classifier="sharded", start_from=str(linear.path), learning_rate=1e-9),
        console=QUIET,
    )
    back = train(small(tmp_path / "back", start_from=str(again.path), learning_rate=1e-9), console=QUIET)
    values = [load_run(run.path).model.head for run in (linear, again, back)]
    for head in values[1:]:
        torch.testing.assert_close(head.classifier.weight, values[0].classifier.weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(head.covariance.factor, values[0].covariance.factor, rtol=0, atol=1e-6)


def test_the_main_process_alone_gathers_what_others_have_a_part_of(tmp_path):
    main, *others = sharded.run(processes.gathered, 4, tmp_path)
    assert torch.equal(main["rows"], torch.arange(33.0).view(11, 3))
    assert others == [{}, {}, {}]


def test_class_shards_must_divide_the_processes():
    with pytest.raises(ValueError, match="class_shards must divide the number of processes, 4, found 3"):
        sharing_classes(World(torch.device("cpu"), 0, 4), small(classifier="sharded", class_shards=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_shards": 2}, "class_shards is 2 and classifier linear; choose classifier = sharded"),
        ({"classifier": "sharded", "data_parallel": "fsdp"}, "goes with data_parallel = ddp, found data_parallel"),
        ({"classifier": "sharded", "optimizer": "lamb"}, "goes with optimizer = adamw or optimizer = sgd, found"),
        ({"classifier": "sharded", "precision": "float16"}, "found precision = float16"),
        ({"classifier": "sharded", "prior": 1.0}, "goes with no prior, found prior = 1.0"),
        ({"classifier": "sharded", "head": "het"}, "classifier = sharded goes with head = det, or het-xl"),
        ({"classifier": "sharded", "label_smoothing": 0.1}, "label_smoothing needs all classes"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_need_all_classes_raise(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
