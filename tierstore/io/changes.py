"""Which rows of a row file changed since a version, read from one snapshot that shows both.

Two directories lie over the snapshot: one as the current version has it, one filled only up to the earlier version's
number. A block whose pages differ was written in between.

If the earlier version is kept, rows are compared with what it shows. If not, only blocks can be told: those with an
epoch above its number. That is right only if the current version was made from the earlier one: after a rollback rows
are what they were without being written. The lineage of the current version tells (``lineage``); it is the caller's to
look at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS, RowLayout
from .directory import Directory
from .lmdb import LmdbColdTier
from .snapshot import Snapshot
from .view import fill_directory

__all__ = ["Basis", "ChangedRows", "Changes", "ChangesTier"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

CHUNK_BYTES: Final = 8 << 20
"""Rows with their state that are read at a time, of each version."""
_LIST_STEP: Final = 1 << 20


class Basis(Enum):
    """What changes are told from."""

    ROWS = "rows"
    """The earlier version is kept: exactly the rows that differ."""
    BLOCKS = "blocks"
    """All rows of the blocks written since: the rows that differ, and neighbours."""
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

    def basis(self, since: int) -> Basis:
        """What changes since a version that the current one was made from can be told from; 0 for no such version."""
        if not since:
            return Basis.NOTHING
        return Basis.ROWS if since in self.versions else Basis.BLOCKS

    @contextmanager
    def changes(self, since: int) -> Iterator["Changes"]:
        """What changed since a version that the current one was made from, valid until the end of the block.

        Args:
            since: its number; 0 for all rows that were ever written.
        """
        basis = self.basis(since)
        with self.lease() as (snapshot, directory):
            earlier = directory.emptied()
            if basis is not Basis.NOTHING:
                fill_directory(earlier, snapshot, since)
            yield Changes(self, snapshot, directory, earlier, basis)

    def gather(self, snapshot: Snapshot, directory: Directory, keys: Int64s) -> tuple[Words, NDArray[np.bool_]]:
        """Weights of rows as a directory shows them, and which of them are there; keys are not empty.

        Raises:
            ChecksumError, TruncatedError: a row is damaged.
        """
        layout = directory.layouts[int(keys[0]) >> KEY_ROW_BITS]
        weights = np.empty((len(keys), layout.weight_words), np.uint64)
        state = np.empty((len(keys), layout.state_words), np.uint64)
        present = np.empty(len(keys), np.bool_)
        self._read_from(snapshot, directory, keys, np.arange(len(keys), dtype=np.int32), weights, state, present)
        return weights, present


class Changes:
    """What changed; made by ``ChangesTier.changes``.

    Attributes:
        basis: what it was told from.
    """

    def __init__(
        self, tier: ChangesTier, snapshot: Snapshot, directory: Directory, earlier: Directory, basis: Basis
    ) -> None:
        self._tier = tier
        self._snapshot = snapshot
        self._directory = directory
        self._earlier = earlier
        self.basis = basis

    def rows(self, table: int, num_rows: int) -> Iterator[ChangedRows]:
        """The table's changed rows, in ascending chunks; none is empty.

        Raises:
            ChecksumError, TruncatedError: a row is damaged.
        """
        for candidates in self._candidates(table, num_rows):
            if not len(candidates):
                continue
            keys = candidates | (table << KEY_ROW_BITS)
            weights, changed = self._tier.gather(self._snapshot, self._directory, keys)
            if self.basis is Basis.ROWS:
                before, was_there = self._tier.gather(self._snapshot, self._earlier, keys)
                changed &= ~was_there | (weights != before).any(axis=1)
            if changed.any():
                yield ChangedRows(candidates[changed], weights[changed])

    def _candidates(self, table: int, num_rows: int) -> Iterator[Int64s]:
        layout = self._directory.layouts[table]
        if self._tier.placement is not None:
            return self._moved_candidates(table, num_rows, layout)
        return self._block_candidates(table, num_rows, layout)

    def _block_candidates(self, table: int, num_rows: int, layout: RowLayout) -> Iterator[Int64s]:
        """Rows of the blocks that differ."""
        tables = self._directory.tables
        base, num_blocks = int(tables.bases[table]), int(tables.num_blocks[table])
        rows_each = np.arange(layout.rows_per_block, dtype=np.int64)
        step = max(1, CHUNK_BYTES // (layout.rows_per_block * layout.row_bytes))
        for start in range(0, num_blocks, _LIST_STEP):
            part = slice(base + start, base + min(start + _LIST_STEP, num_blocks))
            differ = self._directory.pages[part] != self._earlier.pages[part]
            blocks = np.flatnonzero(differ).astype(np.int64) + start
            for first in range(0, len(blocks), step):
                rows = (blocks[first : first + step, None] * layout.rows_per_block + rows_each).ravel()
                yield rows[rows < num_rows]

    def _moved_candidates(self, table: int, num_rows: int, layout: RowLayout) -> Iterator[Int64s]:
        """Rows that lie in blocks that differ, where rows lie anywhere: each row's place is looked up."""
        step = max(1, CHUNK_BYTES // layout.row_bytes)
        for start in range(0, num_rows, step):
            rows = np.arange(start, min(start + step, num_rows), dtype=np.int64)
            yield rows[self._directory.differs(self._earlier, self._tier.place(rows | (table << KEY_ROW_BITS)))]
