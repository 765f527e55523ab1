"""Reading and checking every stored segment, at the rate at which the device reads its files from end to end.

In a file that has been in use, segments that follow one another by number lie anywhere. So they are read in the order
in which they lie, a slice of them at a time, the slices that follow being read meanwhile.
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
from .row_map import RowMap
from .scrub import check_segments, new_found
from .segments import SegmentStatus
from .slots import Segments
from .snapshot import Snapshot
from .stored_records import read_head, read_payload, read_record

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
    """Check all that a tree leads to; see ``ColdTier.verify``. ``progress`` is told how much of the file was passed.

    Of segments of tables that are not in the map, the index alone is checked.

    Raises:
        DamagedError: the tree, a record or a payload is not what was written; or, when all segments were read, some are
            not: names the first places and says how many there are.
    """
    snapshot.check_free_pages()
    for version in read_head(snapshot).kept:
        read_payload(snapshot, read_record(snapshot, version))
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
        part = stored.chosen(np.arange(start, min(start + SLICE_SEGMENTS, len(stored.pages))))
        stops = part.first_pages + part.pages
        first = np.append(True, part.first_pages[1:] > stops[:-1] + _MERGED_PAGES)  # of segments read together
        starts = part.first_pages[first]
        lengths = (stops[np.roll(first, -1)] - starts).astype(np.int32)
        queue_segments(snapshot.file_map.rows.address, snapshot.page_bytes // 8, starts, lengths)
        return part

    starts = range(0, len(stored.pages), SLICE_SEGMENTS)
    if len(starts) < 2:  # a thread would take longer to start
        yield from map(queue, starts)
        return
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
        guard, stored, page_bytes = self._file_map.guard, indexes.stored, self._snapshot.page_bytes
        since = guard.begin()
        count = check_segments(
            segments.geo, self._file_map.words, indexes, segments.data_pages(indexes), self._rows.tables, self._lanes,
            self._found, 0,
        )  # fmt: skip
        self._num_places += max(0, count - _LISTED)
        found = self._found.first(count)
        if not guard.is_clean(since):
            refused = guard.refused(since)
            met = refused.meet(found.starts, found.stops)
            found.statuses[met] = status = refused_status(guard, refused)
            # What was zero anyhow, or read before another reader was refused, is noted nowhere.
            starts = stored.first_pages * page_bytes
            unread = stored.numbers[refused.meet(starts, starts + stored.pages * page_bytes)]
            unread = np.setdiff1d(unread, found.numbers[met])
            self._note(np.full(len(unread), -1), unread, np.full(len(unread), status))
        self._note(found.keys, found.numbers, found.statuses)
        self.segments += len(stored.numbers)
        self.pages += int(stored.pages.sum())

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
