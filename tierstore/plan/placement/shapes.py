"""Pieces of tables, and what a lookup in one is: what costs are estimated from."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..workload import TableShape, Workload

__all__ = ["COLUMN_UNIT", "LookupShape", "Piece", "Shapes"]

COLUMN_UNIT: Final = 4
"""Tables are split by columns in multiples of it; 16 bytes of float32, one vector of the smallest processors."""


class LookupShape(NamedTuple):
    """A pooled lookup, as far as its time depends on it.

    Attributes:
        num_embeddings: rows that ids may name.
        embedding_dim: columns.
        pooling_factor: ids a bag, on average.
        batch_samples: bags.
        exponent: of Zipf's law of the rows' popularity; 0: uniform.
        weight_bytes: of the weights of a row.
    """

    num_embeddings: int
    embedding_dim: int
    pooling_factor: float
    batch_samples: int
    exponent: float
    weight_bytes: int

    @property
    def lookups(self) -> float:
        """Ids of a batch."""
        return self.pooling_factor * self.batch_samples

    @property
    def output_bytes(self) -> float:
        """Of the pooled rows of a batch, in float32."""
        return 4.0 * self.embedding_dim * self.batch_samples


class Piece(NamedTuple):
    """Neighbouring rows and columns of one table.

    Attributes:
        table: its index in the workload.
    """

    table: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    def by_rows(self, count: int) -> "list[Piece]":
        """In ``count`` pieces, or in as many as it has rows."""
        bounds = _bounds(self.num_rows, min(count, self.num_rows))
        return [
            self._replace(first_row=self.first_row + begin, num_rows=end - begin)
            for begin, end in itertools.pairwise(bounds)
        ]

    def by_columns(self, count: int) -> "list[Piece]":
        """In ``count`` pieces, each but the last of a multiple of ``COLUMN_UNIT`` columns, or in as many as it has."""
        units = -(-self.num_columns // COLUMN_UNIT)
        bounds = [min(COLUMN_UNIT * unit, self.num_columns) for unit in _bounds(units, min(count, units))]
        return [
            self._replace(first_column=self.first_column + begin, num_columns=end - begin)
            for begin, end in itertools.pairwise(bounds)
        ]


def _bounds(total: int, parts: int) -> list[int]:
    return [total * part // parts for part in range(parts + 1)]


class Shapes:
    """Sizes of the pieces of a workload's tables.

    Rows of a piece are taken to be as popular together as those of any other of its size: popular rows are scattered.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._row_bytes: dict[tuple[int, int], int] = {}

    def table(self, piece: Piece) -> TableShape:
        return self.workload.tables[piece.table]

    def whole(self) -> list[Piece]:
        """Each table in one piece."""
        return [
            Piece(index, 0, table.num_embeddings, 0, table.embedding_dim)
            for index, table in enumerate(self.workload.tables)
        ]

    def row_bytes(self, piece: Piece) -> int:
        """Of the columns of one row with their optimizer state, as a table of so many columns has them in memory."""
        key = piece.table, piece.num_columns
        if key not in self._row_bytes:
            narrow = dataclasses.replace(self.table(piece), embedding_dim=piece.num_columns)
            self._row_bytes[key] = self.workload.layout(narrow).row_bytes
        return self._row_bytes[key]

    def size_bytes(self, piece: Piece) -> int:
        return piece.num_rows * self.row_bytes(piece)

    def row_share(self, piece: Piece) -> float:
        """Of the table's rows, and so of its ids."""
        return piece.num_rows / self.table(piece).num_embeddings

    def column_share(self, piece: Piece) -> float:
        return piece.num_columns / self.table(piece).embedding_dim

    def lookup(self, piece: Piece) -> LookupShape:
        table = self.table(piece)
        narrow = dataclasses.replace(table, embedding_dim=piece.num_columns)
        return LookupShape(
            num_embeddings=piece.num_rows,
            embedding_dim=piece.num_columns,
            pooling_factor=table.pooling_factor * self.row_share(piece),
            batch_samples=self.workload.batch_samples,
            exponent=table.exponent,
            weight_bytes=8 * self.workload.layout(narrow).weight_words,
        )

    def lookups(self, pieces: Sequence[Piece]) -> list[LookupShape]:
        return [self.lookup(piece) for piece in pieces]
