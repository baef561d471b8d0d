"""How far it is from `head(x, y)` to the gradient."""

import sys

import torch

from hetxl import HetXLHead

MOST_FILES = 19


def modules_of(call):
    """The project's modules whose functions a call runs."""
    names = set()

    def profile(frame, event, argument):
        if event == "call":
            names.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {name for name in names if name.split(".")[0] == "hetxl"}


def test_a_loss_and_its_gradients_go_through_few_files():
    head = HetXLHead(8, 12, rank=2)
    features, ids = torch.randn(4, 8, requires_grad=True), torch.randint(12, (4,))
    seen = set()
    for samples in (2, 16):  # samples first, and factors first

        def step(samples=samples):
            # In this thread, which is the one that is watched.
            torch.autograd.set_multithreading_enabled(False)
            head(features, ids, num_samples=samples).backward()

        step()  # what is imported on the way does not count
        seen |= modules_of(step)
    torch.autograd.set_multithreading_enabled(True)
    assert {"hetxl.nn.heads", "hetxl.functional.engine.autograd", "hetxl.functional.engine.softmax"} <= seen
    assert len(seen) <= MOST_FILES, sorted(seen)
