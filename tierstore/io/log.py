"""What of the log is moved and deleted: cleaning, and segments whose rows nobody needs.

Live rows of the emptiest segments are moved together, so that the segments can be deleted. As long as the segments
take more pages than ``slack`` times those that their rows need, each write moves rows of ``1 / (slack - 1)`` pages for
each page that it appends. Victims are the segments with the fewest live rows a page, of a sample where there are many:
greedy cleaning (Rosenblum and Ousterhout, "The Design and Implementation of a Log-Structured File System", 1992). The
rows go to segments of their own, so that long-lived ones come to lie together. Their pages are prefetched a turn ahead.

A segment with rows that a kept version needs stays until that version is dropped, and counts as fuller. Rows written
between different kept versions are not put together (``row_map.py``).
"""

import logging
from typing import Final

import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int64s, Words
from ..kernels.jit import kernel
from ..layout import PAGE_HEADER_WORDS
from .mapped import queue_parts
from .places import Segments
from .reads import KeyedRows, RowReader
from .row_map import RowMap
from .segments import Stored, byte_ranges, page_header_status, segment_error
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")

DEFAULT_SLACK: Final = 1.4
MOST_SAMPLED: Final = 4096  # segments that are looked at for victims
FULL_SHARE: Final = 0.95  # segments with more of the rows that would fill them are not moved
_PAGES_A_PAGE: Final = 4  # pages that are freed for one that was appended, at most, while the slack is exceeded
_WHOLE_FROM: Final = 4  # segments' worth of rows that are moved together, from which on only whole segments are
DELETED_PAGES: Final = 2048  # about, in a transaction: LMDB lists them in a value of a few pages

Dead = list[tuple[Segments, Int64s]]  # slots of segments, by layout


def some_dead(rows: RowMap, snapshot: Snapshot) -> Dead:
    """Some segments that are to be deleted, by layout. One that is damaged stays, until the file is opened again."""
    found, room = [], DELETED_PAGES
    for segments in rows.segments.values():
        if room > 0 and len(slots := segments.next_dead(room)):
            sound = slots[_sound_headers(snapshot, segments.stored(slots))]
            if len(sound) < len(slots):
                segments.spare(slots, sound)
            if len(sound):
                found.append((segments, sound))
            room -= int(segments.arrays.pages[sound].sum())
    return found


def _sound_headers(snapshot: Snapshot, stored: Stored) -> Bools:
    try:
        require_headers(snapshot, stored)
    except DamagedError as error:
        if len(stored) > 1:
            return np.concatenate([_sound_headers(snapshot, stored[at : at + 1]) for at in range(len(stored))])
        _LOG.warning("a segment that nobody needs is damaged, and stays (%s)", error)
        return np.zeros(1, np.bool_)
    return np.ones(len(stored), np.bool_)


def require_headers(snapshot: Snapshot, stored: Stored) -> None:
    """Look at LMDB's way to segments, and at the page headers that it is going to believe when it deletes them.
    DamagedError: a page header is not that of such a segment, or something cannot be read."""
    snapshot.seek(np.zeros(len(stored), np.uint64), stored["number"].copy())
    file_map, page_bytes = snapshot.file_map.rows, snapshot.page_bytes
    starts, _ = byte_ranges(stored, page_bytes)
    stops = starts + PAGE_HEADER_WORDS * 8
    queue_parts(file_map.address, starts, stops)
    since = file_map.guard.begin()
    status, at = _check_headers(file_map.words, page_bytes // 8, snapshot.limit_pages(), stored)
    file_map.guard.require(since, starts, stops)
    if status:
        raise segment_error(snapshot, int(stored["number"][at]), status)


@kernel
def _check_headers(words: Words, page_words: int, limit: int, stored: Stored) -> tuple[int, int]:
    for i in range(len(stored)):
        status = page_header_status(words, page_words, limit, stored[i]["first_page"], stored[i]["pages"])
        if status != 0:
            return status, i
    return 0, 0


class Cleaner:  # chooses what to clean next, a turn ahead
    def __init__(self, slack: float) -> None:
        self.slack: Final = slack
        self._reader = RowReader(verify=True)  # rows that are moved are verified
        self._plans: dict[int, tuple[Int64s, Words]] = {}  # slots and numbers of the victims, by layout
        self._random = np.random.default_rng(0)
        self._spoiled: set[int] = set()  # segments that cannot be moved, and are not chosen again

    def collect(self, snapshot: Snapshot, rows: RowMap, segments: Segments, kept: tuple[int, ...]) -> KeyedRows | None:
        """The live rows of what ``plan`` chose, as far as they can still be cleaned, segment by segment, to be appended
        again; None if there are none. If they fill several segments, the part of one waits for another turn: LMDB
        reuses pages best where sizes are equal."""
        planned, arrays = self._plans.pop(segments.geo.layout_id, None), segments.arrays
        if planned is None:
            return None
        is_there = planned[0] < len(arrays.numbers)  # not so after a rollback, maybe
        slots, numbers = planned[0][is_there], planned[1][is_there]
        slots = slots[(arrays.numbers[slots] == numbers) & (arrays.rows[slots] > 0) & (arrays.live[slots] > 0)]
        intervals = _intervals(segments, slots, kept)
        victims = slots[intervals == intervals[:1]]
        try:
            return self._read(snapshot, rows, segments, victims)
        except DamagedError:
            sound = [slot for slot in victims.tolist() if self._is_sound(snapshot, rows, segments, slot)]
            return self._read(snapshot, rows, segments, np.array(sound, np.int64))

    def _is_sound(self, snapshot: Snapshot, rows: RowMap, segments: Segments, slot: int) -> bool:
        try:
            self._read(snapshot, rows, segments, np.array([slot]))
        except DamagedError as error:
            number = int(segments.arrays.numbers[slot])
            self._spoiled.add(number)
            _LOG.warning("segment %d is damaged, and stays as it is; run tierstore verify (%s)", number, error)
            return False
        return True

    def _read(self, snapshot: Snapshot, rows: RowMap, segments: Segments, victims: Int64s) -> KeyedRows | None:
        """The live rows of segments; None if there are none. DamagedError if one cannot be read."""
        keys, epochs = rows.live_rows(snapshot, segments.layout, victims)
        if not len(keys):
            return None
        if len(keys) >= _WHOLE_FROM * segments.geo.rows_per_segment:
            count = len(keys) - len(keys) % segments.geo.rows_per_segment
            keys, epochs = keys[:count], epochs[:count]
        return self._reader.stored(snapshot, rows, keys)._replace(epochs=epochs)

    def plan(self, snapshot: Snapshot, segments: Segments, kept: tuple[int, ...], appended: int) -> bool:
        """Choose victims for the next turn, after ``appended`` pages were written, and begin to read them; whether
        there are any."""
        layout, arrays = segments.layout, segments.arrays
        pages_a_row = layout.stored_row_bytes / layout.page_bytes
        of_all = segments.pages - segments.dead_pages - self.slack * segments.rows * pages_a_row
        if of_all <= 0:
            return False
        num_slots = len(arrays.rows)
        is_few = num_slots <= MOST_SAMPLED
        slots = np.arange(num_slots) if is_few else np.unique(self._random.integers(0, num_slots, MOST_SAMPLED))
        scale = num_slots / max(1, len(slots))
        slots = slots[arrays.live[slots] > 0]
        needed = (arrays.live[slots] + arrays.held[slots]) * pages_a_row
        excess = min(of_all, (arrays.pages[slots].sum() - self.slack * needed.sum()) * scale)
        fill = needed / arrays.pages[slots]
        chosen = fill < FULL_SHARE
        if self._spoiled:
            chosen &= ~np.isin(arrays.numbers[slots], np.array(list(self._spoiled), np.uint64))
        slots, fill = slots[chosen], fill[chosen]
        if excess <= 0 or not len(slots):
            return False
        order = np.argsort(fill, kind="stable")
        slots, fill = slots[order], fill[order]
        intervals = _intervals(segments, slots, kept)
        _, firsts = np.unique(intervals, return_index=True)
        for first in np.sort(firsts).tolist():  # the interval of the emptiest segment first
            together = intervals == intervals[first]
            own = slots[together]
            freed = np.cumsum(arrays.pages[own] * (1 - fill[together]))
            moved = np.cumsum(arrays.live[own]) * pages_a_row
            enough = 1 + int(np.searchsorted(freed, min(excess, _PAGES_A_PAGE * appended)))
            victims = own[: max(1, min(enough, int(np.searchsorted(moved, appended / (self.slack - 1)))))]
            # Rows of several epochs take most pages. Few rows of a version may lie no closer together than apart.
            if arrays.pages[victims].sum() > layout.pages_for(int(arrays.live[victims].sum()), is_mixed=True):
                self._plans[segments.geo.layout_id] = victims, arrays.numbers[victims].copy()
                ranges = byte_ranges(segments.stored(victims), snapshot.page_bytes)
                queue_parts(snapshot.file_map.rows.address, *ranges)
                return True
        return False


def _intervals(segments: Segments, slots: Int64s, kept: tuple[int, ...]) -> Int64s:
    """A number for the kept versions between which the rows of a segment were written; one for each open epoch."""
    newest, current = segments.arrays.newest[slots], kept[-1] if kept else 0
    closed = np.searchsorted(np.array(kept, np.int64), newest)
    found: Int64s = np.where(newest <= current, closed, len(kept) + newest)
    return found
