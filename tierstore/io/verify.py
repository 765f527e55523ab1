"""Reading and checking every stored segment, at the rate at which the device reads its files from end to end.

In a file that has been in use, segments that follow one another by number lie anywhere. So they are read in the order in
which they lie, a slice of them at a time, the slices that follow being read meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS, MAX_ROWS
from .base import VerifyReport
from .gather import queue_segments
from .indexes import (
    Indexes,
    StoredSegments,
    damage_error,
    damage_words,
    look_at_indexes,
    refused_status,
    require_logged,
    stored_segments,
)
from .row_map import RowMap, Segments
from .scrub import check_segments, new_found
from .segments import SegmentStatus
from .snapshot import Snapshot

__all__ = ["verify_segments"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

SLICE_SEGMENTS: Final = 128
"""8 MiB, if they are full and of rows that fit a page."""
_SLICES_AHEAD: Final = 4
"""Slices queued for reading while one is checked."""
_MERGED_PAGES: Final = 16
"""Pages between two segments up to which reading them too is cheaper than another request."""
_LISTED: Final = 10_000
_NAMED: Final = 8


def verify_segments(snapshot: Snapshot, rows: RowMap, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check each segment of a tree; see ``ColdTier.verify``. ``progress`` is told how much of the file was passed.

    Of segments of tables that are not in the map, the index alone is checked.

    Raises:
        DamagedError: when all was read; names the first places and says how many there are.
    """
    snapshot.check_free_pages()
    stored = stored_segments(snapshot)
    require_logged(snapshot, stored)
    check, total = _Check(snapshot, rows), snapshot.limit_pages() * snapshot.page_bytes
    for part in _read_ahead(snapshot, stored.chosen(np.argsort(stored.first_pages))):
        check.look_at(part)
        if progress is not None:
            progress(int(part.first_pages[-1] + part.pages[-1]) * snapshot.page_bytes, total)
    if progress is not None:
        progress(total, total)
    check.require_sound()
    counts = rows.counts()
    return VerifyReport(
        tables=int(np.count_nonzero(counts)),
        segments=check.segments,
        rows=sum(counts),
        bytes=check.pages * snapshot.page_bytes,
    )


def _read_ahead(snapshot: Snapshot, stored: StoredSegments) -> Iterator[StoredSegments]:
    """Slices of the segments, in order, those that follow being read meanwhile.

    In a thread of its own: the system takes about as long to queue pages as we take to check them.
    """

    def queue(start: int) -> StoredSegments:
        part = stored.chosen(slice(start, start + SLICE_SEGMENTS))
        stops = part.first_pages + part.pages
        first = np.append(True, part.first_pages[1:] > stops[:-1] + _MERGED_PAGES)  # of segments read together
        starts = part.first_pages[first]
        lengths = (stops[np.roll(first, -1)] - starts).astype(np.int32)
        queue_segments(snapshot.file_map.rows.address, snapshot.page_bytes // 8, starts, lengths)
        return part

    starts = range(0, len(stored.pages), SLICE_SEGMENTS)
    with ThreadPoolExecutor(1, "tierstore-verify") as executor:
        queued = deque(executor.submit(queue, start) for start in starts[:_SLICES_AHEAD])
        try:
            for number in range(len(starts)):
                queued.extend(executor.submit(queue, later) for later in starts[number + _SLICES_AHEAD :][:1])
                yield queued.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)


class _Place(NamedTuple):
    """Something that is damaged: a row, or, with key -1, something else of a segment."""

    key: int
    segment: int
    status: int

    def __str__(self) -> str:
        what = f"segment {self.segment}"
        if self.key >= 0:
            what = f"row {self.key % MAX_ROWS} of table {self.key >> KEY_ROW_BITS} in {what}"
        return damage_words(what, self.status)


class _Check:
    """What was checked so far, and what was found.

    Attributes:
        segments, pages: of known tables, that were checked whole.
    """

    def __init__(self, snapshot: Snapshot, rows: RowMap) -> None:
        self._snapshot = snapshot
        self._file_map = snapshot.file_map.rows
        self._rows = rows
        self._found = new_found(_LISTED)
        self._lanes = np.empty(8, np.uint64)
        self._places: list[_Place] = []
        self._num_places = 0
        self.segments = self.pages = 0

    def look_at(self, stored: StoredSegments) -> None:
        """Check some segments."""
        indexes, statuses = look_at_indexes(self._snapshot, stored)
        layout_ids = self._rows.layout_ids(indexes)
        for segments in self._rows.segments.values():
            own = np.flatnonzero((layout_ids == segments.geo.layout_id) & (statuses == SegmentStatus.DONE))
            fits = segments.fits(indexes.chosen(own))
            statuses[own[~fits]] = SegmentStatus.BAD_INDEX
            self._look_into(segments, indexes.chosen(own[fits]))
        bad = statuses != SegmentStatus.DONE
        self._note(np.full(len(bad), -1)[bad], stored.numbers[bad], statuses[bad])

    def _look_into(self, segments: Segments, indexes: Indexes) -> None:
        """Check segments of one layout, whose indexes and sizes are sound."""
        guard, found, numbers = self._file_map.guard, self._found, indexes.stored.numbers
        since = guard.begin()
        count = check_segments(
            segments.geo, self._file_map.words, indexes, segments.data_pages(indexes), self._rows.tables, self._lanes,
            found, 0,
        )  # fmt: skip
        self._num_places += max(0, count - _LISTED)
        keys, found_in, statuses, starts, stops = (column[:count] for column in found)
        if not guard.is_clean(since):
            refused = guard.refused(since)
            status = refused_status(guard, refused)
            met = refused.meet(starts, stops)
            statuses[met] = status
            # What was zero anyhow, or read before another reader was refused, is noted nowhere.
            starts = indexes.stored.first_pages * self._snapshot.page_bytes
            unread = numbers[refused.meet(starts, starts + indexes.stored.pages * self._snapshot.page_bytes)]
            unread = np.setdiff1d(unread, found_in[met])
            self._note(np.full(len(unread), -1), unread, np.full(len(unread), status))
        self._note(keys, found_in, statuses)
        self.segments += len(numbers)
        self.pages += int(indexes.stored.pages.sum())

    def _note(self, keys: Int64s, numbers: Words, statuses: Int64s) -> None:
        self._num_places += len(keys)
        room = _LISTED - len(self._places)
        columns = (column[:room].tolist() for column in (keys, numbers, statuses))
        self._places += [_Place(*place) for place in zip(*columns, strict=True)]

    def require_sound(self) -> None:
        """Raise if anything was found."""
        if not self._places:
            return
        places = sorted(self._places)
        words = "; ".join(map(str, places[:_NAMED]))
        if (more := self._num_places - _NAMED) > 0:
            words += f"; and {more:,} more places, {self._num_places:,} in all"
        raise damage_error(self._snapshot.path, places[0].status, words)
