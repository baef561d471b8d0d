import numpy as np
import pytest

from hetxl.data.icons_names import OTHER, categories_of, stem_of, words_of


@pytest.mark.parametrize(
    ("name", "words", "stem"),
    [
        ("arrow-left-bold", "arrow left bold", "arrow left"),
        ("account_circle-outline", "account circle outline", "account circle"),
        ("24-hours-fill", "24 hours fill", "24 hours"),
        ("Bold", "bold", "bold"),
        ("format-bold", "format bold", "format"),
        ("line-thin", "line thin", "line"),
    ],
)
def test_words_and_stems(name, words, stem):
    assert words_of(name) == words
    assert stem_of(words) == stem


def test_categories_are_words_that_enough_names_share():
    names = [f"arrow {way}" for way in ("left", "right", "up", "down")] + ["arrow up bold", "go left", "go right"]
    names += ["left turn", "left foot", "left lane", "whale"]
    found, known = categories_of(names, least=3)
    by_name = {name: known[place] for name, place in zip(names, found, strict=True)}
    assert {by_name[name] for name in names[:5]} == {"arrow"}  # the first word goes before "left"
    assert by_name["go left"] == "left"  # two begin with "go": too few
    assert by_name["left foot"] == "left"
    assert by_name["whale"] == OTHER
    assert found.dtype == np.int64


def test_names_count_once():
    found, known = categories_of(["bell"] * 9 + ["bell bold"] * 9, least=2)
    assert [known[place] for place in found] == [OTHER] * 18
    assert categories_of([], least=2)[0].shape == (0,)
