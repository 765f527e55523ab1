"""Which place in the log each row has: 4 bytes a row, and what is known of each segment.

A place is ``slot << place_bits | index``: the segment's slot, a small number that is used again when the segment is
gone, and the row's number in the segment. 0 stands for a row that was never written; slot 0 is never used. Places are
of 4 bytes until a layout needs more segments than these can name; then the map is copied once, to places of 8 bytes.

**Versions.** A row may lie in several segments: once as it is now, and as kept versions show it. Rows of a segment are
*live* if the map leads to them, *held* if only kept versions need them, else dead. Of a row's entries the newest is the
one in the segment with the largest (newest epoch, number). That holds for segments of several epochs, too. Cleaning
moves only live rows, among segments whose rows all lie between the same two kept versions or are of one open epoch. A
row written later has at least the newest epoch, unless it is written late for a version in flight, and no segment with
newer rows holds such a row.

What a row's successor leaves behind is counted under the last version that shows it: no list of held rows is kept.

**Readers.** Entries may change under a reader. It holds a lease on a snapshot, the tree of some transaction: pages of
that tree, and of any later one, stay as they are (``pins.py``). The writer enters a place after the transaction that
wrote it is visible and before the next snapshot is shown. So a reader finds an old place or a new one, and both stay
readable: the slot of a deleted segment is given to no other until leases on earlier snapshots end. Entries are aligned
words, which no processor tears. The same holds for a reader of a map that was copied since, and for a process that
follows the writer (``RowMap.advance``).

**Memory.** The map takes pages of 4 KiB where rows are stored. A *region* of it, 2 MiB or more, goes to huge pages
once one row in 256 is stored: of random rows, nearly all of its pages are touched by then.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError
from ..kernels.arrays import Int64s, Words
from ..layout import KEY_ROW_BITS, PAGE_HEADER_WORDS, ROW_MASK, RowLayout
from ..system.oserrors import RESTORE
from .mapped import HUGE_PAGE_BYTES, use_huge_pages
from .places import (
    Places,
    Regions,
    Segments,
    TableArrays,
    copy_used,
    enter,
    find_positions,
    list_differing,
    list_live,
    new_places,
    place_type,
    publish,
)
from .segments import STORED, Stored, byte_ranges, read_indexes, read_parts
from .snapshot import Tree

if TYPE_CHECKING:
    from .tail import Tail

_LIST_STEP: Final = 1 << 20
_SPARSE_ROWS: Final = 256  # a region with a stored row among so many is to be in huge pages
_MOST_REGIONS: Final = 8192
"""Neighbours in pages of different size are maps of their own to the kernel, which allows 65,530."""


_NONE: Final[Mapping[RowLayout, Segments]] = {}


class RowMap:
    """Places of the rows of some tables, and the segments of their layouts.

    One thread at a time may change it, while any number read it: see the module's docstring.

    Attributes:
        places: uint32 [rows of all tables], or int64 once they must be wider; replaced then.
        tables: by table index.
        layouts: by table index.
        segments: by layout.
        unknown: stored rows of tables that are not known: add the tables before rows are read or written.
        later: the segments that ``enter`` left out, as all their rows are of later epochs.
    """

    def __init__(
        self, shapes: Mapping[int, tuple[RowLayout, int]], segments: Mapping[RowLayout, Segments] = _NONE
    ) -> None:
        self.shapes = dict(sorted(shapes.items()))
        self.layouts = {index: layout for index, (layout, _) in self.shapes.items()}
        self.segments: dict[RowLayout, Segments] = dict(segments)
        for layout in self.layouts.values():
            if layout not in self.segments:
                self.segments[layout] = Segments(layout, len(self.segments))
        length = 1 + max(self.shapes, default=-1)
        self.tables = TableArrays(*(np.full(length, -1, np.int64) for _ in range(3)))
        total = 0
        for index, (layout, num_rows) in self.shapes.items():
            self.tables.bases[index], self.tables.num_rows[index] = total if num_rows else -1, num_rows
            self.tables.layout_ids[index] = self.segments[layout].geo.layout_id
            total += num_rows
        self.places: Places = new_places(total)
        least = max(HUGE_PAGE_BYTES // self.places.itemsize, -(-total // _MOST_REGIONS))
        row_bits = (least - 1).bit_length()
        self._regions = Regions(np.zeros((total >> row_bits) + 1, np.int64), row_bits)
        self._is_huge = np.zeros(len(self._regions.stored), np.bool_)
        self.unknown = 0
        self.later = np.zeros(0, STORED)

    @property
    def size_bytes(self) -> int:
        """Of address space; memory is taken where rows exist, by pages of 4 KiB."""
        return self.places.nbytes + sum(each.size_bytes for each in self.segments.values())

    def with_table(self, table_index: int, layout: RowLayout, num_rows: int) -> "RowMap":
        """A map that knows one table more, without rows; readers may go on using the old one."""
        other = RowMap({**self.shapes, table_index: (layout, num_rows)}, self.segments)
        other.unknown, other.later = self.unknown, self.later
        for index in self.shapes:
            source, target = (int(tables.bases[index]) for tables in (self.tables, other.tables))
            self._copy(source, source + int(self.tables.num_rows[index]), other, target - source)
        other._settle()
        return other

    def copied(self) -> "RowMap":
        """Another map of the same, which may be changed while readers use this one."""
        other = RowMap(self.shapes, {layout: each.copied() for layout, each in self.segments.items()})
        other.unknown, other.later = self.unknown, self.later
        self._copy(0, len(self.places), other, 0)
        other._settle()
        return other

    def _copy(self, first: int, stop: int, other: "RowMap", shift: int) -> None:
        """Copy the entries ``[first, stop)`` to another map, where they are ``shift`` further behind."""
        other._widen(self.places.dtype)
        for start, end in self._used(first, stop):
            copy_used(self.places[start:end], other.places, start + shift, other._regions)

    def _used(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of ``[first, stop)`` of the flat array in which rows may be stored, some at a time."""
        bits = self._regions.row_bits
        begin = first >> bits
        for region in (begin + np.flatnonzero(self._regions.stored[begin : -(-stop >> bits)])).tolist():
            end = min(stop, (region + 1) << bits)
            for start in range(max(first, region << bits), end, _LIST_STEP):
                yield start, min(start + _LIST_STEP, end)

    def make_room(self, layout: RowLayout, runs: Iterable[int]) -> None:
        """Have places lead to all slots that runs of so many rows of a layout may take as segments. BudgetError: the
        system refuses memory for wider places."""
        segments = self.segments[layout]
        count = sum(-(-num_rows // segments.geo.rows_per_segment) for num_rows in runs)
        self._widen(place_type(segments.geo, [segments.last_slot(count)], self.places.dtype))

    def _widen(self, dtype: "np.dtype[Any]") -> None:
        """Have places at least as wide as those of a type. Readers may go on using the old ones."""
        if dtype.itemsize <= self.places.itemsize:
            return
        wide, stored = new_places(len(self.places), dtype), np.zeros_like(self._regions.stored)
        for start, end in self._used(0, len(self.places)):
            copy_used(self.places[start:end], wide, start, Regions(stored, self._regions.row_bits))
        self.places = wide
        self._is_huge[:] = False
        self._settle()

    def _settle(self) -> None:
        """Have the regions that have become dense in huge pages."""
        size_bytes = self.places.itemsize << self._regions.row_bits
        is_dense = self._regions.stored * _SPARSE_ROWS >= 1 << self._regions.row_bits
        for region in np.flatnonzero(is_dense & ~self._is_huge).tolist():
            use_huge_pages(self.places, region * size_bytes, (region + 1) * size_bytes)
            self._is_huge[region] = True

    def enter(self, tree: Tree, stored: Stored, last: int, kept: Collection[int]) -> None:
        """Enter stored segments, those of later epochs than ``last`` left out. ``kept``: versions whose rows are to be
        counted as held. DamagedError: a segment holds what cannot be a row of its tables."""
        shown, later = np.array(sorted(kept), np.int64), [self.later[:0]]
        entering = [_Entering(segments) for segments in self.segments.values()]
        for part in read_parts(tree, stored):
            layout_ids, is_shown = self.layout_ids(part), part["oldest"] <= last
            later.append(part[~is_shown])
            self.unknown += int(part["rows"][(layout_ids < 0) & is_shown].sum())
            for each in entering:
                own = part[(layout_ids == each.segments.geo.layout_id) & is_shown]
                if len(own):
                    self._enter_own(tree, each, own, last, shown)
        self.later = np.sort(np.concatenate(later), order="number")
        for each in entering:
            each.finish(self.places, shown)

    def advance(self, tail: "Tail") -> None:
        """For a reader: enter the tail of the log; show readers the tree next. Rows may be read through the map
        meanwhile if the tail is of the same version, and has the map's own segments."""
        self.segments, self.unknown, self.later = dict(tail.segments), tail.unknown, tail.later
        for layout, (keys, places) in tail.rows.items():
            self._widen(places.dtype)
            positions = self.positions(layout, keys)
            is_first = self.places[positions] == 0
            self.places[positions] = places
            np.add.at(self._regions.stored, positions[is_first] >> self._regions.row_bits, 1)
        self._settle()

    def differing(self, before: "RowMap") -> Int64s:
        """int64 [n], ascending: keys of the rows that lie elsewhere than in another map of the same tables."""
        parts = [np.empty(0, np.int64)]
        for table, (layout, num_rows) in self.shapes.items():
            base, now, then = int(self.tables.bases[table]), self.segments[layout], before.segments[layout]
            for first, stop in sorted({*self._used(base, base + num_rows), *before._used(base, base + num_rows)}):
                rows = np.empty(stop - first, np.int64)
                count = list_differing(
                    self.places[first:stop], now.arrays.numbers, before.places[first:stop], then.arrays.numbers,
                    now.geo.place_bits, rows,
                )  # fmt: skip
                parts.append(rows[:count] + (first - base + (table << KEY_ROW_BITS)))
        return np.concatenate(parts)

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        """``positions``, and the places that they are in."""
        return self.positions(layout, keys), self.places

    def layout_ids(self, stored: Stored) -> Int64s:
        """Of these segments, by the first row of each; -1 if that is of a table that is not known."""
        known, tables = np.append(self.tables.layout_ids, -1), stored["first_key"] >> KEY_ROW_BITS
        found: Int64s = known[np.where((tables >= 0) & (tables < len(known)), tables, len(known) - 1)]
        return found

    def _enter_own(self, tree: Tree, entering: "_Entering", stored: Stored, last: int, kept: Int64s) -> None:
        segments = entering.segments
        slots, at = take_slots(tree, segments, stored)
        self._widen(place_type(segments.geo, slots.tolist(), self.places.dtype))
        beaten, beaten_slots = np.empty((2, int(stored["rows"].sum()) if len(kept) else 0), np.int64)
        file_map = tree.file_map.rows
        since = file_map.guard.begin()
        bad, unknown, dead, count = enter(
            file_map.words, at, slots, last, kept, segments.geo, self.tables, self.places, self._regions,
            segments.arrays, beaten, beaten_slots,
        )  # fmt: skip
        require_entered(tree, segments, stored, since, bad)
        self.unknown += unknown
        self._settle()
        segments.rows -= dead
        entering.slots.append(slots)
        entering.beaten.append((beaten[:count].copy(), beaten_slots[:count].copy()))

    def publish(
        self, layout: RowLayout, stored: Stored, keys: Int64s, *, current: int, txn_id: int, is_moved: bool = False
    ) -> None:
        """Enter segments just written, one after another.

        Args:
            stored: of one epoch, unless cleaning has moved their rows.
            keys: int64, of all of them.
            current: the version that is current.
            txn_id: of the transaction that wrote them.
        """
        segments, positions = self.segments[layout], self.positions(layout, keys)
        slots, epoch = segments.take(stored, txn_id), current if is_moved else int(stored["newest"][0])
        held_for, late_for = segments.held(max(current, epoch - 1)), segments.held(epoch)
        emptied = np.empty(len(keys), np.int64)
        dead, num_emptied = publish(
            positions, slots, np.cumsum(stored["rows"]), epoch, is_moved, segments.geo.place_bits, self.places,
            self._regions, segments.arrays, held_for, late_for, emptied,
        )  # fmt: skip
        segments.rows -= dead
        segments.bury(emptied[:num_emptied])
        self._settle()

    def positions(self, layout: RowLayout, keys: Int64s) -> Int64s:
        """Where rows of one layout have their entries. ValueError: one is no row of a table with this layout."""
        positions = np.empty(len(keys), np.int64)
        bad = find_positions(keys, self.segments[layout].geo.layout_id, self.tables, positions)
        if bad >= 0:
            raise ValueError(
                f"keys has {keys[bad]}, row {keys[bad] & ROW_MASK} of table {keys[bad] >> KEY_ROW_BITS}: not a row of "
                "a table that was added, or of a table with another layout than keys[0]'s"
            )
        return positions

    def live_rows(self, tree: Tree, layout: RowLayout, slots: Int64s, since: int = 0) -> tuple[Int64s, Words]:
        """Keys and epochs of the live rows of segments, in their order, those up to an epoch left out. DamagedError: an
        index is not what it was when it was entered, or cannot be read."""
        segments = self.segments[layout]
        stored = segments.stored(slots)
        read_indexes(tree, stored)  # a damaged epoch would be written again, with a good checksum
        starts, _ = byte_ranges(stored, tree.page_bytes)
        count = int(segments.arrays.live[slots].sum())
        keys, epochs = np.empty(count, np.int64), np.empty(count, np.uint64)
        file_map = tree.file_map.rows
        since_fault = file_map.guard.begin()
        count = list_live(
            file_map.words, starts // 8 + PAGE_HEADER_WORDS, slots, since, segments.geo.place_bits, self.tables,
            self.places, keys, epochs,
        )  # fmt: skip
        file_map.guard.require(since_fault, starts, segments.arrays.data_pages[slots] * tree.page_bytes)
        return keys[:count], epochs[:count]

    def written_since(self, tree: Tree, since: int) -> Int64s:
        """Keys of the rows that are of epochs after ``since``, ascending."""
        parts = [np.empty(0, np.int64)]
        for layout, segments in self.segments.items():
            slots = segments.in_use
            slots = slots[(segments.arrays.newest[slots] > since) & (segments.arrays.live[slots] > 0)]
            parts.append(self.live_rows(tree, layout, slots, since)[0])
        return np.sort(np.concatenate(parts))

    def counts(self) -> list[int]:
        """How many rows of each table were ever written, in the order of ``shapes``."""
        bases = self.tables.bases.tolist()
        tables = (self._used(bases[index], bases[index] + num_rows) for index, (_, num_rows) in self.shapes.items())
        return [sum(int(np.count_nonzero(self.places[start:end])) for start, end in parts) for parts in tables]

    def stored_rows(self, table: int, since: int = 0, *, first: int = 0) -> Iterator[Int64s]:
        """Which rows of a table, from ``first`` on, were written for versions after ``since``, ascending, in parts.
        ``since``: a version that is kept; 0 for all rows that were ever written."""
        base, segments = int(self.tables.bases[table]), self.segments[self.layouts[table]]
        for start, end in self._used(base + first, base + int(self.tables.num_rows[table])):
            slots = self.places[start:end] >> segments.geo.place_bits
            yield np.flatnonzero(segments.arrays.newest[slots] > since) + (start - base)

    def is_stored(self, layout: RowLayout, keys: Int64s, since: int = 0) -> NDArray[np.bool_]:
        """bool [n]: which rows of one layout ``stored_rows`` would list."""
        segments = self.segments[layout]
        slots = self.places[self.positions(layout, keys)] >> segments.geo.place_bits
        stored: NDArray[np.bool_] = segments.arrays.newest[slots] > since
        return stored


class _Entering:
    """What is entered of one layout.

    Attributes:
        slots: of the segments, in parts.
        beaten: of rows that may be held, in parts: positions, and slots.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.slots = [np.zeros(0, np.int64)]
        self.beaten = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]

    def finish(self, places: Places, kept: Int64s) -> None:
        """Count which of the rows that were beaten are held: each under the last version before its successor.

        No segment has rows of before and after a kept version, so a row's epoch may be taken for any of its segment.
        """
        segments, arrays = self.segments, self.segments.arrays
        positions, slots = (np.concatenate(parts) for parts in zip(*self.beaten, strict=True))
        order = np.lexsort((arrays.numbers[slots], arrays.newest[slots], positions))
        positions, slots = positions[order], slots[order]
        successors = (places[positions] >> segments.geo.place_bits).astype(np.int64)
        has_next = np.flatnonzero(positions[1:] == positions[:-1])
        successors[has_next] = slots[has_next + 1]
        which = np.searchsorted(kept, arrays.newest[successors]) - 1
        is_held = which >= 0
        is_held[is_held] = kept[which[is_held]] >= arrays.oldest[slots[is_held]]
        np.add.at(arrays.held, slots[is_held], 1)
        for nth in np.unique(which[is_held]).tolist():
            np.add.at(segments.held(int(kept[nth])), slots[is_held & (which == nth)], 1)
        segments.rows -= int(np.count_nonzero(~is_held))
        entered = np.sort(np.concatenate(self.slots))
        segments.bury(entered[(arrays.live[entered] == 0) & (arrays.held[entered] == 0)])


def take_slots(tree: Tree, segments: Segments, stored: Stored) -> tuple[Int64s, Int64s]:
    """Slots for stored segments of one layout, and the word offset of each one's index. DamagedError if they cannot be
    of the layout."""
    if not (fits := segments.fits(stored)).all():
        raise _not_of_its_tables(tree, int(stored["number"][int(np.argmin(fits))]))
    return segments.take(stored, tree.txn_id), stored["first_page"] * segments.geo.page_words + PAGE_HEADER_WORDS


def require_entered(tree: Tree, segments: Segments, stored: Stored, since: int, bad: int) -> None:
    """DamagedError if the indexes of these segments could not be read since ``Guard.begin`` gave ``since``, or ``bad``,
    not -1, is the position of one that holds what cannot be."""
    starts, _ = byte_ranges(stored, tree.page_bytes)
    tree.file_map.rows.guard.require(since, starts, segments.data_pages(stored) * tree.page_bytes)
    if bad >= 0:
        raise _not_of_its_tables(tree, int(stored["number"][bad]))


def _not_of_its_tables(tree: Tree, number: int) -> DamagedError:
    return DamagedError(
        f"{tree.path}: segment {number} cannot be one of its tables' rows (wrong number or size: is the manifest "
        f"another store's?). {RESTORE}"
    )
