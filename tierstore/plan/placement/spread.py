"""Tables over equal places, so that none has more to look up, or to hold, than need be.

R. L. Graham, Bounds on Multiprocessing Timing Anomalies (SIAM Journal on Applied Mathematics 17, 1969): taking the
costliest first, each to the place with the least cost so far, ends within 4/3 - 1/(3 places) of the least possible
largest cost, where every place has room for everything.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Float64s, Int64s
from ...rows import RowLayout
from ..workload import TableShape, Workload

_FINER: Final = (1, 2, 4)
"""Parts of the mean place's cost that tables are split into: of two equal parts one may be too much."""
_WORTHWHILE: Final = 0.01
"""Splits that make the largest cost smaller by less are not made."""


class Piece(NamedTuple):
    """Neighbouring rows of one table, each as popular, on average, as any other of it.

    Attributes:
        number: of the table in its workload.
    """

    number: int
    first_row: int
    num_rows: int
    table: TableShape
    layout: RowLayout

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.layout.row_bytes

    @property
    def weight_bytes(self) -> int:
        """Of a row."""
        return 8 * self.layout.weight_words

    @property
    def row_share(self) -> float:
        """Of the table's rows, and so of its ids."""
        return self.num_rows / self.table.num_embeddings

    def looked_up_bytes(self, samples: int) -> float:
        """Of the weights that the ids of so many samples name."""
        return self.table.pooling_factor * self.row_share * samples * self.weight_bytes

    def split(self, count: int) -> "list[Piece]":
        """In ``count`` equal pieces, or in as many as it has rows."""
        parts = min(count, self.num_rows)
        bounds = [self.num_rows * part // parts for part in range(parts + 1)]
        return [
            self._replace(first_row=self.first_row + begin, num_rows=end - begin)
            for begin, end in itertools.pairwise(bounds)
        ]


class _Packed(NamedTuple):
    """Pieces, and the place of each."""

    pieces: list[Piece]
    places: Int64s
    largest: float


def spread(workload: Workload, tables: Iterable[int], num_places: int, budget: int) -> list[list[Piece]] | None:
    """The pieces of each place; None if they do not fit. The same input gives the same places.

    Tables that are larger than a place are split first. Then, while a piece costs more than the mean place, it is split
    too. Of the division without these splits and those with more and more of them, the first is taken that is within a
    hundredth of the best. Pieces are assigned longest first; where memory is too tight for that, largest first, and
    what does not fit is split to fill what is free.

    Args:
        tables: their indexes in the workload.
        budget: bytes of rows with their optimizer state, of each place.
    """
    shapes = [(index, workload.tables[index]) for index in tables]
    whole = [Piece(index, 0, table.num_embeddings, table, workload.layout(table)) for index, table in shapes]
    if any(piece.layout.row_bytes > budget for piece in whole):
        return None
    pieces = [part for piece in whole for part in piece.split(-(-piece.num_rows // (budget // piece.layout.row_bytes)))]
    divisions = [pieces]
    for finer in _FINER:
        balanced = _balanced(pieces, workload.batch_samples, num_places, finer)
        if balanced not in divisions:
            divisions.append(balanced)
    packed = [_packed(each, workload.batch_samples, num_places, budget) for each in divisions]
    fitting = [each for each in packed if each is not None]
    if not fitting:
        return None
    enough = (1 + _WORTHWHILE) * min(each.largest for each in fitting)
    best = next(each for each in fitting if each.largest <= enough)
    found: list[list[Piece]] = [[] for _ in range(num_places)]
    for piece, place in sorted(zip(best.pieces, best.places.tolist(), strict=True)):
        found[place].append(piece)
    return found


def _costs(pieces: Sequence[Piece], samples: int) -> Float64s:
    return np.array([piece.looked_up_bytes(samples) for piece in pieces])


def _balanced(pieces: list[Piece], samples: int, num_places: int, finer: int) -> list[Piece]:
    """What costs more than the mean place is split, into parts of at most the mean cost over ``finer``."""
    costs = _costs(pieces, samples)
    mean = costs.sum() / num_places
    found: list[Piece] = []
    for piece, cost in zip(pieces, costs.tolist(), strict=True):
        found += piece.split(finer * min(num_places, int(np.ceil(cost / mean))) if cost > mean else 1)
    return found


def _packed(pieces: list[Piece], samples: int, num_places: int, budget: int) -> _Packed | None:
    sizes = np.array([piece.size_bytes for piece in pieces], np.int64)
    places = longest_first(_costs(pieces, samples), sizes, num_places, budget)
    if places is None:
        filled = _filled(pieces, num_places, budget)
        if filled is None:
            return None
        pieces, places = filled
    return _Packed(pieces, places, float(np.bincount(places, _costs(pieces, samples), num_places).max()))


def _filled(pieces: Iterable[Piece], num_places: int, budget: int) -> tuple[list[Piece], Int64s] | None:
    """Largest first, each to the place with most room; of what fits nowhere as many rows as do."""
    waiting, free = sorted(pieces, key=lambda piece: piece.size_bytes), [budget] * num_places
    placed: list[Piece] = []
    places: list[int] = []
    while waiting:
        piece = waiting.pop()
        place = max(range(num_places), key=free.__getitem__)
        if piece.size_bytes > free[place]:
            rows = free[place] // piece.layout.row_bytes
            if not rows:
                return None
            waiting.append(piece._replace(first_row=piece.first_row + rows, num_rows=piece.num_rows - rows))
            piece = piece._replace(num_rows=rows)
        placed.append(piece)
        places.append(place)
        free[place] -= piece.size_bytes
    return placed, np.array(places, np.int64)


def longest_first(costs: Float64s, sizes: Int64s, num_places: int, budget: int) -> Int64s | None:
    """int64 [things]: the place of each; None if this order leaves no room for one.

    Args:
        costs, sizes: float64 and int64 [things].
        budget: room of each place.
    """
    loads, free = np.zeros(num_places), np.full(num_places, budget, np.int64)
    places = np.empty(len(costs), np.int64)
    for thing in np.argsort(-costs, kind="stable"):
        place = int(np.argmin(np.where(free >= sizes[thing], loads, np.inf)))
        if free[place] < sizes[thing]:
            return None
        places[thing] = place
        loads[place] += costs[thing]
        free[place] -= sizes[thing]
    return places
