"""Set-up for all tests."""

import os
import sys
from pathlib import Path

# A torchvision built for CUDA does not import beside a CPU build of torch, and timm and open_clip with it. The tests'
# own interpreter and those they start declare the operators it misses (support/site/torchvision_ops.py).
sys.path.append(str(Path(__file__).parent / "support" / "site"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), sys.path[-1])))

# Before torch's first bfloat16 product: on some CPUs the widest instruction set it would pick ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
import torchvision_ops  # noqa: F401
from hypothesis import settings

from hetxl_train import process_pool

settings.register_profile("hetxl", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("hetxl")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Problems this small gain nothing from more threads, and lose much where other programs have the cores."""
    with process_pool.one_thread():
        yield
