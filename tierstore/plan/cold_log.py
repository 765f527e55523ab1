"""What a cold tier that is a log reads, appends and moves, by a trace that is gone through with a cache over it.

Rows are appended in the order in which they leave memory, so rows that left together lie together, and often come back
together. Cleaning is as in ``io.cleaning``: the emptiest segments first, whose live rows go to segments of their own.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..io.cleaning import DEFAULT_SLACK
from ..io.segments import geometry
from ..rows import BLOCK_HEADER_WORDS, KEY_ROW_BITS, PAIR_WORDS, RowLayout
from .accesses import Accesses, numbered

__all__ = ["ColdLog", "LogShares", "cold_log_of", "pages_of_rows"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_STEPS_AN_OCTAVE: Final = 2
_SPARE_SEGMENTS: Final = 4
"""Open ones, and such as rows are moved to before those that they come from are free."""


class LogShares(NamedTuple):
    """For each row that is missing in memory.

    Attributes:
        pages: that missing rows lie on, each once a batch.
        moved: rows that cleaning moves.
        cleaned: segments that they are from.
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
        self._found: dict[tuple[int, RowLayout], LogShares | None] = {}

    def shares(self, rows: float, layout: RowLayout) -> LogShares | None:
        """Under a cache of so many rows; of a larger one than any that half of the trace fills, as of the largest of
        these. None if it fills none.

        Shares are found for sizes a root of two apart, and lie on straight lines between, over their logarithms.
        """
        place = _STEPS_AN_OCTAVE * math.log2(max(rows, 1.0))
        lower = int(place)
        above = self._of_step(lower + 1, layout)
        for step in range(lower, -1, -1):
            below = self._of_step(step, layout)
            if below is not None:
                weight = place - lower if above is not None else 0.0
                return LogShares(*(a + weight * (b - a) for a, b in zip(below, above or below, strict=True)))
        return None

    def _of_step(self, step: int, layout: RowLayout) -> LogShares | None:
        key = step, layout
        if key not in self._found:
            self._found[key] = self._go_through(round(2 ** (step / _STEPS_AN_OCTAVE)), layout)
        return self._found[key]

    def _go_through(self, capacity: int, layout: RowLayout) -> LogShares | None:
        """Of the second half, the cache being full from the first."""
        numbers, keys = self._rows
        if capacity >= len(keys):
            return None
        starts, garbage = self._accesses.starts, DEFAULT_SLACK - 1
        most = (1 + garbage) * len(keys) + garbage * self._num_rows + np.diff(starts).max()
        log = _new_log(layout, keys, min(most, len(numbers)))
        halfway = (len(starts) - 1) // 2
        counted = _go_through(log, numbers, starts, halfway, capacity, self._is_written, garbage, self._num_rows)
        missed, pages, moved, cleaned = counted
        return LogShares(pages / missed, moved / missed, cleaned / missed) if missed else None

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
        live: int64 [segments], rows that have their place there; of the log -1 where nothing was appended.
        free: int64 [segments of the log], such segments' numbers, as many as ``counts`` says.
        counts: int64 [6]: free segments; rows that have changed; the open segment of rows that leave memory and that
            of rows that are moved; rows appended to each of these.
        first, last: see ``PagesOfRows``.
        read_in: int32 [segments, pages], the batch that last read each page.
    """

    places: Int64s
    rows: Int32s
    live: Int64s
    free: Int64s
    counts: Int64s
    first: Int64s
    last: Int64s
    read_in: Int32s


_FREE, _CHANGED, _OPEN, _USED = 0, 1, 2, 4
_LEAVING, _MOVED = 0, 1


def _new_log(layout: RowLayout, keys: Int64s, most: float) -> _Log:
    """Of rows with these keys; ``most``: that the log has at any time, superseded ones included."""
    size, row_mask = layout.rows_per_segment, (1 << KEY_ROW_BITS) - 1
    rows = keys & row_mask
    unchanged, segments = np.unique((keys & ~row_mask) | rows // size, return_inverse=True)
    num_segments = math.ceil(most / size) + _SPARE_SEGMENTS
    pages = pages_of_rows(layout)
    return _Log(
        places=(num_segments + segments) * size + rows % size,
        rows=np.empty((num_segments, size), np.int32),
        live=np.full(num_segments + len(unchanged), -1, np.int64),
        free=np.arange(num_segments),
        counts=np.array([num_segments, 0, -1, -1, size, size]),
        first=pages.first,
        last=pages.last,
        read_in=np.full((num_segments + len(unchanged), int(pages.last[-1]) + 1), -1, np.int32),
    )


@kernel
def _go_through(
    log: Any, numbers: Any, starts: Any, counted_from: Any, capacity: Any, is_written: Any, garbage: Any, num_rows: Any
) -> tuple[int, int, int, int]:
    """Rows missing, pages read, rows moved and segments cleaned, from batch ``counted_from`` on; none if the cache was
    not full by then."""
    # A ring of the rows that are in, the one used longest ago behind the root.
    root = len(log.places)
    before, after = np.full(root + 1, -1, np.int64), np.full(root + 1, -1, np.int64)
    before[root] = after[root] = root
    used = missed = pages = moved = cleaned = 0
    for batch in range(len(starts) - 1):
        if batch == counted_from:
            if used < capacity:
                return 0, 0, 0, 0
            missed = pages = moved = cleaned = 0
        for i in range(starts[batch], starts[batch + 1]):
            row = numbers[i]
            if after[row] >= 0:
                _unlink(before, after, row)
            else:
                missed += 1
                pages += _read(log, row, batch)
                if used < capacity:
                    used += 1
                else:
                    out = after[root]
                    _unlink(before, after, out)
                    if is_written:
                        _append(log, out, _LEAVING)
            last = before[root]
            after[last], before[row], after[row], before[root] = row, last, root, row
        rows, segments = _clean(log, garbage * (log.counts[_CHANGED] + num_rows))
        moved += rows
        cleaned += segments
    return missed, pages, moved, cleaned


@inline
def _unlink(before: Any, after: Any, row: Any) -> None:
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
def _append(log: Any, row: Any, kind: Any) -> None:
    """Give a row its next place, among those that leave memory or those that are moved."""
    counts, size = log.counts, log.rows.shape[1]
    if counts[_USED + kind] == size:
        counts[_FREE] -= 1
        counts[_OPEN + kind] = log.free[counts[_FREE]]
        counts[_USED + kind] = log.live[counts[_OPEN + kind]] = 0
    old, segment, index = log.places[row] // size, counts[_OPEN + kind], counts[_USED + kind]
    counts[_CHANGED] += old >= len(log.rows)
    log.live[old] -= 1
    log.live[segment] += 1
    log.rows[segment, index] = row
    log.places[row] = segment * size + index
    counts[_USED + kind] += 1


@inline
def _clean(log: Any, garbage: Any) -> tuple[int, int]:
    """Move what is live in the emptiest segments until the log has only so many superseded rows; how many rows, and
    from how many segments."""
    counts, (num_segments, size) = log.counts, log.rows.shape
    excess = num_segments - counts[_FREE] - (counts[_CHANGED] + garbage) / size
    moved = cleaned = 0
    if excess <= 0:
        return moved, cleaned
    by_live = np.zeros(size, np.int64)
    for segment in range(num_segments):
        if 0 <= log.live[segment] < size and segment != counts[_OPEN] and segment != counts[_OPEN + 1]:
            by_live[log.live[segment]] += 1
    fullest = -1
    while excess > 0 and fullest < size - 1:
        fullest += 1
        excess -= by_live[fullest] * (1 - fullest / size)
    spared = int(-excess / (1 - fullest / size))  # of the fullest ones
    for segment in range(num_segments):
        live = log.live[segment]
        if not 0 <= live <= fullest or segment == counts[_OPEN] or segment == counts[_OPEN + 1]:
            continue
        if live == fullest and spared > 0:
            spared -= 1
            continue
        for index in range(size):
            if log.places[log.rows[segment, index]] == segment * size + index:
                _append(log, log.rows[segment, index], _MOVED)
        moved += live
        cleaned += live > 0
        log.live[segment] = -1
        log.free[counts[_FREE]] = segment
        counts[_FREE] += 1
    return moved, cleaned
