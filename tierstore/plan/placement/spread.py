"""Tables over equal places, so that none has more to look up, or to hold, than need be.

R. L. Graham, Bounds on Multiprocessing Timing Anomalies (SIAM Journal on Applied Mathematics 17, 1969): taking the
costliest first, each to the place with the least cost so far, ends within 4/3 - 1/(3 places) of the least possible
largest cost, where every place has room for everything.
"""

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Float64s, Int64s
from ...rows import RowLayout
from ..loads import FLOAT_BYTES
from ..workload import TableShape, Workload

__all__ = ["Piece", "Shapes", "longest_first", "spread"]


class Piece(NamedTuple):
    """Neighbouring rows of one table; ``table`` is its index in the workload."""

    table: int
    first_row: int
    num_rows: int

    def split(self, count: int) -> "list[Piece]":
        """In ``count`` equal pieces, or in as many as it has rows."""
        parts = min(count, self.num_rows)
        bounds = [self.num_rows * part // parts for part in range(parts + 1)]
        return [
            self._replace(first_row=self.first_row + begin, num_rows=end - begin)
            for begin, end in itertools.pairwise(bounds)
        ]


class Shapes:
    """Sizes of the pieces of a workload's tables. Popular rows are taken to be scattered: each row of a piece is as
    popular, on average, as any other of the table."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._layouts = [workload.layout(table) for table in workload.tables]

    def table(self, piece: Piece) -> TableShape:
        return self.workload.tables[piece.table]

    def layout(self, piece: Piece) -> RowLayout:
        return self._layouts[piece.table]

    def size_bytes(self, piece: Piece) -> int:
        return piece.num_rows * self.layout(piece).row_bytes

    def weight_bytes(self, piece: Piece) -> int:
        """Of a row."""
        return 8 * self.layout(piece).weight_words

    def row_share(self, piece: Piece) -> float:
        """Of the table's rows, and so of its ids."""
        return piece.num_rows / self.table(piece).num_embeddings

    def looked_up_bytes(self, piece: Piece) -> float:
        """Of the weights that a batch's ids name."""
        lookups = self.table(piece).pooling_factor * self.row_share(piece) * self.workload.batch_samples
        return lookups * self.weight_bytes(piece)

    def output_bytes(self, piece: Piece) -> float:
        """Of the pooled rows of a batch, in float32."""
        return float(FLOAT_BYTES * self.table(piece).embedding_dim * self.workload.batch_samples)


_FINER: Final = (1, 2, 4)
"""Parts of the mean place's cost that tables are split into: of two equal parts one may be too much."""
_WORTHWHILE: Final = 0.01
"""Splits that make the largest cost smaller by less are not made."""


class _Packed(NamedTuple):
    """Pieces, and the place of each."""

    pieces: list[Piece]
    places: Int64s
    largest: float


def spread(shapes: Shapes, tables: Sequence[int], num_places: int, budget: int) -> list[list[Piece]] | None:
    """The pieces of each place; None if they do not fit. The same input gives the same places.

    Tables that are larger than a place are split first. Then, while a piece costs more than the mean place, it is split
    too. Of the division without these splits and those with more and more of them, the first is taken that is within a
    hundredth of the best. Pieces are assigned longest first; where memory is too tight for that, largest first, and
    what does not fit is split to fill what is free.

    Args:
        tables: their indexes in the workload.
        budget: bytes of rows with their optimizer state, of each place.
    """
    return _Spreader(shapes, num_places, budget).spread(tables)


class _Spreader(NamedTuple):
    shapes: Shapes
    num_places: int
    budget: int

    def spread(self, tables: Sequence[int]) -> list[list[Piece]] | None:
        whole = [Piece(table, 0, self.shapes.workload.tables[table].num_embeddings) for table in tables]
        if any(self.shapes.layout(piece).row_bytes > self.budget for piece in whole):
            return None
        pieces = [part for piece in whole for part in self._fitting(piece)]
        candidates = [self._packed(pieces)]
        for finer in _FINER:
            balanced = self._balanced(pieces, finer)
            if balanced == pieces:
                break
            candidates.append(self._packed(balanced))
        fitting = [each for each in candidates if each is not None]
        enough = (1 + _WORTHWHILE) * min((each.largest for each in fitting), default=0.0)
        best = next((each for each in fitting if each.largest <= enough), None)
        if best is None:
            return None
        found: list[list[Piece]] = [[] for _ in range(self.num_places)]
        for piece, place in sorted(zip(best.pieces, best.places.tolist(), strict=True)):
            found[place].append(piece)
        return found

    def _costs(self, pieces: Sequence[Piece]) -> Float64s:
        return np.array([self.shapes.looked_up_bytes(piece) for piece in pieces])

    def _sizes(self, pieces: Sequence[Piece]) -> Int64s:
        return np.array([self.shapes.size_bytes(piece) for piece in pieces], np.int64)

    def _fitting(self, piece: Piece) -> list[Piece]:
        """Whole, or, where it is larger than a place, in equal parts."""
        rows = self.budget // self.shapes.layout(piece).row_bytes
        return piece.split(-(-piece.num_rows // rows))

    def _balanced(self, pieces: list[Piece], finer: int) -> list[Piece]:
        """What costs more than the mean place is split, into parts of at most the mean cost over ``finer``."""
        costs = self._costs(pieces)
        mean = costs.sum() / self.num_places
        found: list[Piece] = []
        for piece, cost in zip(pieces, costs.tolist(), strict=True):
            parts = finer * min(self.num_places, int(np.ceil(cost / mean))) if cost > mean else 1
            found += piece.split(parts)
        return found

    def _packed(self, pieces: list[Piece]) -> _Packed | None:
        costs, sizes = self._costs(pieces), self._sizes(pieces)
        places = longest_first(costs, sizes, self.num_places, self.budget)
        if places is None:
            filled = self._filled(pieces)
            if filled is None:
                return None
            pieces, places = filled
            costs, sizes = self._costs(pieces), self._sizes(pieces)
        return _Packed(pieces, places, float(np.bincount(places, costs, self.num_places).max()))

    def _filled(self, pieces: Sequence[Piece]) -> tuple[list[Piece], Int64s] | None:
        """Largest first, each to the place with most room; of what fits nowhere as many rows as do."""
        size_of = self.shapes.size_bytes
        waiting, free = sorted(pieces, key=size_of), [self.budget] * self.num_places
        placed: list[Piece] = []
        places: list[int] = []
        while waiting:
            piece = waiting.pop()
            place = max(range(self.num_places), key=free.__getitem__)
            if size_of(piece) > free[place]:
                rows = free[place] // self.shapes.layout(piece).row_bytes
                if not rows:
                    return None
                waiting.append(piece._replace(first_row=piece.first_row + rows, num_rows=piece.num_rows - rows))
                piece = piece._replace(num_rows=rows)
            placed.append(piece)
            places.append(place)
            free[place] -= size_of(piece)
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
