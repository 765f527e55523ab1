"""From id to row: an open-addressing hash table of row numbers beside an array of the rows' ids.

A place of the table is one uint32: row + 1 in its lower bits, as many as the capacity needs, and in the others how far
it lies behind its home, the largest number standing for all above. 0 is empty. So a probe reads the ids of rows of its
own home alone, and a deletion reads none. With 1.7 places a row, it takes 12 bytes for its id and its
score, which are used together and so lie in one cache line, 6.8 of the table, and one of the queue of those that may
lose their ids next.

Sources: mixer as in ``kernels.hashing``; range reduction, D. Lemire, Fast random integer generation in an interval
(2019); deletion by backward shift, D. Knuth, The Art of Computer Programming, vol. 3, section 6.4, algorithm R.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Bools, Float64s, Int32s, Int64s, Words
from ..kernels.hashing import mix64, unit
from ..kernels.jit import inline, kernel, prefetch_item
from ..kernels.threads import Workers

Uint32s = NDArray[np.uint32]
Records = NDArray[np.void]

ABSENT: Final = -1
MAX_SCORE: Final = 2**30 - 1
_KEPT: Final = 2**30
_DIRTY: Final = 2**31
"""The mark of a row has its score, 0 if it has no id, and above that: it may not lose its id now; something of it
changed since it was last frozen."""
_RECORD: Final = np.dtype([("id", np.int64), ("mark", np.uint32)])
_FAR: Final = 32
_NEAR: Final = 16
_HALF: Final = np.uint64(32)
_ROW: Final = np.uint64(2**32 - 1)
_SAMPLED_ROWS: Final = 2**14
_SCANNED_ROWS: Final = 2**17
_QUEUED_SHARE: Final = 1 / 8
_DIGITS: Final = 2**11


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
        place, distance, row = _home(wanted[i], size), 0, np.int64(ABSENT)
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
    begin: int, end: int, first: int, index: Uint32s, records: Records, row_bits: int, rows: Int64s,
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
            is_in[i] = True


@kernel
def remove_rows(
    begin: int, end: int, first: int, index: Uint32s, records: Records, row_bits: int, rows: Int64s
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


@kernel
def gather_dirty(records: Records, rows: Int32s) -> Any:
    """The first of ``rows``: those that changed; returns how many."""
    count = 0
    for row in range(records.size):
        if records[row]["mark"] >= _DIRTY:
            rows[count] = row
            count += 1
    return count


@kernel
def count_uses(rows: Int64s, records: Records) -> None:
    """Add one to the scores of rows, up to the largest; a row may come several times."""
    for i in range(rows.size):
        score = records[rows[i]]["mark"] & np.uint32(MAX_SCORE)
        records[rows[i]]["mark"] = np.uint32(min(score + np.uint32(1), np.uint32(MAX_SCORE)) | np.uint32(_DIRTY))


@kernel
def free_from(cursor: int, records: Records, rows: Int64s) -> Any:
    """Rows without ids, from that one on and around the end, into all of ``rows``; returns where to go on."""
    for i in range(rows.size):
        while records[cursor]["mark"] & np.uint32(MAX_SCORE):
            cursor = cursor + 1 if cursor + 1 < records.size else 0
        rows[i] = cursor
        cursor = cursor + 1 if cursor + 1 < records.size else 0
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
    for i in range(rows.size if given.size else 0):
        number = -2 - rows[i]
        row = given[max(number, 0)]  # without a jump that is taken at random
        rows[i] = row if number >= 0 else rows[i]


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


@kernel
def find_owners(ids: Int64s, owners: int, out: Int64s) -> None:
    """``out[i]``: which of so many owners has an id. By the half of the hash that ``_home`` does not use."""
    for i in range(ids.size):
        out[i] = np.int64(((mix64(np.uint64(ids[i])) & _ROW) * np.uint64(owners)) >> _HALF)


def owners_of(ids: Int64s, owners: int) -> Int64s:
    """int64 [n]: which of so many owners has each id."""
    out = np.empty(len(ids), np.int64)
    find_owners(ids, owners, out)
    return out


def as_words(ids: Int64s) -> Words:
    """uint64 [n], in the same order."""
    return ids.astype(np.uint64) ^ np.uint64(2**63)


def are_scores(scores: Any) -> bool:
    """Whether rows with ids can have all of these, whole numbers [n]."""
    return bool(0 < scores.min(initial=1) <= scores.max(initial=1) <= MAX_SCORE)


def draws(ids: Int64s, seed: np.uint64) -> Float64s:
    """float64 [n] in [0, 1), by seed and id."""
    out = np.empty(len(ids))
    draw(ids, seed, out)
    return out


def _lowest_ids(rows: Any, ids: Int64s, count: int) -> Any:
    """Of rows, those ``count`` that have the lowest of ``ids``, which are distinct, and all rows'; all if there are no
    more."""
    if not 0 < count < len(rows):
        return rows[:count]
    own = ids[rows]
    return rows[own <= np.partition(own, count - 1)[count - 1]]


def lowest(rows: Int64s, scores: Uint32s, ids: Int64s, count: int) -> Int64s:
    """Those ``count`` rows, or all, with the lowest ``scores``, which are theirs, of equal ones those with the lowest
    of ``ids``, which are all rows'."""
    if not 0 < count < len(rows):
        return rows[:count]
    last = np.partition(scores, count - 1)[count - 1]
    below, equal = rows[scores < last], rows[scores == last]
    return np.concatenate([below, _lowest_ids(equal, ids, count - len(below))])


def _places(capacity: int) -> int:
    return capacity + capacity * 7 // 10 + 1


def map_bytes(capacity: int) -> int:
    """Bytes of an ``IdMap``."""
    return (_RECORD.itemsize + 1) * capacity + 4 * _places(capacity)


@kernel
def gather_up_to(begin: int, end: int, records: Records, most: np.uint32, found: Words) -> Any:
    """The first of ``found``: score << 32 | row, of rows in [begin, end) with ids, and with scores up to ``most``;
    returns how many."""
    count = 0
    for row in range(begin, end):
        score = records[row]["mark"] & np.uint32(MAX_SCORE)
        if 0 < score <= most:
            found[count] = np.uint64(score) << _HALF | np.uint64(row)
            count += 1
    return count


@kernel
def sort_by_score(entries: Words, spare: Words) -> Any:
    """Entries of a queue by their scores, otherwise in order, in one of the two arrays, which is returned."""
    low, high = entries[0] >> _HALF, entries[0] >> _HALF
    for entry in entries:
        low, high = min(low, entry >> _HALF), max(high, entry >> _HALF)
    shift = np.uint64(0)
    while (high - low) >> shift:
        starts = np.zeros(_DIGITS + 1, np.int64)
        for entry in entries:
            starts[np.int64(((entry >> _HALF) - low) >> shift & np.uint64(_DIGITS - 1)) + 1] += 1
        for digit in range(_DIGITS):
            starts[digit + 1] += starts[digit]
        for entry in entries:
            own = np.int64(((entry >> _HALF) - low) >> shift & np.uint64(_DIGITS - 1))
            spare[starts[own]] = entry
            starts[own] += 1
        entries, spare = spare, entries
        shift += np.uint64(11)
    return entries


@kernel
def next_victims(queue: Words, wanted: int, records: Records, rows: Int32s) -> Any:
    """Of a queue of score << 32 | row, ascending, the first ``wanted`` rows that have these scores still and may lose
    their ids, and all others of the score of the last, into ``rows``: (how many, of how many the score is lower than
    that of the last, how many entries come before the first row that has its score still)."""
    count, below, place, first, num_stale = 0, 0, 0, 0, 0
    while place < queue.size:
        if place + _FAR < queue.size:
            prefetch_item(records, np.int64(queue[place + _FAR] & _ROW))
        if queue[place] >> _HALF != queue[first] >> _HALF:
            if count >= wanted:
                break
            below, first = count, place
        row = np.int64(queue[place] & _ROW)
        mark = records[row]["mark"]
        if np.uint64(mark & np.uint32(MAX_SCORE)) == queue[place] >> _HALF:
            if not mark & np.uint32(_KEPT):
                rows[count] = row
                count += 1
        elif num_stale == place:
            num_stale += 1
        place += 1
    return count, below, num_stale


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
        self._queue: Words = np.empty(0, np.uint64)
        self._bound = 0
        self.num_used = self.cursor = 0
        self._row_bits = capacity.bit_length()
        self._index: Uint32s = np.zeros(_places(capacity), np.uint32)

    @property
    def capacity(self) -> int:
        return len(self._records)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    @property
    def used_rows(self) -> Int64s:
        """int64 [num_used], ascending."""
        return np.flatnonzero(self._marks & np.uint32(MAX_SCORE))

    def has_id(self, rows: Int64s) -> Bools:
        """bool [n]."""
        found: Bools = self.scores(rows) != 0
        return found

    def scores(self, rows: Int64s) -> Uint32s:
        """uint32 [n], up to ``MAX_SCORE``."""
        scores: Uint32s = self._marks[rows] & np.uint32(MAX_SCORE)
        return scores

    def set_scores(self, rows: Int64s, scores: Uint32s) -> None:
        """These are above 0, and the rows have ids."""
        self._forget_queue()
        self._marks[rows] = scores | np.uint32(_DIRTY)

    @property
    def dirty_rows(self) -> Int64s:
        """int64 [n], ascending."""
        rows = np.empty(self.capacity, np.int32)
        return rows[: gather_dirty(self._records, rows)].astype(np.int64)

    def clean(self, rows: Int64s) -> None:
        """Nothing of these has changed."""
        self._marks[rows] &= np.uint32(MAX_SCORE | _KEPT)

    def soil(self, rows: Int64s) -> None:
        """They have changed."""
        self._marks[rows] |= np.uint32(_DIRTY)

    def find(self, wanted: Int64s, workers: Workers | None = None, *, score: int = 0) -> Int64s:
        """int64 [n]: the row of each id, -1 of one that has none. Rows get the ``score``, unless it is
        0."""
        rows = np.empty(len(wanted), np.int64)
        if 0 < score <= self._bound:
            self._forget_queue()

        def work(begin: int, end: int) -> None:
            find_rows(begin, end, wanted, score, self._index, self._records, self._row_bits, rows)

        _divide(workers, work, len(wanted))
        return rows

    def count_uses(self, rows: Int64s) -> None:
        """Add one to the score of each, as often as it comes."""
        self._forget_queue()
        count_uses(rows, self._records)

    def put(self, rows: Int64s, ids: Int64s, scores: Uint32s, workers: Workers | None = None) -> None:
        """Give rows that have none these ids, which are distinct and have no row, and scores, which are above 0."""
        if scores.min(initial=MAX_SCORE) <= self._bound:
            self._forget_queue()
        is_in = np.zeros(len(rows), np.bool_)

        def work(begin: int, end: int, first: int) -> None:
            insert_rows(begin, end, first, self._index, self._records, self._row_bits, rows, ids, scores, is_in)

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
        self.cursor = int(free_from(self.cursor, self._records, rows))
        return rows

    def remove(self, rows: Int64s, workers: Workers | None = None) -> None:
        """Take rows from their ids; distinct, and used."""

        def work(begin: int, end: int, first: int) -> None:
            remove_rows(begin, end, first, self._index, self._records, self._row_bits, rows)

        self._over_places(workers, work, len(rows))
        self.num_used -= len(rows)

    # Rows with the lowest scores wait in a queue, by score and row, each as score << 32 | row; those that have another
    # score by now are passed over. Every row with a score up to ``_bound`` is in it.

    def _forget_queue(self) -> None:
        self._queue, self._bound = self._queue[:0], 0

    def evict(
        self, wanted: int, kept: Sequence[Int64s], choose: Callable[[Int64s], Bools], workers: Workers | None = None,
        *, most: int = MAX_SCORE,
    ) -> Int64s:  # fmt: skip
        """Take rows from their ids; returns which, int64 [n <= wanted]: those with the lowest scores, up to ``most``,
        which never falls, of equal ones those with the lowest ids; none of ``kept``. ``choose``, given such rows, says
        which of them go, bool [n]."""
        try:
            for rows in kept:
                self._marks[rows] |= np.uint32(_KEPT)
            victims = self._next(wanted)
            for bound in (self._likely_bound(wanted, most), most) if len(victims) < wanted else ():
                if len(victims) < wanted and bound > self._bound:
                    self._queue, self._bound = self._up_to(bound, workers), bound
                    victims = self._next(wanted)
            gone: Int64s = victims[choose(victims)]
        finally:
            for rows in kept:
                self._marks[rows] &= ~np.uint32(_KEPT)
        self.remove(gone, workers)
        return gone

    def _likely_bound(self, wanted: int, most: int) -> int:
        """A score up to which there are probably ``wanted`` rows, and more for what is wanted next."""
        scores = np.sort(self._marks[:: max(1, self.capacity // _SAMPLED_ROWS)] & np.uint32(MAX_SCORE))
        scores = scores[np.searchsorted(scores, 1) :]
        place = int(len(scores) * (wanted / max(1, self.num_used) + _QUEUED_SHARE))
        return min(int(scores[place]), most) if place < len(scores) else most

    def _up_to(self, most: int, workers: Workers | None) -> Words:
        """The queue of all rows with scores up to that."""
        parts = {0: self._queue[:0]}

        def work(begin: int, end: int) -> None:
            found = np.empty(_SCANNED_ROWS, np.uint64)
            for first in range(begin, end, _SCANNED_ROWS):
                count = gather_up_to(first, min(first + _SCANNED_ROWS, end), self._records, np.uint32(most), found)
                parts[first] = found[:count].copy()

        _divide(workers, work, self.capacity)
        found = np.concatenate([parts[first] for first in sorted(parts)])
        queue: Words = sort_by_score(found, np.empty_like(found)) if len(found) else found
        return queue

    def _next(self, wanted: int) -> Int64s:
        rows = np.empty(len(self._queue), np.int32)
        count, below, num_stale = next_victims(self._queue, wanted, self._records, rows)
        self._queue = self._queue[num_stale:]
        equal = _lowest_ids(rows[below:count], self.ids, wanted - below)
        return np.concatenate([rows[:below], equal], dtype=np.int64)

    def check_integrity(self) -> None:
        """AssertionError unless every used row is found by its id, once, and all others are free."""
        used = self.used_rows
        assert len(used) == self.num_used, f"{len(used)} rows have ids, {self.num_used} counted"
        assert np.array_equal(self.find(self.ids[used]), used), "an id leads to another row"
        assert np.count_nonzero(self._index) == self.num_used, "places that no row has"
