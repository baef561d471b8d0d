"""The wheel: what it carries, and that it works where nothing else is installed."""

import importlib
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import hetxl

ROOT = Path(__file__).parents[2]

USE_IT = """
import torch, hetxl
assert "site-packages" in hetxl.__file__, hetxl.__file__
head = hetxl.HetXLHead(8, 20)
head.loss(torch.randn(4, 8), torch.tensor([0, 1, 2, 3])).backward()
print(hetxl.__version__, head.predict(torch.randn(1, 8), top_k=2))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built as `make wheel` builds it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_readme_licence_and_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(metadata_name).decode()
        (licence,) = (name for name in names if name.endswith("/LICENSE"))
        assert "Apache License" in archive.read(licence).decode()
    assert "hetxl/py.typed" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert (ROOT / "README.md").read_text().splitlines()[0] in metadata
    assert f"Version: {hetxl.__version__}" in metadata
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)


def test_every_extra_is_tried_alone_by_the_workflow():
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    trials = runpy.run_path(str(ROOT / "scripts" / "try_extra.py"))["TRIALS"]
    (listed,) = re.findall(r"extra: \[(.*)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert set(trials) == set(listed.split(", ")) == extras - {"dev"} | {"none"}


def test_lowest_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text().partition("dev = [")[0]
    lowest = dict(re.findall(r'"([\w-]+)>=([\d.]+)', text.partition("dependencies = [")[2]))
    lowest.pop("tomli")  # for Python 3.10 alone
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert set(tested) == set(lowest)
    del tested["torch"]  # older ones come as builds for CUDA only
    assert [name for name in tested if not (tested[name] + ".").startswith(lowest[name] + ".")] == []


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert "pytest" not in listed
    assert "transformers" not in listed
    used = subprocess.run([python, "-c", USE_IT], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert hetxl.__version__ in used.stdout
    command = tmp_path / "env" / "bin" / "hetxl"
    bare = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert bare.returncode == 2
    assert "pip install 'hetxl[train]'" in bare.stderr
    subprocess.run([*install, f"{wheel}[train]"], check=True, capture_output=True)
    version = subprocess.run([command, "--version"], check=True, capture_output=True, text=True)
    assert hetxl.__version__ in version.stdout
    # Without a package that a command needs, one line says what to install.
    for words, message in (
        (["params", "--backbone", "hf:bert", "--classes", "10"], "pip install transformers"),
        (["study", "flops"], "is part of the lab"),
        (["data", "build"], "is part of the lab"),
    ):
        missing = subprocess.run([command, *words], capture_output=True, text=True)
        assert missing.returncode == 2
        assert message in missing.stderr
        assert missing.stderr.count("\n") == 1
