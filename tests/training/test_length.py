import pytest

from hetxl.training.length import passes_of, steps_of, told_length, with_length
from support.training import small


@pytest.mark.parametrize(
    ("rows", "batch", "steps"),
    [
        (1_000_000, 256, 3906),  # one pass
        (256_000, 256, 1000),
        (50_000, 250, 1000),  # five
        (1_600, 256, 312),  # fifty
        (10, 256, 2),
    ],
)
def test_where_nobody_says_how_long(rows, batch, steps):
    config = small(steps=None, batch_size=batch)
    assert config.epochs is None
    assert steps_of(config, rows) == steps
    fixed = with_length(config, rows)  # so many passes from then on
    assert steps_of(fixed, 2 * rows) == pytest.approx(2 * steps, abs=1)


def test_what_is_said_counts():
    assert steps_of(small(steps=7), 10**6) == 7
    assert steps_of(small(steps=7, epochs=3.0), 10**6) == 7
    assert passes_of(small(steps=None, epochs=0.5), 100) == 0.5
    assert steps_of(small(steps=None, epochs=0.5, batch_size=10), 100) == 5
    assert with_length(small(steps=7), 100) == small(steps=7)


def test_in_words():
    assert told_length(small(steps=None, batch_size=256), 1600) == "312 steps of 256, 49.9 times the data"
