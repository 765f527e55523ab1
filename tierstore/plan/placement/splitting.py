"""Splitting tables: what must be, for memory, and what pays, for balance."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .costs import CostModel
from .shapes import COLUMN_UNIT, Piece, Shapes

__all__ = ["Carved", "Division", "SplitKind", "Splitter"]

SplitKind = Literal["table", "row", "column"]


class Division(NamedTuple):
    """All tables, in pieces.

    Attributes:
        reasons: why a table was split, by its index.
    """

    pieces: list[Piece]
    reasons: dict[int, str]


class Carved(NamedTuple):
    """A piece, in two."""

    taken: Piece
    rest: Piece


class Splitter:
    """Splits the tables of one workload.

    Attributes:
        allow: how a table may lie.
    """

    def __init__(self, shapes: Shapes, cost_model: CostModel, allow: tuple[SplitKind, ...]) -> None:
        self.shapes = shapes
        self.allow = allow
        self._cost_model = cost_model
        self._known_costs: dict[Piece, float] = {}

    def costs(self, pieces: Sequence[Piece]) -> NDArray[np.float64]:
        """float64 [pieces], seconds. A piece costs the same wherever in the table it begins."""
        at_origin = [piece._replace(first_row=0, first_column=0) for piece in pieces]
        new = list(dict.fromkeys(piece for piece in at_origin if piece not in self._known_costs))
        found = self._cost_model.seconds(self.shapes.lookups(new)).tolist() if new else []
        self._known_costs.update(zip(new, found, strict=True))
        return np.array([self._known_costs[piece] for piece in at_origin])

    def sizes(self, pieces: Sequence[Piece]) -> NDArray[np.int64]:
        """int64 [pieces], bytes."""
        return np.array([self.shapes.size_bytes(piece) for piece in pieces], np.int64)

    def fitting(self, num_devices: int, budget: int) -> Division:
        """Each table whole, or, where it is larger than a device or may not be whole, in equal parts."""
        found = Division([], {})
        for piece in self.shapes.whole():
            size, parts = self.shapes.size_bytes(piece), [piece]
            if size > budget:
                parts = self._cheapest(piece, -(-size // budget), budget)
                found.reasons[piece.table] = "larger than a device"
            elif "table" not in self.allow:
                parts = self._cheapest(piece, num_devices, budget)
                found.reasons[piece.table] = "no table may be whole"
            found.pieces.extend(parts)
        return found

    def balanced(self, division: Division, num_devices: int, finer: int) -> Division:
        """Split what costs more than the mean device, once each, where its largest part then costs less.

        Args:
            finer: into parts of at most the mean cost over it.
        """
        pieces, reasons = list(division.pieces), dict(division.reasons)
        settled: set[Piece] = set()
        while True:
            costs = self.costs(pieces)
            mean = costs.sum() / num_devices
            at = next((at for at in np.argsort(-costs, kind="stable") if pieces[at] not in settled), None)
            if at is None or costs[at] <= mean:
                return Division(pieces, reasons)
            piece = pieces[at]
            parts = self._cheapest(piece, finer * min(num_devices, int(np.ceil(costs[at] / mean))), None)
            settled |= {piece, *parts}
            if len(parts) > 1 and self.costs(parts).max() < costs[at]:
                pieces[at : at + 1] = parts
                reasons.setdefault(piece.table, "costs more than the mean device")

    def _cheapest(self, piece: Piece, count: int, budget: int | None) -> list[Piece]:
        """By rows or by columns: where parts fit, then whose costliest part is cheaper."""
        ways = [self._by_rows(piece, count, budget)] if "row" in self.allow else []
        ways += [self._by_columns(piece, count, budget)] if "column" in self.allow else []
        if budget is not None:
            ways = [way for way in ways if self.sizes(way).max() <= budget] or ways
        return min(ways, key=lambda way: float(self.costs(way).max()), default=[piece])

    def _by_rows(self, piece: Piece, count: int, budget: int | None) -> list[Piece]:
        if budget is not None:
            count = max(count, -(-piece.num_rows // max(1, budget // self.shapes.row_bytes(piece))))
        return piece.by_rows(count)

    def _by_columns(self, piece: Piece, count: int, budget: int | None) -> list[Piece]:
        """In more parts than ``count`` if optimizer state and padding of each would else be too much."""
        while True:
            parts = piece.by_columns(count)
            if budget is None or len(parts) < count or self.sizes(parts).max() <= budget:
                return parts
            count += 1

    def carve(self, piece: Piece, free: int) -> Carved | None:
        """The most of a piece that ``free`` bytes hold, and the rest; None if it may not be split so."""
        rows = free // self.shapes.row_bytes(piece)
        if "row" in self.allow and 0 < rows < piece.num_rows:
            rest = piece._replace(first_row=piece.first_row + rows, num_rows=piece.num_rows - rows)
            return Carved(piece._replace(num_rows=rows), rest)
        if "column" not in self.allow:
            return None
        taken = next((each for each in _narrower(piece) if self.shapes.size_bytes(each) <= free), None)
        if taken is None:
            return None
        columns = taken.num_columns
        rest = piece._replace(first_column=piece.first_column + columns, num_columns=piece.num_columns - columns)
        return Carved(taken, rest)


def _narrower(piece: Piece) -> Iterator[Piece]:
    """Its first columns, fewer and fewer."""
    most = (piece.num_columns - 1) // COLUMN_UNIT
    return (piece._replace(num_columns=COLUMN_UNIT * units) for units in range(most, 0, -1))
