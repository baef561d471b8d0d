"""Every example runs as its reader would run it."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@cache
def run(path, attempt=1):
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)


AT_ONCE = ("four_heads.py", "plain_pytorch.py", "contrastive_icons.py")
"""Examples that every change is tried on; the others take their time beside them."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name in AT_ONCE else pytest.mark.slow, id=path.name) for path in EXAMPLES],
)
def test_example_runs_without_errors(path):
    process = run(path)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert process.stdout.strip()


def test_four_heads_shows_all_four_with_their_parameters():
    path = next(path for path in EXAMPLES if path.name == "four_heads.py")
    text = run(path).stdout
    noise = 2 * (64 * 64 + 64) + 50 * 64
    for words in ("DET", "HET-H", "HET-XL", "65,000", f"{65_000 + noise:,}", "correlation", "hetxl params", "docs/"):
        assert words in text
    assert run(path, attempt=2).stdout == text  # seeded
    assert len(path.read_text().splitlines()) < 80


USERS = {
    "timm_finetune.py": ("averaged weights", "HetXLLayer over 5 classes"),
    "hf_trainer.py": ("right after loading", "mutual_information"),
    "parquet_sklearn.py": ("cleanlab suspects", "90% sets cover"),
    "lightning_module.py": ("noise_scale", "test NLL"),
    "open_clip_finetune.py": ("zero-shot top-1",),
    "open_clip_lit.py": ("gradients in the locked tower since it was locked: 0", "zero-shot top-1"),
    "fastapi_onnx.py": ("200", "features must be rows of 16 numbers"),
    "uncertainty_methods.py": ("DET", "ensemble of 4", "MC dropout", "Laplace", "HET-XL"),
}
"""What people do with their own libraries, and what the program says of it."""


@pytest.mark.parametrize("name", USERS)
def test_programs_for_other_libraries_are_short(name):
    assert len((EXAMPLES[0].parent / name).read_text().splitlines()) < (80 if name == "open_clip_lit.py" else 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_programs_for_other_libraries_print_their_results(name):
    text = run(EXAMPLES[0].parent / name).stdout
    for words in USERS[name]:
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern", "least"),
    [
        ("timm_finetune.py", r"([\d.]+)% of 200 clean images right", 90),
        ("hf_trainer.py", r"([\d.]+)% right after loading", 60),
        ("parquet_sklearn.py", r"test accuracy ([\d.]+)%", 85),
        ("parquet_sklearn.py", r"([\d.]+)% of them are wrong", 70),
        ("open_clip_finetune.py", r"zero-shot top-1 ([\d.]+)%", 50),
    ],
)
def test_programs_for_other_libraries_learn(name, pattern, least):
    (share,) = re.findall(pattern, run(EXAMPLES[0].parent / name).stdout)
    assert float(share) >= least


@pytest.mark.slow
def test_onnx_serving_agrees_with_torch():
    path = next(path for path in EXAMPLES if path.name == "onnx_serving.py")
    text = run(path).stdout
    for words in ("leaves.onnx", "oak (left)", "prediction set (90% hold the label): ", "from noise", "agree to 1e-5"):
        assert words in text
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    "name",
    [
        "plain_pytorch.py",
        pytest.param("lightning_module.py", marks=pytest.mark.slow),
        pytest.param("accelerate_loop.py", marks=pytest.mark.slow),
    ],
)
def test_runs_come_near_the_best_loss(name):
    path = next(path for path in EXAMPLES if path.name == name)
    text = run(path).stdout
    losses = [float(value) for value in re.findall(r"test NLL (\d\.\d+)", text)]
    best = float(re.findall(r"at best it could be (\d\.\d+)", text)[0])
    assert losses == sorted(losses, reverse=True)
    assert best < losses[-1] < best + 0.25
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.slow
def test_sklearn_arrays_gains_by_noise_and_finds_wrong_labels():
    path = next(path for path in EXAMPLES if path.name == "sklearn_arrays.py")
    text = run(path).stdout
    losses = [float(value) for value in re.findall(r"% │ +(\d\.\d+)", text)]  # LogisticRegression, det, het-xl
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert "from noise" in text
    assert int(re.findall(r"believes least, (\d+)% are wrong", text)[0]) > 80
    assert len(path.read_text().splitlines()) < 80
