"""From id to row: an open-addressing hash table of row numbers beside an array of the rows' ids.

A place of the table is one uint32: row + 1 in its lower bits, as many as the capacity needs, and in the others how far
it lies behind its home, the largest number standing for all above. 0 is empty. So a probe reads the ids of rows of its
own home alone, and a deletion reads none. With 1.7 places a row, it takes 12 bytes for its id and its
score, which are used together and so lie in one cache line, 6.8 of the table and one of flags.

Sources: mixer as in ``kernels.hashing``; range reduction, D. Lemire, Fast random integer generation in an interval
(2019); deletion by backward shift, D. Knuth, The Art of Computer Programming, vol. 3, section 6.4, algorithm R.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Bools, Bytes, Float64s, Int32s, Int64s
from ..kernels.hashing import mix64, unit
from ..kernels.jit import inline, kernel, prefetch_item
from ..kernels.threads import Workers

Uint32s = NDArray[np.uint32]
Records = NDArray[np.void]

ABSENT: Final = -1
MAX_SCORE: Final = 2**31 - 1
_DIRTY: Final = 2**31
"""In the mark of a row, above its score: something of it changed since it was last frozen."""
_USED: Final = 1
_KEPT: Final = 2
"""Flags of a row: it has an id; it may not lose its id now."""
_RECORD: Final = np.dtype([("id", np.int64), ("mark", np.uint32)])
_ALL_USED: Final = np.uint64(0x0101010101010101)
_FAR: Final = 32
_NEAR: Final = 16
_HALF: Final = np.uint64(32)
_SAMPLED_ROWS: Final = 2**14
_SCANNED_ROWS: Final = 2**18


@inline
def _home(wanted: int, places: int) -> Any:
    return np.int64(((mix64(np.uint64(wanted)) >> _HALF) * np.uint64(places)) >> _HALF)


@inline
def _entry(row: Any, distance: Any, row_bits: int) -> np.uint32:
    farthest = (1 << (32 - row_bits)) - 1
    return np.uint32(min(distance, farthest) << row_bits | (row + 1))


@kernel
def find_rows(
    begin: int, end: int, wanted: Int64s, score: int, index: Uint32s, records: Records, row_bits: int, rows: Int64s
) -> None:
    """``rows[i]``: the row of ``wanted[i]``, or -1; for i in [begin, end). Rows get the ``score``, unless it is 0."""
    mask, farthest, size = (1 << row_bits) - 1, (1 << (32 - row_bits)) - 1, index.size
    for i in range(begin, end):
        if i + _FAR < end:
            prefetch_item(index, _home(wanted[i + _FAR], size))
        if i + _NEAR < end:
            entry = np.int64(index[_home(wanted[i + _NEAR], size)])
            if entry != 0:
                prefetch_item(records, (entry & mask) - 1)
        place, distance, row = _home(wanted[i], size), 0, ABSENT
        while True:
            entry = np.int64(index[place])
            if entry == 0:
                break
            if entry >> row_bits == min(distance, farthest) and records[(entry & mask) - 1]["id"] == wanted[i]:
                row = (entry & mask) - 1
                if score:
                    records[row]["mark"] = np.uint32(score | _DIRTY)
                break
            distance += 1
            place = place + 1 if place + 1 < size else 0
        rows[i] = row


# Several threads change the table at a time, each the places from one empty place to another: no probe of an id whose
# home is there leaves them. Places behind the last are those from the first on.


@kernel
def empty_from(index: Uint32s, place: int) -> Any:
    """The first empty place from that one on."""
    while index[place % index.size] != 0:
        place += 1
    return place


@kernel
def insert_rows(
    begin: int, end: int, first: int, index: Uint32s, records: Records, flags: Bytes, row_bits: int, rows: Int64s,
    ids: Int64s, scores: Uint32s, is_in: Bools,
) -> None:  # fmt: skip
    """Give rows these ids, distinct and not in the table, whose homes are in [begin, end). Note which are in: not one
    that would have to go to ``end``. ``first``: the first home there is."""
    size = index.size
    for i in range(rows.size):
        if i + _FAR < rows.size:
            prefetch_item(index, _home(ids[i + _FAR], size))
            prefetch_item(records, rows[i + _FAR])
        if is_in[i]:
            continue
        home = _home(ids[i], size)
        home += size if home < first else 0
        if not begin <= home < end:
            continue
        place = home
        while index[place - size if place >= size else place] != 0:
            place += 1
        if place < end:
            index[place - size if place >= size else place] = _entry(rows[i], place - home, row_bits)
            records[rows[i]]["id"] = ids[i]
            records[rows[i]]["mark"] = scores[i] | np.uint32(_DIRTY)
            flags[rows[i]] = _USED
            is_in[i] = True


@kernel
def remove_rows(
    begin: int, end: int, first: int, index: Uint32s, records: Records, flags: Bytes, row_bits: int, rows: Int64s
) -> None:
    """Take rows out of the table, whose homes are in [begin, end); ``first``: the first home there is."""
    mask, farthest, size = (1 << row_bits) - 1, (1 << (32 - row_bits)) - 1, index.size
    for i in range(rows.size):
        if i + _FAR < rows.size:
            prefetch_item(records, rows[i + _FAR])
        if i + _NEAR < rows.size:
            prefetch_item(index, _home(records[rows[i + _NEAR]]["id"], size))
        home = _home(records[rows[i]]["id"], size)
        if not begin <= home + (size if home < first else 0) < end:
            continue
        hole = home
        while np.int64(index[hole]) & mask != rows[i] + 1:
            hole = hole + 1 if hole + 1 < size else 0
        place, gap = hole, 0  # from the hole to the place
        while True:
            place, gap = place + 1 if place + 1 < size else 0, gap + 1
            entry = np.int64(index[place])
            if entry == 0:
                break
            row, distance = (entry & mask) - 1, entry >> row_bits
            if distance == farthest:
                distance = (place - _home(records[row]["id"], size)) % size
            if distance >= gap:  # its home does not lie behind the hole
                index[hole] = _entry(row, distance - gap, row_bits)
                hole, gap = place, 0
        index[hole] = np.uint32(0)
        records[rows[i]]["mark"] = np.uint32(_DIRTY)
        flags[rows[i]] = 0


@kernel
def count_uses(rows: Int64s, records: Records) -> None:
    """Add one to the scores of rows, up to the largest; a row may come several times."""
    for i in range(rows.size):
        score = records[rows[i]]["mark"] & np.uint32(MAX_SCORE)
        records[rows[i]]["mark"] = np.uint32(min(score + np.uint32(1), np.uint32(MAX_SCORE)) | np.uint32(_DIRTY))


@kernel
def free_from(cursor: int, flags: Bytes, rows: Int64s) -> Any:
    """Rows without ids, from that one on and around the end, into all of ``rows``; returns where to go on."""
    eights = flags[: flags.size // 8 * 8].view(np.uint64)
    for i in range(rows.size):
        while flags[cursor]:
            all_used = cursor % 8 == 0 and cursor // 8 < eights.size and eights[cursor // 8] == _ALL_USED
            cursor += 8 if all_used else 1
            cursor = cursor if cursor < flags.size else 0
        rows[i] = cursor
        cursor = cursor + 1 if cursor + 1 < flags.size else 0
    return cursor


@kernel
def number_absent(wanted: Int64s, rows: Int64s, scratch: Int32s, new: Int64s, counts: Int64s) -> Any:
    """Number the ids without rows in order of first use: ``rows[i]`` becomes -2 less the number. The ids go to ``new``,
    how often they come to ``counts``; returns how many. ``scratch``: a power of two above the ids, all -1."""
    mask, count = np.uint64(scratch.size - 1), 0
    for i in range(rows.size):
        if rows[i] == ABSENT:
            place = mix64(np.uint64(wanted[i])) & mask
            while scratch[place] >= 0 and new[scratch[place]] != wanted[i]:
                place = np.uint64(place + np.uint64(1)) & mask
            if scratch[place] < 0:
                scratch[place], new[count], counts[count] = count, wanted[i], 0
                count += 1
            counts[scratch[place]] += 1
            rows[i] = -2 - scratch[place]
    return count


@kernel
def give_rows(rows: Int64s, given: Int64s) -> None:
    """Put those in that were ``given``, int64 [n], -1 for none, to the ids by number."""
    for i in range(rows.size):
        if rows[i] < ABSENT:
            rows[i] = given[-2 - rows[i]]


def absent(wanted: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """Ids without rows, int64 [n], distinct, and how often they come; they are numbered in ``rows``."""
    scratch = np.full(1 << (2 * len(rows)).bit_length(), -1, np.int32)
    new, counts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    count = number_absent(wanted, rows, scratch, new, counts)
    return new[:count], counts[:count]


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


def lowest(rows: Int64s, scores: Uint32s, ids: Int64s, count: int) -> Int64s:
    """Those ``count`` rows, or all, with the lowest ``scores``, which are theirs, of equal ones those with the lowest
    of ``ids``, which are all rows'."""
    if not 0 < count < len(rows):
        return rows[:count]
    last = np.partition(scores, count - 1)[count - 1]
    below, equal = rows[scores < last], rows[scores == last]
    rest = count - len(below)
    if rest < len(equal):
        equal = equal[np.argpartition(ids[equal], rest - 1)[:rest]]
    return np.concatenate([below, equal])


def _places(capacity: int) -> int:
    return capacity + capacity * 7 // 10 + 1


def map_bytes(capacity: int) -> int:
    """Bytes of an ``IdMap``."""
    return (_RECORD.itemsize + 1) * capacity + 4 * _places(capacity)


@kernel
def gather_up_to(
    begin: int, end: int, records: Records, flags: Bytes, most: int, rows: Int32s, scores: Uint32s
) -> Any:
    """The first of ``rows`` and ``scores``: rows in [begin, end) that may lose their ids, with scores up to ``most``;
    returns how many."""
    count, most = 0, np.uint32(most)
    for row in range(begin, end):
        score = records[row]["mark"] & np.uint32(MAX_SCORE)
        if score <= most and flags[row] == _USED:
            rows[count], scores[count] = row, score
            count += 1
    return count


def _divide(workers: Workers | None, work: Callable[[int, int], None], count: int) -> None:
    if workers is None:
        work(0, count)
    else:
        workers.divide(work, count)


class IdMap:
    """Ids and scores of a bounded number of rows. Methods that are given ``workers`` run on their threads.

    Attributes:
        ids: int64 [capacity]; of rows that are used.
        num_used: rows with an id.
        cursor: where rows without ids are looked for next.
    """

    def __init__(self, capacity: int) -> None:
        self._records: Records = np.zeros(capacity, _RECORD)
        self.ids: Int64s = self._records["id"]
        self._marks: Uint32s = self._records["mark"]
        self._flags: Bytes = np.zeros(capacity, np.uint8)
        self.num_used = self.cursor = 0
        self._row_bits = capacity.bit_length()
        self._index: Uint32s = np.zeros(_places(capacity), np.uint32)

    @property
    def capacity(self) -> int:
        return len(self._flags)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    @property
    def used_rows(self) -> Int64s:
        """int64 [num_used], ascending."""
        return np.flatnonzero(self._flags)

    def has_id(self, rows: Int64s) -> Bools:
        """bool [n]."""
        found: Bools = self._flags[rows].view(np.bool_)
        return found

    def scores(self, rows: Int64s) -> Uint32s:
        """uint32 [n], up to ``MAX_SCORE``."""
        scores: Uint32s = self._marks[rows] & np.uint32(MAX_SCORE)
        return scores

    def set_scores(self, rows: Int64s, scores: Uint32s) -> None:
        self._marks[rows] = scores | np.uint32(_DIRTY)

    @property
    def dirty_rows(self) -> Int64s:
        """int64 [n], ascending."""
        return np.flatnonzero(self._marks >= _DIRTY)

    def clean(self, rows: Int64s | slice) -> None:
        """Nothing of these has changed."""
        self._marks[rows] &= np.uint32(MAX_SCORE)

    def soil(self, rows: Int64s) -> None:
        """They have changed."""
        self._marks[rows] |= np.uint32(_DIRTY)

    def find(self, wanted: Int64s, workers: Workers | None = None, *, score: int = 0) -> Int64s:
        """int64 [n]: the row of each id, -1 of one that has none. Rows get the ``score``, unless it is 0."""
        rows = np.empty(len(wanted), np.int64)

        def work(begin: int, end: int) -> None:
            find_rows(begin, end, wanted, score, self._index, self._records, self._row_bits, rows)

        _divide(workers, work, len(wanted))
        return rows

    def count_uses(self, rows: Int64s) -> None:
        """Add one to the score of each, as often as it comes."""
        count_uses(rows, self._records)

    def put(self, rows: Int64s, ids: Int64s, scores: Uint32s, workers: Workers | None = None) -> None:
        """Give rows that have none these ids, which are distinct and have no row."""
        is_in = np.zeros(len(rows), np.bool_)

        def work(begin: int, end: int, first: int) -> None:
            insert_rows(
                begin, end, first, self._index, self._records, self._flags, self._row_bits, rows, ids, scores, is_in
            )

        self._over_places(workers, work, len(rows))
        if not is_in.all():
            work(0, 2 * len(self._index), 0)
        self.num_used += len(rows)

    def _over_places(self, workers: Workers | None, work: Callable[[int, int, int], None], count: int) -> None:
        """Call ``work(begin, end, first)`` for ranges of places, each from one empty place to another."""
        parts = 1 if workers is None else workers.parts(count)
        bounds = [empty_from(self._index, len(self._index) * part // parts) for part in range(parts)]
        first = bounds[0]
        bounds.append(first + len(self._index))
        if workers is None:
            work(first, bounds[1], first)
        else:
            workers.run(lambda begin, end: work(begin, end, first), bounds)

    def free_rows(self, count: int) -> Int64s:
        """int64 [count], at most ``num_free``: rows without ids, from where the last ones were found on, around the
        end."""
        assert count <= self.num_free, "the caller makes room"
        rows = np.empty(count, np.int64)
        self.cursor = int(free_from(self.cursor, self._flags, rows))
        return rows

    def remove(self, rows: Int64s, workers: Workers | None = None) -> None:
        """Take rows from their ids; distinct, and used."""

        def work(begin: int, end: int, first: int) -> None:
            remove_rows(begin, end, first, self._index, self._records, self._flags, self._row_bits, rows)

        self._over_places(workers, work, len(rows))
        self.num_used -= len(rows)

    def victims(self, wanted: int, kept: Sequence[Int64s], workers: Workers | None = None) -> Int64s:
        """int64 [n <= wanted]: rows with the lowest scores, of equal ones those with the lowest ids, but none of
        ``kept``, which are used."""
        try:
            for rows in kept:
                self._flags[rows] |= _KEPT
            some = slice(None, None, max(1, self.capacity // _SAMPLED_ROWS))
            scores = np.sort(self._marks[some][self._flags[some] == _USED] & np.uint32(MAX_SCORE))
            place = int(len(scores) * 1.1 * wanted / max(1, self.num_used)) + _SAMPLED_ROWS // 2**8
            found = self._up_to(int(scores[place]) if place < len(scores) else MAX_SCORE, workers)
            if len(found[0]) < wanted:
                found = self._up_to(MAX_SCORE, workers)
        finally:
            for rows in kept:
                self._flags[rows] &= ~np.uint8(_KEPT)
        return lowest(*found, self.ids, wanted)

    def _up_to(self, most: int, workers: Workers | None) -> tuple[Int64s, Uint32s]:
        """Rows that are used and not kept, with scores up to that, and the scores."""
        parts = [(np.empty(0, np.int32), np.empty(0, np.uint32))]

        def work(begin: int, end: int) -> None:
            rows, scores = np.empty(_SCANNED_ROWS, np.int32), np.empty(_SCANNED_ROWS, np.uint32)
            for first in range(begin, end, _SCANNED_ROWS):
                stop = min(first + _SCANNED_ROWS, end)
                count = gather_up_to(first, stop, self._records, self._flags, most, rows, scores)
                parts.append((rows[:count].copy(), scores[:count].copy()))

        _divide(workers, work, self.capacity)
        rows, scores = map(np.concatenate, zip(*parts, strict=True))
        return rows.astype(np.int64), scores

    def check_integrity(self) -> None:
        """AssertionError unless every used row is found by its id, once, and all others are free."""
        used = self.used_rows
        assert len(used) == self.num_used, f"{len(used)} rows have ids, {self.num_used} counted"
        assert np.array_equal(self.find(self.ids[used]), used), "an id leads to another row"
        assert np.count_nonzero(self._index) == self.num_used, "places that no row has"
