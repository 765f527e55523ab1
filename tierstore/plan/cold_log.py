"""What a cold tier that is a log reads, appends and moves, by a trace that is gone through with a cache over it.

Rows are appended in the order in which they leave memory, so rows that left together lie together, and often come back
together. They are as many a transaction as in ``writeback``: whole segments mostly. Cleaning is as in ``io.cleaning``:
the emptiest segments first, whose live rows go to segments of their own, the last of which is seldom full.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..io.cleaning import DEFAULT_SLACK, FULL_SHARE, MOST_SAMPLED
from ..io.segments import geometry
from ..kernels.arrays import Int32s, Int64s
from ..kernels.jit import inline, kernel
from ..pool.writeback import rows_a_write
from ..rows import BLOCK_HEADER_WORDS, PAIR_WORDS, ROW_MASK, RowLayout
from .accesses import Accesses, numbered

_STEPS_AN_OCTAVE: Final = 2


class Writing(NamedTuple):
    """How rows are written back.

    Attributes:
        layout: of the rows.
        transaction_bytes: as of ``budget.Division``.
    """

    layout: RowLayout
    transaction_bytes: int

    def transaction_rows(self, cached_rows: float) -> int:
        """At most, under a cache of so many rows."""
        return rows_a_write(self.layout, self.transaction_bytes, int(cached_rows))


class LogShares(NamedTuple):
    """Attributes:
    pages: that missing rows lie on, each once a batch; for each row that is missing in memory.
    moved: rows that cleaning moves, for each row that is written.
    cleaned: segments that they are from, likewise.
    """

    pages: float
    moved: float
    cleaned: float


class ColdLog:
    """Under a cache that keeps the rows used last; those of other policies leave in nearly the same company.

    Rows lie in order of their ids at first, as a copy, an import or a first filling leaves them. They are of a version
    that is kept; what the trace changes is of the next one.

    Args:
        accesses: once a batch, of every row; gone through when a size is asked for, and again for other sizes.
        num_rows: on disk, whether there are accesses to them or not.
        is_written: each row of a batch changes, and is appended when it leaves.
    """

    def __init__(self, accesses: Accesses, num_rows: int, *, is_written: bool) -> None:
        self._accesses = accesses
        self._num_rows = num_rows
        self._is_written = is_written
        self._found: dict[tuple[int, Writing], LogShares | None] = {}

    def shares(self, rows: float, writing: Writing) -> LogShares | None:
        """Under a cache of so many rows; of a larger one than any that half of the trace fills, as of the largest of
        these. None if it fills none.

        Shares are found for sizes a root of two apart, and lie on straight lines between, over their logarithms.
        """
        place = _STEPS_AN_OCTAVE * math.log2(max(rows, 1.0))
        lower = int(place)
        above = self._of_step(lower + 1, writing)
        for step in range(lower, -1, -1):
            below = self._of_step(step, writing)
            if below is not None:
                weight = place - lower if above is not None else 0.0
                return LogShares(*(a + weight * (b - a) for a, b in zip(below, above or below, strict=True)))
        return None

    def _of_step(self, step: int, writing: Writing) -> LogShares | None:
        key = step, writing
        if key not in self._found:
            self._found[key] = self._go_through(round(2 ** (step / _STEPS_AN_OCTAVE)), writing)
        return self._found[key]

    def _go_through(self, capacity: int, writing: Writing) -> LogShares | None:
        """Of the second half, the cache being full from the first."""
        numbers, keys = self._rows
        if capacity >= len(keys):
            return None
        starts, together = self._accesses.starts, writing.transaction_rows(capacity)
        log, ring = _new_log(writing.layout, keys, self._num_rows, together), _new_ring(len(keys))
        halfway, counted = (len(starts) - 1) // 2, np.zeros(5, np.int64)
        _go_through(log, ring, numbers, starts, halfway, capacity, together * self._is_written, counted)
        missed, pages, written, moved, cleaned = counted.tolist()
        if not missed:
            return None
        return LogShares(pages / missed, moved / max(written, 1), cleaned / max(written, 1))

    @functools.cached_property
    def _rows(self) -> tuple[Int32s, Int64s]:
        """Rows as numbers: int32 [n] by access, and int64 [rows], the key of each."""
        numbers, num_rows = numbered(self._accesses.keys)
        keys = np.empty(num_rows, np.int64)
        keys[numbers] = self._accesses.keys
        return numbers, keys


def cold_log_of(accesses: Accesses, num_rows: int, *, is_written: bool) -> ColdLog | None:
    """None for a sample of the rows, which lacks neighbours, and where there is no access."""
    if accesses.sampling_rate < 1 or not len(accesses.keys):
        return None
    return ColdLog(accesses, num_rows, is_written=is_written)


class PagesOfRows(NamedTuple):
    """Of a full segment, by the row's number in it: the first and the last of its blocks' pages that have it."""

    first: Int64s
    last: Int64s


@functools.cache
def pages_of_rows(layout: RowLayout) -> PagesOfRows:
    """Where reading a row has to look, as ``io.gather`` does."""
    geo, index = geometry(layout, 0), np.arange(layout.rows_per_segment)
    block_words = geo.pages_per_block * geo.page_words
    at = index // geo.rows_per_block * block_words + BLOCK_HEADER_WORDS + index % geo.rows_per_block * geo.pair_stride
    length = 1 if geo.pages_per_block == 1 else geo.row_words + PAIR_WORDS
    return PagesOfRows(at // geo.page_words, (at + length - 1) // geo.page_words)


class _Log(NamedTuple):
    """Rows that have changed are in the log's segments, numbered from 0; the others in those behind, by their ids.

    Attributes:
        places: int64 [rows], ``segment * rows_per_segment + index``.
        rows: int32 [segments of the log, rows_per_segment], what was appended there.
        live: int64 [segments of the log], rows that have their place there; 0 of a free segment.
        pages: int64 [segments of the log], that a segment takes, with those of superseded rows.
        free: int64 [segments of the log], such segments' numbers, as many as ``state`` says.
        state: int64 [4]: free segments; the least number of one that was used; rows that have changed; pages of the
            log.
        pages_of: int64 [rows_per_segment + 1], of a segment of so many rows.
        num_rows: on disk, in the version that is kept.
        first, last: see ``PagesOfRows``.
        read_in: int32 [segments, pages], the batch that last read each page.
    """

    places: Int64s
    rows: Int32s
    live: Int64s
    pages: Int64s
    free: Int64s
    state: Int64s
    pages_of: Int64s
    num_rows: int
    first: Int64s
    last: Int64s
    read_in: Int32s


_FREE, _LEAST, _CHANGED, _PAGES = 0, 1, 2, 3


class _Ring(NamedTuple):
    """The rows in memory, in order of their last use, the root behind the newest and before the oldest.

    Attributes:
        before, after: int64 [rows + 1]; -1 of rows that are not in memory. The root is the last.
        is_newer: bool [rows], in memory than on disk.
    """

    before: Int64s
    after: Int64s
    is_newer: NDArray[np.bool_]


_MISSED, _READ, _WRITTEN, _MOVED, _CLEANED = 0, 1, 2, 3, 4


def _new_log(layout: RowLayout, keys: Int64s, num_rows: int, together: int) -> _Log:
    """Of rows with these keys; ``together``: rows of a transaction, at most."""
    size = layout.rows_per_segment
    rows = keys & ROW_MASK
    unchanged, segments = np.unique((keys & ~ROW_MASK) | rows // size, return_inverse=True)
    most = DEFAULT_SLACK * len(keys) + (DEFAULT_SLACK - 1) * num_rows + together
    num_segments = 2 * layout.pages_for(math.ceil(most)) // layout.segment_pages(1)
    pages = pages_of_rows(layout)
    return _Log(
        places=(num_segments + segments) * size + rows % size,
        rows=np.empty((num_segments, size), np.int32),
        live=np.zeros(num_segments, np.int64),
        pages=np.zeros(num_segments, np.int64),
        free=np.arange(num_segments),
        state=np.array([num_segments, num_segments, 0, 0]),
        pages_of=np.array([layout.pages_for(count) for count in range(size + 1)]),
        num_rows=num_rows,
        first=pages.first,
        last=pages.last,
        read_in=np.full((num_segments + len(unchanged), int(pages.last[-1]) + 1), -1, np.int32),
    )


def _new_ring(num_rows: int) -> _Ring:
    before, after = np.full(num_rows + 1, -1, np.int64), np.full(num_rows + 1, -1, np.int64)
    before[num_rows] = after[num_rows] = num_rows
    return _Ring(before, after, np.zeros(num_rows, np.bool_))


@kernel
def _go_through(
    log: Any, ring: Any, numbers: Any, starts: Any, counted_from: Any, capacity: Any, together: Any, counted: Any,
) -> None:  # fmt: skip
    """Count from batch ``counted_from`` on; nothing if the cache was not full by then.

    Args:
        together: rows of a transaction, at most; 0: nothing is written.
        counted: int64 [5]: rows missing, pages read, rows written, rows moved, segments cleaned.
    """
    used, root = 0, len(log.places)
    for batch in range(len(starts) - 1):
        if batch == counted_from:
            counted[:] = 0
            if used < capacity:
                return
        for i in range(starts[batch], starts[batch + 1]):
            row = numbers[i]
            if ring.after[row] >= 0:
                _unlink(ring, row)
            else:
                counted[_MISSED] += 1
                counted[_READ] += _read(log, row, batch)
                used += 1
            if used > capacity:
                out = ring.after[root]
                if ring.is_newer[out]:
                    _write(log, ring, together, counted)
                _unlink(ring, out)
                used -= 1
            _link(ring, row)
            ring.is_newer[row] = together > 0


@inline
def _link(ring: Any, row: Any) -> None:
    """As the one used last."""
    root = len(ring.is_newer)
    last = ring.before[root]
    ring.after[last], ring.before[row], ring.after[row], ring.before[root] = row, last, root, row


@inline
def _unlink(ring: Any, row: Any) -> None:
    before, after = ring.before, ring.after
    after[before[row]], before[after[row]] = after[row], before[row]
    after[row] = -1


@inline
def _read(log: Any, row: Any, batch: Any) -> int:
    """Pages that the row is on and that the batch has not read yet."""
    segment, index = divmod(log.places[row], log.rows.shape[1])
    count = 0
    for page in range(log.first[index], log.last[index] + 1):
        if log.read_in[segment, page] != batch:
            log.read_in[segment, page] = batch
            count += 1
    return count


@inline
def _write(log: Any, ring: Any, most: Any, counted: Any) -> None:
    """One transaction: so many newer rows at most, those used longest ago; and cleaning."""
    rows, count, root = np.empty(most, np.int32), 0, len(log.places)
    row = ring.after[root]
    while row != root and count < most:
        if ring.is_newer[row]:
            ring.is_newer[row] = False
            rows[count] = row
            count += 1
        row = ring.after[row]
    counted[_WRITTEN] += count
    _append(log, rows[:count])
    _clean(log, counted)


@inline
def _append(log: Any, rows: Any) -> None:
    """Give rows their next places, in segments of their own."""
    state, size = log.state, log.rows.shape[1]
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        assert state[_FREE] > 0, "there are twice as many segments as there can be"
        state[_FREE] -= 1
        state[_LEAST] = min(state[_LEAST], state[_FREE])
        segment = log.free[state[_FREE]]
        log.live[segment], log.pages[segment] = len(part), log.pages_of[len(part)]
        state[_PAGES] += log.pages[segment]
        for index in range(len(part)):
            old = log.places[part[index]] // size
            log.rows[segment, index] = part[index]
            log.places[part[index]] = segment * size + index
            if old >= len(log.rows):
                state[_CHANGED] += 1
            else:
                _lose(log, old)


@inline
def _lose(log: Any, segment: Any) -> None:
    """A row of the segment is live there no more; without any the segment is free."""
    log.live[segment] -= 1
    if not log.live[segment]:
        log.state[_PAGES] -= log.pages[segment]
        log.free[log.state[_FREE]] = segment
        log.state[_FREE] += 1


@inline
def _clean(log: Any, counted: Any) -> None:
    """Move what is live in the emptiest segments, if the log takes more pages than the slack allows."""
    size = log.rows.shape[1]
    allowed = DEFAULT_SLACK * log.state[_CHANGED] + (DEFAULT_SLACK - 1) * log.num_rows
    excess = log.state[_PAGES] - allowed * log.pages_of[size] / size
    if excess <= 0:
        return
    victims = _emptiest(log, excess)
    live = log.live[victims].sum()
    if log.pages[victims].sum() <= live // size * log.pages_of[size] + log.pages_of[live % size]:
        return
    rows, count = np.empty(live, np.int32), 0
    for segment in victims:
        index, end = segment * size, count + log.live[segment]
        while count < end:
            row = log.rows[segment, index % size]
            if log.places[row] == index:
                rows[count] = row
                count += 1
            index += 1
    _append(log, rows)
    counted[_MOVED] += live
    counted[_CLEANED] += len(victims)


@inline
def _emptiest(log: Any, excess: Any) -> Any:
    """Of a sample of the segments where there are many, those that free so many pages."""
    size, least = log.rows.shape[1], log.state[_LEAST]
    stride = 1 + (len(log.live) - least) // MOST_SAMPLED
    found = np.arange(least + log.state[_PAGES] % stride, len(log.live), stride)  # beginning anywhere
    needed = log.live[found] * (log.pages_of[size] / size)
    is_worth = (needed > 0) & (needed < FULL_SHARE * log.pages[found])
    found, needed = found[is_worth], needed[is_worth]
    freed = log.pages[found] - needed
    fill = (size * needed / log.pages[found]).astype(np.int64)
    last = np.searchsorted(np.cumsum(np.bincount(fill, freed)), excess)
    at_last = np.flatnonzero(fill == last)
    enough = 1 + np.searchsorted(np.cumsum(freed[at_last]), excess - freed[fill < last].sum())
    return np.concatenate((found[fill < last], found[at_last[:enough]]))
