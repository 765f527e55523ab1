"""Merges the positions of several lookups that share tables into one, so that backward merges each row once."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Floats
from ..pool.bags import NO_FLOATS, Numbering
from .joined import Joined, tables_of
from .tables import LookupTable

_INT32_MAX: Final = 2**31 - 1


class _Piece(NamedTuple):
    """The bags, and the positions, that one lookup has of one table; and how far its positions move."""

    lookup: int
    bags: slice
    positions: slice
    shift: int


class Merged(Joined):
    """Positions table by table, within a table in the order of the lookups. It has one bag a "feature", and the output
    it belongs to is that of all lookups, flat, end to end.

    Args:
        parts: what each lookup joined; all in one pool, pooled alike.
        widths: columns of each lookup's output.
    """

    def __init__(self, parts: Sequence[Joined], widths: Sequence[int]) -> None:
        self._parts = parts
        self.tables = list(dict.fromkeys(table for part in parts for table in part.tables))
        self.batch = 1
        self._pieces, table_bags = _pieces(self.tables, parts)
        self.table_bags = np.array(table_bags, np.int64)
        self.table_of = tables_of(self.table_bags)
        sizes = self._over_bags([np.diff(part.bag_starts) for part in parts])
        self.bag_starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=self.bag_starts[1:])
        self.columns = self._over_bags(_places(parts, widths))
        has_scale = any(len(part.scale) for part in parts)
        scales = self.over_positions([_scale(part) for part in parts]) if has_scale else [NO_FLOATS]
        self.scale = np.concatenate(scales)
        self._keys = self._slots = self._numbering = None

    def _read(self, numbering: Numbering | None, out: NDArray[Any]) -> None:
        rows = [part.keys if numbering is None else part.slots(numbering) for part in self._parts]
        np.concatenate(self.over_positions(rows), out=out)

    def _over_bags(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Of an array over the bags of each lookup, one over the bags of all."""
        return np.concatenate([arrays[piece.lookup][piece.bags] for piece in self._pieces])

    def over_positions(self, arrays: Sequence[Any]) -> list[Any]:
        """Of an array or tensor over the positions of each lookup, those over the positions of all, in pieces."""
        return [arrays[piece.lookup][piece.positions] for piece in self._pieces]

    def winners(self, arg_max: Sequence[Any]) -> list[Any]:
        """Of the positions that gave each lookup's maxima (array or tensor [bags, dim]), those of the bags of all, in
        pieces."""
        return [arg_max[piece.lookup][piece.bags] + piece.shift for piece in self._pieces]


def _pieces(tables: Sequence[LookupTable], parts: Sequence[Joined]) -> tuple[list[_Piece], list[int]]:
    """(pieces in order, the first bag of each table and the end of the last)."""
    places = [{table: place for place, table in enumerate(part.tables)} for part in parts]
    pieces: list[_Piece] = []
    table_bags, num_positions = [0], 0
    for table in tables:
        num_bags = table_bags[-1]
        for number, (part, place_of) in enumerate(zip(parts, places, strict=True)):
            if table in place_of:
                begin, end = part.table_bags[place_of[table] : place_of[table] + 2].tolist()
                first, last = part.bag_starts[[begin, end]].tolist()
                pieces.append(_Piece(number, slice(begin, end), slice(first, last), num_positions - first))
                num_bags += end - begin
                num_positions += last - first
        table_bags.append(num_bags)
    return pieces, table_bags


def _places(parts: Sequence[Joined], widths: Sequence[int]) -> list[NDArray[Any]]:
    """Where the result of each bag begins in the outputs laid end to end: for each lookup an array [bags]."""
    sizes = [part.batch * width for part, width in zip(parts, widths, strict=True)]
    dtype = np.int32 if sum(sizes) <= _INT32_MAX else np.int64
    starts = np.cumsum(sizes) - sizes
    return [
        (np.add.outer(part.columns.astype(np.int64), np.arange(part.batch) * width).ravel() + start).astype(dtype)
        for part, width, start in zip(parts, widths, starts.tolist(), strict=True)
    ]


def _scale(part: Joined) -> Floats:
    return part.scale if len(part.scale) else np.ones(len(part), np.float32)
