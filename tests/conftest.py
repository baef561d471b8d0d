"""Set-up for all tests."""

import os

# Before torch's first bfloat16 product: on some CPUs the widest instruction set it would pick ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import settings

from hetxl.training import parallel
from support import torchvision_ops  # noqa: F401

settings.register_profile("hetxl", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("hetxl")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Problems this small gain nothing from more threads, and lose much where other programs have the cores."""
    with parallel.one_thread():
        yield
