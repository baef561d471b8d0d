import pytest

from hetxl.report.lines import LIMIT, lines, pairs


def test_pairs_leave_out_what_is_not_there():
    records = [{"step": 2, "nll": 1.0}, {"step": 1, "nll": None}, {"nll": 3.0}, {"step": 0, "nll": 5.0}, 7, "text"]
    assert pairs(records, "step", "nll") == [(0, 0, 5.0), (2, 2, 1.0)]
    assert pairs([[0.5, 0.1], [0.2, float("nan")], [1], None], 0, 1) == [(0.5, 0.5, 0.1)]


def test_seeds_at_the_same_steps_become_one_line_of_means():
    first = [(100, 1.0, 4.0), (200, 2.0, 3.0)]
    second = [(100, 3.0, 6.0), (200, 4.0, 3.5)]
    (line,) = lines("HET", [(0, first), (1, second), (2, [])])
    assert line.seeds == 2
    assert [(point.x, point.y, point.low, point.high) for point in line.points] == [(2, 5, 4, 6), (3, 3.25, 3, 3.5)]


def test_seeds_at_other_steps_stay_lines_of_their_own():
    first = [(step, step, 1.0) for step in (10, 20, 30)]
    second = [(step, step, 2.0) for step in (15, 25, 35)]
    found = lines("HET", [(0, first), (1, second)])
    assert [(line.note, line.seeds, line.points[0].y) for line in found] == [("seed 0", 1, 1.0), ("seed 1", 1, 2.0)]


def test_long_lines_are_shortened_without_losing_a_spike():
    points = [(step, step, 50.0 if step == 1234 else 1.0) for step in range(10_000)]
    (line,) = lines("DET", [(0, points)])
    assert len(line.points) <= LIMIT
    assert max(point.y for point in line.points) == 50
    assert (line.points[0].x, line.points[-1].x) == (0, 9999)


@pytest.mark.parametrize("runs", [[], [(0, [])]])
def test_nothing_gives_no_line(runs):
    assert lines("DET", runs) == []
