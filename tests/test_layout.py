"""The shape of the package: which layer may import which, and what a plain import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hetxl

PACKAGE = Path(hetxl.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {"functional": {"functional"}, "nn": {"functional", "nn"}}


def imported_layers(path):
    """The parts of hetxl that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("hetxl."):
                yield name.split(".")[1]


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_go_one_way(layer):
    for path in (PACKAGE / layer).rglob("*.py"):
        assert set(imported_layers(path)) <= ALLOWED[layer], path.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


def test_every_module_has_its_test():
    tests = Path(__file__).parent
    # Checks and re-exports are tested through the modules that use them.
    exempt = {"__init__.py", "_version.py", "_checks.py"}
    for path in MODULES:
        if path.name not in exempt:
            relative = path.relative_to(PACKAGE)
            assert (tests / relative.parent / f"test_{relative.name}").exists(), relative


def test_a_plain_import_loads_no_extra():
    extras = ("matplotlib", "timm", "transformers", "open_clip", "lightning", "optuna", "faiss", "onnx", "torchvision")
    code = f"import sys, hetxl; print([name for name in {extras} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_public_names_are_there():
    for name in hetxl.__all__:
        assert getattr(hetxl, name) is not None
    for name in hetxl.functional.__all__:
        assert getattr(hetxl.functional, name) is not None
