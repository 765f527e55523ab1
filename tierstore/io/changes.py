"""Which rows of a row file were written since a version, read from the indexes of its segments.

That is what changed only if the current version was made from the earlier one: after a rollback rows are what they were
without being written. The lineage of the current version tells (``lineage``); it is the caller's to look at.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s, Words
from ..layout import MAX_ROWS, ROW_MASK
from .reads import by_key, stored_batches
from .row_map import RowMap
from .snapshot import Snapshot

CHUNK_BYTES: Final = 8 << 20
"""Rows with their state that are read at a time."""


class ChangedRows(NamedTuple):
    """Some rows of a table, ascending.

    Attributes:
        rows: int64 [n].
        weights: uint64 [n, weight words], as they are now.
    """

    rows: Int64s
    weights: Words


class Changes:
    """What changed; made by ``LmdbColdTier.changes``."""

    def __init__(self, snapshot: Snapshot, rows: RowMap, since: int) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._since = since

    @cached_property
    def written(self) -> Int64s:
        """Keys of the rows that were written since, ascending."""
        return self._rows.written_since(self._snapshot, self._since)

    def rows(self, table: int) -> Iterator[ChangedRows]:
        """The table's changed rows, in ascending chunks; none is empty.

        Raises:
            ChecksumError, TruncatedError: a row is damaged.
        """
        step = max(1, CHUNK_BYTES // self._rows.layouts[table].row_bytes)
        for batch in stored_batches(self._snapshot, self._rows, self._keys(table), step):
            yield ChangedRows(batch.keys & ROW_MASK, batch.weights)

    def _keys(self, table: int) -> Iterable[Int64s]:
        if not self._since:
            return by_key(self._rows, [table])
        first, stop = np.searchsorted(self.written, [table * MAX_ROWS, (table + 1) * MAX_ROWS])
        return [self.written[first:stop]]
