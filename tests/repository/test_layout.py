"""The shape of the package: which layer may import which, and what a plain import may load."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import hetxl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def import_graph():
    """The script that prints the graph, as a module."""
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "scripts" / "import_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packages_do_not_import_in_a_cycle(import_graph):
    assert import_graph.cycles(import_graph.graph()) == []


def test_imports_go_inwards(import_graph):
    assert import_graph.outward(import_graph.graph()) == []


def test_functional_and_nn_import_nothing_above_them(import_graph):
    edges = import_graph.graph()
    assert edges["hetxl.functional"] <= {"hetxl._checks", "hetxl._seeds", "hetxl.registry"}
    assert edges["hetxl.nn"] <= {"hetxl._checks", "hetxl.functional", "hetxl.registry"}


def test_cycles_and_outward_imports_are_seen(import_graph):
    edges = {"hetxl.a": {"hetxl_train.b"}, "hetxl_train.b": {"hetxl.c"}, "hetxl.c": {"hetxl.a"}}
    assert import_graph.cycles(edges) == [["hetxl.a", "hetxl.c", "hetxl_train.b"]]
    assert import_graph.outward(edges) == ["hetxl.a → hetxl_train.b"]


def loaded_by(code):
    """The project's modules that a statement loads in a new process."""
    code += "; import sys; print(*[name for name in sys.modules if name.split('.')[0].startswith('hetxl')])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_library_loads_neither_app_nor_lab():
    assert {name.split(".")[0] for name in loaded_by("import hetxl")} == {"hetxl"}


def test_importing_a_configuration_loads_no_report_task_or_model():
    modules = loaded_by("import hetxl_train.config")
    heavy = ("report", "tasks", "model", "loop", "data", "search", "temperature", "cli")
    assert [name for name in modules if name.startswith(tuple(f"hetxl_train.{part}" for part in heavy))
            and name != "hetxl_train.temperature_methods"] == []  # fmt: skip
    assert len(modules) < 12


def test_entry_points_of_the_lab_exist():
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    for group, entries in project["entry-points"].items():
        for name, target in entries.items():
            assert EntryPoint(name, target, group).load() is not None


VAGUE = {"found", "place", "told", "made", "given", "wanted", "kept", "one", "it"}


@pytest.mark.parametrize("ring", ["src/hetxl", "src/hetxl_train", "lab/hetxl_lab", "tests", "benchmarks", "examples"])
def test_names_say_what_they_hold(ring):
    vague = []
    for path in sorted((ROOT / ring).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else getattr(node, "arg", None) or getattr(node, "name", None)
            # Arguments of calls and imports have the names of others, such as hypothesis.given.
            if name in VAGUE and not isinstance(node, (ast.keyword, ast.alias)):
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert vague == []


def test_a_plain_import_loads_no_extra():
    extras = ("timm", "transformers", "open_clip", "lightning", "optuna", "faiss", "onnx", "torchvision")
    code = f"import sys, hetxl; print([name for name in {extras} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist():
    for name in hetxl.__all__:
        assert getattr(hetxl, name) is not None
    for name in hetxl.functional.__all__:
        assert getattr(hetxl.functional, name) is not None
