"""Backward of a lookup in host memory: positions grouped by row, rows updated, both split over threads."""

import bisect
from typing import Any, Final

import numpy as np

from ..kernels import slots as kernels
from ..kernels.arrays import Bytes, Floats, Int32s, Int64s, Words
from ..kernels.slots import padded_width
from ..kernels.threads import Workers
from ..optim.configs import Hyper, adding
from ..optim.rules import SCRATCH_ROWS, merge_and_update
from .joined import NO_ARG_MAX, NO_FLOATS, NO_INTS, Joined
from .leases import RowArrays

_NO_FLAGS: Final = np.empty(0, np.uint8)


class Groups:
    """The positions of a batch grouped by row, table by table; see ``kernels.group_rows`` for the arrays. Rows are
    numbered from 0 on, table after table, in each in order of first use.

    Args:
        rows: int32 [N], which row each position has, by any numbers: of slots, say.
        number: int32, longer than the greatest of these, scratch: all 0 before and after.
        arg_max: int32 [K, dim], the positions that gave maxima, of max pooling; or empty.
        is_mean: gradients are divided by the sizes of their bags.
        num_columns: of a row of the output.

    Attributes:
        rows: int32 [U], the number that was given of each row.
    """

    def __init__(
        self, joined: Joined, rows: Int32s, number: Int32s, arg_max: Int32s | None, num_columns: int,
        workers: Workers, *, is_mean: bool,
    ) -> None:  # fmt: skip
        bounds, count = joined.features.bounds * joined.batch, len(rows)
        num_tables = len(bounds) - 1
        self._features = joined.features
        self._arg_max = arg_max = NO_ARG_MAX if arg_max is None else arg_max  # no maxima were looked up
        self._workers = workers
        self._table_starts = table_starts = joined.starts[bounds]
        self._counts = counts = np.zeros(num_tables, np.int64)
        self._starts = starts = np.empty(count + 2 * num_tables, np.int64)
        self._sources = sources = np.empty(count, np.int64)
        self._factors = factors = np.empty(count, np.float32) if is_mean or len(joined.scale) else NO_FLOATS
        self._positions = positions = np.empty(count, np.int32) if len(arg_max) else NO_INTS
        self._bag_of = bag_of = np.empty_like(positions)
        own, inverse = np.empty((2, count), np.int32)

        def work(begin: int, end: int) -> None:
            kernels.group_rows(
                begin, end, bounds, joined.starts, joined.columns, joined.batch, num_columns, rows, number, own,
                inverse, joined.scale, is_mean, counts, starts, sources, factors, positions, bag_of,
            )  # fmt: skip

        workers.share(work, table_starts)
        self._firsts = counts.cumsum() - counts
        self._pairs: list[tuple[int, int]] = list(zip(table_starts.tolist(), counts.tolist(), strict=False))
        self.rows: Int32s = np.concatenate([own[start : start + size] for start, size in self._pairs])

    def update(
        self, rows: RowArrays, first: int, slots: Int32s, hyper: list[Hyper] | None, grad_out: Floats, *,
        flags: Bytes = _NO_FLAGS, dirty: int = 0, seeds: Words | None = None, keys: Int64s | None = None,
    ) -> None:  # fmt: skip
        """Update the rows whose numbers begin at ``first``. The caller holds the lock.

        Args:
            slots: int32, by number from ``first`` on.
            hyper: of each table; None to add the gradients to the rows.
            grad_out: float32 [batch, columns], C-contiguous.
            flags: uint8 [S], or empty: ``dirty`` is set in those of the rows.
            seeds: uint64 [tables], what each table rounds with; None if all to nearest: see ``kernels.floats``.
            keys: int64, by number from ``first`` on; or None without ``seeds``.
        """
        codes, numbers = adding(len(self._counts)) if hyper is None else self._features.rules(hyper)
        cuts = self._cuts(first, len(slots))
        width = padded_width(rows.layout.dim)
        firsts, gradients, dim = self._firsts - first, grad_out.reshape(1, -1), rows.layout.dim

        def work(begin: int, end: int) -> None:
            merge_and_update(
                *cuts[begin], *cuts[end], self._table_starts, firsts, slots, self._counts, self._starts,
                self._sources, self._factors, self._positions, self._bag_of, self._arg_max, gradients, codes, numbers,
                rows.weights, rows.state, dim, rows.dtype_code, flags, dirty, seeds, keys,
                np.zeros((SCRATCH_ROWS, width), np.float32),
            )  # fmt: skip

        self._workers.run(work, range(len(cuts)))

    def _cuts(self, first: int, count: int) -> list[tuple[int, int]]:
        """(table, row in it), ascending: where so many rows from ``first`` on begin and end, and what divides them into
        ranges of about as many positions, each worth a thread."""
        ends, bounds, firsts = [], [], self._firsts.tolist()
        for number in (first, first + count):
            table = bisect.bisect_right(firsts, number) - 1
            row, start = number - firsts[table], self._pairs[table][0]
            ends.append((table, row))
            bounds.append(start + self._starts.item(start + 2 * table + row))
        low, high = bounds
        parts = self._workers.parts(high - low)
        between = [self._row_of(low + (high - low) * part // parts) for part in range(1, parts)]
        return [ends[0], *between, ends[1]]

    def _row_of(self, position: int) -> tuple[int, int]:
        """The first (table, row in it) from the position on."""
        table = bisect.bisect_right(self._table_starts, position, 0, len(self._pairs)) - 1
        start, size = self._pairs[table]
        place = start + 2 * table
        return table, bisect.bisect_left(self._starts, position - start, place, place + size) - place


def merged(
    joined: Joined, dim: int, grad_out: Floats, workers: Workers, *, arg_max: Any = NO_ARG_MAX, is_mean: bool = False,
    places: Int32s | None = None,
) -> Floats:  # fmt: skip
    """float32 [U, dim]: the merged gradient of each of the batch's ``distinct`` rows, at its number there or at
    ``places``, int32 [U]; ``grad_out``: float32 [batch, columns], C-contiguous."""
    inverse, keys = joined.distinct
    gradients = np.zeros((len(keys), dim), np.float32)
    number = np.zeros(len(keys), np.int32)
    groups = Groups(joined, inverse, number, arg_max, grad_out.shape[1], workers, is_mean=is_mean)
    slots = groups.rows if places is None else places[groups.rows]
    groups.update(RowArrays.plain(gradients), 0, slots, None, grad_out)
    return gradients
