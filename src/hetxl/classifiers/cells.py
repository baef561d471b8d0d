"""Rows in cells of about the same direction: spherical k-means on a sample of them, then every row to its nearest cell.

By direction, because what is searched for is a large inner product; by distance, centres near the origin draw far more
rows into their cells than others do. Projections to fewer dimensions, or cells within groups, would be less work, but
tear clusters apart: a search then has to look at many more cells for the same recall.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LATE = 0.4
"""Share of the centres that come second."""
POINTS = 32
"""Rows for each centre that k-means looks at; more would tear a few clusters less apart, in more time."""
BLOCK = 16_384
"""Rows at a time where all of them are read."""

Take = Callable[[Tensor], Tensor]
"""Rows [n, d] at ids [n]."""


def find_cells(take: Take, total: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Centres [n, d] of unit length of at most `count` cells, and the cell of each row [total].

    Args:
        take: gives rows by their ids, all on one device.
        total: number of rows.
        count: how many cells to aim for.
        generator: of the first centres, on the CPU.
    """
    everything = torch.arange(total)
    centres = k_means(take(_some(everything, POINTS * count, generator)), count, generator)
    sums, cells = torch.zeros_like(centres), []
    for part in everything.split(BLOCK):
        rows = take(part)
        place = nearest(rows, centres)
        sums.index_add_(0, place, F.normalize(rows, dim=-1))
        cells.append(place.cpu())
    # Centres of all that is in a cell, not of the sample alone: a search finds a cell by its centre. Empty ones stay.
    found = F.normalize(sums, dim=-1)
    return torch.where(sums.any(-1, keepdim=True), found, centres), torch.cat(cells)


def k_means(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` centres [n, d] of unit length of rows [m, d].

    Centres that start from random rows leave some clusters without one, whose rows are then scattered over the cells of
    others. So a second lot of centres starts from the rows that the first lot fits least.
    """
    rows = F.normalize(rows, dim=-1)
    if count >= len(rows):
        return rows
    late = int(LATE * count)
    centres = _lloyd(rows, _some_rows(rows, count - late, generator), 2, generator)
    if late:
        fit = torch.cat([(part @ centres.T).amax(-1) for part in rows.split(BLOCK)])
        misfits = rows[fit.argsort()[: int(LATE * len(rows))]]
        second = _lloyd(misfits, _some_rows(misfits, late, generator), 3, generator)
        centres = _lloyd(rows, torch.cat((centres, second)), 2, generator)
    return centres


def _lloyd(rows: Tensor, centres: Tensor, iterations: int, generator: torch.Generator) -> Tensor:
    """Centres [n, d] moved to the rows [m, d] that are nearest to them; those without any start again from a row."""
    for _ in range(iterations):
        place = torch.cat([nearest(part, centres) for part in rows.split(BLOCK)])
        sums = torch.zeros_like(centres).index_add_(0, place, rows)
        centres = F.normalize(sums, dim=-1)
        empty = (torch.bincount(place, minlength=len(centres)) == 0).nonzero().squeeze(-1)
        if len(empty):
            centres[empty] = _some_rows(rows, len(empty), generator)
    return centres


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """Place [m] of the one of centres [n, d], of unit length, that is nearest in direction to each of rows [m, d]."""
    return (rows @ centres.T).argmax(-1)


def _some(ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the ids at random, each once; all of them when there are not more."""
    return ids if count >= len(ids) else ids[torch.randperm(len(ids), generator=generator)[:count]]


def _some_rows(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[_some(torch.arange(len(rows)), count, generator)]
