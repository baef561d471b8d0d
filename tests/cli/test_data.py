import json

import numpy as np
from typer.testing import CliRunner

from hetxl.cli import app


def test_describe(tmp_path):
    np.savez(tmp_path / "x.npz", features=np.eye(30, dtype="float32"), labels=np.arange(30) % 3)
    result = CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["classes"] == 3
    assert sum(found["rows"].values()) == 30
    assert "classes" in CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz")]).stdout


def test_bad_data(tmp_path):
    np.savez(tmp_path / "x.npz", features=np.full((4, 2), np.nan, dtype="float32"), labels=np.arange(4))
    result = CliRunner().invoke(app, ["data", "describe", str(tmp_path / "x.npz")])
    assert result.exit_code == 2
    assert "NaN" in result.stderr
