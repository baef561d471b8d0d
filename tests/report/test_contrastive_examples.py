from pathlib import Path

from hetxl.report.contrastive_examples import named_pictures, noisy_pairs
from hetxl.report.groups import Group
from hetxl.report.read import Run

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def group(label, examples, seed=None):
    return Group(label, (Run(Path("run"), result={"seed": seed}, examples=examples),))


def test_heads_with_noise_come_first_and_the_rest_is_folded():
    entry = {"label": "bell", "image": PICTURE, "top": [["bell", 0.9]], "hit": True}
    groups = [group("DET", {"zero_shot": [entry]}, 3), group("HET-XL", {"zero_shot": [entry]}, 3)]
    text = "".join(named_pictures(groups))
    assert text.index("HET-XL, seed 3") < text.index("The same by DET, seed 3")
    assert 'alt="bell"' in text
    assert "90.0%" in text


def test_what_cannot_be_shown_is_left_out():
    bad = {
        "label": "<b>", "image": "javascript:alert(1)", "path": "a/<b>.png", "top": [["x"], ["moon", 2.0], 5],
        "hit": None, "noise": "much",
    }  # fmt: skip
    text = "".join(named_pictures([group("HET-XL", {"zero_shot": [bad, "no entry"]})]))
    assert "javascript" not in text
    assert "<b></b>" not in text
    assert "&lt;b&gt;" in text
    assert "width:100.0%" in text  # a share beyond 1 is drawn as 1
    assert "0 of these 1 are right" in text


def test_pairs_by_their_noise():
    examples = {
        "noisiest": [{"label": "moon", "image": PICTURE, "noise": 0.5, "swapped": True}],
        "calmest": [{"label": "", "image": None, "noise": 0.1, "swapped": None}],
    }
    text = "".join(noisy_pairs([group("HET-XL", examples), group("DET", {})]))
    assert "Most noise, HET-XL" in text
    assert "Least noise, HET-XL" in text
    assert text.count("swapped") == 1
    assert "noise 0.1000" in text


def test_nothing():
    assert "left out" in named_pictures([group("DET", {})])[0]
    assert "left out" in noisy_pairs([group("DET", {"noisiest": "x"})])[0]
