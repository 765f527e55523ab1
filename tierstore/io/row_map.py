"""Which place in the log each row has: 4 bytes a row, and what is known of each segment.

A place is ``slot << place_bits | index``: the segment's slot, a small number that is used again when the segment is
gone, and the row's number in the segment. 0 stands for a row that was never written; slot 0 is never used. The map is
made from the indexes of the segments, and kept up to date by the writer.

**Versions.** A row may lie in several segments: once as it is now, and as kept versions show it. Rows of a segment are
*live* if the map leads to them, *held* if only kept versions need them, else dead. Of a row's entries the newest is the
one in the segment with the largest (newest epoch, number). That is right though segments that cleaning has put together
hold rows of several epochs: only live rows are moved, only among segments whose rows all lie between the same two kept
versions or are all of one open epoch, and a row written later has at least the newest epoch that there is, but for one
written late for a version under way, which no segment with newer rows holds.

What a row's successor leaves behind is counted under the last version that shows it, so that counting ends with that
version: no list of held rows is kept.

**Readers.** Entries may change under a reader. It holds a lease on a snapshot, the tree of some transaction t: pages of
that tree, and of any later one, stay as they are (``pins.py``). The writer enters a place after the transaction that
wrote it is visible and before the next snapshot is shown. So a reader at t finds an old place or a new one, and both
stay readable while it holds its lease, provided that a slot is not given to another segment meanwhile: a slot waits,
when its segment is deleted, for the leases on snapshots of before. Entries are aligned words, which no processor tears.
A process that follows the writer changes its map in the same way while it shows the same version (``RowMap.advance``).

**Memory.** The map takes pages of 4 KiB where rows are stored. A *region* of it, 2 MiB or more, goes to huge pages
once one row in 256 is stored: of random rows, nearly all of its pages are touched by then.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError, DamagedError
from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import inline, kernel
from ..rows import KEY_ROW_BITS, PAGE_HEADER_WORDS, ROW_MASK, RowLayout
from ..system.oserrors import RESTORE
from ..system.sizes import format_size
from .indexes import STORED, Stored, byte_ranges, read_indexes
from .mapped import HUGE_PAGE_BYTES, prefetch_word, use_huge_pages, zeros
from .segments import KEYS, NEWEST, Geometry, rows_listed
from .slots import SegmentArrays, Segments
from .snapshot import Tree

if TYPE_CHECKING:
    from .tail import Tail

Places = NDArray[np.uint32]

_COPY_STEP: Final = 1024
_LIST_STEP: Final = 1 << 20
_AHEAD: Final = 16
_SPARSE_ROWS: Final = 256
"""A region with a stored row among so many is to be in huge pages."""
_MOST_REGIONS: Final = 1024
"""Neighbours in pages of different size are maps of their own to the kernel, which allows 65,530."""


class TableArrays(NamedTuple):
    """What kernels know of each table, by table index; a table not added has base -1."""

    bases: Int64s
    """Position of row 0 in the flat array of places."""
    num_rows: Int64s
    layout_ids: Int64s


class Regions(NamedTuple):
    """How many rows are stored, by region of ``1 << row_bits`` rows."""

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
def _publish(
    positions: Int64s, slot: int, epoch: int, is_moved: bool, place_bits: int, places: Places, regions: Regions,
    segments: SegmentArrays, held_for: Int32s, late_for: Int32s, emptied: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Enter the rows of a segment just written: all of one epoch, or moved by cleaning.

    A row that has a version of a later epoch already, while that for ``epoch`` was under way, is held.

    Args:
        held_for: int32 [slots]: rows of the epochs before, by segment, that a version before ``epoch`` needs.
        late_for: the same, for ``epoch`` itself.
        emptied: int64 [rows], receives the slots without live and held rows.

    Returns:
        How many rows died, and how many segments were emptied.
    """
    dead, count = 0, 0
    for index in range(len(positions)):
        if index + _AHEAD < len(positions):
            prefetch_word(places, positions[index + _AHEAD])
        at = positions[index]
        old = np.int64(places[at])
        before = old >> place_bits
        if old != 0 and not is_moved and segments.newest[before] > epoch:
            segments.held[slot] += 1
            late_for[slot] += 1
            continue
        places[at] = np.uint32(slot << place_bits | index)
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


@kernel
def _enter(
    words: Words, indexes: Int64s, slots: Int64s, last: int, kept: Int64s, geo: Geometry, tables: TableArrays,
    places: Places, regions: Regions, segments: SegmentArrays, held: NDArray[np.int32],
) -> tuple[int, int, int]:  # fmt: skip
    """Enter the rows of stored segments, in ascending order of (newest epoch, number).

    Args:
        indexes: word offset of each one's index, which was checked.
        last: rows of later epochs are left out.
        kept: int64, versions that are kept, ascending.
        held: int32 [kept, slots]: receives the rows that have a newer version, under the last one that shows them.

    Returns:
        -1 or the position of a segment that holds what cannot be; rows of tables that are not known; rows that died.
    """
    unknown, dead = 0, 0
    for s in range(len(indexes)):
        at = indexes[s]
        slot = slots[s]
        num, is_mixed = rows_listed(words, at)
        for i in range(num):
            if i + _AHEAD < num:
                ahead = np.int64(words[at + KEYS + i + _AHEAD])
                if is_known(ahead >> KEY_ROW_BITS, tables):
                    prefetch_word(places, tables.bases[ahead >> KEY_ROW_BITS] + (ahead & ROW_MASK))
            key = np.int64(words[at + KEYS + i])
            table = key >> KEY_ROW_BITS
            if not can_be_stored(key, geo.layout_id, tables):
                return s, unknown, dead
            epoch = np.int64(words[at + KEYS + num + i]) if is_mixed else segments.newest[slot]
            if epoch > last:
                continue
            if not is_known(table, tables):
                segments.held[slot] += 1
                unknown += 1
                continue
            position = tables.bases[table] + (key & ROW_MASK)
            old = np.int64(places[position])
            if old == 0:
                regions.stored[position >> regions.row_bits] += 1
            else:
                before = old >> geo.place_bits
                segments.live[before] -= 1
                which = len(kept) - 1
                while which >= 0 and kept[which] >= epoch:
                    which -= 1
                if which >= 0 and kept[which] >= segments.oldest[before]:
                    segments.held[before] += 1
                    held[which, before] += 1
                else:
                    dead += 1
            places[position] = np.uint32(slot << geo.place_bits | i)
            segments.live[slot] += 1
    return -1, unknown, dead


@kernel
def _list_live(
    words: Words, indexes: Int64s, slots: Int64s, since: int, place_bits: int, tables: TableArrays, places: Places,
    keys: Int64s, epochs: Words,
) -> int:  # fmt: skip
    """List the live rows of segments that are of epochs after ``since``, and the epochs; returns how many."""
    count = 0
    for s in range(len(slots)):
        at = indexes[s]
        num, is_mixed = rows_listed(words, at)
        for i in range(num):
            key = np.int64(words[at + KEYS + i])
            table = key >> KEY_ROW_BITS
            epoch = words[at + KEYS + num + i] if is_mixed else words[at + NEWEST]
            if epoch <= np.uint64(since) or not is_known(table, tables):
                continue
            if places[tables.bases[table] + (key & ROW_MASK)] == np.uint32(slots[s] << place_bits | i):
                keys[count] = key
                epochs[count] = epoch
                count += 1
    return count


@kernel
def _copy_used(source: Places, target: Places, first: int, regions: Regions) -> None:
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


def new_places(total: int) -> Places:
    """Of so many rows, without segments.

    Raises:
        BudgetError: the system refuses memory for them.
    """
    try:
        return zeros(total, np.uint32)
    except (MemoryError, OSError) as error:
        raise BudgetError(
            f"the system refuses {format_size(4 * total)} of address space for the map of {total:,} rows ({error}); "
            "make the tables smaller, raise `ulimit -v`, or let the system overcommit memory"
        ) from error


class RowPlaces(Protocol):
    """Where the rows of some tables lie.

    Attributes:
        layouts: by table index.
        segments: by layout.
        unknown: stored rows of tables that are not known.
    """

    @property
    def layouts(self) -> Mapping[int, RowLayout]: ...
    @property
    def segments(self) -> Mapping[RowLayout, Segments]: ...
    @property
    def unknown(self) -> int: ...

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        """Positions (int64 [n]) of rows of one layout in places; ValueError as ``RowMap.positions``."""


@kernel
def _list_differing(
    now: Places, numbers_now: Words, then: Places, numbers_then: Words, place_bits: int, rows: Int64s
) -> int:
    """List the positions that differ in two maps' places; returns how many. Maps give slots to segments as they like,
    and a segment's number is the same in all."""
    mask = (1 << place_bits) - 1
    count = 0
    for i in range(len(now)):
        a, b = np.int64(now[i]), np.int64(then[i])
        if (a & mask) != (b & mask) or numbers_now[a >> place_bits] != numbers_then[b >> place_bits]:
            rows[count] = i
            count += 1
    return count


_NONE: Final[Mapping[RowLayout, Segments]] = {}


class RowMap:
    """Places of the rows of some tables, and the segments of their layouts.

    One thread at a time may change it, while any number read it: see the module's docstring.

    Attributes:
        places: uint32 [rows of all tables].
        tables: by table index.
        layouts: by table index.
        segments: by layout.
        unknown: stored rows of tables that are not known. Their segments are left alone, with the rows of known tables
            in some of them: add the tables before rows are read or written.
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
            self.tables.bases[index], self.tables.num_rows[index] = total, num_rows
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
            count = int(self.tables.num_rows[index])
            _copy_used(self.places[source : source + count], other.places, target, other._regions)
        other._settle()
        return other

    def copied(self) -> "RowMap":
        """Another map of the same, which may be changed while readers use this one."""
        other = RowMap(self.shapes, {layout: each.copied() for layout, each in self.segments.items()})
        other.unknown, other.later = self.unknown, self.later
        _copy_used(self.places, other.places, 0, other._regions)
        other._settle()
        return other

    def _settle(self) -> None:
        """Have the regions that have become dense in huge pages."""
        size_bytes = self.places.itemsize << self._regions.row_bits
        is_dense = self._regions.stored * _SPARSE_ROWS >= 1 << self._regions.row_bits
        for region in np.flatnonzero(is_dense & ~self._is_huge).tolist():
            use_huge_pages(self.places, region * size_bytes, (region + 1) * size_bytes)
            self._is_huge[region] = True

    def enter(self, tree: Tree, stored: Stored, last: int, kept: Collection[int]) -> None:
        """Enter stored segments, those of later epochs than ``last`` left out.

        Args:
            kept: versions whose rows are to be counted as held.

        Raises:
            DamagedError: a segment holds what cannot be a row of its tables.
        """
        layout_ids = self.layout_ids(stored)
        shown = stored["oldest"] <= last
        self.later = stored[~shown]
        self.unknown += int(stored["rows"][(layout_ids < 0) & shown].sum())
        for segments in self.segments.values():
            own = stored[(layout_ids == segments.geo.layout_id) & shown]
            self._enter_own(tree, segments, own, last, np.array(sorted(kept), np.int64))

    def advance(self, tail: "Tail") -> None:
        """For a reader: enter the tail of the log. Rows may be read through the map meanwhile if the tail is of the
        same version, and has the map's own segments; show readers the tree next."""
        self.segments, self.unknown, self.later = dict(tail.segments), tail.unknown, tail.later
        for layout, (keys, places) in tail.rows.items():
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
            for first in range(0, num_rows, _LIST_STEP):
                count = min(_LIST_STEP, num_rows - first)
                own = slice(base + first, base + first + count)
                rows = np.empty(count, np.int64)
                count = _list_differing(
                    self.places[own], now.arrays.numbers, before.places[own], then.arrays.numbers,
                    now.geo.place_bits, rows,
                )  # fmt: skip
                parts.append(rows[:count] + (first | table << KEY_ROW_BITS))
        return np.concatenate(parts)

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        """See ``RowPlaces``."""
        return self.positions(layout, keys), self.places

    def layout_ids(self, stored: Stored) -> Int64s:
        """Of these segments, by the first row of each; -1 if that is of a table that is not known."""
        known, tables = np.append(self.tables.layout_ids, -1), stored["first_key"] >> KEY_ROW_BITS
        found: Int64s = known[np.where((tables >= 0) & (tables < len(known)), tables, len(known) - 1)]
        return found

    def _enter_own(self, tree: Tree, segments: Segments, stored: Stored, last: int, kept: Int64s) -> None:
        stored = stored[np.lexsort((stored["number"], stored["newest"]))]
        slots, at = take_slots(tree, segments, stored)
        held = np.zeros((len(kept), len(segments.arrays.rows)), np.int32)
        file_map = tree.file_map.rows
        since = file_map.guard.begin()
        bad, unknown, dead = _enter(
            file_map.words, at, slots, last, kept, segments.geo, self.tables, self.places, self._regions,
            segments.arrays, held,
        )  # fmt: skip
        require_entered(tree, segments, stored, since, bad)
        self.unknown += unknown
        self._settle()
        arrays = segments.arrays
        segments.rows -= dead
        for version, counts in zip(kept.tolist(), held, strict=True):
            if counts.any():
                segments.held(version)[:] += counts
        segments.bury(slots[(arrays.live[slots] == 0) & (arrays.held[slots] == 0)])

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
        slots, epoch, stop = segments.take(stored, txn_id), current if is_moved else int(stored["newest"][0]), 0
        held_for, late_for = segments.held(max(current, epoch - 1)), segments.held(epoch)
        all_emptied = []
        for slot, count in zip(slots.tolist(), stored["rows"].tolist(), strict=True):
            stop, part, emptied = stop + count, positions[stop : stop + count], np.empty(count, np.int64)
            dead, num_emptied = _publish(
                part, slot, epoch, is_moved, segments.geo.place_bits, self.places, self._regions, segments.arrays,
                held_for, late_for, emptied,
            )  # fmt: skip
            segments.rows -= dead
            all_emptied.append(emptied[:num_emptied])
        segments.bury(np.concatenate(all_emptied))
        self._settle()

    def positions(self, layout: RowLayout, keys: Int64s) -> Int64s:
        """Where rows of one layout have their entries.

        Raises:
            ValueError: one is no row of a table with this layout.
        """
        positions = np.empty(len(keys), np.int64)
        bad = find_positions(keys, self.segments[layout].geo.layout_id, self.tables, positions)
        if bad >= 0:
            raise ValueError(
                f"keys has {keys[bad]}, row {keys[bad] & ROW_MASK} of table {keys[bad] >> KEY_ROW_BITS}: not a row of "
                "a table that was added, or of a table with another layout than keys[0]'s"
            )
        return positions

    def live_rows(self, tree: Tree, layout: RowLayout, slots: Int64s, since: int = 0) -> tuple[Int64s, Words]:
        """Keys and epochs of the live rows of segments, in their order, those up to an epoch left out.

        Raises:
            DamagedError: an index is not what it was when it was entered, or cannot be read.
        """
        segments = self.segments[layout]
        stored = segments.stored(slots)
        read_indexes(tree, stored)  # a damaged epoch would be written anew, with a good checksum
        starts, _ = byte_ranges(stored, tree.page_bytes)
        count = int(segments.arrays.live[slots].sum())
        keys, epochs = np.empty(count, np.int64), np.empty(count, np.uint64)
        file_map = tree.file_map.rows
        since_fault = file_map.guard.begin()
        count = _list_live(
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
        bases = self.tables.bases
        parts = (self.places[bases[index] : bases[index] + num_rows] for index, (_, num_rows) in self.shapes.items())
        return [int(np.count_nonzero(part)) for part in parts]

    def stored_rows(self, table: int, first: int, stop: int, since: int = 0) -> Int64s:
        """Which of the rows ``[first, stop)`` of a table were written for versions after ``since``, ascending.

        Args:
            since: a version that is kept; 0 for all rows that were ever written.
        """
        base, segments = int(self.tables.bases[table]), self.segments[self.layouts[table]]
        slots = self.places[base + first : base + stop] >> segments.geo.place_bits
        rows: Int64s = np.flatnonzero(segments.arrays.newest[slots] > since) + first
        return rows

    def is_stored(self, layout: RowLayout, keys: Int64s, since: int = 0) -> NDArray[np.bool_]:
        """bool [n]: which rows of one layout ``stored_rows`` would list."""
        segments = self.segments[layout]
        slots = self.places[self.positions(layout, keys)] >> segments.geo.place_bits
        stored: NDArray[np.bool_] = segments.arrays.newest[slots] > since
        return stored


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
