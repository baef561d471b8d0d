"""Datasets that stay open."""

import dataclasses

import pytest

from hetxl.data import describe
from hetxl.data.synthetic import load_synthetic
from hetxl.training import opened as module
from hetxl.training.opened import KEPT, opened, source_of
from support.training import small


def test_the_last_ones_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_open", {})
    asked = []

    def open_it(name):
        asked.append(name)
        return load_synthetic(rows=60, classes=3, features=2)

    first = opened(0, lambda: open_it(0))
    assert opened(0, lambda: open_it(0)) is first
    assert first[1].as_dict() == describe(first[0]).as_dict()
    for name in range(1, KEPT + 1):
        opened(name, lambda name=name: open_it(name))
    assert asked == list(range(KEPT + 1))
    assert opened(0, lambda: open_it(0)) is not first
    assert asked[-1] == 0


@pytest.mark.parametrize(
    "change",
    [{"data_seed": 1}, {"data": "synthetic:rows=50"}, {"label_noise": "symmetric", "label_noise_rate": 0.2}],
)
def test_a_source_is_what_the_data_depends_on(change):
    config = small()
    same = dataclasses.replace(config, head="det", seed=7, steps=3, workers=2, out="elsewhere")
    assert source_of(same) == source_of(config)
    assert source_of(dataclasses.replace(config, **change)) != source_of(config)
