"""Cleaning: live rows of the emptiest segments are moved together, so that the segments can be deleted.

Each write may clean a little, as long as the segments take more pages than ``slack`` times those that their rows need:
it moves rows of ``1 / (slack - 1)`` pages for each page that it appends, which keeps the slack. Victims are the
segments with the fewest live rows a page, of a sample where there are many: greedy cleaning (Rosenblum and Ousterhout,
"The Design and Implementation of a Log-Structured File System", 1992). The rows go to segments of their own, so that
long-lived ones come to lie together. Their pages are prefetched a turn before they are needed.

Only live rows are moved. A segment with rows that a kept version needs stays until that version is dropped, and counts
as fuller. Rows written between different kept versions are not put together (``row_map.py``).
"""

import logging
from typing import Final, NamedTuple

import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Int64s, Words
from .mapped import queue_parts
from .places import Segments
from .reads import KeyedRows, RowReader
from .row_map import RowMap
from .segments import byte_ranges
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")

DEFAULT_SLACK: Final = 1.4
MOST_SAMPLED: Final = 4096  # segments that are looked at for victims
_PAGES_A_PAGE: Final = 4  # pages that are freed for one that was appended, at most, while the slack is exceeded
_WHOLE_FROM: Final = 4  # Segments' worth of rows that are moved together, from which on only whole segments are
FULL_SHARE: Final = 0.95  # segments with more of the rows that would fill them are not moved


class _Plan(NamedTuple):
    slots: Int64s
    numbers: Words


class Cleaner:
    """Chooses what to clean next, a turn ahead. ``reader``: rows that are moved are read, and verified, by it."""

    def __init__(self, slack: float, reader: RowReader) -> None:
        self.slack: Final = slack
        self._reader = reader
        self._plans: dict[int, _Plan] = {}
        self._random = np.random.default_rng(0)
        self._spoiled: set[int] = set()

    def collect(self, snapshot: Snapshot, rows: RowMap, segments: Segments, kept: tuple[int, ...]) -> KeyedRows | None:
        """The live rows of what ``plan`` chose, segment by segment, to be appended again; None if there are none. If
        they fill several segments, the part of one waits for another turn: LMDB reuses pages best where sizes are
        equal."""
        victims = self._victims(segments, kept)
        if not len(victims):
            return None
        try:
            return self._read(snapshot, rows, segments, victims)
        except DamagedError:
            sound = [slot for slot in victims.tolist() if self._is_sound(snapshot, rows, segments, slot)]
            return self._read(snapshot, rows, segments, np.array(sound, np.int64))

    def _is_sound(self, snapshot: Snapshot, rows: RowMap, segments: Segments, slot: int) -> bool:
        """Whether a segment can be moved; one that cannot is not chosen again."""
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

    def _victims(self, segments: Segments, kept: tuple[int, ...]) -> Int64s:
        """Slots that ``plan`` chose, as far as they can still be cleaned."""
        plan = self._plans.pop(segments.geo.layout_id, None)
        if plan is None:
            return np.empty(0, np.int64)
        arrays = segments.arrays
        is_there = plan.slots < len(arrays.numbers)  # not so after a rollback, maybe
        slots, numbers = plan.slots[is_there], plan.numbers[is_there]
        slots = slots[(arrays.numbers[slots] == numbers) & (arrays.rows[slots] > 0)]
        slots = slots[arrays.live[slots] > 0]
        victims: Int64s = slots[self._interval(segments, slots, kept) == self._interval(segments, slots[:1], kept)]
        return victims

    def plan(self, snapshot: Snapshot, segments: Segments, kept: tuple[int, ...], appended: int) -> bool:
        """Choose victims for the next turn, after ``appended`` pages were written, and begin to read them; whether
        there are any."""
        geo, arrays = segments.geo, segments.arrays
        pages_a_row = segments.layout.stored_row_bytes / segments.layout.page_bytes
        of_all = segments.pages - segments.dead_pages - self.slack * segments.rows * pages_a_row
        if of_all <= 0:
            return False
        slots = self._sample(len(arrays.rows))
        scale = len(arrays.rows) / max(1, len(slots))
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
        intervals = self._interval(segments, slots, kept)
        _, firsts = np.unique(intervals, return_index=True)
        for first in np.sort(firsts).tolist():  # the interval of the emptiest segment first
            together = intervals == intervals[first]
            own = slots[together]
            freed = np.cumsum(arrays.pages[own] * (1 - fill[together]))
            moved = np.cumsum(arrays.live[own]) * pages_a_row
            enough = 1 + int(np.searchsorted(freed, min(excess, _PAGES_A_PAGE * appended)))
            victims = own[: max(1, min(enough, int(np.searchsorted(moved, appended / (self.slack - 1)))))]
            # Rows of several epochs take most pages.
            if arrays.pages[victims].sum() > segments.layout.pages_for(int(arrays.live[victims].sum()), is_mixed=True):
                self._plans[geo.layout_id] = _Plan(victims, arrays.numbers[victims].copy())
                ranges = byte_ranges(segments.stored(victims), snapshot.page_bytes)
                queue_parts(snapshot.file_map.rows.address, *ranges)
                return True
            # Else few rows of a version, which would lie no closer.
        return False

    def _sample(self, length: int) -> Int64s:
        if length <= MOST_SAMPLED:
            return np.arange(length)
        return np.unique(self._random.integers(0, length, MOST_SAMPLED))

    def _interval(self, segments: Segments, slots: Int64s, kept: tuple[int, ...]) -> Int64s:
        """A number for the kept versions between which the rows of a segment were written; one for each open epoch."""
        newest = segments.arrays.newest[slots]
        current = kept[-1] if kept else 0
        closed = np.searchsorted(np.array(kept, np.int64), newest)
        found: Int64s = np.where(newest <= current, closed, len(kept) + newest)
        return found
