"""Which place in the log each row has: 4 bytes a row, and what is known of each segment.

A place is ``slot << place_bits | index``: the segment's slot, used again when the segment is gone, and the row's number
in the segment. 0 stands for a row that was never written; slot 0 is never used. Places are of 4 bytes until a layout
needs more segments than these can name; then the map is copied once, to places of 8 bytes.

**Versions.** A row may lie in several segments: once as it is now, and as kept versions show it. Rows of a segment are
*live* if the map leads to them, *held* if only kept versions need them, else dead. Of a row's entries the newest is the
one in the segment with the largest (newest epoch, number). That holds for segments of several epochs, too. Cleaning
moves only live rows, among segments whose rows all lie between the same two kept versions or are of one open epoch. A
row written later has at least the newest epoch, unless it is written late for a version in flight, and no segment with
newer rows holds such a row.

What a row's successor leaves behind is counted under the last version that shows it: no list of held rows is kept.

**Readers.** Entries may change under a reader. It holds a lease on a snapshot: pages of that tree, and of any later
one, stay as they are (``reader_locks.py``). The writer enters a place after the transaction that wrote it is visible
and before the next snapshot is shown. So a reader finds an old place or a new one, by words that no processor tears.
Both stay readable: the slot of a deleted segment is given to no other until leases on earlier snapshots end. The same
holds for a reader of a map that was copied since, and for a process that follows the writer: it reads the indexes of
new segments (``NewSegments``), and its map stays as it is until the later tree is shown (``RowMap.advance``).

**Memory.** The map takes pages of 4 KiB where rows are stored. A *region*, 2 MiB or more, goes to huge pages once one
row in 256 is stored: of random rows, nearly all of its pages are touched by then.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int64s, Words
from ..layout import KEY_ROW_BITS, PAGE_HEADER_WORDS, ROW_MASK, RowLayout
from ..system.files import RESTORE
from .mapped import HUGE_PAGE_BYTES, use_huge_pages
from .places import (
    Listed,
    Places,
    Regions,
    Segments,
    TableArrays,
    copy_used,
    enter,
    find_positions,
    list_rows,
    new_places,
    place_type,
    publish,
)
from .segments import STORED, Stored, byte_ranges, read_indexes, read_parts
from .snapshot import Tree

_LIST_STEP: Final = 1 << 20
_SPARSE_ROWS: Final = 256  # a region with a stored row among so many is to be in huge pages
_MOST_REGIONS: Final = 8192  # with pages of other sizes each is a map of its own to the kernel, which allows 65,530
_TOGETHER: Final = 128  # segments whose rows are listed before they are entered
_ANY_EPOCH: Final = 2**63 - 1


class RowMap:
    """Places of the rows of some tables, and the segments of their layouts. One thread at a time may change it, while
    any number read it. ``places``: uint32 [rows of all tables], or int64 once they must be wider; replaced then.
    ``tables``, ``layouts``: by table index. ``segments``: by layout. ``unknown``: stored rows of tables that are not
    known. ``later``: the segments that ``enter`` left out, as all their rows are of later epochs."""

    def __init__(
        self, shapes: Mapping[int, tuple[RowLayout, int]], segments: Mapping[RowLayout, Segments] | None = None
    ) -> None:
        self.shapes = dict(sorted(shapes.items()))
        self.layouts = {index: layout for index, (layout, _) in self.shapes.items()}
        self.segments: dict[RowLayout, Segments] = dict(segments or {})
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

    def with_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> "RowMap":
        """A map that knows more tables, without rows; readers may go on using the old one."""
        return self._made_again(shapes, self.segments)

    def copied(self) -> "RowMap":
        """Another map of the same, which may be changed while readers use this one."""
        return self._made_again(self.shapes, {layout: each.copied() for layout, each in self.segments.items()})

    def _made_again(
        self, shapes: Mapping[int, tuple[RowLayout, int]], segments: Mapping[RowLayout, Segments]
    ) -> "RowMap":
        other = RowMap(shapes, segments)
        other.unknown, other.later = self.unknown, self.later
        other._widen(self.places.dtype)
        for index, (_, num_rows) in self.shapes.items():
            base, target = int(self.tables.bases[index]), int(other.tables.bases[index])
            for start, end in self._used(base, base + num_rows):
                copy_used(self.places[start:end], other.places, start - base + target, other._regions)
        other._settle()
        return other

    def _used(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Parts of ``[first, stop)`` of the flat array in which rows may be stored."""
        bits = self._regions.row_bits
        begin = first >> bits
        for region in (begin + np.flatnonzero(self._regions.stored[begin : -(-stop >> bits)])).tolist():
            end = min(stop, (region + 1) << bits)
            for start in range(max(first, region << bits), end, _LIST_STEP):
                yield start, min(start + _LIST_STEP, end)

    def make_room(self, layout: RowLayout, runs: Iterable[int]) -> None:
        """Have places lead to all slots that runs of so many rows may take. BudgetError: no memory for wider places."""
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
        size_bytes = self.places.itemsize << self._regions.row_bits
        is_dense = self._regions.stored * _SPARSE_ROWS >= 1 << self._regions.row_bits
        for region in np.flatnonzero(is_dense & ~self._is_huge).tolist():
            use_huge_pages(self.places, region * size_bytes, (region + 1) * size_bytes)
            self._is_huge[region] = True

    def enter(self, tree: Tree, stored: Stored, last: int, kept: Collection[int]) -> None:
        """Enter stored segments, those of later epochs than ``last`` left out. ``kept``: versions whose rows are to be
        counted as held. DamagedError: a segment holds what cannot be a row of its tables."""
        shown, later = np.array(sorted(kept), np.int64), [self.later[:0]]
        beaten = {layout: [np.empty((2, 0), np.int64)] for layout in self.segments}
        for part in read_parts(tree, stored):
            layout_ids, is_shown = self.layout_ids(part), part["oldest"] <= last
            later.append(part[~is_shown])
            self.unknown += int(part["rows"][(layout_ids < 0) & is_shown].sum())
            for layout, segments in self.segments.items():
                if len(own := part[(layout_ids == segments.geo.layout_id) & is_shown]):
                    beaten[layout] += self._enter_own(tree, segments, own, last, shown)
        self.later = np.sort(np.concatenate(later), order="number")
        for layout, segments in self.segments.items():
            self._count_held(segments, np.concatenate(beaten[layout], axis=1), shown)
            slots = np.setdiff1d(segments.in_use, segments.dead)
            gone = slots[segments.arrays.live[slots] + segments.arrays.held[slots] == 0]
            segments.dead = np.concatenate([segments.dead, gone])

    def _enter_own(self, tree: Tree, segments: Segments, stored: Stored, last: int, kept: Int64s) -> Iterator[Int64s]:
        """Enter segments of one layout, some at a time; gives int64 [2, n], positions and slots of the rows that may be
        held."""
        slots, geo = _take_slots(tree, segments, stored), segments.geo
        self._widen(place_type(geo, slots.tolist(), self.places.dtype))
        for first in range(0, len(stored), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            listed, unknown, dropped = self._list(tree, segments, stored[some], slots[some], last)
            segments.arrays.held[slots[some]] += unknown
            self.unknown += int(unknown.sum())
            beaten = np.empty((2, len(listed.keys) if len(kept) else 0), np.int64)
            dead, count = enter(listed, kept, geo.place_bits, self.places, self._regions, segments.arrays, *beaten)
            segments.rows -= dead + dropped
            yield beaten[:, :count].copy()
        self._settle()

    def _list(
        self, tree: Tree, segments: Segments, stored: Stored, slots: Int64s, last: int
    ) -> tuple[Listed, Int64s, int]:
        """The rows of segments in these slots, whose indexes were checked; how many each has of unknown tables; how
        many are of tables that were dropped. DamagedError: an index cannot be read, or holds what cannot be."""
        listed, unknown = Listed(*np.empty((4, int(stored["rows"].sum())), np.int64)), np.zeros(len(slots), np.int64)
        starts, _ = byte_ranges(stored, tree.page_bytes)
        file_map = tree.file_map.rows
        since = file_map.guard.begin()
        bad, count, dropped = list_rows(
            file_map.words, starts // 8 + PAGE_HEADER_WORDS, slots, last, segments.geo, self.tables, listed, unknown
        )
        file_map.guard.require(since, starts, segments.data_pages(stored) * tree.page_bytes)
        if bad >= 0:
            raise _not_of_its_tables(tree, int(stored["number"][bad]))
        return Listed(*(column[:count] for column in listed)), unknown, dropped

    def _count_held(self, segments: Segments, beaten: Int64s, kept: Int64s) -> None:
        """Count which of the beaten rows are held, each under the last version before its successor. No segment has
        rows of before and after a kept version, so a row's epoch may be taken for any of its segment."""
        arrays, (positions, slots) = segments.arrays, beaten
        order = np.lexsort((arrays.numbers[slots], arrays.newest[slots], positions))
        positions, slots = positions[order], slots[order]
        successors = (self.places[positions] >> segments.geo.place_bits).astype(np.int64)
        has_next = np.flatnonzero(positions[1:] == positions[:-1])
        successors[has_next] = slots[has_next + 1]
        which = np.searchsorted(kept, arrays.newest[successors]) - 1
        is_held = which >= 0
        is_held[is_held] = kept[which[is_held]] >= arrays.oldest[slots[is_held]]
        np.add.at(arrays.held, slots[is_held], 1)
        for nth in np.unique(which[is_held]).tolist():
            np.add.at(segments.held(int(kept[nth])), slots[is_held & (which == nth)], 1)
        segments.rows -= int(np.count_nonzero(~is_held))

    def advance(self, new: "NewSegments") -> None:
        """For a reader: enter new segments; show readers the tree next. Rows may be read through the map meanwhile if
        the new ones are of the same version, and have the map's own segments."""
        self.segments, self.unknown, self.later = dict(new.segments), new.unknown, new.later
        for listed in new.rows.values():
            self._widen(listed.places.dtype)
            is_first = self.places[listed.positions] == 0
            self.places[listed.positions] = listed.places
            np.add.at(self._regions.stored, listed.positions[is_first] >> self._regions.row_bits, 1)
        self._settle()

    def differing(self, before: "RowMap") -> Int64s:
        """int64 [n], ascending: keys of the rows that lie elsewhere than in another map of the same tables. Maps give
        slots to segments as they like; a segment's number is the same in all."""
        parts = [np.empty(0, np.int64)]
        for table, (layout, num_rows) in self.shapes.items():
            base, now, then = int(self.tables.bases[table]), self.segments[layout], before.segments[layout]
            bits = now.geo.place_bits
            for first, stop in sorted({*self._used(base, base + num_rows), *before._used(base, base + num_rows)}):
                ours, theirs = (each.places[first:stop].astype(np.int64) for each in (self, before))
                is_other = now.arrays.numbers[ours >> bits] != then.arrays.numbers[theirs >> bits]
                is_other |= (ours ^ theirs) & ((1 << bits) - 1) != 0
                parts.append(np.flatnonzero(is_other) + (first - base + (table << KEY_ROW_BITS)))
        return np.concatenate(parts)

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        return self.positions(layout, keys), self.places

    def layout_ids(self, stored: Stored) -> Int64s:
        """Of these segments, by the first row of each; -1 if that is of a table that is not known."""
        known, tables = np.append(self.tables.layout_ids, -1), stored["first_key"] >> KEY_ROW_BITS
        found: Int64s = known[np.where((tables >= 0) & (tables < len(known)), tables, len(known) - 1)]
        return found

    def publish(
        self, segments: Segments, stored: Stored, keys: Int64s, current: int, txn_id: int, *, is_moved: bool
    ) -> None:
        """Enter segments just written by transaction ``txn_id``, with these keys: of one epoch, unless cleaning has
        moved their rows. ``current``: the version that is current."""
        positions = self.positions(segments.layout, keys)
        slots, epoch = segments.take(stored, txn_id), current if is_moved else int(stored["newest"][0])
        held_for, late_for = segments.held(max(current, epoch - 1)), segments.held(epoch)
        emptied = np.empty(len(keys), np.int64)
        dead, num_emptied = publish(
            positions, slots, np.cumsum(stored["rows"]), epoch, is_moved, segments.geo.place_bits, self.places,
            self._regions, segments.arrays, held_for, late_for, emptied,
        )  # fmt: skip
        segments.rows -= dead
        segments.dead = np.concatenate([segments.dead, emptied[:num_emptied]])
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
        listed, _, _ = self._list(tree, segments, stored, slots, _ANY_EPOCH)
        is_live = (self.places[listed.positions] == listed.places) & (listed.epochs > since)
        return listed.keys[is_live], listed.epochs[is_live].view(np.uint64)

    def written_since(self, tree: Tree, since: int) -> Int64s:
        """Keys of the rows that are of epochs after ``since``, ascending."""
        parts = [np.empty(0, np.int64)]
        for layout, segments in self.segments.items():
            slots = segments.in_use
            slots = slots[(segments.arrays.newest[slots] > since) & (segments.arrays.live[slots] > 0)]
            some = (slots[first : first + _TOGETHER] for first in range(0, len(slots), _TOGETHER))
            parts += (self.live_rows(tree, layout, each, since)[0] for each in some)
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

    def is_stored(self, layout: RowLayout, keys: Int64s, since: int = 0) -> Bools:
        """bool [n]: which rows of one layout ``stored_rows`` would list."""
        segments = self.segments[layout]
        slots = self.places[self.positions(layout, keys)] >> segments.geo.place_bits
        stored: Bools = segments.arrays.newest[slots] > since
        return stored


class NewSegments:
    """What a later tree has beyond a map, ``base``; also where it has any row of the map's tables. ``layouts``,
    ``unknown``, ``later``: as ``RowMap``'s. ``segments``: by layout, without those that are gone. ``rows``: by layout,
    those in new segments; keys ascend, and places are of the map's type or wider. ``changed``: int64 [n], ascending:
    keys of the rows that are others than the map shows."""

    def __init__(self, base: RowMap, segments: Mapping[RowLayout, Segments]) -> None:
        self.base, self.segments = base, segments
        self.layouts, self.unknown, self.later = base.layouts, base.unknown, base.later
        self.rows: dict[RowLayout, Listed] = {}
        self.changed: Int64s = np.empty(0, np.int64)

    @classmethod
    def read(
        cls, base: RowMap, segments: Mapping[RowLayout, Segments], tree: Tree, stored: Stored, *,
        shown: int, last: int, oldest: int,
    ) -> "NewSegments | None":  # fmt: skip
        """Read the indexes that are new in a tree with these ``stored`` segments, which shows version ``last``; None if
        versions were rolled back, and a new map is to be made. DamagedError: a segment is damaged, or holds what cannot
        be a row of its tables. ``base``: of version ``shown``. ``segments``: the map's, or a copy of them; they are
        changed. ``oldest``: transaction of the oldest tree that is in use."""
        new, gone = cls(base, segments), {}
        numbers, is_new = np.ascontiguousarray(stored["number"]), np.ones(len(stored), np.bool_)
        for layout, own in segments.items():
            own.reuse(oldest)
            slots = own.in_use
            at, is_there = _look_up(numbers, own.arrays.numbers[slots])
            is_new[at[is_there]] = False
            gone[layout] = slots[~is_there | (own.arrays.oldest[slots] > last)]
        at, is_there = _look_up(numbers, base.later["number"])
        is_new[at[is_there]] = False
        came = np.concatenate([base.later[is_there], read_indexes(tree, stored[is_new])])
        layout_ids, is_shown = base.layout_ids(came), came["oldest"] <= last
        new.later = came[~is_shown]
        new.unknown += int(came["rows"][(layout_ids < 0) & is_shown].sum())
        changed = [new.changed]
        for layout, own in segments.items():
            part = came[(layout_ids == own.geo.layout_id) & is_shown]
            changed.append(new._enter(tree, layout, part[np.lexsort((part["number"], part["newest"]))], shown, last))
        new.changed = np.sort(np.concatenate(changed))
        for layout, slots in gone.items():
            own = segments[layout]
            if own.arrays.live[slots].any():  # it shows rows, is gone or of a later version, and has no successor
                return None
            own.free(slots, tree.txn_id)
            own.dead = np.empty(0, np.int64)
        return new

    def _enter(self, tree: Tree, layout: RowLayout, stored: Stored, shown: int, last: int) -> Int64s:
        """Enter segments of one layout in ascending order of (newest epoch, number); keys of the rows that are others.
        A row of an epoch up to ``shown`` was only moved, unless it was in a segment of later epochs: then ``shown`` was
        rolled back."""
        segments = self.segments[layout]
        slots, bits, arrays = _take_slots(tree, segments, stored), segments.geo.place_bits, segments.arrays
        listed, unknown, dropped = self.base._list(tree, segments, stored, slots, last)
        arrays.held[slots] += unknown
        self.unknown += int(unknown.sum())
        order = np.argsort(listed.keys, kind="stable")
        is_newest = np.diff(listed.keys[order], append=-1) != 0
        own = Listed(*(column[order[is_newest]] for column in listed))
        before = (self.base.places[own.positions] >> bits).astype(np.int64)
        is_stored = before != 0
        np.add.at(arrays.live, own.places >> bits, 1)
        np.subtract.at(arrays.live, before[is_stored], 1)
        segments.rows -= dropped + len(order) - int(np.count_nonzero(~is_stored))
        width = place_type(segments.geo, slots.tolist(), self.base.places.dtype)
        self.rows[layout] = own._replace(places=own.places.astype(width))
        others: Int64s = own.keys[(own.epochs > shown) | ~is_stored | (own.epochs < arrays.oldest[before])]
        return others

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        own, places = self.rows[layout], self.base.places[self.base.positions(layout, keys)]
        places = places.astype(np.promote_types(places.dtype, own.places.dtype), copy=False)
        at, is_own = _look_up(own.keys, keys)
        places[is_own] = own.places[at[is_own]]
        return np.arange(len(keys)), places


RowPlaces = RowMap | NewSegments


def _look_up(listed: Any, wanted: Any) -> tuple[Int64s, Bools]:
    """Where in ``listed``, ascending, each of the wanted belongs, and whether it is there."""
    at = np.searchsorted(listed, wanted)
    is_there = at < len(listed)
    is_there[is_there] = listed[at[is_there]] == wanted[is_there]
    return at, is_there


def _take_slots(tree: Tree, segments: Segments, stored: Stored) -> Int64s:
    """Slots for stored segments of one layout. DamagedError if they cannot be of the layout."""
    if not (fits := segments.fits(stored)).all():
        raise _not_of_its_tables(tree, int(stored["number"][int(np.argmin(fits))]))
    return segments.take(stored, tree.txn_id)


def _not_of_its_tables(tree: Tree, number: int) -> DamagedError:
    return DamagedError(
        f"{tree.path}: segment {number} cannot be one of its tables' rows (wrong number or size: is the manifest "
        f"another store's?). {RESTORE}"
    )
