"""benchmarks/retrieved.py: a smoke run with few classes."""

import argparse

import torch


def test_both_predictions_are_compared_and_timed(load):
    module = load("retrieved")
    options = argparse.Namespace(
        classes=2000,
        features=16,
        rank=2,
        samples=8,
        examples=16,
        batch=8,
        rounds=1,
        noise_init=0.5,
        index="ivf",
        seed=0,
    )
    with torch.no_grad():
        rows, lines = module.measure(options)
    speed, agreement = rows
    assert speed.measured > 0
    assert 0.8 <= agreement.measured <= 1
    assert agreement.detail.endswith("of 16 examples")
    assert len(lines) == 2
