"""What each policy misses, at any sizes: accesses are replayed once for LRU, and once a size for the others.

*LRU* at every size in one pass: stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM
Systems Journal 9, 1970). An access hits a cache of c rows if fewer than c other rows were accessed since the row's last
access. So one histogram of these distances holds the curve. A tree of sums (P. Fenwick, A new data structure for
cumulative frequency tables, 1994) over the accesses counts those that are the last one to their row, and a distance is
how many of these are behind a row's own. A store pins the rows of in-flight batches. They are those used last, so while
not all slots are pinned the least recently used row is none of them; and where all are, they are let go. So distances
hold at every size.

*LFU and TinyLFU* by the DDR tier's own code: batch by batch, with the pins that it has.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cache.ddr import DdrCache
from ...kernels.arrays import Float64s, Int64s
from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel
from ...pool import HELD_SHARE
from ..accesses import Accesses, Numbered, first_uses


@inline
def _add(tree: Any, time: Any, amount: Any) -> None:
    place = time + 1
    while place < tree.shape[0]:
        tree[place] += amount
        place += place & -place


@inline
def _sum_to(tree: Any, time: Any) -> Any:
    """Of all up to ``time``, itself too."""
    found, place = 0, time + 1
    while place > 0:
        found += tree[place]
        place -= place & -place
    return found


@kernel
def _count_distances(numbers: Any, begin: Any, end: Any, latest: Any, tree: Any, num_rows: Any, histogram: Any) -> Any:
    """``num_rows``: distinct ones before ``begin``; returned of those before ``end``."""
    for time in range(begin, end):
        last = latest[numbers[time]]
        if last >= 0:
            histogram[num_rows - _sum_to(tree, last)] += 1
            _add(tree, last, -1)
        else:
            num_rows += 1
        _add(tree, time, 1)
        latest[numbers[time]] = time
    return num_rows


Progress = Callable[[int, int], None]
"""Told how much is done, and of how much; accesses, each once a replay."""

_INTERPOLATED: Final = 16
"""Rows. Below, a part of a row makes a difference."""
_CHUNK: Final = 1 << 20
"""Accesses between two calls of a ``Progress``."""


def distances(accesses: Numbered, *, skip: int = 0, progress: Progress | None = None) -> Int64s:
    """int64 [rows]: accesses by how many other rows came since the row's last one. A row's first access is in none.

    8 bytes of memory a row, and 4 an access.

    Args:
        skip: accesses at the start that are not counted.
    """
    total, num_rows = len(accesses.numbers), 0
    tree, latest = np.zeros(total + 1, np.int32), np.full(accesses.num_rows, -1, np.int64)
    uncounted, counted = np.zeros(accesses.num_rows, np.int64), np.zeros(accesses.num_rows, np.int64)
    for part, (begin, end) in ((uncounted, (0, skip)), (counted, (skip, total))):
        for start in range(begin, end, _CHUNK):
            stop = min(end, start + _CHUNK)
            num_rows = _count_distances(accesses.numbers, start, stop, latest, tree, num_rows, part)
            if progress is not None:
                progress(stop, total)
    return counted


class Replay(NamedTuple):
    """Accesses that caches of any sizes see.

    Attributes:
        policy: of ``POLICIES``.
        rows: the accesses' keys, numbered.
        skip: batches at the start that fill the cache and are not counted.
        prefetch_depth: batches that are brought in ahead of the one in use.
    """

    policy: str
    accesses: Accesses
    rows: Numbered
    skip: int = 0
    prefetch_depth: int = 0
    progress: Progress | None = None

    def misses(self, sizes: Float64s) -> Float64s:
        """float64 [k]: accesses that miss, at sizes (float64 [k], rows, more than 0).

        Between two whole sizes misses lie on a straight line; policies that are replayed for each size take the nearest
        whole one from 16 rows on.
        """
        if self.policy != "lru":
            sizes = np.where(sizes < _INTERPOLATED, sizes, np.rint(sizes))
        sizes = np.minimum(sizes, self.rows.num_rows)
        low, high = np.floor(sizes).astype(np.int64), np.ceil(sizes).astype(np.int64)
        wanted = np.unique(np.concatenate([low, high]))
        missed = self._by_distance(wanted) if self.policy == "lru" else self._by_store(wanted)
        at_low, at_high = (missed[np.searchsorted(wanted, ends)] for ends in (low, high))
        found: Float64s = at_low + (at_high - at_low) * (sizes - low)
        return found

    @property
    def _first(self) -> int:
        return int(self.accesses.starts[self.skip])

    def _by_distance(self, wanted: Int64s) -> Int64s:
        nearer = np.cumsum(distances(self.rows, skip=self._first, progress=self.progress))
        missed: Int64s = len(self.accesses.keys) - self._first - np.append(0, nearer)[wanted]
        return missed

    def _by_store(self, wanted: Int64s) -> Int64s:
        is_first = first_uses(self.rows, self.accesses.starts)
        keys, starts = self.accesses.keys[is_first], np.append(0, np.cumsum(is_first))[self.accesses.starts]
        missed, total = np.empty(len(wanted), np.int64), len(self.accesses.keys)
        for index, capacity in enumerate(wanted.tolist()):
            is_hit = np.ones(total, np.bool_)  # a row that its own batch has used is there
            is_hit[is_first] = self._store_hits(capacity, keys, starts) if capacity else False
            missed[index] = np.count_nonzero(~is_hit[self._first :])
            if self.progress is not None:
                self.progress((index + 1) * total, len(wanted) * total)
        return missed

    def _store_hits(self, capacity: int, keys: Int64s, starts: Int64s) -> NDArray[np.bool_]:
        policy: Any = self.policy
        cache = DdrCache(capacity, weight_words=0, state_words=0, policy=policy)
        held_rows = int(capacity * HELD_SHARE)
        return cache.access(keys, starts, depth=self.prefetch_depth, held_rows=held_rows)
