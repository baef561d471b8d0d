import pytest

from hetxl.studies.residual import STUDY


def test_miniature(studied):
    text, summary = studied("residual")
    assert [line["label"] for line in summary["lines"]] == [
        "rank-1, learned τ",
        "diagonal, learned τ",
        "rank-1, τ not learned",
        "diagonal, τ not learned",
    ]
    assert len({line["values"]["parameters"] for line in summary["lines"][:2]}) == 1  # as many, the paper says
    # Seconds of trainings that ran beside others say nothing of what a residual costs.
    assert "training, s" not in text


@pytest.mark.parametrize(("diagonal", "word"), [(2.001, "holds here"), (2.2, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, diagonal, word):
    values = {
        (f"{kind}, {tau}", None): nll
        for tau in ("learned τ", "τ not learned")
        for kind, nll in (("rank-1", 2.0), ("diagonal", diagonal))
    }
    assert word in STUDY.conclusion(lines(values))


def test_a_loss_that_was_not_finite(lines, made_up):
    values = {("rank-1, learned τ", None): 2.0, ("diagonal, learned τ", None): None}
    values |= {("rank-1, τ not learned", None): 2.0, ("diagonal, τ not learned", None): 2.0}
    text = STUDY.conclusion(lines(values))
    assert "not known, as a loss did not stay finite" in text
    assert "do not decide" in text
