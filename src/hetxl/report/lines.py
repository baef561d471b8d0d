"""From runs to lines: the mean over seeds where they share their places, with the range of the seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetxl.report.format import finite
from hetxl.report.scales import downsample

LIMIT = 400
"""A line has at most so many points."""


@dataclass(frozen=True)
class Point:
    """A point of a line.

    Attributes:
        x: across.
        y: up; the mean over seeds.
        low: the lowest of the seeds.
        high: the highest of them.
    """

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """What one label shows.

    Attributes:
        label: whose it is.
        points: by x, at most LIMIT of them.
        seeds: how many runs the points are the mean of.
        note: what sets it apart from the other lines of the label, like its seed.
    """

    label: str
    points: tuple[Point, ...]
    seeds: int = 1
    note: str = ""


def pairs(records: Iterable[Any], x: str | int, y: str | int) -> list[tuple[float, float, float]]:
    """Three numbers of each record: its place among the others, x and y. Records without both are left out.

    Args:
        records: dicts or lists.
        x: the key or index of x.
        y: that of y.
    """
    found = []
    for record in records:
        try:
            key, across, up = finite(record["step"] if isinstance(record, dict) else record[0]), record[x], record[y]
        except (KeyError, IndexError, TypeError):
            continue
        across, up = finite(across), finite(up)
        if key is not None and across is not None and up is not None:
            found.append((key, across, up))
    return sorted(found)


def lines(label: str, runs: Sequence[tuple[int | None, Sequence[tuple[float, float, float]]]]) -> list[Line]:
    """The lines of one label.

    Seeds that were measured at the same places become one line of means; seeds that were not (one stopped early, or was
    evaluated at other steps) stay lines of their own, since a mean over different seeds would jump.

    Args:
        label: whose they are.
        runs: the seed of each run, and its points as `pairs` gives them.
    """
    filled = [(seed, points) for seed, points in runs if points]
    if not filled:
        return []
    common = set.intersection(*({key for key, _, _ in points} for _, points in filled))
    longest = max(len(points) for _, points in filled)
    if len(filled) > 1 and 2 * len(common) < longest:
        return [
            _shortened(Line(label, tuple(Point(x, y, y, y) for _, x, y in points), 1, f"seed {seed}"))
            for seed, points in filled
        ]
    by_key: dict[float, list[tuple[float, float]]] = {}
    for _, points in filled:
        for key, x, y in points:
            if key in common:
                by_key.setdefault(key, []).append((x, y))
    merged = []
    for key in sorted(by_key):
        across, up = zip(*by_key[key], strict=True)
        merged.append(Point(sum(across) / len(across), sum(up) / len(up), min(up), max(up)))
    return [_shortened(Line(label, tuple(merged), len(filled)))]


def _shortened(line: Line) -> Line:
    kept = downsample([point.y for point in line.points], LIMIT)
    return Line(line.label, tuple(line.points[index] for index in kept), line.seeds, line.note)
