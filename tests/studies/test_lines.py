import pytest

from hetxl.studies.cache import Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.lines import NLL, PARAMETERS, PRECISION, Line, LineStudy, cells_of, dots_of, trainings_of, values_of
from hetxl.studies.study import Lab

FORM = FORMS["miniature"]
LINES = [Line("DET", "det", FORM.base), Line("HET-XL", "het-xl", FORM.base, {"rank": 1})]


class Two(LineStudy):
    name, question, claim, title = "two", "Which?", "one", "Two heads"

    def lines(self, form):
        return LINES

    def conclusion(self, summary):
        return ""


def test_all_lines_with_the_first_seed_come_first():
    trainings = trainings_of(LINES, (3, 4))
    assert [(one.config.head, one.config.seed) for one in trainings] == [
        ("det", 3),
        ("het-xl", 3),
        ("det", 4),
        ("het-xl", 4),
    ]
    assert trainings[1].config.rank == 1
    assert Two().trainings(FORM, (3, 4)) == trainings


def test_values_and_cells(lines, made_up):
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


def test_the_table_and_the_picture_have_all_lines(lines, tmp_path):
    summary = lines({("DET", None): 2.0, ("HET-XL", None): None})
    (table,) = Two().tables(summary)
    assert [row.name for row in table.rows] == ["DET", "HET-XL"]
    assert table.rows[1].cells[0] == "not finite"
    assert dots_of(summary["lines"])["test NLL"][0][1][1] == ("HET-XL", [])
    assert "HET-XL" in Two().plot(summary, tmp_path / "two.svg").read_text()


def test_a_training_that_has_not_ended_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not ended"):
        Two().measure(Lab(FORM, (0,), Cache(tmp_path)))
