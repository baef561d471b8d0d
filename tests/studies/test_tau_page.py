from hetxl.report.statistics import PairedTest
from hetxl.studies.tau_page import (
    CLAIMS,
    MAIN,
    OURS,
    PAPER,
    Claim,
    claims_table,
    compared,
    conclusion,
    holds,
    page,
    plot,
    table,
)


def methods(**nll):
    """Rows with these losses; those of other labels are 2."""
    found = {}
    for number, label in enumerate((*PAPER, *OURS)):
        values = nll.get(label, [2.0 + 0.01 * number, 2.1 + 0.01 * number, 2.0 + 0.011 * number])
        found[label] = {
            "seeds": [0, 1, 2],
            "nll": values,
            "precision@1": [0.4, 0.41, 0.42],
            "temperature": [0.8, 0.9, 1.0],
            "trainings": [1, 1, 1],
            "seconds": [10.0, 12.0, 14.0],
        }
    return found


def summary(**nll):
    about = {"told": "Some data.", "num_classes": 1000, "training_rows": 5000, "steps": 100, "batch_size": 32}
    return {
        "head": "het-xl",
        "seeds": [0, 1, 2],
        "settings": [{"setting": "pycode", **about, "methods": methods(**nll)}],
    }


def test_rows_have_our_numbers_and_the_papers():
    lines = table(methods(), MAIN).splitlines()
    assert len(lines) == 2 + len(MAIN)
    training = next(line for line in lines if line.startswith("| Simple training |"))
    assert "| ✓ | ✓ | 0.90 ± 0.06 | 12 s | 5.99 ± 0.04 | 0.435 ± 0.001 |" in training
    grid = next(line for line in lines if line.startswith("| Grid search |"))
    assert "| 2.033 ± 0.033 | 0.410 ± 0.006 | × | × |" in grid
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    fitted = table(methods(), ("Fitted afterwards", "never run"))
    assert "| ✓ | × | 0.90" in fitted
    assert fitted.endswith("– | – |\n")


def test_the_papers_rows_are_all_there():
    text = page(summary())
    for label in (*PAPER, *OURS):
        assert f"| {label} |" in text
    assert text.count("| Grid search |") == 2  # in both tables
    for claim in CLAIMS:
        assert claim.told in text


def test_claims():
    good, worse = Claim("", "a", "b"), Claim("", "a", "b", worse=True)
    higher, lower, unsure = (PairedTest(d, 0.01, p, 3) for d, p in ((0.1, 0.01), (-0.1, 0.01), (0.1, 0.3)))
    assert [holds(good, test) for test in (higher, lower, unsure)] == [
        "does not hold",
        "holds, and better",
        "no difference seen",
    ]
    assert [holds(worse, test) for test in (higher, lower, unsure)] == ["holds", "the contrary", "not seen"]
    assert holds(good, PairedTest(0.1, None, None, 1)) == "no difference seen"


def test_differences_are_paired_over_the_seeds_that_both_have():
    found = methods(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [2.0, 2.1, 2.0]})
    test = compared(found, "Simple training", "Grid search")
    assert round(test.difference, 3) == 0.5
    assert test.p < 0.001
    found["Grid search"] |= {"seeds": [5, 1, 7]}
    assert compared(found, "Simple training", "Grid search").pairs == 1
    assert compared(found, "Simple training", "nothing") is None
    found["Grid search"] |= {"seeds": [5, 6, 7]}
    assert compared(found, "Simple training", "Grid search") is None


def test_what_does_not_hold_is_said():
    bad = summary(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [2.0, 2.1, 2.0]})
    assert "| Simple training costs nothing against grid search | does not hold: +0.500" in claims_table(
        bad["settings"]
    )


def test_the_papers_numbers_are_those_of_its_table():
    assert len(PAPER) == 13
    assert PAPER["Simple training"] == (5.99, 0.04, 0.435, 0.001)
    assert PAPER["Luketina et al. (12.5 %)"].nll == 6.19


def test_the_conclusion_in_words():
    bad = summary(**{"Simple training": [2.5, 2.6, 2.5001], "Grid search": [1.9, 2.0, 1.9], "τ = 1": [2.2, 2.3, 2.2]})
    text = conclusion(bad["settings"][0])
    assert "with an NLL of 2.533; the better search, grid search, chooses 0.90 ± 0.06, with 1.933 after 1" in text
    assert "does not hold (+0.600" in text
    assert "the best first: Luketina" in text
    assert text.index("τ = 1;") < text.index("Simple training (+0.300")
    good = summary(**{"Simple training": [1.8, 1.91, 1.8], "Grid search": [1.9, 2.0, 1.9]})
    assert "costs nothing, holds: it gains (−0.097" in conclusion(good["settings"][0])
    alone = {"setting": "x", "told": "Data.", "methods": {"τ = 1": bad["settings"][0]["methods"]["τ = 1"]}}
    assert conclusion(alone) == "**x.** Data."
    assert conclusion(bad["settings"][0]) in page(bad)


def test_a_picture(tmp_path):
    text = plot(summary(), tmp_path / "tau.svg").read_text()
    assert text.count("<!-- ") > 20  # matplotlib notes every label of an axis
    assert "<!-- Grid search (2 folds) -->" in text
