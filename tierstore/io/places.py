"""The flat array of places that ``row_map.py`` explains, what is known of segments by slot, and kernels over both."""

from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError
from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import prefetch_word
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import KEY_ROW_BITS, PAGE_HEADER_WORDS, ROW_MASK, SEGMENT_HEADER_WORDS, RowLayout
from ..system.sizes import format_size
from .mapped import zeros
from .segments import KEYS, NEWEST, STORED, Geometry, Stored, geometry, rows_listed


class SegmentArrays(NamedTuple):  # of one layout, by slot; readers use the first two
    data_pages: Int64s  # page of the first block
    numbers: Words
    newest: Int64s
    oldest: Int64s  # the largest and the least epoch of its rows
    rows: Int32s  # 0 where the slot is free
    live: Int32s
    held: Int32s
    pages: Int32s


_DTYPES: Final = (np.int64, np.uint64, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)

WAITING_SHARE: Final = 1 / 32  # of all segments' pages, which dead ones may have before they are deleted
SMALL_PAGES: Final = 1 << 14  # of the first so many pages they may have none


def _grown(column: Any, length: int) -> Any:
    grown = np.zeros(length, column.dtype)
    grown[: len(column)] = column
    return grown


class Segments:
    """The segments of one layout, by slot: ``pages`` of all, live and held ``rows`` of all, and the slots of those that
    have none and are to be deleted (``dead``). ``arrays`` are replaced by longer ones when slots run out."""

    def __init__(self, layout: RowLayout, layout_id: int) -> None:
        self.layout: Final = layout
        self.geo: Final = geometry(layout, layout_id)
        self.arrays = SegmentArrays._make(np.zeros(1, dtype) for dtype in _DTYPES)
        self.pages = self.rows = 0
        self.dead: Int64s = np.empty(0, np.int64)
        self._in_order = 0  # of the dead, so many at the front ascend by number and go next
        self.held_under: dict[int, Int32s] = {}
        self._free: Int64s = np.empty(0, np.int64)  # the last is taken first
        self._waiting: list[tuple[int, Int64s]] = []

    def copied(self) -> "Segments":
        other = Segments(self.layout, self.geo.layout_id)
        other.arrays = SegmentArrays._make(column.copy() for column in self.arrays)
        other.pages, other.rows, other.dead = self.pages, self.rows, self.dead
        other._free = np.concatenate([self._free, *(slots for _, slots in self._waiting)])
        return other

    @property
    def in_use(self) -> Int64s:
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
        """Pages of their first blocks; see ``segments.index_pages``."""
        listed = stored["rows"] * (1 + (stored["newest"] != stored["oldest"]))
        found: Int64s = (
            stored["first_page"] - -(PAGE_HEADER_WORDS + SEGMENT_HEADER_WORDS + listed) // self.geo.page_words
        )
        return found

    def fits(self, stored: Stored) -> NDArray[np.bool_]:
        """Which of these segments take the pages that so many rows of the layout do."""
        geo = self.geo
        stops = self.data_pages(stored) + -(-stored["rows"] // geo.rows_per_block) * geo.pages_per_block
        found: NDArray[np.bool_] = stored["first_page"] + stored["pages"] == stops
        return found & (stored["rows"] <= geo.rows_per_segment)

    def take(self, stored: Stored, txn_id: int) -> Int64s:
        """Slots for these segments, which have no live rows yet. Readers of trees before transaction ``txn_id``, which
        wrote them, know shorter arrays only."""
        count, length = len(stored), len(self.arrays.numbers)
        if len(self._free) < count:
            grown = length + max(count, length // 2)
            self.arrays = SegmentArrays._make(_grown(column, grown) for column in self.arrays)
            self._waiting = [(txn_id, np.concatenate([*(slots for _, slots in self._waiting), self._free]))]
            self._free = np.arange(grown - 1, length - 1, -1)
        left, arrays = len(self._free) - count, self.arrays
        slots, self._free = self._free[left:][::-1].copy(), self._free[:left]
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
        return int(self._free[len(self._free) - count :].max(initial=0))

    @property
    def dead_pages(self) -> int:
        return int(self.arrays.pages[self.dead].sum())

    def next_dead(self, most_pages: int) -> Int64s:
        """Slots of the segments to delete next: none while few are dead. They go by number: neighbours share pages of
        LMDB's tree, each of which is written once a transaction."""
        if not self._in_order and self.dead_pages > max(0, self.pages - SMALL_PAGES) * WAITING_SHARE:
            self.dead = self.dead[np.argsort(self.arrays.numbers[self.dead])]
            self._in_order = len(self.dead)
        slots = self.dead[: min(self._in_order, most_pages)]
        return slots[: 1 + int(np.searchsorted(np.cumsum(self.arrays.pages[slots]), most_pages))]

    def spare(self, slots: Int64s, sound: Int64s) -> None:
        """Of these, which ``next_dead`` gave, only some are still to be deleted; the others stay, or are gone."""
        self.dead = np.concatenate([sound, self.dead[len(slots) :]])
        self._in_order -= len(slots) - len(sound)

    def free(self, slots: Int64s, txn_id: int) -> None:
        """Segments were deleted by a transaction; their slots wait for its readers."""
        self.pages -= int(self.arrays.pages[slots].sum())
        self.arrays.rows[slots] = 0
        self._waiting.append((txn_id, slots))

    def reuse(self, oldest: int) -> None:
        """Slots that only trees before transaction ``oldest`` knew are free."""
        freed = [slots for txn_id, slots in self._waiting if txn_id <= oldest]
        waiting = [each for each in self._waiting if each[0] > oldest]
        self._free, self._waiting = np.concatenate([self._free, *freed]), waiting

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
            self.dead = np.concatenate([self.dead, slots[gone]])

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self.arrays) + sum(counts.nbytes for counts in self.held_under.values())


Places = NDArray[np.uint32] | NDArray[np.int64]

NARROW: Final = np.dtype(np.uint32)
_WIDE: Final = np.dtype(np.int64)
_COPY_STEP: Final = 1024
_AHEAD: Final = 16


class TableArrays(NamedTuple):  # by table index; one that was dropped has base -1, one not added layout -1 too
    bases: Int64s  # position of row 0 in the flat array of places
    num_rows: Int64s
    layout_ids: Int64s


class Regions(NamedTuple):  # how many rows are stored, by region of ``1 << row_bits`` rows
    stored: Int64s
    row_bits: int


@kernel
def find_positions(keys: Int64s, layout_id: int, tables: TableArrays, positions: Int64s) -> int:
    """Where rows have their entries in the flat array; -1, or the position in ``keys`` of what is no such row."""
    for i in range(len(keys)):
        table = keys[i] >> KEY_ROW_BITS
        row = keys[i] & ROW_MASK
        known = table >= 0 and table < len(tables.bases) and tables.layout_ids[table] == layout_id
        if not known or row >= tables.num_rows[table]:
            return i
        positions[i] = tables.bases[table] + row
    return -1


@inline
def is_known(table: int | np.int64, tables: TableArrays) -> bool:
    """Whether there is a table with this index, which may be any number."""
    return 0 <= table < len(tables.bases) and tables.bases[table] >= 0  # type: ignore[return-value]


@inline
def can_be_stored(key: np.int64, layout_id: int, tables: TableArrays) -> bool:
    """Whether a segment of this layout may have the key: of a row of a table with it, or of an unknown table."""
    table = key >> KEY_ROW_BITS
    if not is_known(table, tables):
        return bool(table >= 0)
    return bool(tables.layout_ids[table] == layout_id and (key & ROW_MASK) < tables.num_rows[table])


@kernel
def publish(
    positions: Int64s, slots: Int64s, stops: Int64s, epoch: int, is_moved: bool, place_bits: int, places: Places,
    regions: Regions, segments: SegmentArrays, held_for: Int32s, late_for: Int32s, emptied: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Enter the rows of segments just written: all of one epoch, or moved by cleaning. A row that has one of a later
    epoch already, as ``epoch``'s version is in flight, is held. Returns how many rows died and segments were emptied.

    Args:
        slots, stops: int64 [segments]: of each one, and where its rows end in ``positions``.
        held_for, late_for: int32 [slots]: rows that a version before ``epoch`` needs, and that ``epoch`` itself does.
        emptied: int64 [rows], receives the slots without live and held rows.
    """
    dead, count, part, begin = 0, 0, 0, 0
    for i in range(len(positions)):
        if i + _AHEAD < len(positions):
            prefetch_word(places, positions[i + _AHEAD])
        if i == stops[part]:
            part, begin = part + 1, i
        slot, at = slots[part], positions[i]
        old = np.int64(places[at])
        before = old >> place_bits
        if old != 0 and not is_moved and segments.newest[before] > epoch:
            segments.held[slot] += 1
            late_for[slot] += 1
            continue
        places[at] = slot << place_bits | (i - begin)
        segments.live[slot] += 1
        if old == 0:
            regions.stored[at >> regions.row_bits] += 1
            continue
        segments.live[before] -= 1
        if not is_moved and segments.newest[before] < epoch:
            segments.held[before] += 1
            held_for[before] += 1
            continue
        dead += 1
        if segments.live[before] == 0 and segments.held[before] == 0:
            emptied[count] = before
            count += 1
    return dead, count


class Listed(NamedTuple):  # rows of some segments: int64 [n] each
    keys: Int64s
    positions: Int64s  # in the flat array of places
    places: Int64s  # where the rows are, whatever the map says
    epochs: Int64s


@kernel
def list_rows(
    words: Words, indexes: Int64s, slots: Int64s, last: int, geo: Geometry, tables: TableArrays, listed: Listed,
    unknown: Int64s,
) -> tuple[int, int, int]:  # fmt: skip
    """List the rows of stored segments of one layout, in their order, up to epoch ``last``. ``indexes``: word offset of
    each one's index, which was checked. ``unknown``: int64 [segments], zeros; receives how many rows of each are of
    tables that are not known. Returns -1 or the position of a segment that holds what cannot be; rows listed; rows of
    tables that were dropped."""
    count, dropped = 0, 0
    for s in range(len(indexes)):
        at = indexes[s]
        num, is_mixed = rows_listed(words, at)
        for i in range(num):
            key = np.int64(words[at + KEYS + i])
            table = key >> KEY_ROW_BITS
            if not can_be_stored(key, geo.layout_id, tables):
                return s, count, dropped
            epoch = np.int64(words[at + KEYS + num + i] if is_mixed else words[at + NEWEST])
            if epoch > last:
                continue
            if not is_known(table, tables):
                if table < len(tables.bases) and tables.layout_ids[table] >= 0:
                    dropped += 1
                else:
                    unknown[s] += 1
                continue
            listed.keys[count] = key
            listed.positions[count] = tables.bases[table] + (key & ROW_MASK)
            listed.places[count] = slots[s] << geo.place_bits | i
            listed.epochs[count] = epoch
            count += 1
    return -1, count, dropped


@kernel
def enter(
    listed: Listed, kept: Int64s, place_bits: int, places: Places, regions: Regions, segments: SegmentArrays,
    beaten: Int64s, beaten_slots: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Enter rows of stored segments, which come in any order; how many are dead, and how many beaten. ``kept``: int64,
    kept versions, ascending. ``beaten``, ``beaten_slots``: int64 [rows], receive the positions in ``places`` of the
    rows that have a newer version and may be held, and the slots that they are in."""
    dead, count, positions = 0, 0, listed.positions
    for i in range(len(positions)):
        if i + _AHEAD < len(positions):
            prefetch_word(places, positions[i + _AHEAD])
        position, slot = positions[i], listed.places[i] >> place_bits
        winner, loser = slot, np.int64(places[position]) >> place_bits
        if places[position] == 0:
            regions.stored[position >> regions.row_bits] += 1
        else:
            if _is_older(segments, slot, loser):
                winner, loser = loser, slot
            which = len(kept) - 1  # the last version before the newer one
            while which >= 0 and kept[which] >= segments.newest[winner]:
                which -= 1
            if which >= 0 and kept[which] >= segments.oldest[loser]:
                beaten[count] = position
                beaten_slots[count] = loser
                count += 1
            else:
                dead += 1
            if winner != slot:
                continue
            segments.live[loser] -= 1
        places[position] = listed.places[i]
        segments.live[slot] += 1
    return dead, count


@inline
def _is_older(segments: SegmentArrays, slot: int, other: int | np.int64) -> bool:
    if segments.newest[slot] != segments.newest[other]:
        return segments.newest[slot] < segments.newest[other]  # type: ignore[no-any-return]
    return segments.numbers[slot] < segments.numbers[other]  # type: ignore[no-any-return]


@kernel
def copy_used(source: Places, target: Places, first: int, regions: Regions) -> None:
    """Copy what is not zero to ``target[first:]``, so that untouched memory stays untouched."""
    for start in range(0, len(source), _COPY_STEP):
        end = min(start + _COPY_STEP, len(source))
        used = False
        for i in range(start, end):
            used = used or source[i] != 0
        if used:
            for i in range(start, end):
                target[first + i] = source[i]
                regions.stored[(first + i) >> regions.row_bits] += source[i] != 0


def new_places(total: int, dtype: "np.dtype[Any]" = NARROW) -> Places:
    """Of so many rows, without segments. BudgetError: the system refuses memory for them."""
    try:
        return zeros(total, dtype)
    except (MemoryError, OSError) as error:
        raise BudgetError(
            f"the system refuses {format_size(dtype.itemsize * total)} of address space for the map of {total:,} rows "
            f"({error}); make the tables smaller, raise `ulimit -v`, or let the system overcommit memory (it counts "
            "memory that is only reserved where vm.overcommit_memory is 2)"
        ) from error


def place_type(geo: Geometry, slots: Iterable[int], least: "np.dtype[Any]") -> "np.dtype[Any]":
    """The type of places that lead to these slots: ``least``, unless it is too narrow."""
    stop = (1 + max(slots, default=0)) << geo.place_bits
    return least if stop <= 1 << (8 * least.itemsize) else _WIDE
