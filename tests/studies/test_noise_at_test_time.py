import pytest

from hetxl.studies.noise_at_test_time import MARGIN, STUDY


def test_miniature(studied):
    text, summary = studied("test-noise")
    assert len(summary["runs"]) == 3
    assert "| deterministic | 84.35 |" in text  # the paper's
    assert "3 MC samples" in text


def sampled(summary, less):
    """Accuracies with draws that are lower by some numbers, one for each seed."""
    for run in summary["runs"].values():
        for key in ("top1", "top5"):
            run[f"sampled_{key}"] = [value - one for value, one in zip(run[f"zero_shot_{key}"], less, strict=True)]
    return summary


@pytest.mark.parametrize(
    ("less", "word"),
    [
        ((0.0001, 0.0, -0.0001), ", holds here"),
        ((0.02, 0.021, 0.02), "does not hold here"),
        ((0.02, 0.0, -0.02), "do not decide"),
    ],
)
def test_the_conclusion_follows_the_numbers(pair_runs, less, word):
    summary = sampled(pair_runs(dict.fromkeys(STUDY.settings, 0.5)), less)
    text = STUDY.conclusion(summary)
    assert word in text
    assert "With 22 draws" in text
    assert f"counts from {100 * MARGIN:g} points on" in text
    assert STUDY.tables(summary)[0].value("22 MC samples", "zero-shot top-1", "40 % swapped") == pytest.approx(
        50 - 100 * sum(less) / 3, abs=0.1
    )
