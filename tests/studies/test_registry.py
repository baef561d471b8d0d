import json
import subprocess
import sys

import pytest

from hetxl.studies.registry import ENTRIES, Entry, listing, load_study, minutes_text
from hetxl.studies.study import Study

PAPERS = [
    "main",
    "data-scale",
    "model-scale",
    "learn-tau",
    "tau-dynamics",
    "tau-range",
    "samples",
    "sharing",
    "alignment",
    "residual",
    "latency",
    "memory",
    "flops",
    "few-shot",
    "equal-params",
    "contrastive",
    "normalisation",
    "test-noise",
]


def test_every_entry_has_its_study():
    assert [entry.name for entry in ENTRIES.values() if entry.module] == PAPERS
    for name in PAPERS:
        assert isinstance(load_study(name), Study)
    assert {"defaults", "recovery", "levers"} <= set(ENTRIES)
    assert [entry.name for entry in ENTRIES.values() if entry.pairs] == PAPERS[-3:]


def test_all_full_forms_of_the_paper_fit_into_six_hours():
    assert sum(ENTRIES[name].full for name in PAPERS) <= 6 * 60
    assert ENTRIES["main"].full <= 90


def test_a_study_with_a_command_of_its_own_is_not_loaded_here():
    with pytest.raises(ValueError, match=r"study must be one of 'main', .*found 'defaults'"):
        load_study("defaults")
    with pytest.raises(ValueError, match="did you mean 'residual'"):
        load_study("residuals")


def test_the_list_shows_all_and_fits_a_terminal():
    lines = listing().splitlines()
    assert [line.split()[0] for line in lines[1 : len(ENTRIES) + 1]] == list(ENTRIES)
    assert "Method comparison" in lines[1]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("minutes", "text"), [(None, "–"), (0.001, "1 s"), (0.5, "30 s"), (4, "4 min"), (89, "89 min"), (300, "5.0 h")]
)
def test_costs(minutes, text):
    assert minutes_text(minutes) == text


def test_the_registry_loads_no_study():
    code = (
        "import sys, hetxl.studies.registry; "
        "print([name for name in sys.modules if name.startswith('hetxl.studies.') and not name.endswith('registry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # The figures of the paper are also profiling's.
    assert set(json.loads(found.replace("'", '"'))) <= {"hetxl.studies.paper", "hetxl.studies.tables"}
    assert Entry("a", "b", "c", None, None).module is None
