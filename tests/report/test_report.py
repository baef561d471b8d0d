import json
import re
import shutil
import stat
from datetime import datetime, timezone
from pathlib import Path

import pytest

import hetxl.report
from hetxl.report import find_runs, read_run, report_html, write_report
from hetxl.report.read import Run
from support.runs import FILES, SCRIPT, write_comparison, write_run

MADE = datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc)
PLOTS = (
    "nll-steps",
    "nll-time",
    "temperature",
    "parameters-nll",
    "reliability-0",
    "risk-coverage",
    "bands",
    "frequencies",
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("out"), steps=200, best_nll=4.05)


def test_the_whole_report(comparison, tmp_path):
    path = write_report(find_runs(comparison), tmp_path / "deep" / "page.html", made=MADE)
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "deep" / "page.html"
    for plot in PLOTS:
        assert f'id="{plot}"' in text
    for shown in ("6 heads on pycode", "8,192 classes", "made 2026-03-01 12:30 UTC from 18 runs"):
        assert shown in text
    assert "HET-XL has the lowest NLL" in text
    assert 'class="missing"' not in text
    assert len(text) < 500_000


def test_what_comes_from_data_stays_text(comparison):
    text = report_html(find_runs(comparison))
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_names_of_runs_and_labels_stay_text(tmp_path):
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>", SCRIPT, dataset='"><script>', steps=20)
    text = report_html([read_run(folder)])
    assert "<script" not in text
    assert "<img src=x" not in text


def test_identifiers_are_unique_and_references_hold(comparison):
    text = report_html(find_runs(comparison))
    idents = re.findall(r' id="([^"]+)"', text)
    assert len(idents) == len(set(idents))
    for names in re.findall(r'aria-labelledby="([^"]+)"', text):
        assert set(names.split()) <= set(idents)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(idents)


def test_the_same_runs_give_the_same_report(comparison):
    runs = find_runs(comparison)
    assert report_html(runs, made=MADE) == report_html(find_runs(comparison), made=MADE)


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_missing(tmp_path, name):
    folder = write_comparison(tmp_path, ("DET", "HET"), seeds=1, steps=20)
    for run in (folder / "runs").iterdir():
        (run / name).unlink()
    text = report_html(find_runs(folder))
    assert f"{name} is missing" in text
    assert ('class="missing"' in text) == (name != "config.json")


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_cut_short(tmp_path, name):
    folder = write_run(tmp_path / "run", steps=20)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    assert f"{name} " in report_html([read_run(folder)])


def test_a_run_that_only_has_a_log(tmp_path):
    write_run(tmp_path / "run", steps=200)
    for name in FILES:
        if name != "log.jsonl":
            (tmp_path / "run" / name).unlink()
    text = report_html([read_run(tmp_path / "run")], made=MADE)
    assert "from 1 run that is not finished" in text
    assert 'id="nll-steps"' in text
    assert "No run has test metrics yet." in text


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return write_run(folder / "det", "DET", steps=20), write_run(folder / "het", "HET", steps=20)


def replaced(value, new):
    """A copy of a JSON value with every leaf replaced."""
    if isinstance(value, dict):
        return {key: replaced(entry, new) for key, entry in value.items()}
    if isinstance(value, list):
        return [replaced(entry, new) for entry in value]
    return new


@pytest.mark.parametrize("new", [None, "text", float("nan"), float("inf"), -1, 0, 1e300, [], {}, True])
def test_values_of_any_kind_do_no_harm(tmp_path, pair, new):
    det, het = pair
    for name in FILES:
        shutil.copytree(het, tmp_path / name)
        text = (het / name).read_text()
        lines = text.splitlines() if name == "log.jsonl" else [text]
        (tmp_path / name / name).write_text("\n".join(json.dumps(replaced(json.loads(line), new)) for line in lines))
        changed = read_run(tmp_path / name)
        with_det = changed.dataset in (None, "pycode")
        html = report_html([changed, read_run(det)] if with_det else [changed])
        assert html.endswith("</html>\n")
        for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            assert not re.search(r'="[^"]*\b(nan|inf|None)\b', drawing), name


def test_a_directory_gets_the_usual_name_and_an_old_report_is_replaced(tmp_path):
    (tmp_path / "report.html").write_text("old")
    path = write_report([Run(Path("a"))], tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444


def test_nothing_is_written_when_runs_cannot_be_reported(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "new" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_report(tmp_path):
    target = tmp_path / "report.html"
    (target / "inside").mkdir(parents=True)
    (target / "report.html").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError, match=r"report\.html"):
        write_report([Run(Path("a"))], target)
    assert sorted(child.name for child in target.iterdir()) == ["inside", "report.html"]


def test_it_imports_neither_torch_nor_a_plotting_library():
    for path in Path(hetxl.report.__file__).parent.glob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert not imported & {"torch", "matplotlib", "PIL", "pandas", "scipy"}, path.name
