"""LRU at every size in one pass: stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM
Systems Journal 9, 1970).

An access hits a cache of c rows if fewer than c other rows were accessed since the row's last access. So one histogram
of these distances holds the curve. Accesses are bits of a map, set where no later one is to the same row, and a
distance is how many are set behind a row's own (B. Bennett, V. Kruskal: LRU stack processing, IBM Journal of Research
and Development 19, 1975). Counters of 16 words of the map, of 16 such groups and so on are added from the bit on
upwards, and only towards the present; so near distances, which most are, cost a word or two.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.arrays import Int64s
from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel
from ..accesses import Numbered

__all__ = ["StackDistances"]


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
        _count(self._numbers, begin, end, self._last, *self._times, histogram)


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
def _count(
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
