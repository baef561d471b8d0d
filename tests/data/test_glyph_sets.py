"""Sets of characters, and where each family and character goes."""

import numpy as np
import pytest

from hetxl.data.glyph_sets import UNSEEN_HOME, candidates, homes


def test_the_sizes_of_jis():
    level_1, both = candidates("jis1"), candidates("jis")
    assert (len(level_1), len(both) - len(level_1)) == (2965, 3390)
    assert set(level_1) < set(both)
    assert {"亜", "腕"} <= set(level_1)  # the first and the last of the level
    assert {"弌", "熙"} <= set(both) - set(level_1)


@pytest.mark.parametrize("name", ["jis1", "jis", "common"])
def test_characters_are_ideographs_in_order(name):
    found = candidates(name)
    assert found == sorted(set(found))
    assert all(0x3400 <= ord(character) < 0xA000 for character in found)


def test_common_asks_for_more():
    assert len(candidates("common")) == 20_992 + 6_592
    assert set(candidates("jis")) < set(candidates("common"))


def everything(families, characters):
    return np.ones((len(families), len(characters)), dtype=bool)


def test_shares_of_the_splits():
    families, characters = [f"f{number}" for number in range(8)], candidates("jis1")
    found = homes(families, characters, everything(families, characters), ["f3"])
    assert (found[3] == UNSEEN_HOME).all()
    rest = np.delete(found, 3, axis=0)
    np.testing.assert_allclose(np.bincount(rest.ravel()) / rest.size, [0.8, 0.1, 0.1], atol=0.01)
    assert (rest == 0).any(0).all()


def test_a_pair_is_where_it_is_whatever_else_there_is():
    families, characters = ["a", "b", "c"], candidates("jis1")
    whole = homes(families, characters, everything(families, characters), [])
    part = homes(["c", "a"], characters[100:200], np.ones((2, 100), dtype=bool), [])
    together = (whole[[2, 0], 100:200] == 0).any(0) & (part == 0).any(0)  # the others were moved
    assert together.sum() > 80
    moved = (part != whole[[2, 0], 100:200])[:, together]
    # A pair that was moved because a character had no other is the one exception.
    assert moved.mean() < 0.02


def test_a_character_that_training_would_not_have():
    families, characters = ["a", "b", "c"], candidates("jis1")
    drawn = np.zeros((3, len(characters)), dtype=bool)
    drawn[0] = drawn[1] = True
    first = homes(families[:1], characters, drawn[:1], [])
    assert (first == 0).all()  # one family: always in training
    found = homes(families, characters, drawn, ["b"])
    assert (found[0] == 0).all()  # the unseen family does not count
    assert (found[1] == UNSEEN_HOME).all()
    assert (found[2] != 0).any()  # nothing is drawn there, so nothing is moved


def test_without_any_characters():
    assert homes(["a"], [], np.ones((1, 0), dtype=bool), []).shape == (1, 0)
