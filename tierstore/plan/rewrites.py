"""How many blocks a cache of newer rows has written, by a trace that is gone through with it.

A block that is written takes along all that changed in it, so neighbours that come and go together are written once.
"""

import functools
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS
from .accesses import Accesses, numbered

__all__ = ["Rewrites", "rewrites_of"]

_STEPS_AN_OCTAVE: Final = 2


class Rewrites:
    """Of a cache that keeps the rows used last, each of which changes at the end of a batch that it is in, or before it
    leaves if that is earlier.

    Args:
        accesses: once a batch, of every row; gone through when a size is asked for, and again for other sizes.
    """

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses
        self._found: dict[tuple[int, int], float | None] = {}

    def share(self, rows: float, rows_per_block: int) -> float | None:
        """Blocks written for each row that leaves a cache of so many rows, rows lying in order of their ids; of a
        larger one than any that half of the trace fills, as of the largest of these. None if it fills none.

        Shares are found for sizes a root of two apart, and lie on straight lines between, over their logarithms.
        """
        place = _STEPS_AN_OCTAVE * math.log2(max(rows, 1.0))
        lower = int(place)
        above = self._share(lower + 1, rows_per_block)
        for step in range(lower, -1, -1):
            below = self._share(step, rows_per_block)
            if below is not None:
                return below if above is None else below + (place - lower) * (above - below)
        return None

    def _share(self, step: int, rows_per_block: int) -> float | None:
        key = step, rows_per_block
        if key not in self._found:
            self._found[key] = self._go_through(round(2 ** (step / _STEPS_AN_OCTAVE)), rows_per_block)
        return self._found[key]

    def _go_through(self, capacity: int, rows_per_block: int) -> float | None:
        """Of the second half, the cache being warm from the first."""
        numbers, keys = self._rows
        if capacity >= len(keys):
            return None
        row_mask = (1 << KEY_ROW_BITS) - 1
        _, blocks = np.unique((keys & ~row_mask) | (keys & row_mask) // rows_per_block, return_inverse=True)
        starts = self._accesses.starts
        written, left = _count_written(numbers, starts, (len(starts) - 1) // 2, blocks, capacity)
        return written / left if left else None

    @functools.cached_property
    def _rows(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Rows as numbers: int32 [n] by access, and int64 [rows], the key of each."""
        numbers, num_rows = numbered(self._accesses.keys)
        keys = np.empty(num_rows, np.int64)
        keys[numbers] = self._accesses.keys
        return numbers, keys


def rewrites_of(accesses: Accesses) -> Rewrites | None:
    """None for a sample of the rows, which lacks neighbours, and where there is no access."""
    return None if accesses.sampling_rate < 1 or not len(accesses.keys) else Rewrites(accesses)


@kernel
def _count_written(numbers: Any, starts: Any, counted_from: Any, blocks: Any, capacity: Any) -> tuple[int, int]:
    """Blocks written, and rows that left, from batch ``counted_from`` on; none if the cache was not full by then, as
    the first rows that leave have more written for them than later ones.

    Args:
        blocks: int64 [rows], the number of each row's.
    """
    # A ring of the rows that are in, the one used longest ago behind the root.
    root = len(blocks)
    before, after = np.full(root + 1, -1, np.int64), np.full(root + 1, -1, np.int64)
    before[root] = after[root] = root
    # A row is as it is on disk if its block was written in a later batch than that which changed it last.
    changed_in, written_in = np.full(root, -1, np.int64), np.full(root, -1, np.int64)
    used = written = left = 0
    for batch in range(len(starts) - 1):
        if batch == counted_from:
            if used < capacity:
                return 0, 0
            written = left = 0
        for i in range(starts[batch], starts[batch + 1]):
            row = numbers[i]
            changed_in[row] = batch
            if after[row] >= 0:
                _unlink(before, after, row)
            elif used < capacity:
                used += 1
            else:
                out = after[root]
                _unlink(before, after, out)
                left += 1
                if changed_in[out] >= written_in[blocks[out]]:
                    written += 1
                    written_in[blocks[out]] = batch
            last = before[root]
            after[last], before[row], after[row], before[root] = row, last, root, row
    return written, left


@inline
def _unlink(before: Any, after: Any, row: Any) -> None:
    after[before[row]], before[after[row]] = after[row], before[row]
    after[row] = -1
