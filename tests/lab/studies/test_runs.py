import dataclasses
import json
import threading
import time

import numpy as np
import pytest
import torch

from hetxl._files import write_json
from hetxl.registry import METRIC_NAMES
from hetxl_lab.studies import runs
from hetxl_lab.studies.class_subsets import apply_view, check_view
from hetxl_lab.studies.profiles import LEARNED, PROFILES
from hetxl_lab.studies.runs import (
    DIVERGED,
    PAIR_SETTINGS,
    PairBench,
    RunCache,
    StudyRun,
    over_seeds,
    pair_values,
    run_missing,
)
from hetxl_train.config import ContrastiveConfig, TrainConfig
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.runs import start_run
from hetxl_train.training import train
from support.training import QUIET, Listening

CONFIG = TrainConfig(data="synthetic:rows=100", head="het-xl", seed=3)


def changed(**options):
    return StudyRun(dataclasses.replace(CONFIG, **options))


def test_the_name_of_a_run_is_made_of_its_options():
    first = StudyRun(CONFIG)
    assert first.key.startswith("synthetic-het-xl-seed3-")
    # Where it goes and how many processes read its data changes nothing.
    assert changed(out="elsewhere", workers=0, log_every=7).key == first.key
    others = [changed(rank=2), changed(seed=4), changed(head="det"), changed(steps=5), StudyRun(CONFIG, "known:5")]
    assert len({run.key for run in (first, *others)}) == 6
    assert first.title == "synthetic:rows=100 HET-XL seed 3"
    assert StudyRun(CONFIG, rescaled=True).key == first.key != StudyRun(CONFIG, blind=True).key


def test_names_stay_those_of_the_runs_on_disk():
    base = PROFILES["full"].base
    assert base.run("het-xl", 0, **LEARNED).key == "pycode-het-xl-seed0-f4349bad717db5c8"
    assert base.run("det", 1, view="known:5").key == "pycode-det-seed1-d96c18f2b92af955"


def test_an_option_at_its_default_is_not_in_the_name():
    """So that a new option, which all old runs have at its default, changes no name."""
    spec = next(field for field in dataclasses.fields(TrainConfig) if field.name == "rank")
    assert changed(rank=spec.default).key == StudyRun(CONFIG).key


def test_runs_on_the_same_data_share_it():
    assert changed(rank=2, seed=9, workers=0).source == StudyRun(CONFIG).source
    assert changed(data_seed=1).source != StudyRun(CONFIG).source
    assert StudyRun(CONFIG, "known:5").source != StudyRun(CONFIG).source


def test_an_unknown_view_raises_at_once():
    with pytest.raises(ValueError, match="view must be"):
        StudyRun(CONFIG, "half")


def test_cache_returns_results_of_finished_runs(tmp_path):
    cache, run = RunCache(tmp_path), StudyRun(CONFIG)
    assert not cache.done(run)
    with pytest.raises(FileNotFoundError, match=r"no result\.json.*run the study again"):
        cache.result(run)
    directory = cache.directory(run)
    directory.mkdir()
    (directory / DIVERGED).write_text(json.dumps({"message": "the loss is nan"}))
    assert cache.done(run)
    assert cache.result(run) is None
    (directory / "result.json").write_text('{"steps": 3}')
    assert cache.result(run) == {"steps": 3}


def test_run_directory_with_other_options_raises(tmp_path):
    """As when a default was another one then: the name has only what differs from the defaults."""
    cache, run = RunCache(tmp_path), StudyRun(CONFIG)
    start_run(CONFIG, cache.directory(run))
    (cache.directory(run) / "result.json").write_text("{}")
    assert cache.done(run)
    write_json(cache.directory(run) / "config.json", dataclasses.replace(CONFIG, train_samples=99).to_dict())
    with pytest.raises(ValueError, match="train_samples 99 there"):
        cache.done(run)


def test_turn_excludes_a_second_thread(tmp_path):
    cache, run, order = RunCache(tmp_path), StudyRun(CONFIG), []

    def other():
        with cache.turn(run):
            order.append("second")

    with cache.turn(run):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


BENCH = PairBench("icons", {"steps": 3})


def test_settings_differ_from_the_defaults_in_what_they_say():
    assert set(PAIR_SETTINGS) == {f"{head}-swap{swap}" for head in ("det", "het-xl") for swap in (0, 20, 40)} | {
        f"het-xl-normalize-{placement}" for placement in ("after", "both", "none")
    }
    usual = ContrastiveConfig(steps=3, eval_samples=22, seed=4, data_seed=4)
    assert BENCH.run("het-xl-swap0", 4).config == usual
    config = BENCH.run("het-xl-normalize-none", 4).config
    assert (config.normalize, config.swap, config.head) == ("none", 0, "het-xl")
    assert BENCH.run("det-swap40", 4).config.swap == 0.4


def test_a_run_has_a_name_and_a_title():
    run = BENCH.run("det-swap20", 3)
    assert run.key == "det-swap20-seed3"
    assert run.title == "icons DET (det-swap20) seed 3"


def test_another_run_under_its_name_is_an_error(tmp_path):
    run = BENCH.run("det-swap20", 3)
    cache = RunCache(tmp_path)
    assert not cache.done(run)
    directory = cache.directory(run)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(run.config.to_dict()))
    assert not cache.done(run)
    (directory / "log.jsonl").touch()
    other = PairBench("icons", {"steps": 4}).run("det-swap20", 3)
    with pytest.raises(ValueError, match=r"holds a run with other options \(steps 3 there, 4 here\)"):
        cache.done(other)


def test_invalid_pair_settings_raise():
    with pytest.raises(ValueError, match=r"setting must be one of .*did you mean 'det-swap20'"):
        BENCH.run("det-swap2", 0)
    with pytest.raises(ValueError, match="data must be set"):
        PairBench("").run("det-swap0", 0)


def test_metrics_that_one_run_has_not_are_left_out():
    full = {"metrics": {"test": {"zero_shot": {"top1": 0.1, "top5": 0.2}}}, "swaps": {"noise_auroc": 0.6}}
    part = {"metrics": {"test": {"zero_shot": {"top1": 0.3, "top5": 0.4}}}}
    assert pair_values([full, part]) == {"zero_shot_top1": [0.1, 0.3], "zero_shot_top5": [0.2, 0.4]}
    assert pair_values([full])["noise_auroc"] == [0.6]


def result(label, seed, nll):
    metrics = dict.fromkeys(METRIC_NAMES, 0.5)
    return {
        "label": label,
        "seed": seed,
        "metrics": {"test": metrics | {"nll": nll}, "validation": metrics | {"nll": nll + 1}},
        "train_seconds": 2.0,
        "steps": 5,
        "temperature": 1.0,
        "parameters": {"total": 7},
    }


def test_lists_in_the_order_of_the_seeds():
    values = over_seeds([result("DET", 2, 3.0), result("DET", 0, 1.0)])
    assert (values["seeds"], values["nll"], values["validation_nll"]) == ([0, 2], [1.0, 3.0], [2.0, 4.0])
    assert (values["steps"], values["parameters"], values["precision@1"]) == (5, 7, [0.5, 0.5])
    assert over_seeds([result("DET", 2, 3.0)], "validation")["nll"] == [4.0]


POOL_BENCH = PROFILES["miniature"].base


def test_each_run_is_trained_once(tmp_path, monkeypatch):
    cache, started = RunCache(tmp_path), []

    def counting(config, **options):
        started.append(config.seed)
        return train(config, **options)

    monkeypatch.setattr(runs, "train", counting)
    planned = [POOL_BENCH.run("det", seed) for seed in (0, 1, 0)]
    console = Listening()
    run_missing(planned, cache, jobs=1, console=console)
    assert started == [0, 1]
    assert console.said[0] == f"2 runs, 0 of them done before; in {tmp_path}"
    assert console.said[1].startswith("[1/2] synthetic:rows=400,classes=20,features=8 DET seed 0: test NLL ")
    run_missing([*planned, POOL_BENCH.run("det", 2)], cache, jobs=1, console=QUIET)
    assert started == [0, 1, 2]
    directory = cache.directory(planned[0])
    assert (directory / "model.safetensors").exists()
    assert not (directory / "checkpoints").exists()
    assert json.loads((directory / "result.json").read_text())["steps"] == POOL_BENCH.steps


def test_two_processes_give_what_one_gives(tmp_path):
    planned = [POOL_BENCH.run("het-xl", seed) for seed in (0, 1)]
    caches = RunCache(tmp_path / "one"), RunCache(tmp_path / "two")
    for jobs, cache in enumerate(caches, 1):
        run_missing(planned, cache, jobs=jobs, console=QUIET)
    for run in planned:
        serial, parallel = (cache.result(run)["metrics"]["test"]["nll"] for cache in caches)
        assert parallel == serial


def test_a_loss_that_is_not_finite_is_a_result(tmp_path, monkeypatch):
    def fragile(config, **options):
        raise FloatingPointError("the loss is nan after step 2")

    monkeypatch.setattr(runs, "train", fragile)
    cache, console = RunCache(tmp_path), Listening()
    run = POOL_BENCH.run("det", 0)
    cache.directory(run).mkdir(parents=True)
    run_missing([run], cache, jobs=1, console=console)
    assert console.said[-1].endswith("the loss did not stay finite")
    assert cache.result(run) is None


def test_invalid_options_stop_all_runs(tmp_path):
    wrong = StudyRun(dataclasses.replace(POOL_BENCH.config("det"), data="synthetic:rows=400,colour=3"))
    with pytest.raises(TypeError, match="colour"):
        run_missing([wrong], RunCache(tmp_path), jobs=1, console=QUIET)


def test_invalid_number_of_jobs_raises(tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, found 0"):
        run_missing([], RunCache(tmp_path), jobs=0, console=QUIET)
    assert run_missing([], RunCache(tmp_path), jobs=2, console=QUIET) < 1
    assert not list(tmp_path.iterdir())


DATA = load_synthetic(rows=400, classes=11, features=4)


def test_known_and_unknown_classes_part_the_data():
    known, unknown = apply_view(DATA, "known:5"), apply_view(DATA, "unknown:5")
    assert list(unknown.class_names) == ["4", "9"]
    assert len(known.class_names) == 9
    assert not set(known.class_names) & set(unknown.class_names)
    for name, split in DATA.splits.items():
        parts = known.splits[name], unknown.splits[name]
        assert sum(map(len, parts)) == len(split)
        for dataset, part in zip((known, unknown), parts, strict=True):
            names = [dataset.class_names[label] for label in part.labels.ids]
            assert names == [DATA.class_names[label] for label in split.labels.ids[part.rows]]


def test_rows_are_those_of_the_source():
    part = apply_view(DATA, "unknown:5").splits["train"]
    rows = np.array([3, 0, 3])
    fetched = part.fetch(rows)
    assert fetched.rows.tolist() == [3, 0, 3]
    assert torch.equal(fetched.inputs, DATA.splits["train"].features[torch.from_numpy(part.rows[rows])])
    assert part.show(0) == DATA.splits["train"].show(int(part.rows[0]))


def test_empty_view_is_the_whole_dataset():
    assert apply_view(DATA, "") is DATA
    assert check_view("") is None
    assert check_view("known:5") == ("known", 5)


@pytest.mark.parametrize("text", ["known", "known:1", "seen:5", "known:x"])
def test_invalid_views_raise(text):
    with pytest.raises(ValueError, match=f"view must be known:N or unknown:N .*found '{text}'"):
        check_view(text)


def test_a_view_needs_single_labels_and_classes():
    with pytest.raises(ValueError, match="one label for each row"):
        apply_view(load_synthetic(rows=100, classes=4, features=2, multi_label=True), "known:2")
    with pytest.raises(ValueError, match="leaves none of the 11 classes"):
        apply_view(DATA, "unknown:50")
