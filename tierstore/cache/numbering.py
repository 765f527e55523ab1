"""Slots by arithmetic: row r of a table is in slot ``first + r``, with a ``first`` for each table."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s
from ..layout import KEY_ROW_BITS, ROW_MASK

TABLE_BYTES: Final = 5 * 8
"""Host memory for each table of a store."""


class RowNumbering:
    """Which slot each row of some tables has, from 0 on without gaps.

    Args:
        tables: the range of the rows of each table, by table index.
    """

    def __init__(self, tables: Mapping[int, range]) -> None:
        self._tables: Int64s = np.array(sorted(tables), np.int64)
        rows = [tables[int(index)] for index in self._tables]
        sizes = np.array([len(each) for each in rows], np.int64)
        self._firsts: Int64s = np.cumsum(sizes) - sizes
        # By table index: the slot that row 0 has or would have, and the range of rows.
        self._first_of, self._low_of, self._high_of = np.zeros((3, int(self._tables[-1]) + 1), np.int64)
        self._low_of[self._tables] = [each.start for each in rows]
        self._high_of[self._tables] = [each.stop for each in rows]
        self._first_of[self._tables] = self._firsts - self._low_of[self._tables]

    @property
    def by_table(self) -> tuple[Int64s, Int64s, Int64s]:
        """By table index: the slot that row 0 has or would have, the first row, and the one after the last."""
        return self._first_of, self._low_of, self._high_of

    @property
    def size_bytes(self) -> int:
        arrays = (self._tables, self._firsts, self._first_of, self._low_of, self._high_of)
        return sum(array.nbytes for array in arrays)

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0; negative if the range begins behind it."""
        slots: Int64s = self._first_of[table_indices]
        return slots

    def keys_at(self, slots: Int32s) -> Int64s:
        """int64 [n]: the keys of the rows whose slots these are."""
        tables = self._tables[np.searchsorted(self._firsts, slots, side="right") - 1]
        keys: Int64s = (tables << KEY_ROW_BITS) | (slots - self._first_of[tables])
        return keys

    def slots_of(self, keys: Int64s) -> Int64s:
        """int64 [n], of keys of the tables; AssertionError for others."""
        assert self._are_rows(keys).all(), "a key that is no row of the tables"
        slots: Int64s = self._first_of[keys >> KEY_ROW_BITS] + (keys & ROW_MASK)
        return slots

    def _are_rows(self, keys: Int64s) -> Bools:
        """bool [n]: which keys are of rows that have slots."""
        tables = keys >> KEY_ROW_BITS
        known = (tables >= 0) & (tables < len(self._high_of))
        tables, rows = np.where(known, tables, 0), keys & ROW_MASK
        found: Bools = known & (rows >= self._low_of[tables]) & (rows < self._high_of[tables])
        return found
