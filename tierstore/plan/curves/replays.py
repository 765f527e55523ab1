"""What each policy misses, at any sizes: accesses are replayed once for LRU, and once a size for the others.

*LRU* at every size in one pass: stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM
Systems Journal 9, 1970). An access hits a cache of c rows if fewer than c other rows were accessed since the row's last
access. So one histogram of these distances holds the curve. Accesses are bits of a map, set where no later one is to
the same row, and a distance is how many are set behind a row's own (B. Bennett, V. Kruskal: LRU stack processing, IBM
Journal of Research and Development 19, 1975). Counters of 16 words of the map, of 16 such groups and so on are added
from the bit on upwards, and only towards the present; so near distances, which most are, cost a word or two. A store
pins the rows of in-flight batches. They are those used last, so while not all slots are pinned the least recently used
row is none of them; and where all are, they are let go. So distances hold at every size.

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
from ..accesses import Numbered, first_uses
from .sampled import Sample

FANOUT_BITS: Final = 4
"""A counter is the sum of so many, as a power of two, of the level below."""
WORD_BITS: Final = 6


class _Times(NamedTuple):
    """The map of last accesses.

    Attributes:
        words: uint64 [w], bit t of them all is set if access t is the last one to its row.
        counts: int32, bits set in each group, level after level; the last level is one group at most.
        firsts: int64 [levels], where each level begins in ``counts``.
    """

    words: NDArray[np.uint64]
    counts: NDArray[np.int32]
    firsts: Int64s


def _no_times(count: int) -> _Times:
    sizes = [-(-count >> WORD_BITS + FANOUT_BITS)]
    while sizes[-1] > 1 << FANOUT_BITS:
        sizes.append(-(-sizes[-1] >> FANOUT_BITS))
    words = np.zeros(-(-count >> WORD_BITS), np.uint64)
    return _Times(words, np.zeros(sum(sizes), np.int32), np.cumsum([0, *sizes[:-1]]))


@inline
def _popcount(word: Any) -> Any:
    """Bits set in a uint64: sums of ever wider fields, which the compiler knows as the processor's instruction."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inline
def _set_after(words: Any, counts: Any, firsts: Any, last: Any, time: Any) -> Any:
    """Bits set after ``last``, which is set itself; none is from ``time`` on."""
    word = last >> WORD_BITS
    found = _popcount(words[word] >> np.uint64(last & 63)) - 1
    end = (time >> WORD_BITS) + 1
    stop = min(end, (word + 16) & ~15)
    for each in range(word + 1, stop):
        found += _popcount(words[each])
    level = 0
    while stop < end:
        begin, end = stop >> FANOUT_BITS, (end + 15) >> FANOUT_BITS
        stop = min(end, (begin + 15) & ~15)
        for each in range(firsts[level] + begin, firsts[level] + stop):
            found += counts[each]
        level += 1
    return found


@inline
def _change(counts: Any, firsts: Any, last: Any, time: Any) -> None:
    """Count a bit at ``time`` instead of ``last``; -1: beside the others."""
    shift = WORD_BITS + FANOUT_BITS
    for level in range(firsts.shape[0]):
        if last >> shift == time >> shift:
            break
        if last >= 0:
            counts[firsts[level] + (last >> shift)] -= 1
        counts[firsts[level] + (time >> shift)] += 1
        shift += FANOUT_BITS


@kernel
def _count_distances(
    numbers: Any, begin: Any, end: Any, latest: Any, words: Any, counts: Any, firsts: Any, histogram: Any
) -> None:
    for time in range(begin, end):
        last = latest[numbers[time]]
        if last >= 0:
            histogram[_set_after(words, counts, firsts, last, time)] += 1
            words[last >> WORD_BITS] ^= np.uint64(1) << np.uint64(last & 63)
        words[time >> WORD_BITS] |= np.uint64(1) << np.uint64(time & 63)
        _change(counts, firsts, last, time)
        latest[numbers[time]] = time


Progress = Callable[[int, int], None]
"""Told how much is done, and of how much; accesses, each once a replay."""

_INTERPOLATED: Final = 16
"""Rows. Below, a part of a row makes a difference."""
_CHUNK: Final = 1 << 20
"""Accesses between two calls of a ``Progress``."""


def distances(accesses: Numbered, *, skip: int = 0, progress: Progress | None = None) -> Int64s:
    """int64 [rows]: accesses by how many other rows came since the row's last one. A row's first access is in none.

    8 bytes of memory a row, and a bit an access.

    Args:
        skip: accesses at the start that are not counted.
    """
    total = len(accesses.numbers)
    times, latest = _no_times(total), np.full(accesses.num_rows, -1, np.int64)
    uncounted, counted = np.zeros(accesses.num_rows, np.int64), np.zeros(accesses.num_rows, np.int64)
    for part, (begin, end) in ((uncounted, (0, skip)), (counted, (skip, total))):
        for start in range(begin, end, _CHUNK):
            stop = min(end, start + _CHUNK)
            _count_distances(accesses.numbers, start, stop, latest, *times, part)
            if progress is not None:
                progress(stop, total)
    return counted


class Replay(NamedTuple):
    """Accesses that caches of any sizes see.

    Attributes:
        policy: of ``POLICIES``.
        rows: the sample's keys, numbered.
        skip: batches at the start that fill the cache and are not counted.
        prefetch_depth: batches that are brought in ahead of the one in use.
    """

    policy: str
    sample: Sample
    rows: Numbered
    skip: int = 0
    prefetch_depth: int = 0
    progress: Progress | None = None

    def misses(self, sizes: Float64s) -> Float64s:
        """float64 [k]: accesses that miss, at sizes (float64 [k], rows, more than 0).

        Between two whole sizes misses lie on a straight line; with policies that are replayed for each size only
        between small ones, and from 16 rows on the nearest whole size is taken.
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
        return int(self.sample.starts[self.skip])

    def _by_distance(self, wanted: Int64s) -> Int64s:
        nearer = np.cumsum(distances(self.rows, skip=self._first, progress=self.progress))
        missed: Int64s = len(self.sample.keys) - self._first - np.append(0, nearer)[wanted]
        return missed

    def _by_store(self, wanted: Int64s) -> Int64s:
        is_first = first_uses(self.rows, self.sample.starts)
        keys, starts = self.sample.keys[is_first], np.append(0, np.cumsum(is_first))[self.sample.starts]
        missed, total = np.empty(len(wanted), np.int64), len(self.sample.keys)
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
