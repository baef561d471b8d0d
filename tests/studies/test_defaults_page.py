import copy
import json

from hetxl.studies.defaults_page import LONGER, finished, order_told, page, plot
from hetxl.training.rescale import SCALED, SCALED_XL

NLL = {"DET": [2.0, 2.1, 2.05], "HET": [1.9, 2.01, 1.94], "HET-H": [2.0, 2.09, 2.06], "HET-XL": [1.8, 1.9, 1.86]}


def summary(**nll):
    more = {"precision@1": [0.5] * 3, "calibration_error": [0.02] * 3, "brier": [0.6] * 3, "steps": 10}
    heads = {head: {"nll": values, "seeds": [0, 1, 2], **more} for head, values in {**NLL, **nll}.items()}
    return copy.deepcopy({"setting": "words", "num_classes": 100, "seeds": [0, 1, 2], "heads": heads})


def test_the_order_says_which_differences_count():
    assert order_told(summary()) == "HET-XL < HET < HET-H ≈ DET"
    assert order_told(summary(HET=NLL["DET"])).startswith("HET-XL < HET-H ≈ ")


def test_the_page():
    text = page([summary()])
    assert "HET-XL against DET in 1 settings" in text
    assert "counts (p < 0.05) and ≈ where it does not:\n" in text
    assert "| words | HET-XL < HET < HET-H ≈ DET |\n" in text
    assert "## words" in text
    few = summary()
    del few["heads"]["HET"]
    assert "The paper's order" not in page([few])
    del few["heads"]["HET-XL"]
    assert "HET-XL against DET" not in page([few])
    assert "30 % of the training labels" in text
    assert "over 3 seeds" in text
    assert "For as much time" not in text
    assert "words: behind in other runs.\n" in page([summary() | {"note": "behind in other runs."}])


def test_the_page_has_the_heads_for_as_much_time():
    one = summary()
    one["heads"][LONGER] = one["heads"]["DET"] | {"nll": [1.5, 1.6, 1.55]}
    text = page([one, summary()])
    assert "## For as much time" in text
    assert "| words | 100 | 1.550 ± 0.029 | 1.853 ± 0.029 | +0.303 ± 0.003 |" in text
    assert "HET-XL against DET in 1 settings: NLL significantly better (p < 0.01) in 0, significantly worse" in text


def test_the_page_has_the_heads_as_validation_labels_scale_them():
    one = summary()
    one["heads"][SCALED] = one["heads"]["DET"] | {"nll": [1.5, 1.6, 1.55]}
    scaled = {"nll": [1.4, 1.49, 1.46], "temperature": [0.9] * 3, "noise_scale": [0.0, 0.25, 0.5]}
    one["heads"][SCALED_XL] = one["heads"]["HET-XL"] | scaled
    text = page([one, summary()])
    assert "## Rescaled on the validation split" in text
    assert "| setting | K | DET's NLL | HET-XL's NLL |" in text
    assert "| words | 100 | 1.550 ± 0.029 | 1.450 ± 0.026 | −0.100 ± 0.006 | 0.003 |" in text
    assert f"{SCALED_XL} against {SCALED} in 1 settings: NLL significantly better (p < 0.01) in 1" in text
    assert "| 0.90, noise × 0.25 |" in text
    assert "Rescaled" not in page([summary()])


def test_settings_that_are_done(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "summary.json").write_text(json.dumps({"setting": "words"}))
    assert finished(tmp_path, ["pycode", "words"]) == [{"setting": "words"}]


def test_a_picture_of_heads_that_are_there(tmp_path):
    text = plot([summary()], tmp_path / "x.svg").read_text()
    assert "<!-- HET-H -->" in text
    assert "as much time" not in text
