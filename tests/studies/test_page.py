from hetxl.studies.page import how, index, publish, publish_own
from hetxl.studies.registry import ENTRIES

SUMMARY = {
    "command": "hetxl study residual --seeds 2",
    "machine": "some CPU",
    "seeds": [0, 1],
    "form": "full",
    "trainings": 8,
    "training_seconds": 600.0,
    "measuring_seconds": 0.2,
}


def test_a_page_has_all_that_it_must(studied):
    text, summary = studied("residual")
    assert text.startswith("# Rank-1 or diagonal\n\nBeside its factors")
    order = ["The paper's conclusion", "![", "## Here", "## In the paper", "## How it was run"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "| rank-1, learned τ | 5.71 |" in text  # the paper's
    nll = summary["lines"][0]["values"]["nll"]
    assert f"{sum(nll) / 2:.3f} ± " in text  # ours
    assert "(residual.svg)" in text
    assert "miniature form" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1  # ours is of the same form as the paper's


def test_how_it_was_run():
    text = how(SUMMARY)
    assert "```\nhetxl study residual --seeds 2\n```" in text
    assert "Seeds 0, 1;" in text
    assert "8 trainings" in text
    assert "10 min in all" in text
    assert "form of the study" not in text
    assert "Measuring" not in text
    measured = how({**SUMMARY, "trainings": 0, "measuring_seconds": 90, "form": "quick"})
    assert "Seeds" not in measured
    assert "Measuring took 2 min (some CPU)." in measured
    assert "This is the quick form" in measured


def test_the_index_links_what_is_there(tmp_path):
    source = tmp_path / "source.md"
    source.write_text("# A page\n")
    target = tmp_path / "pages"
    publish({"main.md": source}, target)
    assert (target / "main.md").read_text() == "# A page\n"
    text = (target / "index.md").read_text()
    assert text == index(target)
    assert "[main](main.md): Five methods compared" in text
    assert "`latency`: Time of a step" in text
    assert text.count("\n| ") == len(ENTRIES) + 2


def test_a_study_with_its_own_text(tmp_path):
    picture = tmp_path / "levers.png"
    picture.write_bytes(b"png")
    target = tmp_path / "pages"
    numbers = tmp_path / "summary.json"
    numbers.write_text("{}")
    files = {"levers.png": picture}, {"levers/pycode.json": numbers}
    publish_own(ENTRIES["levers"], "Some text.\n", "hetxl study levers", target, *files)
    text = (target / "levers.md").read_text()
    assert text.startswith("# What each default is worth\n\nSome text.\n")
    assert "![What each default is worth](levers.png)" in text
    assert text.endswith("```\nhetxl study levers\n```\n")
    assert (target / "levers.png").read_bytes() == b"png"
    assert (target / "levers" / "pycode.json").read_text() == "{}"
    assert "pycode.json" not in text
    publish_own(ENTRIES["levers"], "# Own title\n", "hetxl study levers", target, {})
    assert (target / "levers.md").read_text().startswith("# Own title\n")
    assert "[levers](levers.md)" in (target / "index.md").read_text()
