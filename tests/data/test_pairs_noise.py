import numpy as np
import pytest

from hetxl.data.pairs import open_pairs
from hetxl.data.pairs_noise import Swaps, swapped
from support.pairs import vectors_file


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(1)
    category = rng.integers(0, 40, 400)  # some have few members
    category[0] = 77  # and one has a single one
    path = vectors_file(tmp_path / "x.npz", count=400, captions=True, category=category)
    return open_pairs(path, whole=True).splits["test"]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9])
def test_a_share_of_the_texts_moves_and_none_is_lost(pairs, rate, within):
    found = swapped(pairs, rate, within, seed=3)
    assert abs(len(found.swaps) - rate * 400) <= (2 if rate < 0.9 else 8)
    before, after = pairs.captions(), found.captions()
    assert sorted(after) == sorted(before)
    changed = np.array([old != new for old, new in zip(before, after, strict=True)])
    assert np.array_equal(changed, found.swaps.mask(400))
    assert [before[source] for source in found.swaps.sources] == [after[row] for row in found.swaps.rows]
    if within:
        assert np.array_equal(pairs.categories[found.swaps.sources], pairs.categories[found.swaps.rows])
    elif rate:
        assert (pairs.categories[found.swaps.sources] != pairs.categories[found.swaps.rows]).mean() > 0.5
    assert pairs.swaps is None


def test_seeds(pairs):
    first, again, other = (swapped(pairs, 0.3, seed=seed).sources for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_equal_texts_do_not_count(tmp_path):
    path = vectors_file(tmp_path / "x.npz", count=100, captions=["same"] * 100)
    found = swapped(open_pairs(path, whole=True).splits["test"], 0.5)
    assert len(found.swaps) == 0


def test_saved_and_read(pairs, tmp_path):
    swaps = swapped(pairs, 0.3, within=True, seed=2).swaps
    swaps.save(tmp_path / "swaps.npz")
    found = Swaps.load(tmp_path / "swaps.npz")
    assert np.array_equal(found.rows, swaps.rows)
    assert np.array_equal(found.sources, swaps.sources)
    assert (found.rate, found.within, found.seed) == (0.3, True, 2)
    (tmp_path / "swaps.npz").write_bytes(b"not a file of swaps")
    with pytest.raises(ValueError, match=r"swaps\.npz holds no swaps"):
        Swaps.load(tmp_path / "swaps.npz")


def test_bad_input(pairs, tmp_path):
    for rate in (-0.1, 1.1, True, "0.2"):
        with pytest.raises(ValueError, match="rate must be from 0 to 1"):
            swapped(pairs, rate)
    with pytest.raises(ValueError, match="pairs have swaps already"):
        swapped(swapped(pairs, 0.2), 0.2)
    plain = open_pairs(vectors_file(tmp_path / "y.npz"), whole=True).splits["test"]
    with pytest.raises(ValueError, match="within=True needs categories"):
        swapped(plain, 0.2, within=True)
