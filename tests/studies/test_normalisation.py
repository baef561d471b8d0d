import pytest

from hetxl.studies.normalisation import STUDY
from hetxl.studies.paper import paper_table


def test_miniature(studied):
    text, summary = studied("normalisation")
    assert list(summary["runs"]) == [
        "het-xl-normalize-none",
        "het-xl-normalize-after",
        "het-xl-swap0",
        "het-xl-normalize-both",
    ]
    assert "| before the noise | 84.37 |" in text  # the paper's


def test_rows_are_the_papers(pair_runs):
    table = STUDY.tables(pair_runs(dict.fromkeys(STUDY.settings, 0.5)))[0]
    paper = paper_table("tab:contrastive_normalization")
    assert [row.name for row in table.rows] == [row.name for row in paper.rows]


@pytest.mark.parametrize(
    ("none", "after", "before", "both", "needed", "again"),
    [
        (0.2, 0.3, 0.5, 0.5, "after the normalisation, holds", "consistent effect, holds"),
        (0.2, 0.5, 0.5, 0.5, "1 of the two differences counts", "consistent effect, holds"),
        (0.6, 0.3, 0.5, 0.5, "after the normalisation, does not hold", "consistent effect, holds"),
        (0.2, 0.3, 0.5, 0.6, "after the normalisation, holds", "consistent effect, does not hold"),
        (0.2, None, 0.5, 0.5, "1 of the two differences counts", "consistent effect, holds"),
    ],
)
def test_the_conclusion_follows_the_numbers(pair_runs, none, after, before, both, needed, again):
    values = dict(zip(STUDY.settings, (none, after, before, both), strict=True))
    text = STUDY.conclusion(pair_runs(values))
    assert needed in text
    assert again in text
