"""What is known of the segments of one layout, by slot, and which slots are free: see ``row_map.py``."""

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int32s, Int64s, Words
from ..layout import RowLayout
from .indexes import STORED, Stored
from .segments import geometry, index_lengths


class SegmentArrays(NamedTuple):
    """What is known of the segments of one layout, by slot. Readers use the first two."""

    data_pages: Int64s
    """Page of the first block."""
    numbers: Words
    newest: Int64s
    oldest: Int64s
    """The largest and the least epoch of its rows."""
    rows: Int32s
    """0 where the slot is free."""
    live: Int32s
    held: Int32s
    pages: Int32s


_DTYPES: Final = (np.int64, np.uint64, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)

WAITING_SHARE: Final = 1 / 32
SMALL_PAGES: Final = 1 << 14
"""Of the pages of all segments, the share that dead ones may have before they are deleted together. Below so many pages
none wait: LMDB's tree is small there."""


def _grown(column: Any, length: int) -> Any:
    grown = np.zeros(length, column.dtype)
    grown[: len(column)] = column
    return grown


class Segments:
    """The segments of one layout, by slot.

    Attributes:
        arrays: by slot; replaced by longer ones when slots run out.
        pages: of all segments.
        rows: live and held ones of all segments.
        dead: int64, slots of segments without such rows, to be deleted.
    """

    def __init__(self, layout: RowLayout, layout_id: int) -> None:
        self.layout: Final = layout
        self.geo: Final = geometry(layout, layout_id)
        self.arrays = SegmentArrays._make(np.zeros(1, dtype) for dtype in _DTYPES)
        self.pages = 0
        self.rows = 0
        self.dead: Int64s = np.empty(0, np.int64)
        self._in_order = 0  # of the dead, so many at the front ascend by number and go next
        self.held_under: dict[int, Int32s] = {}
        self._free: list[int] = []
        self._waiting: list[tuple[int, list[int]]] = []

    def copied(self) -> "Segments":
        other = Segments(self.layout, self.geo.layout_id)
        other.arrays = SegmentArrays._make(column.copy() for column in self.arrays)
        other.pages, other.rows, other.dead = self.pages, self.rows, self.dead
        other._free = self._free + [slot for _, slots in self._waiting for slot in slots]
        return other

    @property
    def in_use(self) -> Int64s:
        """Slots of segments."""
        return np.flatnonzero(self.arrays.rows)

    def stored(self, slots: Int64s) -> Stored:
        """Of segments in these slots; without their first keys."""
        arrays, stored = self.arrays, np.zeros(len(slots), STORED)
        stored["number"], stored["pages"] = arrays.numbers[slots], arrays.pages[slots]
        for name in ("rows", "newest", "oldest"):
            stored[name] = getattr(arrays, name)[slots]
        stored["first_page"] = arrays.data_pages[slots] - self.data_pages(stored)
        return stored

    def data_pages(self, stored: Stored) -> Int64s:
        """Where the first blocks of these segments begin."""
        lengths: Int64s = index_lengths(self.geo, stored["rows"], stored["newest"] != stored["oldest"])
        return stored["first_page"] + lengths

    def fits(self, stored: Stored) -> NDArray[np.bool_]:
        """Which of these segments take the pages that so many rows of the layout do."""
        geo = self.geo
        stops = self.data_pages(stored) + -(-stored["rows"] // geo.rows_per_block) * geo.pages_per_block
        found: NDArray[np.bool_] = stored["first_page"] + stored["pages"] == stops
        return found & (stored["rows"] <= geo.rows_per_segment)

    def take(self, stored: Stored, txn_id: int) -> Int64s:
        """Slots for these segments, which have no live rows yet.

        Args:
            txn_id: of the transaction that wrote them: readers of trees before it know shorter arrays only.
        """
        slots = self._free_slots(len(stored), txn_id)
        arrays = self.arrays
        arrays.data_pages[slots] = self.data_pages(stored)
        arrays.numbers[slots] = stored["number"]
        arrays.live[slots] = arrays.held[slots] = 0
        for name in ("newest", "oldest", "pages", "rows"):
            getattr(arrays, name)[slots] = stored[name]
        self.pages += int(stored["pages"].sum())
        self.rows += int(stored["rows"].sum())
        return slots

    def last_slot(self, count: int) -> int:
        """The largest of the slots that so many segments may take."""
        if count > len(self._free):
            return len(self.arrays.numbers) + count - 1
        return max(self._free[len(self._free) - count :], default=0)

    def _free_slots(self, count: int, txn_id: int) -> Int64s:
        if len(self._free) < count:
            length = len(self.arrays.numbers)
            grown = length + max(count, length // 2)
            self.arrays = SegmentArrays._make(_grown(column, grown) for column in self.arrays)
            self._waiting = [(txn_id, [slot for _, slots in self._waiting for slot in slots] + self._free)]
            self._free = list(range(grown - 1, length - 1, -1))
        return np.array([self._free.pop() for _ in range(count)], np.int64)

    def bury(self, slots: Int64s) -> None:
        """These segments have no live or held row any more."""
        self.dead = np.concatenate([self.dead, slots])

    @property
    def dead_pages(self) -> int:
        return int(self.arrays.pages[self.dead].sum())

    def next_dead(self, most_pages: int) -> Int64s:
        """Slots of the segments to delete next: some pages of them, or none, while few are dead.

        They wait until there are many, and go by number: neighbours in LMDB's tree share its pages, each of which is
        written once a transaction.
        """
        if not self._in_order and self.dead_pages > max(0, self.pages - SMALL_PAGES) * WAITING_SHARE:
            self.dead = self.dead[np.argsort(self.arrays.numbers[self.dead])]
            self._in_order = len(self.dead)
        slots = self.dead[: min(self._in_order, most_pages)]
        count = 1 + int(np.searchsorted(np.cumsum(self.arrays.pages[slots]), most_pages))
        return slots[:count]

    def spare(self, slots: Int64s, sound: Int64s) -> None:
        """Of these, which ``next_dead`` gave, only some can be deleted; the others stay for good."""
        self.dead = np.concatenate([sound, self.dead[len(slots) :]])
        self._in_order -= len(slots) - len(sound)

    def delete(self, slots: Int64s, txn_id: int) -> None:
        """These, which ``next_dead`` gave or ``spare`` left, were deleted by a transaction."""
        self.spare(slots, slots[:0])
        self.free(slots, txn_id)

    def free(self, slots: Int64s, txn_id: int) -> None:
        """Segments were deleted by a transaction; their slots wait for its readers."""
        self.pages -= int(self.arrays.pages[slots].sum())
        self.arrays.rows[slots] = 0
        self._waiting.append((txn_id, slots.tolist()))

    def reuse(self, oldest: int) -> None:
        """Slots that only trees before transaction ``oldest`` knew are free."""
        self._free += [slot for txn_id, slots in self._waiting if txn_id <= oldest for slot in slots]
        self._waiting = [each for each in self._waiting if each[0] > oldest]

    def held(self, version: int) -> Int32s:
        """int32 [slots]: held rows, by segment, that no version after this one needs."""
        counts = self.held_under.get(version, np.zeros(0, np.int32))
        if len(counts) < len(self.arrays.rows):
            counts = self.held_under[version] = _grown(counts, len(self.arrays.rows))
        return counts

    def release(self, kept: Collection[int], last: int) -> None:
        """Let go of what only versions need that are neither kept nor to come after ``last``."""
        for version in sorted(self.held_under.keys() - set(kept)):
            if version > last:
                continue
            counts, arrays = self.held_under.pop(version), self.arrays
            older = max((each for each in kept if each < version), default=0)
            is_older = arrays.oldest[: len(counts)] <= older  # no segment has rows of before and after a kept version
            if older:
                self.held(older)[: len(counts)] += np.where(is_older, counts, 0)
                counts = np.where(is_older, 0, counts)
            slots = np.flatnonzero(counts)
            arrays.held[slots] -= counts[slots]
            self.rows -= int(counts.sum())
            gone = (arrays.live[slots] == 0) & (arrays.held[slots] == 0) & (arrays.rows[slots] > 0)
            self.bury(slots[gone])

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self.arrays) + sum(counts.nbytes for counts in self.held_under.values())
