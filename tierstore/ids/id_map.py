"""From id to row: a hash table of row numbers (``kernels.hash_table``), and an array of the rows' ids and scores.

A row takes 12 bytes for id and score, in one cache line, 7 bytes of the table, and one of the queue of those that may
lose their ids next; up to 4 where many have one score.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..kernels import hash_table
from ..kernels.arrays import Bools, Float64s, Int32s, Int64s, Words
from ..kernels.hash_table import FAR, NEAR, Records, Uint32s, num_places
from ..kernels.hashing import SECRET, keyed_hash, mix64, unit
from ..kernels.jit import inline, kernel, prefetch_item
from ..kernels.simd import item, put
from ..kernels.slots import unique_in_order
from ..kernels.threads import Workers

MAX_SCORE: Final = 2**30 - 1
_KEPT: Final = 2**30
_DIRTY: Final = 2**31
"""The mark of a row has its score, 0 if it has no id, and above that: it may not lose its id now; something of it
changed since it was last frozen."""
_CHUNK_BITS: Final = 9  # of the number of a row in its chunk: chunks without changed rows are passed over
_RECORD: Final = np.dtype([("key", np.int64), ("mark", np.uint32)])
_HALF: Final = np.uint64(32)
_ROW: Final = np.uint64(2**32 - 1)
_SAMPLED_ROWS: Final = 2**14
_QUEUED_SHARE: Final = 1 / 4
_BUCKETS: Final = 2**10
_DIGITS: Final = 2**11
_ONE_THREAD: Final = Workers(1)


@kernel
def find_rows(
    begin: int, end: int, wanted: Int64s, score: int, secret: int, index: Uint32s, records: Records, row_bits: int,
    dirty: Bools, rows: Int64s,
) -> None:  # fmt: skip
    """``rows[i]``: the row of ``wanted[i]``, or -1; for i in [begin, end). Rows get the ``score``, unless it is 0."""
    hashes = rows.view(np.uint64)  # a place of ``rows`` holds the id's hash, then the row it may have, then its row
    for i in range(begin - FAR, end):
        if i + FAR < end:
            put(hashes, i + FAR, keyed_hash(item(wanted, i + FAR), secret))
            hash_table.fetch_places(index, item(hashes, i + FAR))
        if begin <= i + NEAR < end:
            row, _ = hash_table.candidate(index, records, item(hashes, i + NEAR), row_bits, np.uint64(0))
            put(rows, i + NEAR, row)
        if i >= begin:
            row, key = item(rows, i), item(wanted, i)
            if row >= 0 and records[row]["key"] != key:
                row = hash_table.find(index, records, key, keyed_hash(key, secret), row_bits)
                put(rows, i, row)
            if score and row >= 0:
                records[row]["mark"] = np.uint32(score | _DIRTY)
                dirty[row >> _CHUNK_BITS] = True


# Several threads change the table at a time, each the places from one empty place to another: no probe of an id whose
# home is there leaves them. Places behind the last are those from the first on.


@kernel
def empty_from(index: Uint32s, place: int) -> Any:
    """The first empty place from that one on."""
    while index[place % index.size] != 0:
        place += 1
    return place


@kernel
def hashes_of(ids: Int64s, secret: int) -> Words:
    hashes = np.empty(ids.size, np.uint64)
    for i in range(ids.size):
        hashes[i] = keyed_hash(ids[i], secret)
    return hashes


@kernel
def homes_in(begin: int, end: int, first: int, index: Uint32s, hashes: Words, mine: Int32s) -> Any:
    """The first of ``mine``: which ids, of these hashes, have their homes in [begin, end); returns how many. ``first``:
    the first home there is."""
    count: Any = 0
    for i in range(hashes.size):
        home = np.int64(hash_table.home_of(index, hashes[i]))
        mine[count] = i
        count += begin <= home + (index.size if home < first else 0) < end
    return count


@kernel
def insert_rows(
    mine: Int32s, end: int, first: int, hashes: Words, index: Uint32s, records: Records, row_bits: int, dirty: Bools,
    rows: Int64s, ids: Int64s, scores: Uint32s, is_in: Bools,
) -> None:  # fmt: skip
    """Give those of ``mine`` of the rows their ids, distinct and not in the table. Note which are in: not one that
    would have to go to ``end``."""
    for n in range(mine.size):
        if n + FAR < mine.size:
            hash_table.fetch_places(index, hashes[mine[n + FAR]])
            prefetch_item(records, rows[mine[n + FAR]])
        i = mine[n]
        if not is_in[i] and hash_table.insert(index, hashes[i], rows[i], row_bits, first, end):
            records[rows[i]]["key"] = ids[i]
            records[rows[i]]["mark"] = scores[i] | np.uint32(_DIRTY)
            dirty[rows[i] >> _CHUNK_BITS] = True
            is_in[i] = True


@kernel
def remove_rows(
    mine: Int32s, hashes: Words, secret: int, index: Uint32s, records: Records, row_bits: int, dirty: Bools,
    rows: Int64s,
) -> None:  # fmt: skip
    """Take those of ``mine`` of the rows out of the table, of whose ids these are the hashes."""
    for n in range(mine.size):
        if n + FAR < mine.size:
            hash_table.fetch_places(index, hashes[mine[n + FAR]])
            prefetch_item(records, rows[mine[n + FAR]])
        row = rows[mine[n]]
        hash_table.erase(index, records, hashes[mine[n]], row, row_bits, secret)
        records[row]["mark"] = np.uint32(_DIRTY)
        dirty[row >> _CHUNK_BITS] = True


@kernel
def gather_dirty(records: Records, dirty: Bools, rows: Int64s) -> Any:
    """The first of ``rows``: those that changed, all in chunks that are ``dirty``; returns how many."""
    count = 0
    for chunk in range(dirty.size):
        if dirty[chunk]:
            before = count
            for row in range(chunk << _CHUNK_BITS, min((chunk + 1) << _CHUNK_BITS, records.size)):
                if records[row]["mark"] >= _DIRTY:
                    rows[count] = row
                    count += 1
            dirty[chunk] = count > before
    return count


@kernel
def count_uses(rows: Int64s, records: Records, dirty: Bools) -> None:
    """Add one to the scores of rows, up to the largest; a row may come several times."""
    for i in range(rows.size):
        score = records[rows[i]]["mark"] & np.uint32(MAX_SCORE)
        records[rows[i]]["mark"] = np.uint32(min(score + np.uint32(1), np.uint32(MAX_SCORE)) | np.uint32(_DIRTY))
        dirty[rows[i] >> _CHUNK_BITS] = True


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
def absent(wanted: Int64s, rows: Int64s, secret: int) -> tuple[Int64s, Int64s]:
    """Ids without rows, int64 [n], distinct, and how often each comes, int64 [n]. They are numbered in order of first
    use: ``rows[i]`` becomes -2 less the number."""
    most, size = np.count_nonzero(rows < 0), 1
    while size < 2 * most:
        size *= 2
    places, keys, found = np.empty(most + 1, np.int64), np.empty(most + 1, np.int64), 0
    for i in range(rows.size if most else 0):
        places[found], keys[found] = i, wanted[i]
        found += rows[i] < 0  # without a jump that is taken at random
    new, inverse = np.empty(most, np.int64), np.empty(most, np.int32)
    count = unique_in_order(keys[:most], np.full(size, np.int32(-1)), new, inverse, secret)
    counts = np.zeros(count, np.int64)
    for i in range(most):
        rows[places[i]] = -2 - inverse[i]
        counts[inverse[i]] += 1
    return new[:count], counts


@kernel
def give_rows(rows: Int64s, given: Int64s) -> None:
    """Put in the rows that were ``given`` to the ids by number, int64 [n], -1 for none."""
    for i in range(rows.size if given.size else 0):
        number = -2 - rows[i]
        row = given[max(number, 0)]  # without a jump that is taken at random
        rows[i] = row if number >= 0 else rows[i]


@kernel
def draws(ids: Int64s, seed: np.uint64, step: int) -> Float64s:
    """float64 [n] in [0, 1), by seed, batch and id."""
    out, words = np.empty(ids.size, np.float64), mix64(np.uint64(seed ^ mix64(np.uint64(step))))
    for i in range(ids.size):
        out[i] = unit(mix64(np.uint64(words ^ mix64(np.uint64(ids[i])))))
    return out


@kernel
def owners_of(ids: Int64s, owners: int) -> Int64s:
    """int64 [n]: which of so many owners has each id. All processes agree, so no secret is in it."""
    out = np.empty(ids.size, np.int64)
    for i in range(ids.size):
        out[i] = np.int64(((mix64(np.uint64(ids[i])) & _ROW) * np.uint64(owners)) >> _HALF)
    return out


def as_words(ids: Int64s) -> Words:
    """uint64 [n], in the same order."""
    return ids.astype(np.uint64) ^ np.uint64(2**63)


def are_scores(scores: Any) -> bool:
    """Whether rows with ids can have all of these, whole numbers [n]."""
    return bool(0 < scores.min(initial=1) <= scores.max(initial=1) <= MAX_SCORE)


@kernel
def gather_ids(begin: int, end: int, records: Records, rows: Int64s, ids: Int64s) -> None:
    """``ids[i]``: that of row ``rows[i]``; for i in [begin, end)."""
    for i in range(begin, end):
        if i + FAR < end:
            prefetch_item(records, rows[i + FAR])
        ids[i] = records[rows[i]]["key"]


@kernel
def select(values: Int64s, place: int) -> Any:
    """The value that would be at that place if they were sorted. By digits of how far they are above the lowest, the
    highest first: 2 ns a value, ``numpy.partition`` takes 11."""
    while True:
        low, high = values.min(), values.max()
        span, shift = np.uint64(high) - np.uint64(low), np.uint64(0)
        while span >> shift >= np.uint64(_DIGITS):
            shift += np.uint64(1)
        counts = np.zeros(_DIGITS, np.int64)
        for value in values:
            counts[(np.uint64(value) - np.uint64(low)) >> shift] += 1
        digit = 0
        while counts[digit] <= place:
            place -= counts[digit]
            digit += 1
        if shift == 0:
            return low + digit
        left, count = np.empty(counts[digit] + 1, np.int64), 0
        for value in values:
            left[count] = value
            count += (np.uint64(value) - np.uint64(low)) >> shift == np.uint64(digit)
            count = min(count, counts[digit])
        values = left[:count]


def _lowest_ids(rows: Int64s, ids_of: Callable[[Int64s], Int64s], count: int) -> Int64s:
    """Of rows, those ``count`` that have the lowest ids, which are distinct; all if there are no more."""
    if not 0 < count < len(rows):
        return rows[:count]
    own = ids_of(rows)
    found: Int64s = rows[own <= select(own, count - 1)]
    return found


def lowest(rows: Int64s, scores: Uint32s, ids_of: Callable[[Int64s], Int64s], count: int) -> Int64s:
    """Those ``count`` rows, or all, with the lowest ``scores``, which are theirs, of equal ones those with the lowest
    ids, which ``ids_of`` gives."""
    if not 0 < count < len(rows):
        return rows[:count]
    last = np.partition(scores, count - 1)[count - 1]
    below, equal = rows[scores < last], rows[scores == last]
    return np.concatenate([below, _lowest_ids(equal, ids_of, count - len(below))])


def map_bytes(capacity: int) -> int:
    """Bytes of an ``IdMap``."""
    return (_RECORD.itemsize + 1) * capacity + 4 * num_places(capacity)


@inline
def _bucket(mark: Any, low: int, shift: int, bound: int) -> int:
    """Of a row with this mark: by its score, those up to ``low`` in one; -1 if it has no id, or a score above."""
    score: Any = np.int64(mark & np.uint32(MAX_SCORE))
    return max(score - low, 0) >> shift if 0 < score <= bound else -1


@kernel
def queue_up_to(
    begin: int, end: int, records: Records, low: int, shift: int, bound: int, places: Int64s, queue: Int32s
) -> None:
    """Put the rows in [begin, end) where the ``places`` say for each bucket; without a queue, count them there."""
    for row in range(begin, end):
        bucket = _bucket(records[row]["mark"], low, shift, bound)
        if bucket >= 0:
            if queue.size:
                queue[places[bucket]] = row
            places[bucket] += 1


@kernel
def next_victims(
    queue: Int32s, starts: Int64s, bucket: int, wanted: int, bound: int, records: Records, rows: Int64s, ids: Int64s
) -> Any:
    """The first of ``rows``, and their ``ids``: those of a queue that have scores up to ``bound`` still, and may lose
    their ids, bucket by bucket from that one on until there are as many as ``wanted``: (how many, how many are not of
    the last bucket, the first bucket that has such rows, or some that may not)."""
    count, below, first, is_first = 0, 0, bucket, True
    while bucket + 1 < starts.size and count < wanted:
        below = count
        for place in range(starts[bucket], starts[bucket + 1]):
            if place + FAR < queue.size:
                prefetch_item(records, queue[place + FAR])
            mark = records[queue[place]]["mark"]
            if _bucket(mark, 0, 0, bound) >= 0:
                is_first = False
                if not mark & np.uint32(_KEPT):
                    rows[count] = queue[place]
                    ids[count] = records[queue[place]]["key"]
                    count += 1
        bucket += 1
        first = bucket if is_first else first
    return count, below, first


class IdMap:
    """Ids and scores of a bounded number of rows.

    Attributes:
        ids: int64 [capacity]; of rows that are used.
        num_used: rows with an id.
        cursor: where rows without ids are looked for next.
    """

    def __init__(self, capacity: int, workers: Workers = _ONE_THREAD) -> None:
        self._records: Records = np.zeros(capacity, _RECORD)
        self.ids: Int64s = self._records["key"]
        self._marks: Uint32s = self._records["mark"]
        self._dirty: Bools = np.zeros((capacity >> _CHUNK_BITS) + 1, np.bool_)
        self.num_used = self.cursor = 0
        self._index: Uint32s = np.zeros(num_places(capacity), np.uint32)
        self._arrays = self._index, self._records, capacity.bit_length(), self._dirty  # what kernels take
        self._workers = workers
        self._forget_queue()

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

    def ids_of(self, rows: Int64s) -> Int64s:
        ids = np.empty(len(rows), np.int64)
        self._workers.divide(lambda begin, end: gather_ids(begin, end, self._records, rows, ids), len(rows))
        return ids

    def scores(self, rows: Int64s) -> Uint32s:
        """uint32 [n], up to ``MAX_SCORE``; 0 of rows without an id."""
        scores: Uint32s = self._marks[rows] & np.uint32(MAX_SCORE)
        return scores

    def set_scores(self, rows: Int64s, scores: Uint32s) -> None:
        """These are above 0, and the rows have ids."""
        self._forget_queue()
        self._marks[rows] = scores
        self.soil(rows)

    @property
    def dirty_rows(self) -> Int64s:
        """int64 [n], ascending."""
        rows = np.empty(np.count_nonzero(self._dirty) << _CHUNK_BITS, np.int64)
        return rows[: gather_dirty(self._records, self._dirty, rows)]

    def clean(self, rows: Int64s) -> None:
        """Nothing of these has changed."""
        self._marks[rows] &= np.uint32(MAX_SCORE | _KEPT)

    def soil(self, rows: Int64s) -> None:
        """They have changed."""
        self._marks[rows] |= np.uint32(_DIRTY)
        self._dirty[rows >> _CHUNK_BITS] = True

    def find(self, wanted: Int64s, *, score: int = 0) -> Int64s:
        """int64 [n]: the row of each id, -1 of one that has none. Rows get the ``score``, unless it is 0."""
        rows, wanted = np.empty(len(wanted), np.int64), np.ascontiguousarray(wanted)
        if 0 < score <= self._bound:
            self._forget_queue()

        def work(begin: int, end: int) -> None:
            find_rows(begin, end, wanted, score, SECRET, *self._arrays, rows)

        self._workers.divide(work, len(wanted))
        return rows

    def count_uses(self, rows: Int64s) -> None:
        """Add one to the score of each, as often as it comes."""
        self._forget_queue()
        count_uses(rows, self._records, self._dirty)

    def put(self, rows: Int64s, ids: Int64s, scores: Uint32s) -> None:
        """Give rows that have none these ids, which are distinct and have no row, and scores, which are above 0."""
        if scores.min(initial=MAX_SCORE) <= self._bound:
            self._forget_queue()
        is_in, every = np.zeros(len(rows), np.bool_), np.arange(len(rows), dtype=np.int32)
        hashes = hashes_of(ids, SECRET)

        def work(mine: Int32s, end: int, first: int) -> None:
            insert_rows(mine, end, first, hashes, *self._arrays, rows, ids, scores, is_in)

        self._over_places(work, hashes)
        if not is_in.all():
            work(every, 2 * len(self._index), 0)
        self.num_used += len(rows)

    def _over_places(self, work: Callable[[Int32s, int, int], None], hashes: Words) -> None:
        """Call ``work(mine, end, first)`` for ranges of places, each from one empty place to another: which ids, of
        these hashes, have their homes there, the end of the range, and the first home there is."""
        parts = self._workers.parts(len(hashes))
        bounds = [empty_from(self._index, len(self._index) * part // parts) for part in range(parts)]
        first, size = bounds[0], len(self._index)
        lists = np.empty((parts, len(hashes) + 1), np.int32)  # before anything changes

        def each(begin: int, end: int) -> None:
            mine = lists[bounds.index(begin)]
            work(mine[: homes_in(begin, end, first, self._index, hashes, mine)], end, first)

        self._workers.run(each, [*bounds, first + size])

    def free_rows(self, count: int) -> Int64s:
        """int64 [count], at most ``num_free``: rows without ids, from where the last ones were found on, around the
        end."""
        assert count <= self.num_free, "the caller makes room"
        rows = np.empty(count, np.int64)
        self.cursor = int(free_from(self.cursor, self._records, rows))
        return rows

    def remove(self, rows: Int64s, ids: Int64s | None = None) -> None:
        """Take rows from their ids, which may be given; distinct, and used."""
        hashes = hashes_of(self.ids_of(rows) if ids is None else ids, SECRET)

        def work(mine: Int32s, *_: int) -> None:
            remove_rows(mine, hashes, SECRET, *self._arrays, rows)

        self._over_places(work, hashes)
        self.num_used -= len(rows)

    # Rows with the lowest scores wait in a queue, in buckets of 2^_shift scores each, the first of which has all scores
    # below, too. Every row with a score up to ``_bound`` is in it; those that have a higher one by now are passed over.

    def _forget_queue(self) -> None:
        self._queue, self._starts = np.empty(0, np.int32), np.zeros(1, np.int64)
        self._bound = self._bucket = self._shift = 0

    def evict(
        self, wanted: int, kept: Sequence[Int64s], choose: Callable[[Int64s], Bools], *, most: int = MAX_SCORE
    ) -> Int64s:
        """Take rows from their ids; returns which, int64 [n <= wanted], by score and row: those with the lowest scores,
        up to ``most``, which never falls, of equal ones those with the lowest ids; none of ``kept``. ``choose``, given
        such rows, says which of them go, bool [n]."""
        try:
            for rows in kept:
                self._marks[rows] |= np.uint32(_KEPT)
            victims, ids = self._next(wanted)
            for share in (wanted / max(1, self.num_used) + _QUEUED_SHARE, 1) if len(victims) < wanted else ():
                if len(victims) < wanted and self._bound < most:
                    self._fill_queue(share, most)
                    victims, ids = self._next(wanted)
            goes = choose(victims)
            gone: Int64s = victims[goes]
        finally:
            for rows in kept:
                self._marks[rows] &= ~np.uint32(_KEPT)
        self.remove(gone, ids[goes])
        return gone

    def _fill_queue(self, share: float, most: int) -> None:
        """Queue all rows with scores up to one that about such a share of rows do not exceed, or to ``most``."""
        scores = np.sort(self._marks[:: max(1, self.capacity // _SAMPLED_ROWS)] & np.uint32(MAX_SCORE)).astype(np.int64)
        scores = scores[np.searchsorted(scores, 1) :]
        place = int(len(scores) * share)
        bound = min(int(scores[place]), most) if place < len(scores) else most
        low = min([*scores[:1].tolist(), bound])
        shift = ((bound - low) // _BUCKETS).bit_length()
        parts = self._workers.parts(self.capacity)
        bounds = [self.capacity * part // parts for part in range(parts + 1)]
        places = np.zeros((parts, ((bound - low) >> shift) + 1), np.int64)

        queue = np.empty(0, np.int32)

        def work(begin: int, end: int) -> None:
            queue_up_to(begin, end, self._records, low, shift, bound, places[bounds.index(begin)], queue)

        self._workers.run(work, bounds)
        ends = np.cumsum(places.T).reshape(-1, parts)
        starts = np.append(0, ends[:, -1])
        places[:] = ends.T - places
        queue = np.empty(ends[-1, -1], np.int32)
        self._workers.run(work, bounds)
        self._queue, self._starts, self._bound, self._bucket, self._shift = queue, starts, bound, 0, shift

    def _next(self, wanted: int) -> tuple[Int64s, Int64s]:
        """Rows and their ids."""
        rows, ids = np.empty((2, wanted + int(np.diff(self._starts).max(initial=0))), np.int64)
        is_of_one_score = self._bucket > 0 and self._shift == 0
        count, below, self._bucket = next_victims(
            self._queue, self._starts, self._bucket, wanted, self._bound, self._records, rows, ids
        )
        left, places = wanted - below, np.arange(below, count)
        if is_of_one_score:
            last = _lowest_ids(places, ids.take, left)
        else:
            last = lowest(places, self.scores(rows[below:count]), ids.take, left)
        chosen = np.append(np.arange(below), last)
        if not is_of_one_score:
            chosen = chosen[np.argsort(self.scores(rows[chosen]), kind="stable")]
        return rows[chosen], ids[chosen]

    def check_integrity(self) -> None:
        """AssertionError unless every used row is found by its id, once, and all others are free."""
        used = self.used_rows
        assert len(used) == self.num_used, f"{len(used)} rows have ids, {self.num_used} counted"
        assert np.array_equal(self.find(self.ids[used]), used), "an id leads to another row"
        assert np.count_nonzero(self._index) == self.num_used, "places that no row has"
