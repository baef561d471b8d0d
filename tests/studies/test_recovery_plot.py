import numpy as np

from hetxl.studies.recovery_plot import plot_recovery


def test_a_panel_for_each_head_and_bars_for_all(tmp_path):
    rng = np.random.default_rng(0)
    heads = {
        "DET": {"gap_closed": [0.0, 0.0]},
        "DET + temperature scaling": {"gap_closed": [0.01, 0.02]},
        "HET": {"gap_closed": [0.3, 0.35], "agreement": {"pearson": [-0.11, -0.13]}},
        "HET-XL": {"gap_closed": [0.9, 0.92], "agreement": {"pearson": [0.95, 0.97]}},
    }
    points = {label: (rng.uniform(-1, 1, 50), rng.uniform(-1, 1, 50)) for label in ("HET", "HET-XL")}
    text = plot_recovery({"heads": heads}, points, tmp_path / "made" / "recovery.svg").read_text()
    assert "<svg" in text
    # Titles are drawn as outlines, and named beside them.
    assert all(f"<!-- {title} -->" in text for title in ("HET: r = −0.12", "HET-XL: r = 0.96", "gap closed"))


def test_one_seed_has_no_error(tmp_path):
    heads = {
        "DET": {"gap_closed": [0.0]},
        "HET-XL": {"gap_closed": [0.9], "agreement": {"pearson": [0.9]}},
    }
    path = plot_recovery({"heads": heads}, {"HET-XL": (np.zeros(2), np.ones(2))}, tmp_path / "one.png")
    assert path.read_bytes().startswith(b"\x89PNG")
