"""What each policy misses, at any sizes: accesses are replayed once for LRU, and once a size for the others.

*LRU* at every size in one pass: stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM
Systems Journal 9, 1970). An access hits a cache of c rows if fewer than c other rows were accessed since the row's last
access. So one histogram of these distances holds the curve. Accesses are bits of a map, set where no later one is to
the same row, and a distance is how many are set behind a row's own (B. Bennett, V. Kruskal: LRU stack processing, IBM
Journal of Research and Development 19, 1975). Counters of 16 words of the map, of 16 such groups and so on are added
from the bit on upwards, and only towards the present; so near distances, which most are, cost a word or two. A store
pins the rows of in-flight batches. They are those used last, so while not all slots are pinned the least recently used
row is none of them; and where all are, they are let go. So distances hold at every size.

*Caches that know too much*, perfect counts and the future, evict the row of least priority. The priority that each
access gives its row is known before any cache is simulated; so one kernel replays both. The optimum is that of caches
which let every row in: L. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
5, 1966.
"""

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...cache.ddr import DdrCache
from ...kernels.arrays import Float64s, Int64s
from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel
from ...pool import HELD_SHARE
from ...settings.names import nearest
from ..accesses import Numbered, first_uses, numbered
from .base import POLICIES
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


class StackDistances:
    """Counts distances, part of the accesses after part. 8 bytes of memory a row, and a bit an access."""

    def __init__(self, accesses: Numbered) -> None:
        self._numbers = accesses.numbers
        self._times = _no_times(len(accesses.numbers))
        self._last = np.full(accesses.num_rows, -1, np.int64)

    def count(self, begin: int, end: int, histogram: Int64s) -> None:
        """Go on from access ``begin``, where the last call ended, up to ``end``.

        Args:
            histogram: int64 [rows], added to: accesses by how many other rows came since the row's last one.
        """
        _count_distances(self._numbers, begin, end, self._last, *self._times, histogram)


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


def perfect_counts(accesses: Numbered) -> Int64s:
    """int64 [n]: by how often the row was accessed so far, cached or not; of equal counts the least recent leaves."""
    priorities = np.empty(len(accesses.numbers), np.int64)
    _count_uses(accesses.numbers, np.zeros(accesses.num_rows, np.int64), priorities)
    return priorities


def times_of_next_use(accesses: Numbered) -> Int64s:
    """int64 [n]: the sooner the row is used again, the more."""
    priorities = np.empty(len(accesses.numbers), np.int64)
    _look_ahead(accesses.numbers, np.full(accesses.num_rows, len(priorities), np.int64), priorities)
    return priorities


def replay(accesses: Numbered, priorities: Int64s, capacity: int) -> NDArray[np.bool_]:
    """Which accesses hit: bool [n].

    Args:
        priorities: int64 [n], each row's after the access.
        capacity: rows, at least 1.
    """
    is_hit = np.empty(len(accesses.numbers), np.bool_)
    heap, levels = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
    _replay(accesses.numbers, priorities, heap, levels, np.full(accesses.num_rows, -1, np.int32), is_hit)
    return is_hit


@kernel
def _count_uses(numbers: Any, counts: Any, priorities: Any) -> None:
    for time in range(numbers.shape[0]):
        counts[numbers[time]] += 1
        priorities[time] = counts[numbers[time]] * numbers.shape[0] + time


@kernel
def _look_ahead(numbers: Any, next_uses: Any, priorities: Any) -> None:
    for time in range(numbers.shape[0] - 1, -1, -1):
        priorities[time] = -next_uses[numbers[time]]
        next_uses[numbers[time]] = time


@inline
def _rise(heap: Any, levels: Any, places: Any, place: Any, row: Any, level: Any) -> Any:
    """Where an element belongs between ``place``, which is free, and the root; those above move down."""
    while place > 0:
        parent = (place - 1) >> 1
        if levels[parent] <= level:
            break
        heap[place], levels[place] = heap[parent], levels[parent]
        places[heap[place]] = place
        place = parent
    heap[place], levels[place], places[row] = row, level, place
    return place


@inline
def _sink(heap: Any, levels: Any, places: Any, size: Any, place: Any, row: Any, level: Any) -> None:
    """The same, between ``place`` and the leaves of a heap of ``size``."""
    child = 2 * place + 1
    while child < size:
        if child + 1 < size and levels[child + 1] < levels[child]:
            child += 1
        if levels[child] >= level:
            break
        heap[place], levels[place] = heap[child], levels[child]
        places[heap[place]] = place
        place = child
        child = 2 * place + 1
    heap[place], levels[place], places[row] = row, level, place


@kernel
def _replay(numbers: Any, priorities: Any, heap: Any, levels: Any, places: Any, is_hit: Any) -> None:
    """``heap``, ``levels``: rows and priorities of a binary heap, the least first; ``places``: of each row, or -1."""
    size = np.int64(0)
    for time in range(numbers.shape[0]):
        row, level = numbers[time], priorities[time]
        place = np.int64(places[row])
        is_hit[time] = place >= 0
        if place < 0:
            if size == heap.shape[0]:
                places[heap[0]] = -1
                place = np.int64(0)
            else:
                place = size
                size += 1
        place = _rise(heap, levels, places, place, row, level)
        _sink(heap, levels, places, size, place, row, level)


Progress = Callable[[int, int], None]
"""Told how much is done, and of how much; accesses, each once a replay."""

_INTERPOLATED: Final = 16
"""Rows. Below, a part of a row makes a difference."""
_CHUNK: Final = 1 << 20
"""Accesses between two calls of a ``Progress``."""
_PRIORITIES: Final = {"perfect-lfu": perfect_counts, "opt": times_of_next_use}


class Replay(Protocol):
    """Accesses, ready to be asked what a cache misses."""

    @property
    def num_rows(self) -> int:
        """Distinct rows."""

    @property
    def bends(self) -> list[int]:
        """Sizes at which the curve may change its slope at once, in ascending order."""

    def misses(self, sizes: Float64s) -> Float64s:
        """float64 [windows, k]: in each window, at sizes (float64 [k], rows, more than 0).

        Between two whole sizes misses lie on a straight line; with policies that are replayed for each size only
        between small ones, and from 16 rows on the nearest whole size is taken.
        """


def replay_of(policy: str, sample: Sample, *, prefetch_depth: int = 0, progress: Progress | None = None) -> Replay:
    """Args:
        sample: what is cached stays so from one window to the next.
        prefetch_depth: batches that are brought in ahead of the one in use.

    Raises:
        ValueError: no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: {nearest(policy, POLICIES)}")
    told = progress or _tell_nobody
    if policy == "lru":
        return _Distances(sample, told)
    return _Bounds(policy, sample, told) if policy in _PRIORITIES else _Stores(policy, sample, prefetch_depth, told)


class _Distances:
    """LRU."""

    def __init__(self, sample: Sample, progress: Progress) -> None:
        accesses = numbered(sample.keys)
        stack, self._nearer = StackDistances(accesses), []
        for begin, end in itertools.pairwise(sample.bounds):
            histogram = np.zeros(accesses.num_rows, np.int64)
            for start in range(begin, end, _CHUNK):
                stack.count(start, min(end, start + _CHUNK), histogram)
                progress(min(end, start + _CHUNK), len(sample.keys))
            self._nearer.append(np.append(0, np.cumsum(histogram)))
        self._lengths = np.diff(sample.bounds)
        self.num_rows: Final = accesses.num_rows
        self.bends: list[int] = []

    def misses(self, sizes: Float64s) -> Float64s:
        low = np.minimum(np.floor(sizes), self.num_rows).astype(np.int64)
        at_low, at_high = (
            np.stack([each[ends] for each in self._nearer]) for ends in (low, low + (low < self.num_rows))
        )
        missed: Float64s = self._lengths[:, None] - (at_low + (at_high - at_low) * (sizes - low))
        return missed


class _Simulations:
    """A replay for each size."""

    def __init__(self, sample: Sample, progress: Progress) -> None:
        self._sample, self._progress = sample, progress
        self._accesses = numbered(sample.keys)
        self.bends: list[int] = []

    @property
    def num_rows(self) -> int:
        return self._accesses.num_rows

    def misses(self, sizes: Float64s) -> Float64s:
        bounds, total = self._sample.bounds, len(self._sample.keys)
        sizes = np.where(sizes < _INTERPOLATED, sizes, np.rint(sizes))
        low, high = np.floor(sizes), np.ceil(sizes)
        wanted = np.unique(np.minimum(np.concatenate([low, high]), self.num_rows)).astype(np.int64)
        missed = np.empty((len(bounds) - 1, len(wanted)))
        for index, capacity in enumerate(wanted.tolist()):
            is_hit = self._hits(capacity) if capacity else np.zeros(total, np.bool_)
            missed[:, index] = [
                stop - start - np.count_nonzero(is_hit[start:stop]) for start, stop in itertools.pairwise(bounds)
            ]
            self._progress((index + 1) * total, len(wanted) * total)
        at_low, at_high = (missed[:, np.searchsorted(wanted, np.minimum(ends, self.num_rows))] for ends in (low, high))
        found: Float64s = at_low + (at_high - at_low) * (sizes - low)
        return found

    def _hits(self, capacity: int) -> NDArray[np.bool_]:
        """bool [n], in a cache of at least one row."""
        raise NotImplementedError


class _Stores(_Simulations):
    """A policy of the store, by the DDR tier's own code: batch by batch, with the pins that it has."""

    def __init__(self, policy: Any, sample: Sample, prefetch_depth: int, progress: Progress) -> None:
        super().__init__(sample, progress)
        self._policy, self._depth = policy, prefetch_depth
        self._is_first = first_uses(self._accesses, sample.starts)
        self._keys = sample.keys[self._is_first]
        self._starts = np.append(0, np.cumsum(self._is_first))[sample.starts]
        self.bends = [int(np.diff(self._starts).max(initial=0))]

    def _hits(self, capacity: int) -> NDArray[np.bool_]:
        cache = DdrCache(capacity, weight_words=0, state_words=0, policy=self._policy)
        is_hit = np.ones(len(self._is_first), np.bool_)  # a row that its own batch has used is there
        held_rows = int(capacity * HELD_SHARE)
        is_hit[self._is_first] = cache.access(self._keys, self._starts, depth=self._depth, held_rows=held_rows)
        return is_hit


class _Bounds(_Simulations):
    """What no store reaches, by priorities, access by access."""

    def __init__(self, policy: str, sample: Sample, progress: Progress) -> None:
        super().__init__(sample, progress)
        self._priorities = _PRIORITIES[policy](self._accesses)

    def _hits(self, capacity: int) -> NDArray[np.bool_]:
        return replay(self._accesses, self._priorities, capacity)


def _tell_nobody(done: int, total: int) -> None:
    pass
