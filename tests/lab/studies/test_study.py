import json
import subprocess
import sys

import pytest

from hetxl_lab.studies import runs
from hetxl_lab.studies.profiles import LEARNED, PROFILES, Bench
from hetxl_lab.studies.registry import ENTRIES, listing, load_study, minutes_text
from hetxl_lab.studies.run import command, how, index, publish, run_study
from hetxl_lab.studies.runs import DIVERGED, RunCache
from hetxl_lab.studies.study import (
    NLL,
    PARAMETERS,
    PRECISION,
    Lab,
    Line,
    PaperStudy,
    TableStudy,
    cells_of,
    dots_of,
    runs_of,
    values_of,
)
from hetxl_train.console import Console

PROFILE = PROFILES["miniature"]
NAMES = list(ENTRIES)


def result(seed, nll):
    metrics = dict.fromkeys(("nll", "precision@1", "precision@5", "calibration_error", "brier"), 0.5) | {"nll": nll}
    return {
        "seed": seed,
        "metrics": {"test": metrics, "validation": metrics},
        "train_seconds": 1.0,
        "steps": 3,
        "temperature": 1.0,
        "parameters": {"total": 7},
    }


def test_results_are_collected_over_seeds(tmp_path):
    lab = Lab(PROFILE, (0, 1), RunCache(tmp_path))
    planned = [PROFILE.base.run("det", seed) for seed in lab.seeds]
    for run, nll in zip(planned, (2.0, 3.0), strict=True):
        lab.cache.directory(run).mkdir()
        (lab.cache.directory(run) / "result.json").write_text(json.dumps(result(run.config.seed, nll)))
    assert lab.results(planned)["nll"] == [2.0, 3.0]
    directory = lab.cache.directory(planned[1])
    (directory / "result.json").unlink()
    (directory / DIVERGED).write_text("{}")
    assert lab.results(planned) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_study_states_its_question(name):
    study = load_study(name)
    assert study.name == name
    assert study.question[0].isupper()
    assert study.question[-1] in ".?"
    if isinstance(study, PaperStudy):
        assert not study.claim.endswith(".")
        assert len(study.paper_tables()) >= len(study.paper)


def test_studies_share_their_runs():
    """The full forms: those of the ablations are the main table's where they can be."""
    keys = {name: {run.key for run in load_study(name).runs(PROFILES["full"], (0,))} for name in NAMES}
    for name in ("tau-dynamics", "alignment", "equal-params"):
        assert keys[name] <= keys["main"], name
    for name in ("data-scale", "model-scale", "learn-tau", "sharing", "residual"):
        assert keys[name] & keys["main"], name
    assert len(keys["main"]) == (4 + 2) * 6
    assert len(set().union(*keys.values())) < sum(map(len, keys.values())) - 20


LINES = [Line("DET", "det", PROFILE.base), Line("HET-XL", "het-xl", PROFILE.base, {"rank": 1})]


class Two(TableStudy):
    name, question, claim, title = "two", "Which?", "one", "Two heads"

    def lines(self, profile):
        return LINES

    def conclusion(self, summary):
        return ""


def test_all_lines_with_the_first_seed_come_first():
    planned = runs_of(LINES, (3, 4))
    assert [(run.config.head, run.config.seed) for run in planned] == [
        ("det", 3),
        ("het-xl", 3),
        ("det", 4),
        ("het-xl", 4),
    ]
    assert planned[1].config.rank == 1
    assert Two().runs(PROFILE, (3, 4)) == planned


def test_values_of_a_missing_line_raise(lines, made_up):
    summary = lines({("DET", None): 2.0, ("HET", "g"): None})
    assert values_of(summary, "DET")["nll"] == [1.99, 2.0, 2.011]
    assert values_of(summary, "HET", "g") is None
    with pytest.raises(ValueError, match="has no line 'HET'"):
        values_of(summary, "HET")
    nll, precision, parameters = cells_of(made_up(2.0, parameters=2_500_000), (NLL, PRECISION, PARAMETERS))
    assert nll[0] == pytest.approx(2.0, abs=1e-3)
    assert precision[0] == pytest.approx(0.5, abs=1e-3)
    assert parameters == 2.5
    assert cells_of(None, (NLL, PRECISION)) == ["not finite", None]


def test_the_table_and_the_image_have_all_lines(lines, tmp_path):
    summary = lines({("DET", None): 2.0, ("HET-XL", None): None})
    (table,) = Two().tables(summary)
    assert [row.label for row in table.rows] == ["DET", "HET-XL"]
    assert table.rows[1].cells[0] == "not finite"
    assert dots_of(summary["lines"])["test NLL"][0][1][1] == ("HET-XL", [])
    assert "HET-XL" in Two().plot(summary, tmp_path / "two.svg").read_text()


def test_a_run_that_has_not_ended_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not ended"):
        Two().measure(Lab(PROFILE, (0,), RunCache(tmp_path)))


BENCH = Bench("b", "synthetic:rows=100", 40, {"rank": 3}, {"linear": {}, "MLP": {"backbone": "mlp", "rank": 4}})


def test_options_go_over_one_another():
    config = BENCH.config("het-xl", scale=0.5, train_samples=7)
    assert (config.data, config.head, config.steps, config.rank) == ("synthetic:rows=100", "het-xl", 20, 3)
    assert (config.train_samples, config.temperature, config.evaluate_every) == (7, "1.0", 20)
    assert BENCH.config("det", backbone="MLP").rank == 4
    assert BENCH.config("het-xl", **LEARNED).temperature == "learned"
    assert BENCH.config("det", scale=0.001).steps == 1


def test_a_run_has_its_seed_and_its_view():
    run = BENCH.run("det", 5, view="known:5", rank=2)
    assert (run.config.seed, run.config.rank, run.view) == (5, 2, "known:5")


def test_a_backbone_that_does_not_exist():
    with pytest.raises(ValueError, match="backbone must be one of 'linear', 'MLP', found 'CNN'"):
        BENCH.config("det", backbone="CNN")


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_profiles_are_consistent(profile):
    assert profile.base is profile.benches[0]
    assert all(len(bench.backbones) == 2 for bench in profile.benches)
    assert 1.0 not in profile.temperatures
    assert list(profile.samples) == sorted(profile.samples)
    assert profile.samples[0] == profile.sizes.samples[0] == 1


def test_only_the_full_profile_needs_built_data():
    for name in ("quick", "miniature"):
        profile = PROFILES[name]
        for bench in (*profile.benches, profile.sampling, *profile.few_shot):
            assert bench.data.partition(":")[0] in ("pycode", "synthetic")
    assert [bench.name for bench in PROFILES["full"].benches] == ["pycode", "glyphs", "wordnet"]
    assert [bench.name for bench in PROFILES["full"].few_shot] == ["glyphs", "icons", "pycode"]


PAPERS = [name for name, entry in ENTRIES.items() if entry.paper != "–" and name != "tau"]


def test_the_paper_has_twenty_studies_of_its_tables():
    assert len(PAPERS) == 20
    assert all(isinstance(load_study(name), PaperStudy) for name in PAPERS)
    own = {"tau", "locked-towers", "defaults", "strangers", "recovery", "levers", "audit", "noise-only", "coverage"}
    assert set(ENTRIES) - set(PAPERS) == own


def test_all_full_profiles_of_the_paper_fit_into_six_hours():
    assert sum(ENTRIES[name].full for name in PAPERS) <= 6 * 60
    assert ENTRIES["main"].full <= 90


def test_an_unknown_study_is_refused():
    with pytest.raises(ValueError, match="did you mean 'residual'"):
        load_study("residuals")


def test_options_have_defaults_and_unknown_ones_are_refused():
    entry = ENTRIES["defaults"]
    assert entry.with_defaults({"heads": "det"}) == {"settings": None, "heads": "det", "equal_time": True}
    assert ENTRIES["levers"].with_defaults({"data": None})["data"] == "pycode"
    with pytest.raises(ValueError, match=r"option of study defaults must be one of .*found 'head'"):
        entry.with_defaults({"head": "det"})


def test_the_list_shows_all_and_fits_a_terminal():
    lines = listing().splitlines()
    assert [line.split()[0] for line in lines[1 : len(ENTRIES) + 1]] == list(ENTRIES)
    assert "Method comparison" in lines[1]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("minutes", "text"), [(None, "–"), (0.001, "1 s"), (0.5, "30 s"), (4, "4 min"), (89, "89 min"), (300, "5.0 h")]
)
def test_minutes_are_formatted(minutes, text):
    assert minutes_text(minutes) == text


def test_the_registry_loads_no_study():
    code = (
        "import sys, hetxl_lab.studies.registry; "
        "print([name for name in sys.modules "
        "if name.startswith('hetxl_lab.studies.') and not name.endswith('registry')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert output == "[]"


QUIET = Console(quiet=True)


def test_repeated_study_trains_nothing(studied, tmp_path, monkeypatch):
    text, summary = studied("residual")

    def never(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", never)
    options = {"profile": "miniature", "cache": studied.cache, "jobs": 1, "console": QUIET}
    page = run_study("residual", out=tmp_path / "again", write=tmp_path / "docs", **options)
    again = json.loads(page.with_suffix(".json").read_text())
    changing = ("measuring_seconds",)
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in summary.items() if k not in changing
    }
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {
        "residual.md",
        "residual.svg",
        "residual.json",
        "index.md",
    }
    assert (tmp_path / "docs" / "residual.md").read_text() == text
    # Another study reuses the runs of this one.
    monkeypatch.undo()
    assert summary["trainings"] == 8


def test_the_cost_is_that_of_the_runs(studied):
    _, summary = studied("residual")
    results = [json.loads(path.read_text()) for path in studied.cache.glob("*/result.json")]
    spent = [run_result["train_seconds"] + run_result["evaluate_seconds"] for run_result in results]
    assert 0 < summary["training_seconds"] <= sum(spent) + 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"seeds": ()}, "seeds must be different numbers, at least one"),
        ({"options": {"head": "het"}}, "option of study residual must be one of .*found 'head'"),
        ({"profile": "small"}, "profile must be one of 'full', 'quick', 'miniature', found 'small'"),
    ],
)
def test_invalid_options_raise_before_any_run(options, message, tmp_path):
    arguments = {"out": tmp_path / "out", "cache": tmp_path / "cache", "console": QUIET, **options}
    with pytest.raises(ValueError, match=message):
        run_study("residual", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("profile", "seeds", "text"),
    [
        ("full", (0, 1, 2), "hetxl study main"),
        ("full", (0, 1), "hetxl study main --seeds 2"),
        ("quick", (0, 1), "hetxl study main --quick"),
        ("full", (4, 5), "hetxl study main --seeds 4,5"),
        ("full", (3,), "hetxl study main --seeds 3,"),
    ],
)
def test_command_has_profile_and_seeds(profile, seeds, text):
    assert command("main", profile, seeds) == text


def test_commands_of_studies_on_pairs():
    assert command("normalisation", "full", (1, 2, 3, 4, 5)) == "hetxl study normalisation"
    assert command("test-noise", "quick", (0, 1), {"data": "mine.npz"}) == "hetxl study test-noise mine.npz --quick"
    assert command("contrastive", "full", (0, 1, 2)) == "hetxl study contrastive --seeds 3"


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("defaults", {"equal_time": False, "settings": "pycode"}, "defaults --settings pycode --no-equal-time"),
        ("recovery", {"data": "synthetic:noise=2", "data_seed": 4}, "recovery synthetic:noise=2 --data-seed 4"),
        ("levers", {"data": "pycode", "levers": None}, "levers"),
        ("tau", {"head": "het-xl", "longer": True}, "tau --longer"),
    ],
)
def test_commands_have_the_options_that_differ_from_their_defaults(name, options, text):
    seeds = load_study(name).seeds(PROFILES["full"])
    assert command(name, "full", seeds, options) == f"hetxl study {text}"


SUMMARY = {
    "command": "hetxl study residual --seeds 2",
    "machine": "some CPU",
    "seeds": [0, 1],
    "form": "full",
    "trainings": 8,
    "training_seconds": 600.0,
    "measuring_seconds": 0.2,
}


def test_page_has_all_sections_in_order(studied):
    text, summary = studied("residual")
    assert text.startswith("# Rank-1 or diagonal\n\nBeside its factors")
    order = ["The paper's conclusion", "![", "## Here", "## In the paper", "## How it was run"]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "| rank-1, learned τ | 5.71 |" in text  # the paper's
    nll = summary["lines"][0]["values"]["nll"]
    assert f"{sum(nll) / 2:.3f} ± " in text  # ours
    assert "(residual.svg)" in text
    assert "miniature profile" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1  # ours is of the same form as the paper's


def test_how_section_has_command_seeds_and_time():
    text = how(SUMMARY)
    assert "```\nhetxl study residual --seeds 2\n```" in text
    assert "Seeds 0, 1;" in text
    assert "8 runs" in text
    assert "10 min in all" in text
    assert "profile of the study" not in text
    assert "Measuring" not in text
    measured = how({**SUMMARY, "trainings": 0, "measuring_seconds": 90, "form": "quick"})
    assert "Seeds" not in measured
    assert "Measuring took 2 min (some CPU)." in measured
    assert "This is the quick profile" in measured


def test_index_links_existing_pages(tmp_path):
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
