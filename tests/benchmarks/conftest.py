"""The benchmarks are scripts, not a package: they find their neighbours when their folder is on the path."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load():
    """Import a script of benchmarks/ by its name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in [path.stem for path in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)
