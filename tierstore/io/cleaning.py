"""Cleaning: live rows of the emptiest segments are moved together, so that the segments can be deleted.

Each write may clean about as much as it appends, as long as the segments take more pages than ``slack`` times those
that their rows need. Victims are the segments with the fewest live rows a page, of a sample where there are many. That
is greedy cleaning (Rosenblum and Ousterhout, "The Design and Implementation of a Log-Structured File System", 1992).
The rows go to segments of their own, so that long-lived ones come to lie apart from the others. Their pages are read
ahead, a turn before they are needed.

Segments with rows that only a kept version needs are left alone, as are rows of other versions' intervals together:
``row_map.py`` tells why.
"""

import logging
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError
from .appending import NewRows
from .gather import GatherStatus, queue_segments
from .reads import RowReader
from .row_map import RowMap, Segments
from .snapshot import Snapshot

__all__ = ["DEFAULT_SLACK", "Cleaner", "Moved"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

_LOG: Final = logging.getLogger("tierstore")

DEFAULT_SLACK: Final = 1.4
_SAMPLE: Final = 4096
"""Segments that are looked at for victims."""
_PAGES_A_PAGE: Final = 4
"""Pages that are freed for one that was appended, at most, while the slack is exceeded."""
_FULL: Final = 0.95
"""Segments with more of the rows that would fill them are not moved."""


class _Plan(NamedTuple):
    slots: Int64s
    numbers: Words


class Moved(NamedTuple):
    """Rows that are to be appended anew.

    Attributes:
        pages: that they were on.
    """

    rows: NewRows
    pages: int


class Cleaner:
    """Chooses what to clean next, a turn ahead.

    Args:
        reader: rows that are moved are read, and verified, by it.
    """

    def __init__(self, slack: float, reader: RowReader) -> None:
        self.slack: Final = slack
        self._reader = reader
        self._plans: dict[int, _Plan] = {}
        self._random = np.random.default_rng(0)
        self._spoiled: set[int] = set()

    def collect(self, snapshot: Snapshot, rows: RowMap, segments: Segments, kept: tuple[int, ...]) -> Moved | None:
        """The live rows of what ``plan`` chose, segment by segment; None if there are none."""
        victims = self._victims(segments, kept)
        moved = self._read(snapshot, rows, segments, victims)
        if moved is None:
            is_sound = [self._is_sound(snapshot, rows, segments, slot) for slot in victims.tolist()]
            moved = self._read(snapshot, rows, segments, victims[is_sound])
        return moved if moved is not None and len(moved.rows.keys) else None

    def _is_sound(self, snapshot: Snapshot, rows: RowMap, segments: Segments, slot: int) -> bool:
        """Whether a segment can be moved; one that cannot is not chosen again."""
        if self._read(snapshot, rows, segments, np.array([slot])) is not None:
            return True
        number = int(segments.arrays.numbers[slot])
        self._spoiled.add(number)
        _LOG.warning("%s: segment %d is damaged, and stays as it is; run tierstore verify", snapshot.path, number)
        return False

    def _read(self, snapshot: Snapshot, rows: RowMap, segments: Segments, victims: Int64s) -> Moved | None:
        """The live rows of segments, all at once; None if one is damaged."""
        layout = segments.layout
        try:
            keys, epochs = rows.live_rows(snapshot, layout, victims)
        except DamagedError:
            return None
        weights = np.empty((len(keys), layout.weight_words), np.uint64)
        state = np.empty((len(keys), layout.state_words), np.uint64)
        slots, present = np.arange(len(keys), dtype=np.int32), np.empty(len(keys), np.bool_)
        positions = rows.positions(layout, keys)
        result = self._reader.gather(snapshot, segments, rows.places, positions, keys, slots, weights, state, present)
        if result[0] != GatherStatus.DONE:
            return None
        return Moved(NewRows(keys, slots, weights, state, epochs), int(result[2]))

    def _victims(self, segments: Segments, kept: tuple[int, ...]) -> Int64s:
        """Slots that ``plan`` chose, as far as they can still be cleaned."""
        plan = self._plans.pop(segments.geo.layout_id, None)
        if plan is None:
            return np.empty(0, np.int64)
        arrays = segments.arrays
        is_there = plan.slots < len(arrays.numbers)  # not so after a rollback, maybe
        slots, numbers = plan.slots[is_there], plan.numbers[is_there]
        slots = slots[(arrays.numbers[slots] == numbers) & (arrays.rows[slots] > 0)]
        slots = slots[(arrays.held[slots] == 0) & (arrays.live[slots] > 0)]
        victims: Int64s = slots[self._interval(segments, slots, kept) == self._interval(segments, slots[:1], kept)]
        return victims

    def plan(self, snapshot: Snapshot, segments: Segments, kept: tuple[int, ...], appended: int) -> None:
        """Choose victims for the next turn, after ``appended`` pages were written, and begin to read them."""
        geo, arrays = segments.geo, segments.arrays
        pages_a_row = segments.layout.segment_pages(geo.rows_per_segment) / geo.rows_per_segment
        of_all = segments.pages - arrays.pages[segments.dead].sum() - self.slack * segments.rows * pages_a_row
        if of_all <= 0:
            return
        slots = self._sample(len(arrays.rows))
        share = len(slots) / len(arrays.rows)
        slots = slots[(arrays.rows[slots] > 0) & (arrays.held[slots] == 0) & (arrays.live[slots] > 0)]
        needed = arrays.live[slots] * pages_a_row
        excess = min(of_all, (arrays.pages[slots].sum() - self.slack * needed.sum()) / share)
        fill = needed / arrays.pages[slots]
        chosen = fill < _FULL
        if self._spoiled:
            chosen &= ~np.isin(arrays.numbers[slots], np.array(list(self._spoiled), np.uint64))
        slots, fill = slots[chosen], fill[chosen]
        if excess <= 0 or not len(slots):
            return
        order = np.argsort(fill, kind="stable")
        slots, fill = slots[order], fill[order]
        together = self._interval(segments, slots, kept) == self._interval(segments, slots[:1], kept)
        slots, fill = slots[together], fill[together]
        freed = np.cumsum(arrays.pages[slots] * (1 - fill))
        count = 1 + int(np.searchsorted(freed, min(excess, _PAGES_A_PAGE * appended)))
        slots = slots[:count]
        self._plans[geo.layout_id] = _Plan(slots, arrays.numbers[slots].copy())
        address = snapshot.file_map.rows.address
        queue_segments(address, geo.page_words, segments.first_pages(slots), arrays.pages[slots])

    def _sample(self, length: int) -> Int64s:
        if length <= _SAMPLE:
            return np.arange(1, length)
        return np.unique(self._random.integers(1, length, _SAMPLE))

    def _interval(self, segments: Segments, slots: Int64s, kept: tuple[int, ...]) -> Int64s:
        """A number for the kept versions between which the rows of a segment were written; one for each open epoch."""
        newest = segments.arrays.newest[slots]
        current = kept[-1] if kept else 0
        found: Int64s = np.where(newest <= current, np.searchsorted(kept, newest), len(kept) + newest)
        return found
