from typer.testing import CliRunner

from hetxl.cli import app
from support.small_run import small_run


def test_report(tmp_path):
    run = small_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "HET-XL" in (tmp_path / "page.html").read_text()
    assert "NLL" in result.stdout


def test_no_run(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
