"""Which rows of a row file were written since a version, read from the indexes of its segments.

That is what changed only if the current version was made from the earlier one: after a rollback rows are what they were
without being written. The lineage of the current version tells (``lineage``); it is the caller's to look at.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s, Words
from ..rows import MAX_ROWS
from .lmdb import LmdbColdTier
from .reads import by_key, stored_batches
from .row_map import RowMap
from .snapshot import Snapshot

CHUNK_BYTES: Final = 8 << 20
"""Rows with their state that are read at a time."""


class Basis(Enum):
    """What changes are told from."""

    ROWS = "rows"
    """An earlier version: the rows that were written since."""
    NOTHING = "nothing"
    """Every row that was ever written."""


class ChangedRows(NamedTuple):
    """Some rows of a table, ascending.

    Attributes:
        rows: int64 [n].
        weights: uint64 [n, weight words], as they are now.
    """

    rows: Int64s
    weights: Words


class ChangesTier(LmdbColdTier):
    """A row file that tells what changed in it."""

    @contextmanager
    def changes(self, since: int) -> Iterator["Changes"]:
        """What changed since a version that the current one was made from, valid until the end of the block.

        Args:
            since: its number; 0 for all rows that were ever written.
        """
        with self.lease() as (snapshot, rows):
            yield Changes(snapshot, rows, since)


class Changes:
    """What changed; made by ``ChangesTier.changes``.

    Attributes:
        basis: what it was told from.
    """

    def __init__(self, snapshot: Snapshot, rows: RowMap, since: int) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._since = since
        self.basis = Basis.ROWS if since else Basis.NOTHING

    @cached_property
    def _written(self) -> Int64s:
        return self._rows.written_since(self._snapshot, self._since)

    def rows(self, table: int) -> Iterator[ChangedRows]:
        """The table's changed rows, in ascending chunks; none is empty.

        Raises:
            ChecksumError, TruncatedError: a row is damaged.
        """
        step = max(1, CHUNK_BYTES // self._rows.layouts[table].row_bytes)
        for batch in stored_batches(self._snapshot, self._rows, self._keys(table), step):
            yield ChangedRows(batch.keys & (MAX_ROWS - 1), batch.weights)

    def _keys(self, table: int) -> Iterable[Int64s]:
        if self.basis is Basis.NOTHING:
            return by_key(self._rows, [table])
        first, stop = np.searchsorted(self._written, [table * MAX_ROWS, (table + 1) * MAX_ROWS])
        return [self._written[first:stop]]
