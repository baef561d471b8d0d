"""The contrastive study: all of it, on pairs that train in a second."""

import json

import pytest
from typer.testing import CliRunner

from hetxl.cli import app
from hetxl.contrastive.config import ContrastiveConfig
from hetxl.studies.contrastive import PLACEMENTS, study, variants
from support.pairs import QUIET, vectors_file

TINY = {
    "steps": 2, "batch_size": 16, "features": 8, "rank": 2, "buckets": 64, "embedding": 8, "text_width": 16,
    "eval_samples": 3, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A study, run twice."""
    out = tmp_path_factory.mktemp("study")
    data = str(vectors_file(out / "x.npz", captions=True))
    options = {"seeds": (0, 3), "out": out / "study", "options": TINY, "narrator": QUIET}
    first = study(data, **options).read_text()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert study(data, **options).read_text() == first
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    return out / "study", json.loads(first)


def test_every_training_once_for_a_seed(results):
    out, summary = results
    names = {path.name.rpartition("-seed")[0] for path in (out / "runs").iterdir()}
    assert names == set(summary["runs"])
    assert names == {f"{head}-swap{swap}" for head in ("det", "het-xl") for swap in (0, 20, 40)} | {
        f"het-xl-normalize-{placement}" for placement in PLACEMENTS[1:]
    }
    assert len(list((out / "runs").iterdir())) == 2 * 9


def test_seeds_are_paired(results):
    out, _ = results
    swaps = [(out / "runs" / f"{head}-swap40-seed3" / "swaps.npz").read_bytes() for head in ("det", "het-xl")]
    assert swaps[0] == swaps[1]
    assert swaps[0] != (out / "runs" / "det-swap40-seed0" / "swaps.npz").read_bytes()
    config = ContrastiveConfig.from_dict(json.loads((out / "runs/het-xl-swap20-seed3/config.json").read_text()))
    assert (config.seed, config.data_seed, config.swap, config.eval_samples) == (3, 3, 0.2, 3)


def test_values_are_those_of_the_runs(results):
    out, summary = results
    stored = json.loads((out / "runs" / "het-xl-swap20-seed3" / "result.json").read_text())
    run = summary["runs"]["het-xl-swap20"]
    assert run["zero_shot_top1"][1] == stored["metrics"]["test"]["zero_shot"]["top1"]
    assert run["noise_auroc"][1] == stored["swaps"]["noise_auroc"]
    assert "noise_auroc" not in summary["runs"]["det-swap20"]
    assert "noise_auroc" not in summary["runs"]["het-xl-swap0"]
    assert (out / "study.md").read_text().startswith("# Contrastive learning on ")


def test_variants_differ_in_one_thing():
    found = variants(ContrastiveConfig())
    assert found["het-xl-swap0"] == ContrastiveConfig()
    assert found["het-xl-normalize-none"].swap == 0


def test_command(tmp_path, monkeypatch):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    monkeypatch.setattr("hetxl.studies.contrastive.QUICK", TINY)
    arguments = ["study", "contrastive", str(data), "--quick", "--seeds", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "study.md").read_text() in result.stdout


def test_bad_seeds(tmp_path):
    with pytest.raises(ValueError, match="seeds must be different numbers"):
        study(seeds=(1, 1), out=tmp_path)
