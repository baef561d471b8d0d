import json
import re
import shutil
import stat
from datetime import datetime, timezone
from pathlib import Path

import pytest

import hetxl_train.report
from hetxl_train.report import find_runs, html, read_run, report_html, write_report
from hetxl_train.report.charts import Figure, styles
from hetxl_train.report.compare import group_runs
from hetxl_train.report.read import Run
from support.runs import FILES, SCRIPT, colour_image, write_comparison, write_run

CREATED = datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc)
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


def test_report_has_every_plot_and_table(comparison, tmp_path):
    path = write_report(find_runs(comparison), tmp_path / "deep" / "page.html", created=CREATED)
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "deep" / "page.html"
    for plot in PLOTS:
        assert f'id="{plot}"' in text
    for shown in ("6 heads on pycode", "8,192 classes", "created 2026-03-01 12:30 UTC from 18 runs"):
        assert shown in text
    assert "HET-XL has the lowest NLL" in text
    assert 'class="missing"' not in text
    assert len(text) < 500_000


def test_text_from_data_is_escaped(comparison):
    text = report_html(find_runs(comparison))
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_names_of_runs_and_labels_are_escaped(tmp_path):
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
    assert report_html(runs, created=CREATED) == report_html(find_runs(comparison), created=CREATED)


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
    text = report_html([read_run(tmp_path / "run")], created=CREATED)
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
def test_values_of_any_type_do_not_raise(tmp_path, pair, new):
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


def test_report_imports_neither_torch_nor_a_plotting_library():
    for path in Path(hetxl_train.report.__file__).parent.glob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert not imported & {"torch", "matplotlib", "PIL", "pandas", "scipy"}, path.name


EMPTY = Run(Path("empty"), result={"label": "DET", "seed": 0})


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("out"), ("DET", "HET-XL"), seeds=2, steps=200)
    return group_runs(find_runs(folder))


def idents(charts):
    return [panel.ident for chart in charts if isinstance(chart, Figure) for panel in chart.panels]


def test_every_section_draws_its_charts(two_heads):
    looks = styles(["DET", "HET-XL"])
    assert idents(html.training(two_heads, looks)) == ["nll-steps", "nll-time", "temperature"]
    assert idents(html.calibration(two_heads, looks, "test")) == ["reliability-0", "reliability-1", "risk-coverage"]
    assert idents(html.cost(two_heads, looks, "test")) == ["parameters-nll"]
    assert idents(html.frequency(two_heads, looks, "test")) == ["bands", "frequencies"]


@pytest.mark.parametrize("build", [html.calibration, html.cost, html.frequency])
def test_sections_without_data_give_a_reason(build):
    charts = build(group_runs([EMPTY]), styles(["DET"]), "test")
    assert charts
    assert all(chart.why.startswith("no run") for chart in charts)


def test_report_without_a_log_names_missing_charts():
    text = report_html([EMPTY])
    assert "Validation NLL left out: no log.jsonl has evaluations." in text
    assert "Temperature over steps left out" in text
    assert "bands reach from the lowest" not in text


def test_a_run_without_times_keeps_its_steps():
    run = Run(Path("a"), result={"label": "DET"}, evaluations=[{"kind": "evaluation", "step": 5, "nll": 4.0}])
    charts = html.training(group_runs([run]), styles(["DET"]))
    assert idents(charts) == ["nll-steps"]
    assert "have no times" in charts[1].why


@pytest.mark.parametrize(
    ("seconds", "unit"), [(30.0, "training time, s"), (600.0, "training time, min"), (50_000.0, "training time, h")]
)
def test_times_have_a_suitable_unit(seconds, unit):
    evaluations = [{"step": step, "seconds": seconds * step, "nll": 4.0} for step in (0, 1)]
    run = Run(Path("a"), result={"label": "DET"}, evaluations=evaluations)
    assert unit in html.training(group_runs([run]), styles(["DET"]))[1].panels[0].content


def test_frequencies_name_their_bins():
    data = {"frequencies": [[0, 5], [1, 10], [3, 20], [1000, 2]]}
    run = Run(Path("a"), result={"label": "DET", "data": data})
    chart = html.frequency(group_runs([run]), styles(["DET"]), "test")[1]
    rows = [(row.label, *row.cells) for row in chart.numbers.rows]
    assert rows == [("0", "5"), ("1", "10"), ("2 to 3", "20"), ("4 to 1,000", "2")]
    described = "37 classes. Most of them, 20, have 2 to 3 training examples; the most frequent have up to 1,000."
    assert chart.panels[0].description == described


def test_curves_of_the_wrong_kind_are_left_out():
    curves = {"reliability": [[0.5, None, 3], "x", [1, 2]], "risk_coverage": {"a": 1}}
    assert idents(html.calibration(group_runs([Run(Path("a"), curves=curves)]), styles(["a"]), "test")) == []


def run_page(**fields):
    result = {"label": "HET-XL", "seed": 0, **fields.pop("result", {})}
    return report_html([Run(Path("out/het-xl-0"), result=result, **fields)])


def card(**entry):
    shown = {"row": 1, "label": "cat", "top": [["cat", 0.7], ["dog", 0.2]], "entropy": 0.5, "hit": True} | entry
    return run_page(examples={"most_certain": [shown]}).split('id="examples"')[1].split("</section>")[0]


def test_pairs_show_correlation_and_confusion():
    pair = {"first": SCRIPT, "second": "b", "correlation": -0.93}
    numbers = {"examples": 1200, "confused": 7, "confused_share": 0.31}
    text = run_page(confusions=[pair | numbers])
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    for shown in ("−0.93", "1,200", ">7<", "31%", "HET-XL, seed 0"):
        assert shown in text


def test_confusions_lead_to_their_rows():
    pair = {"first": "cat", "second": "dog", "correlation": -0.9, "confused": 3}
    shown = {
        "row": 17,
        "text": "a text that barks",
        "label": "cat",
        "top": [["dog", 0.7]],
        "entropy": 0.5,
        "hit": False,
    }
    behind = {"first": "cat", "second": "dog", "rows": [17, 4], "examples": [shown]}
    text = run_page(confusions=[pair], examples={"confused": [behind]})
    ident = text.split('<a href="#confused-')[1].split('"')[0]
    block = text.split(f'<div id="confused-{ident}">')[1].split("</details>")[0]
    assert "Rows 17, 4, …" in block
    assert "a text that barks" in block


def test_missing_numbers_of_a_pair_are_dashes():
    text = run_page(confusions=[{"first": 3, "second": "b", "correlation": 0.5}])
    assert text.split('class="pairs"')[1].split("</table>")[0].count("<td>–</td>") == 3


def test_the_best_head_is_open_and_the_others_are_folded():
    pair = {"first": "a", "second": "b", "correlation": 0.5}
    losses = {"HET": 4.0, "HET-XL": 3.0}
    results = {label: {"label": label, "metrics": {"test": {"nll": nll}}} for label, nll in losses.items()}
    text = report_html([Run(Path(label), result=result, confusions=[pair]) for label, result in results.items()])
    assert "<h3>HET-XL</h3>" in text
    assert "<summary>Pairs of HET</summary>" in text


def test_pairs_without_correlation_are_left_out():
    pairs = [{"first": "a", "second": "b", "correlation": None}, {"correlation": 0.5}]
    assert "Pairs of classes left out" in run_page(confusions=pairs)


def test_an_example_shows_its_image_text_and_probabilities():
    text = card(image=colour_image(1, 2, 3), text="a < b", path='a/"<b>.png')
    for shown in ("<img", "a &lt; b", "&#34;&lt;b&gt;.png", ">right<", "70.0%", "entropy 0.50 nats"):
        assert shown in text


def test_only_images_inside_the_page_are_shown():
    for source in ("https://example.org/a.png", "data:text/html;base64,AAAA", 'data:image/png;base64,A" onerror="x', 5):
        assert "<img" not in card(image=source)


def test_errors_and_several_labels():
    text = card(hit=False, label=["cat", "dog"], text="<i>")
    assert "cat and dog" in text
    assert ">wrong<" in text
    assert "&lt;i&gt;" in text


def test_broken_entries_do_not_raise():
    text = card(top=[["a"], "b", ["c", None], ["d", 7.0]], entropy=None, hit=None, label=None, text=5)
    assert "width:100.0%" in text
    assert "Examples left out" in run_page(examples={"most_certain": 3, "least_certain": [4]})


def test_long_texts_lose_their_middle():
    assert html.shortened("a" * 1000 + "b" * 1000, 100) == "a" * 50 + " … " + "b" * 50
    assert html.shortened("short") == "short"


def test_runs_are_listed_with_what_is_missing():
    text = run_page(
        result={"steps": 2000, "data": {"notes": ["split by <file>"]}},
        config={"rank": 20, "name": "<x>"},
        problems=("curves.json is missing",),
    )
    for shown in ("curves.json is missing", "2,000", "split by &lt;file&gt;", "&#34;rank&#34;: 20", "&lt;x&gt;"):
        assert shown in text


def test_characters_that_cannot_be_written_are_replaced():
    text = run_page(result={"data": {"notes": ["a\x00b\ud800c\uffff"]}})
    assert "a\ufffdb\ufffdc\ufffd" in text
    assert text.encode()


def test_a_page_loads_nothing_and_runs_no_script():
    text = report_html([EMPTY])
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert "http" not in text.replace("http-equiv", "")
