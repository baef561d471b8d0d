import copy
import json

import pytest
import torch

from hetxl_lab.studies.costs import OUT, fitting, lower_share, ratios, steps_of
from hetxl_lab.studies.measure import (
    DeviceMeter,
    HeadSize,
    Step,
    peaks_of,
    predicted_bytes,
    seconds_of,
    step_of,
    warm_up,
)
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study

SIZE = HeadSize(16, 40, 3)


@pytest.mark.parametrize("name", ["det", "het", "het-h", "het-xl"])
@pytest.mark.parametrize("way", ["engine", "paper"])
def test_a_training_step_leaves_gradients_and_a_prediction_none(name, way):
    head = SIZE.build(name)
    step_of(head, Step(name, way, 4, 5))()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())
    step_of(head, Step(name, way, 4, 5, "eval"))()
    assert all(parameter.grad is None for parameter in head.parameters())
    assert not head.training


def test_a_whole_step_goes_through_the_backbone():
    size = HeadSize(64, 10, 2, "timm:test_vit")
    head, backbone = size.build("het-xl"), size.build_backbone()
    step_of(head, Step("het-xl", "engine", 2, 3, whole=True), backbone)()
    assert all(parameter.grad is not None for parameter in backbone.module.parameters())
    step_of(head, Step("het-xl", "engine", 2, 3, "eval", True), backbone)()
    assert all(parameter.grad is None for parameter in backbone.module.parameters())


def test_both_ways_have_the_same_expectation():
    gradients = []
    for way in ("engine", "paper"):
        head = SIZE.build("het-xl")
        step_of(head, Step("het-xl", way, 4, 4000))()
        gradients.append(head.classifier.weight.grad)
    assert torch.allclose(*gradients, atol=0.01)


def test_building_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (SIZE.build("het").classifier.weight for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(2), expected)


def test_seconds_of_warms_up_and_stops_at_its_limit():
    calls = []
    assert seconds_of(lambda: calls.append(1), 3, 10.0) >= 0
    assert len(calls) == 4  # one warms up
    calls.clear()
    seconds_of(lambda: calls.append(1), 3, -1.0)
    assert len(calls) == 1


def test_warming_up_leaves_nothing_behind():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    warm_up("het-h")
    assert torch.equal(torch.rand(2), expected)


def test_predictions_of_memory():
    head = HeadSize(64, 5000, 10).build("het-xl", device="meta")
    gradients = 4 * sum(parameter.numel() for parameter in head.parameters())
    small, large = (predicted_bytes(head, Step("het-xl", "paper", 8, samples)) for samples in (10, 1000))
    assert (large - gradients) == 100 * (small - gradients)
    # With few samples the two gradients of W are more than those.
    few = predicted_bytes(head, Step("het-xl", "paper", 1, 1))
    assert few == gradients + 2 * 4 * 64 * 5000 < small
    # Ours has a budget for its blocks.
    assert predicted_bytes(head, Step("het-xl", "engine", 8, 1000), budget=2**24) <= gradients + 2**24
    # A prediction has no gradients, and the samples less often.
    assert predicted_bytes(head, Step("het-xl", "paper", 8, 1000, "eval")) < large - gradients
    det = HeadSize(64, 5000, 10).build("det", device="meta")
    assert predicted_bytes(det, Step("det", "engine", 8, 1)) == 4 * (64 * 5000 + 5000) + 4 * 8 * 5000


def test_peaks_are_near_their_predictions():
    size = HeadSize(64, 4000, 10)
    steps = [Step("het-xl", "paper", 16, samples) for samples in (20, 100)]
    peaks = list(peaks_of(size, steps))
    assert [step for step, _ in peaks] == steps
    for step, peak in peaks:
        assert 0.5 < peak / predicted_bytes(size.build("het-xl", device="meta"), step) < 2


LATENCY = load_study("latency")

SIZES = {"D": 8, "K": 30, "R": 2, "batches": [1, 8], "samples": [1, 10, 100], "budget": 2**30}
WHOLE = {
    "backbone": {mode: {"1": 100.0, "8": 300.0} for mode in ("train", "eval")},
    "whole": {"train": 202.0, "eval": 404.0},
}


def grid(per_sample, shift=0.0):
    cells = {
        f"B={batch},S={count}": batch * (1 + shift + per_sample * count) for batch in (1, 8) for count in (1, 10, 100)
    }
    return {"engine": cells, "paper": dict(cells)}


def latency_summary(xl):
    det = {"engine": {"B=1,S=1": 0.5, "B=8,S=1": 0.6}}
    heads = {"DET": det, "HET": grid(0.1), "HET-H": grid(0.1), "HET-XL": xl}
    setting = {"milliseconds": {"train": heads, "eval": copy.deepcopy(heads)}, "sizes": SIZES, **WHOLE}
    return {"settings": {"s": setting}, "device": "a CPU"}


def test_latency_study_times_every_cell(studied):
    text, summary = studied("latency")
    sizes, setting = PROFILES["miniature"].sizes, summary["settings"]["small"]
    for mode in ("train", "eval"):
        heads = setting["milliseconds"][mode]
        cells = heads["HET-XL"]["engine"]
        assert len(cells) == len(sizes.batches) * len(sizes.samples)
        assert all(value > 0 for value in cells.values())
        assert len(heads["DET"]["engine"]) == len(sizes.batches)
        assert heads["HET"]["paper"]["B=4,S=200"] is None
        assert all(value > 0 for value in setting["backbone"][mode].values())
    assert OUT in text
    assert "With the backbone" in text


@pytest.mark.parametrize(
    ("name", "head", "values"), [("latency", "DET", "milliseconds"), ("memory", "det", "megabytes")]
)
def test_a_study_that_was_stopped_keeps_what_it_has_measured(studied, tmp_path, name, head, values):
    cell, file = f"cpu, small, train, {head}, engine, B=2,S=1", tmp_path / "cells.json"
    file.write_text(json.dumps({"seconds": 60.0, "values": {cell: 7e6}}))
    summary = json.loads(studied.run(name, tmp_path).with_suffix(".json").read_text())
    assert summary["settings"]["small"][values]["train"]["DET"]["engine"]["B=2,S=1"] in (7e6, 7.0)
    assert summary["measuring_seconds"] > 60
    assert not file.exists()


def test_a_device_that_is_absent_is_refused(studied, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for name in ("latency", "memory"):
        with pytest.raises(ValueError, match="device 'cuda' is not available"):
            studied.run(name, tmp_path, options={"device": "cuda"})


def test_det_has_one_step_for_all_samples():
    sizes = PROFILES["full"].sizes
    assert len(steps_of("HET", "paper", sizes)) == len(sizes.batches) * len(sizes.samples)
    assert {step.samples for step in steps_of("DET", "engine", sizes)} == {1}


@pytest.mark.parametrize(("xl", "word"), [(grid(1.0, -0.99), "holds here"), (grid(0.05, -0.5), "does not hold here")])
def test_latency_the_conclusion_follows_the_numbers(xl, word):
    text = LATENCY.conclusion(latency_summary(xl))
    assert word in text
    assert "up to 16 samples and HET from 64 on" in text


def test_ratios_are_of_cells_that_both_have():
    values = latency_summary(grid(1.0))["settings"]["s"]["milliseconds"]["train"]
    values["HET-XL"]["paper"]["B=8,S=100"] = None
    assert ratios(values, SIZES, "paper")[1][0] == 10
    for count in (10, 100):
        values["HET-XL"]["paper"][f"B=8,S={count}"] = None
    assert ratios(values, SIZES, "paper")[1] == (100, pytest.approx(101 / 11))  # of the smaller batch
    for count in (10, 100):
        values["HET-XL"]["paper"][f"B=1,S={count}"] = None
    with pytest.raises(ValueError, match="no batch size has two cells"):
        ratios(values, SIZES, "paper")


def test_det_has_one_time_for_all_samples():
    table, *_, whole = LATENCY.tables(latency_summary(grid(1.0)))
    assert [row.cells[0] for row in table.rows] == [0.5] * 3 + [0.6] * 3
    first = whole.rows[0]  # B = 1, S = 1
    assert (first.label, first.cells) == ("training, B = 1, S = 1", [100.0, 100.5, 101.1, 101.1, 102.0])
    assert "takes 1.00, 2.01 times the sum" in whole.note  # 201 by the table


MEMORY = load_study("memory")

MEMORY_SIZES = {"D": 8, "K": 30, "R": 2, "batches": [1], "samples": [1, 10], "budget": 100_000_000, "whole_batch": 4}


def memory_summary(xl=50.0):
    cells = {"B=1,S=1": 60.0, "B=1,S=10": 120.0}
    both = {"engine": dict(cells), "paper": {"B=1,S=1": 90.0, "B=1,S=10": None}}
    ours = {"engine": {"B=1,S=1": xl, "B=1,S=10": xl + 1}, "paper": dict(both["paper"])}
    measured = {"DET": {"engine": {"B=1,S=1": 10.0}}, "HET": both, "HET-H": copy.deepcopy(both), "HET-XL": ours}
    predicted = {
        label: {way: {name: 2 * (value or 400.0) for name, value in cells.items()} for way, cells in ways.items()}
        for label, ways in measured.items()
    }
    whole = {"train": {label: [7.0, 8.0] for label in measured}, "eval": {label: [3.0] for label in measured}}
    setting = {
        name: dict.fromkeys(("train", "eval"), values)
        for name, values in (("megabytes", measured), ("predicted", predicted))
    }
    return {"settings": {"s": {**setting, "whole": whole, "sizes": MEMORY_SIZES}}, "device": "a CPU"}


def test_memory_study_predicts_cells_beyond_the_budget(studied):
    text, summary = studied("memory")
    setting = summary["settings"]["small"]
    measured, predicted = (setting[name]["train"]["HET"]["paper"] for name in ("megabytes", "predicted"))
    assert measured["B=4,S=200"] is None
    assert predicted["B=4,S=200"] > predicted["B=2,S=200"]
    assert all(value is not None for value in setting["megabytes"]["eval"]["DET"]["engine"].values())
    assert all(value > 0 for value in setting["whole"]["train"]["HET-XL"])
    assert "Cells that fit the budget" in text
    assert "far above the budget" in text


def test_fitting_counts_measured_and_predicted_cells():
    fits = fitting(memory_summary()["settings"]["s"], "train")
    assert fits["HET", "engine"] == {"cells": 2, "measured": 1, "predicted": 0, "ratio": 0.5}
    assert fits["HET", "paper"]["measured"] == 1
    assert fits["HET-XL", "engine"]["measured"] == 2
    assert fits["HET-XL", "engine"]["predicted"] == 1


@pytest.mark.parametrize(("xl", "word"), [(50.0, "holds here"), (500.0, "does not hold here"), (70.0, "do not decide")])
def test_memory_the_conclusion_follows_the_numbers(xl, word):
    assert word in MEMORY.conclusion(memory_summary(xl))
    assert lower_share(memory_summary(50.0)["settings"]["s"], "train", "HET-H") == 1


class Allocator:
    """What torch's module of an accelerator tells of its memory."""

    def __init__(self):
        self.now, self.most, self.calls = 100, 900, []

    def synchronize(self, device):
        self.calls.append("synchronize")

    def empty_cache(self):
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self, device):
        self.most = self.now

    def memory_allocated(self, device):
        return self.now

    def max_memory_allocated(self, device):
        return self.most


def test_the_peak_of_an_accelerator_is_read_after_it_has_finished():
    allocator = Allocator()
    meter = DeviceMeter(torch.device("cuda"), allocator)
    assert meter.reset() == 100
    allocator.most = 250
    assert meter.peak() == 250  # of what came after the reset
    assert allocator.calls == ["synchronize", "empty_cache", "synchronize"]


SAMPLES = load_study("samples")


def test_samples_study_has_a_line_for_each_count(studied):
    text, summary = studied("samples")
    assert [(line["group"], line["label"]) for line in summary["lines"]] == [
        ("HET", "1"),
        ("HET", "4"),
        ("HET-XL", "1"),
        ("HET-XL", "4"),
    ]
    for label in ("HET", "HET-XL"):
        for way in ("engine", "paper"):
            assert all(value > 0 for value in summary["milliseconds"][label][way].values())
    assert "The head's part of a step" in text


def test_the_same_samples_in_training_and_evaluation():
    configs = [run.config for run in SAMPLES.runs(PROFILES["full"], (0,))]
    assert {config.train_samples for config in configs} == {1, 4, 16, 64, 256, 512, 1000}
    assert all(config.train_samples == config.eval_samples for config in configs)


def samples_summary(lines, nll):
    times = {"engine": {"1": 1.0, "1000": 2.0}, "paper": {"1": 1.0, "1000": None}}
    values = {("1", "HET"): 2.3, ("1000", "HET"): 2.2, ("1", "HET-XL"): nll, ("1000", "HET-XL"): 2.0}
    return lines(values, milliseconds={"HET": times, "HET-XL": times})


@pytest.mark.parametrize(("nll", "word"), [(2.1, "holds here"), (2.5, "does not hold here")])
def test_samples_the_conclusion_follows_the_numbers(lines, nll, word):
    text = SAMPLES.conclusion(samples_summary(lines, nll))
    assert word in text
    assert "At S = 1 the paper's evaluation takes 1.0 times" in text  # the largest that fits


def test_steps_beyond_the_budget_are_marked(lines, tmp_path):
    summary = samples_summary(lines, 2.1)
    _, steps = SAMPLES.tables(summary)
    assert steps.rows[1].cells == [2.0, "out of memory budget", 2.0, "out of memory budget"]
    assert SAMPLES.plot(summary, tmp_path / "samples.svg").exists()
