"""Rows of one sharded table, put together of what the ranks' row files have."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..config import TableConfig
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.floats import code_of_dtype
from ..layout import ROW_MASK, RowLayout
from ..pool.converting import RowSource
from .plan import Shard


class Piece(NamedTuple):
    """A shard of a table, and the table that its rank's store has."""

    shard: Shard
    config: TableConfig
    layout: RowLayout
    state_columns: Int64s


class WholeTable:
    """Reads rows of one table from the ranks that have them.

    Args:
        layout: of whole rows.
        pieces: in order of rows and columns, no row or column twice.
    """

    def __init__(self, layout: RowLayout, num_rows: int, pieces: Sequence[Piece]) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self._pieces = pieces

    def owners(self) -> Iterator[tuple[int, range]]:
        """A rank that has them, for each range of rows, ascending."""
        first = -1
        for shard, *_ in self._pieces:
            if shard.first_row > first:
                first = shard.first_row
                yield shard.rank, range(first, first + shard.num_rows)

    def read(self, reads: Sequence[RowSource], keys: Int64s, slots: Int32s, weights: Words, state: Words) -> Bools:
        """``ColdTier.read`` by each rank's; returns ``present``."""
        if self._pieces[0].layout.dim < self.layout.dim:
            return self._read_columns(reads, keys, slots, weights, state)
        present, rows = np.zeros(len(keys), np.bool_), keys & ROW_MASK
        for shard, *_ in self._pieces:
            own = np.flatnonzero((rows >= shard.first_row) & (rows < shard.first_row + shard.num_rows))
            here = np.zeros(len(own), np.bool_)
            reads[shard.rank](keys[own], slots[own], weights, state, here)
            present[own] = here
        return present

    def _read_columns(
        self, reads: Sequence[RowSource], keys: Int64s, slots: Int32s, weights: Words, state: Words
    ) -> Bools:
        found = [_read_part(reads[piece.shard.rank], piece, keys) for piece in self._pieces]
        present: Bools = np.logical_or.reduce([each.present for each in found])
        whole = Found.empty(self.layout, len(keys))
        for piece, part in zip(self._pieces, found, strict=True):
            part.fill_first_values(piece, keys, np.flatnonzero(present & ~part.present))
            shard, layout = piece.shard, piece.layout
            columns = slice(shard.first_column, shard.first_column + shard.num_columns)
            values = part.weights.view(layout.numpy_dtype)[:, : layout.dim]
            whole.weights.view(layout.numpy_dtype)[:, columns] = values
            whole.state.view(np.float32)[:, piece.state_columns] = part.state.view(np.float32)[:, : layout.state_dim]
        weights[slots[present]], state[slots[present]] = whole.weights[present], whole.state[present]
        return present


class Found(NamedTuple):
    """Rows in arrays of their own, as ``ColdTier.read`` takes them."""

    weights: Words
    state: Words
    present: Bools

    @classmethod
    def empty(cls, layout: RowLayout, count: int) -> "Found":
        weights, state = (np.zeros((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
        return cls(weights, state, np.zeros(count, np.bool_))

    def fill_first_values(self, piece: Piece, keys: Int64s, places: Int64s) -> None:
        """Of rows that another rank wrote its columns of: this one's had the bits that they began with."""
        layout, config = piece.layout, piece.config
        weights: Any = self.weights.view(layout.numpy_dtype)
        config.init.fill(keys[places], places.astype(np.int32), weights, layout.dim, code_of_dtype(layout.dtype))
        self.state.view(np.float32)[places, : layout.state_dim] = config.optimizer.initial_state


def _read_part(read: RowSource, piece: Piece, keys: Int64s) -> Found:
    found = Found.empty(piece.layout, len(keys))
    read(keys, np.arange(len(keys), dtype=np.int32), *found)
    return found
