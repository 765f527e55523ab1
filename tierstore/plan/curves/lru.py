"""LRU at every size in one pass: stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies, IBM
Systems Journal 9, 1970).

An access hits a cache of c rows if fewer than c other rows were accessed since the row's last access. So one histogram
of these distances holds the curve. Times at which a row was last accessed are bits of a map, and a distance is how many
are set behind a row's own (B. Bennett, V. Kruskal: LRU stack processing, IBM Journal of Research and Development 19,
1975). Counters of 16 words of the map, of 16 such groups and so on are added from the bit on upwards, and only towards
the present; so near distances, which most are, cost a word or two. When the map is full the bits set move together at
its start: it is a few bits for each distinct row, whatever the number of accesses, and stays in the processor's caches.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel
from .entries import empty_entries, grown_entries, is_half_full, place_of, prefetch_place

__all__ = ["StackDistances"]

Int64s = NDArray[np.int64]

FANOUT_BITS: Final = 4
"""A counter is the sum of so many, as a power of two, of the level below."""
WORD_BITS: Final = 6
_FEWEST_ROWS: Final = 1 << 5
_FEWEST_TIMES: Final = 1 << 10
_TIMES_PER_ROW: Final = 4
_TIME: Final = 0
_ROWS: Final = 1


class _Times(NamedTuple):
    """The map of last accesses.

    Attributes:
        words: uint64 [w], bit t of them all is set if some row was last accessed at time t.
        counts: int32, bits set in each group, level after level.
        firsts: int64 [levels], where each level begins in ``counts``.
    """

    words: NDArray[np.uint64]
    counts: NDArray[np.int32]
    firsts: Int64s


def _packed_times(num_rows: int) -> _Times:
    """With room for some times as many accesses; the first ``num_rows`` bits are set."""
    num_times = max(_FEWEST_TIMES, _TIMES_PER_ROW << max(0, num_rows - 1).bit_length())
    words = np.zeros(num_times >> WORD_BITS, np.uint64)
    words[: num_rows >> WORD_BITS] = np.uint64(2**64 - 1)
    if num_rows % 64:
        words[num_rows >> WORD_BITS] = np.uint64((1 << num_rows % 64) - 1)
    levels: list[NDArray[np.int32]] = []
    shift = WORD_BITS + FANOUT_BITS
    while not levels or len(levels[-1]) > 1 << FANOUT_BITS:
        group = 1 << shift
        levels.append(np.clip(num_rows - np.arange(-(-num_times // group)) * group, 0, group).astype(np.int32))
        shift += FANOUT_BITS
    firsts = np.cumsum([0, *map(len, levels[:-1])])
    return _Times(words, np.concatenate(levels), firsts)


class StackDistances:
    """Counts distances of accesses as they come. Memory grows with the distinct rows alone, some 60 bytes each.

    Attributes:
        histogram: int64; accesses by how many other rows were accessed since the row's last access.
    """

    def __init__(self) -> None:
        self._entries: Int64s = empty_entries(_FEWEST_ROWS)
        self._times = _packed_times(0)
        self._tally: Int64s = np.zeros(2, np.int64)
        self.histogram: Int64s = np.zeros(_FEWEST_ROWS, np.int64)

    @property
    def num_rows(self) -> int:
        """Distinct rows so far."""
        return int(self._tally[_ROWS])

    def access(self, keys: Int64s) -> None:
        """``keys``: int64 [n]."""
        taken = 0
        while taken < len(keys):
            taken += _access_keys(keys[taken:], self._entries, *self._times, self._tally, self.histogram)
            if taken < len(keys):
                self._make_room()

    def take_histogram(self) -> Int64s:
        """What was counted since the last call; what was last accessed when stays known."""
        taken = self.histogram
        self.histogram = np.zeros_like(taken)
        return taken

    def _make_room(self) -> None:
        if 4 * self.num_rows == len(self._entries):
            self._entries = grown_entries(self._entries)
            self.histogram = np.concatenate([self.histogram, np.zeros_like(self.histogram)])
        if self._tally[_TIME] == len(self._times.words) << WORD_BITS:
            _move_times(self._entries, self._times.words, np.empty(len(self._times.words), np.int64))
            self._times = _packed_times(self.num_rows)
            self._tally[_TIME] = self.num_rows


@inline
def _popcount(word: Any) -> Any:
    """Bits set in a uint64: sums of ever wider fields, which the compiler knows as the processor's instruction."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inline
def _set_after(words: Any, counts: Any, firsts: Any, last: Any, time: Any) -> Any:
    """Bits set after ``last``, which is set itself; none is from ``time`` on. The last level is one group at most."""
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
def _move_bit(words: Any, counts: Any, firsts: Any, last: Any, time: Any) -> None:
    words[last >> WORD_BITS] ^= np.uint64(1) << np.uint64(last & 63)
    words[time >> WORD_BITS] |= np.uint64(1) << np.uint64(time & 63)
    shift = WORD_BITS + FANOUT_BITS
    for level in range(firsts.shape[0]):
        if last >> shift == time >> shift:
            break
        counts[firsts[level] + (last >> shift)] -= 1
        counts[firsts[level] + (time >> shift)] += 1
        shift += FANOUT_BITS


@inline
def _set_bit(words: Any, counts: Any, firsts: Any, time: Any) -> None:
    words[time >> WORD_BITS] |= np.uint64(1) << np.uint64(time & 63)
    shift = WORD_BITS + FANOUT_BITS
    for level in range(firsts.shape[0]):
        counts[firsts[level] + (time >> shift)] += 1
        shift += FANOUT_BITS


@kernel
def _access_keys(keys: Any, entries: Any, words: Any, counts: Any, firsts: Any, tally: Any, histogram: Any) -> Any:
    """Count the distances of ``keys``; returns of how many, fewer than all where entries or times are full."""
    time, rows = tally[_TIME], tally[_ROWS]
    num_times = words.shape[0] << WORD_BITS
    position = 0
    while position < keys.shape[0] and time < num_times and not is_half_full(entries, rows):
        prefetch_place(entries, keys, position)
        place = place_of(entries, keys[position])
        last = entries[place + 1]
        if last >= 0:
            histogram[_set_after(words, counts, firsts, last, time)] += 1
            _move_bit(words, counts, firsts, last, time)
        else:
            entries[place] = keys[position]
            rows += 1
            _set_bit(words, counts, firsts, time)
        entries[place + 1] = time
        time += 1
        position += 1
    tally[_TIME], tally[_ROWS] = time, rows
    return position


@kernel
def _move_times(entries: Any, words: Any, ranks: Any) -> None:
    """Let each row's last time be how many other rows' are earlier. ``ranks``: int64 [words], scratch."""
    total = np.int64(0)
    for word in range(words.shape[0]):
        ranks[word] = total
        total += _popcount(words[word])
    for place in range(1, entries.shape[0], 2):
        last = entries[place]
        if last >= 0:
            earlier = words[last >> WORD_BITS] & ((np.uint64(1) << np.uint64(last & 63)) - np.uint64(1))
            entries[place] = ranks[last >> WORD_BITS] + _popcount(earlier)
