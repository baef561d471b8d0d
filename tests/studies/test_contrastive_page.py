import pytest

from hetxl.studies.contrastive_page import COMPARED, page, welch_p


def run(value, **more):
    """Two seeds around a value."""
    found = {key: [value - 0.01, value + 0.01] for key, _ in COMPARED}
    return found | {"train_seconds": [10.0, 12.0]} | more


@pytest.fixture
def summary():
    runs = {}
    for swap, drop in ((0, 0.0), (20, 0.1)):
        runs[f"det-swap{swap}"] = run(0.5 - drop, distance_auroc=[0.9, 0.9])
        runs[f"het-xl-swap{swap}"] = run(
            0.55 - drop, sampled_top1=[0.54, 0.56], sampled_top5=[0.6, 0.6], noise_auroc=[0.6, 0.7],
            distance_auroc=[0.92, 0.92],
        )  # fmt: skip
    for place, value in (("after", 0.4), ("both", 0.52), ("none", 0.1)):
        runs[f"het-xl-normalize-{place}"] = run(value)
    return {
        "data": "icons", "seeds": [0, 1], "rows": {"train": 19668}, "classes": 2211, "steps": 538, "samples": 22,
        "swaps": [0.0, 0.2], "runs": runs,
    }  # fmt: skip


def test_tables(summary):
    text = page(summary)
    assert "19,668 training pairs, 538 steps, 2 seeds; 2,211 test classes (chance 0.045 %)" in text
    assert "## 20 % of the texts swapped" in text
    assert "| zero-shot top-1 | 50.00 ± 1.00 | 55.00 ± 1.00 | +5.00 ± 0.00 | < 0.001 |" in text
    assert "| **pre-noise normalisation = false** | 10.00 ± 1.00 / " in text
    assert "| **pre-noise normalisation = true** | 55.00 ± 1.00 / " in text
    assert "mean over 22 draws" in text
    assert "| 20 % | 65.00 ± 5.00 | 92.00 ± 0.00 | 90.00 ± 0.00 |" in text
    assert "| training time | 11 s | 11 s |" in text


def test_one_seed_has_no_tests(summary):
    summary["seeds"] = [0]
    for found in summary["runs"].values():
        for key in found:
            found[key] = found[key][:1]
    text = page(summary)
    assert "| zero-shot top-1 | 49.00 | 54.00 | +5.00 | – | – |" in text


def test_welch():
    # By hand: t = −2 / √(1/3 + 4/3), 2.94 degrees of freedom.
    assert welch_p([1, 2, 3], [2, 4, 6]) == pytest.approx(0.2208, abs=2e-3)
    assert welch_p([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert welch_p([1, 1], [2, 2]) == 0
    assert welch_p([1, 1], [1, 1]) == 1
    assert welch_p([1], [1, 2]) is None
