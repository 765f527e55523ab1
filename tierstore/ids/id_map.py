"""From id to row: an open-addressing hash table of row numbers beside an array of the rows' ids.

A place of the table is one uint32: row + 1 in its lower bits, as many as the capacity needs, and in the others how far
it lies behind its home, the largest number standing for all above. 0 is empty. So a probe reads the ids of rows of its
own home alone, and a deletion reads none. With half as many places again as rows, a row takes 8 bytes for its id, 6 of
the table, 4 for its score and one of flags.

Sources: mixer as in ``kernels.hashing``; range reduction, D. Lemire, Fast random integer generation in an interval
(2019); deletion by backward shift, D. Knuth, The Art of Computer Programming, vol. 3, section 6.4, algorithm R.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Bools, Bytes, Float64s, Int64s
from ..kernels.hashing import mix64, unit
from ..kernels.jit import inline, kernel, prefetch_item
from ..kernels.threads import Workers

Uint32s = NDArray[np.uint32]

ABSENT: Final = -1
USED: Final = 1
DIRTY: Final = 2
KEPT: Final = 4
"""Flags of a row: it has an id; something of it changed since it was last frozen; it may not lose its id now."""
_BUCKETS: Final = 4096
_FAR: Final = 32
_NEAR: Final = 16
_HALF: Final = np.uint64(32)
_SCANNED_ROWS: Final = 2**14


@inline
def _home(wanted: int, places: int) -> Any:
    return np.int64(((mix64(np.uint64(wanted)) >> _HALF) * np.uint64(places)) >> _HALF)


@inline
def _entry(row: Any, distance: Any, row_bits: int) -> np.uint32:
    farthest = (1 << (32 - row_bits)) - 1
    return np.uint32(min(distance, farthest) << row_bits | (row + 1))


@inline
def _find(index: Uint32s, ids: Int64s, row_bits: int, wanted: int) -> Any:
    """(place of an id, distance from its home), or (-1 less the empty place where it would be, distance)."""
    mask, farthest = (1 << row_bits) - 1, (1 << (32 - row_bits)) - 1
    place, distance = _home(wanted, index.size), 0
    while True:
        entry = np.int64(index[place])
        if entry == 0:
            return -1 - place, distance
        if entry >> row_bits == min(distance, farthest) and ids[(entry & mask) - 1] == wanted:
            return place, distance
        distance += 1
        place = place + 1 if place + 1 < index.size else 0


@kernel
def find_rows(begin: int, end: int, wanted: Int64s, index: Uint32s, ids: Int64s, row_bits: int, rows: Int64s) -> None:
    """``rows[i]``: the row of ``wanted[i]``, or -1; for i in [begin, end)."""
    mask = (1 << row_bits) - 1
    for i in range(begin, end):
        if i + _FAR < end:
            prefetch_item(index, _home(wanted[i + _FAR], index.size))
        if i + _NEAR < end:
            entry = np.int64(index[_home(wanted[i + _NEAR], index.size)])
            if entry != 0:
                prefetch_item(ids, (entry & mask) - 1)
        place, _ = _find(index, ids, row_bits, wanted[i])
        rows[i] = (np.int64(index[place]) & mask) - 1 if place >= 0 else ABSENT


@kernel
def insert_rows(index: Uint32s, ids: Int64s, row_bits: int, rows: Int64s) -> None:
    """Enter rows, whose ``ids`` are set, distinct and not in the table."""
    for i in range(rows.size):
        if i + _FAR < rows.size:
            prefetch_item(index, _home(ids[rows[i + _FAR]], index.size))
        place, distance = _find(index, ids, row_bits, ids[rows[i]])
        index[-1 - place] = _entry(rows[i], distance, row_bits)


@kernel
def remove_rows(index: Uint32s, ids: Int64s, row_bits: int, rows: Int64s) -> None:
    """Take rows out of the table."""
    mask, farthest, size = (1 << row_bits) - 1, (1 << (32 - row_bits)) - 1, index.size
    for i in range(rows.size):
        if i + _FAR < rows.size:
            prefetch_item(ids, rows[i + _FAR])
        if i + _NEAR < rows.size:
            prefetch_item(index, _home(ids[rows[i + _NEAR]], size))
        hole, _ = _find(index, ids, row_bits, ids[rows[i]])
        place, gap = hole, 0  # from the hole to the place
        while True:
            place, gap = place + 1 if place + 1 < size else 0, gap + 1
            entry = np.int64(index[place])
            if entry == 0:
                break
            row, distance = (entry & mask) - 1, entry >> row_bits
            if distance == farthest:
                distance = (place - _home(ids[row], size)) % size
            if distance >= gap:  # its home does not lie behind the hole
                index[hole] = _entry(row, distance - gap, row_bits)
                hole, gap = place, 0
        index[hole] = np.uint32(0)


@kernel
def count_uses(rows: Int64s, scores: Uint32s, flags: Bytes) -> None:
    """Add one to the scores of rows, up to the largest; a row may come several times."""
    for i in range(rows.size):
        if scores[rows[i]] != np.uint32(0xFFFFFFFF):
            scores[rows[i]] += np.uint32(1)
        flags[rows[i]] |= np.uint8(DIRTY)


@kernel
def note_use(rows: Int64s, score: int, scores: Uint32s, flags: Bytes) -> None:
    """Set the scores of rows."""
    for i in range(rows.size):
        scores[rows[i]] = np.uint32(score)
        flags[rows[i]] |= np.uint8(DIRTY)


@kernel
def draw(ids: Int64s, seed: np.uint64, out: Float64s) -> None:
    """``out[i]``: in [0, 1), by seed and id."""
    for i in range(ids.size):
        out[i] = unit(mix64(np.uint64(seed ^ mix64(np.uint64(ids[i])))))


def draws(ids: Int64s, seed: np.uint64) -> Float64s:
    """float64 [n] in [0, 1), by seed and id."""
    out = np.empty(len(ids))
    draw(ids, seed, out)
    return out


def lowest(scores: Uint32s, ids: Int64s, count: int) -> Int64s:
    """Which of some rows have the ``count`` lowest scores, and of equal scores the lowest ids; int64."""
    if not 0 < count < len(scores):
        return np.arange(min(count, len(scores)))
    last = np.partition(scores, count - 1)[count - 1]
    below, equal = np.flatnonzero(scores < last), np.flatnonzero(scores == last)
    rest = count - len(below)
    chosen = np.argpartition(ids[equal], rest - 1)[:rest] if rest < len(equal) else slice(None)
    return np.concatenate([below, equal[chosen]])


def _places(capacity: int) -> int:
    return capacity + capacity // 2 + 1


def map_bytes(capacity: int) -> int:
    """Bytes of an ``IdMap``."""
    return 13 * capacity + 4 * _places(capacity)


@kernel
def sift(scores: Uint32s, flags: Bytes, wanted: int, below: Int64s, among: Int64s) -> Any:
    """Of the rows that may lose their ids, sift out those with the ``wanted`` lowest scores: (n, m), where
    ``below[:n]`` are certain, and the others are among ``among[:m]``, whose scores are all higher."""
    low, high = np.int64(2**32), np.int64(-1)
    for row in range(scores.size):
        if flags[row] & (USED | KEPT) == USED:
            low, high = min(low, np.int64(scores[row])), max(high, np.int64(scores[row]))
    counts = np.zeros(_BUCKETS + 1, np.int64)
    shift = 0
    while (high - low) >> shift >= _BUCKETS:
        shift += 1
    for row in range(scores.size):
        if flags[row] & (USED | KEPT) == USED:
            counts[(np.int64(scores[row]) - low) >> shift] += 1
    bucket, total = 0, np.int64(0)
    while bucket < _BUCKETS and total + counts[bucket] <= wanted:
        total += counts[bucket]
        bucket += 1
    num_below, num_among = 0, 0
    for row in range(scores.size):
        if flags[row] & (USED | KEPT) == USED:
            own = (np.int64(scores[row]) - low) >> shift
            if own < bucket:
                below[num_below] = row
                num_below += 1
            elif own == bucket:
                among[num_among] = row
                num_among += 1
    return num_below, num_among


class IdMap:
    """Ids and scores of a bounded number of rows.

    Attributes:
        ids: int64 [capacity]; of rows that are ``USED``.
        scores: uint32 [capacity].
        flags: uint8 [capacity], ``USED``, ``DIRTY`` and ``KEPT``.
        num_used: rows with an id.
        cursor: where rows without ids are looked for next.
    """

    def __init__(self, capacity: int) -> None:
        self.ids: Int64s = np.zeros(capacity, np.int64)
        self.scores: Uint32s = np.zeros(capacity, np.uint32)
        self.flags: Bytes = np.zeros(capacity, np.uint8)
        self.num_used = 0
        self._index: Uint32s = np.zeros(_places(capacity), np.uint32)
        self._row_bits = capacity.bit_length()
        self.cursor = 0

    @property
    def capacity(self) -> int:
        return len(self.ids)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    @property
    def is_used(self) -> Bools:
        """bool [capacity]."""
        used: Bools = (self.flags & np.uint8(USED)).view(np.bool_)
        return used

    @property
    def used_rows(self) -> Int64s:
        """int64 [num_used], ascending."""
        return np.flatnonzero(self.is_used)

    def find(self, wanted: Int64s, workers: Workers | None = None) -> Int64s:
        """int64 [n]: the row of each id, -1 of one that has none."""
        rows = np.empty(len(wanted), np.int64)

        def work(begin: int, end: int) -> None:
            find_rows(begin, end, wanted, self._index, self.ids, self._row_bits, rows)

        if workers is None:
            work(0, len(wanted))
        else:
            workers.divide(work, len(wanted))
        return rows

    def put(self, rows: Int64s, ids: Int64s, scores: Uint32s) -> None:
        """Give rows that have none these ids, which are distinct and have no row."""
        self.ids[rows], self.scores[rows] = ids, scores
        self.flags[rows] = USED | DIRTY
        insert_rows(self._index, self.ids, self._row_bits, rows)
        self.num_used += len(rows)

    def free_rows(self, count: int) -> Int64s:
        """int64 [count], at most ``num_free``: rows without ids, from where the last ones were found on, around the
        end."""
        assert count <= self.num_free, "the caller makes room"
        found = [np.empty(0, np.int64)]
        while count:
            part = self.flags[self.cursor : self.cursor + _SCANNED_ROWS]
            free = np.flatnonzero(part & USED == 0)[:count]
            found.append(free + self.cursor)
            count -= len(free)
            self.cursor += len(part) if count else int(free[-1]) + 1
            if self.cursor >= self.capacity:
                self.cursor = 0
        return np.concatenate(found)

    def remove(self, rows: Int64s) -> None:
        """Take rows from their ids; distinct, and used."""
        remove_rows(self._index, self.ids, self._row_bits, rows)
        self.flags[rows] = DIRTY
        self.scores[rows] = 0
        self.num_used -= len(rows)

    def victims(self, wanted: int, kept: Sequence[Int64s]) -> Int64s:
        """int64 [n <= wanted]: rows with the lowest scores, of equal ones those with the lowest ids, but none of
        ``kept``, which are used."""
        below, among = np.empty(self.num_used, np.int64), np.empty(self.num_used, np.int64)
        try:
            for rows in kept:
                self.flags[rows] |= KEPT
            num_below, num_among = sift(self.scores, self.flags, wanted, below, among)
        finally:
            self.flags &= ~np.uint8(KEPT)
        others = among[:num_among]
        chosen = others[lowest(self.scores[others], self.ids[others], wanted - num_below)]
        return np.concatenate([below[:num_below], chosen])

    def check_integrity(self) -> None:
        """AssertionError unless every used row is found by its id, once, and all others are free."""
        used = self.used_rows
        assert len(used) == self.num_used, f"{len(used)} rows have ids, {self.num_used} counted"
        assert np.array_equal(self.find(self.ids[used]), used), "an id leads to another row"
        assert np.count_nonzero(self._index) == self.num_used, "places that no row has"
