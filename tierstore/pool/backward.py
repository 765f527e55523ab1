"""Backward of a lookup in host memory: positions grouped by row, rows updated, both split over threads.

A *row number* is ``firsts[t] + u`` for row u of table t, the rows of a table being numbered in order of first use.
"""

from typing import Final, NamedTuple

import numpy as np

from ..kernels import slots as kernels
from ..kernels.arrays import Bytes, Floats, Int32s, Int64s, Words
from ..kernels.threads import Workers
from ..optim.configs import adding
from ..optim.rules import merge_and_update, scratch
from .arena import RowArrays
from .bags import NO_FLOATS, NO_INTS, Bags

_NO_FLAGS: Final = np.empty(0, np.uint8)


class Groups:
    """The positions of a batch grouped by row, table by table; see ``kernels.group_rows`` for the arrays.

    Args:
        arg_max: int32 [K, dim], the positions that gave maxima, of max pooling; or empty.
        is_mean: gradients are divided by the sizes of their bags.
        num_columns: of a row of the output.
    """

    def __init__(self, bags: Bags, arg_max: Int32s, num_columns: int, workers: Workers, *, is_mean: bool) -> None:
        num_positions, num_tables = int(bags.starts[-1]), len(bags.bounds) - 1
        self._bags = bags
        self._arg_max = arg_max
        self._is_mean = is_mean
        self._num_columns = num_columns
        self._workers = workers
        self._table_starts = bags.starts[bags.bounds]
        self.counts = np.zeros(num_tables, np.int64)  # of rows, once they are grouped
        self._starts = np.empty(num_positions + 2 * num_tables, np.int64)
        self._sources = np.empty(num_positions, np.int64)
        self._factors = np.empty(num_positions, np.float32) if is_mean or len(bags.scale) else NO_FLOATS
        self._positions = np.empty(num_positions, np.int32) if len(arg_max) else NO_INTS
        self._bag_of = np.empty_like(self._positions)
        self._firsts = self._table_starts[:-1]

    def by_slot(self, slots: Int32s, number: Int32s) -> Int32s:
        """Group by slot, int32 [N], with scratch int32 [capacity]; the slot of each row, int32 [N] by number. A table's
        first row has the number of its first position, so numbers have gaps."""
        row_slots, inverse = np.empty(len(slots), np.int32), np.empty(len(slots), np.int32)
        self._group(slots, number, row_slots, inverse)
        return row_slots

    def by_number(self, inverse: Int32s, num_unique: int) -> None:
        """Group by the number of each position's row, int32 [N], from 0 on in order of first use."""
        firsts = np.full(len(self.counts) + 1, num_unique, np.int64)
        has_positions = np.flatnonzero(np.diff(self._table_starts))
        firsts[has_positions] = inverse[self._table_starts[has_positions]]
        firsts = np.minimum.accumulate(firsts[::-1])[::-1]
        self._firsts, self.counts = firsts[:-1], np.diff(firsts)
        self._group(NO_INTS, NO_INTS, NO_INTS, inverse)

    def _group(self, slots: Int32s, number: Int32s, row_slots: Int32s, inverse: Int32s) -> None:
        bags = self._bags

        def work(begin: int, end: int) -> None:
            kernels.group_rows(
                begin, end, bags.bounds, bags.starts, bags.columns, bags.batch, self._num_columns, slots, number,
                row_slots, inverse, bags.scale, self._is_mean, self.counts, self._starts, self._sources,
                self._factors, self._positions, self._bag_of,
            )  # fmt: skip

        self._workers.share(work, self._table_starts)

    def used(self, by_number: Int32s) -> Int32s:
        """Of an array over row numbers, the elements that belong to a row."""
        pairs = zip(self._firsts.tolist(), self.counts.tolist(), strict=True)
        return np.concatenate([by_number[first : first + count] for first, count in pairs])

    def update(
        self, rows: RowArrays, first: int, slots: Int32s, codes: Int64s, hyper: Floats, grad_out: Floats, *,
        flags: Bytes = _NO_FLAGS, dirty: int = 0, seeds: Words | None = None, keys: Int64s | None = None,
    ) -> None:  # fmt: skip
        """Update the rows whose numbers begin at ``first``. The caller holds the lock. For others see ``Update``.

        Args:
            slots: int32, by number from ``first`` on.
            flags: uint8 [S], or empty: ``dirty`` is set in those of the rows.
            keys: int64, by number from ``first`` on; or None without ``seeds``.
        """
        cuts = self._cuts(self._place(first), self._place(first + len(slots)))
        firsts, gradients = self._firsts - first, grad_out.reshape(1, -1)

        def work(begin: int, end: int) -> None:
            merge_and_update(
                *cuts[begin], *cuts[end], self._table_starts, firsts, slots, self.counts, self._starts,
                self._sources, self._factors, self._positions, self._bag_of, self._arg_max, gradients, codes, hyper,
                rows.weights, rows.state, rows.layout.dim, rows.dtype_code, flags, dirty, seeds, keys,
                scratch(rows.layout.dim),
            )  # fmt: skip

        self._workers.run(work, range(len(cuts)))

    def merged(
        self, inverse: Int32s, num_unique: int, dim: int, grad_out: Floats, places: Int32s | None = None
    ) -> Floats:
        """float32 [num_unique, dim]: the merged gradient of each row, at its number or at ``places``, int32."""
        self.by_number(inverse, num_unique)
        gradients = np.zeros((num_unique, dim), np.float32)
        slots = np.arange(num_unique, dtype=np.int32) if places is None else places
        self.update(RowArrays.plain(gradients), 0, slots, *adding(len(self.counts)), grad_out)
        return gradients

    def _place(self, number: int) -> tuple[int, int]:
        table = max(int(np.searchsorted(self._firsts, number, side="right")) - 1, 0)
        return table, min(number - int(self._firsts[table]), int(self.counts[table]))

    def _cuts(self, begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
        if self._workers.parts(len(self._sources)) == 1:
            return [begin, end]
        low, high = self._position(begin), self._position(end)
        parts = self._workers.parts(high - low)
        middle = [self._row_at(low + (high - low) * part // parts) for part in range(1, parts)]
        return [begin, *(min(max(place, begin), end) for place in middle), end]

    def _position(self, place: tuple[int, int]) -> int:
        """How many positions lie before a row, in the order of groups."""
        table, row = place
        first = int(self._table_starts[table])
        return first + int(self._starts[first + 2 * table + row])

    def _row_at(self, position: int) -> tuple[int, int]:
        table = int(np.searchsorted(self._table_starts[:-1], position, side="right")) - 1
        first = int(self._table_starts[table])
        starts = self._starts[first + 2 * table :][: int(self.counts[table]) + 1]
        return table, int(np.searchsorted(starts, position - first))


class Update(NamedTuple):
    """One update of the rows of a batch."""

    groups: Groups  # its positions, to be grouped by row
    codes: Int64s  # int64 [T], optimizer of each table
    hyper: Floats  # float32 [T, NUM_HYPER]
    gradient: Floats  # float32 [batch, columns], C-contiguous
    seeds: Words | None  # uint64 [T], what each table rounds with; None if all to nearest: see ``kernels.floats``
