"""Loaded by the interpreters that tests start: see tests/conftest.py."""

import torchvision_ops  # noqa: F401
