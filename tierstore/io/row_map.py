"""Which place in the log each row has: uint32 a row, and what is known of each segment.

A place is ``slot << place_bits | index``: the segment's slot, a small number that is used again when the segment is
gone, and the row's number in the segment. 0 stands for a row that was never written, so slot 0 is never used.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..errors import TierstoreError
from ..rows import KEY_ROW_BITS
from .segments import COUNT, COUNT_MASK, KEYS, MIXED, NEWEST, Geometry

__all__ = ["SegmentArrays", "TableArrays", "publish"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]
Places = NDArray[np.uint32]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_COPY_STEP: Final = 1024


class TableArrays(NamedTuple):
    """What kernels know of each table, by table index; a table not added has base -1."""

    bases: Int64s
    """Position of row 0 in the flat array of places."""
    num_rows: Int64s
    layout_ids: Int64s


class SegmentArrays(NamedTuple):
    """What is known of the segments of one layout, by slot.

    ``live + held + dead == rows`` of each.
    """

    data_pages: Int64s
    """Page of the first block; 0 where the slot is free."""
    numbers: Words
    newest: Int64s
    """The largest epoch of its rows."""
    oldest: Int64s
    rows: Int32s
    live: Int32s
    """Rows whose newest version is here."""
    held: Int32s
    """Rows that have a newer version and that a kept version needs."""
    pages: Int32s


@inline
def position_of(key: int | np.int64, tables: TableArrays) -> int | np.int64:
    return tables.bases[key >> _ROW_BITS] + (key & _ROW_MASK)


@kernel
def publish(
    keys: Int64s,
    slot: int,
    epoch: int,
    place_bits: int,
    tables: TableArrays,
    places: Places,
    segments: SegmentArrays,
    held_for: Int32s,
    late_for: Int32s,
) -> None:
    """Enter the rows of a segment just written, whose epochs are all the same.

    A row that has a version of a later epoch already, for which ``epoch`` was under way when that was written, is held.

    Args:
        held_for: int32 [slots], of ``epoch``: by segment, the rows that versions before it need; counted here.
        late_for: the same, of the epoch after.
    """
    for index in range(len(keys)):
        at = position_of(keys[index], tables)
        old = np.int64(places[at])
        if old == 0:
            places[at] = np.uint32(slot << place_bits | index)
            segments.live[slot] += 1
            continue
        before = old >> place_bits
        if segments.newest[before] > epoch:
            segments.held[slot] += 1
            late_for[slot] += 1
            continue
        places[at] = np.uint32(slot << place_bits | index)
        segments.live[slot] += 1
        segments.live[before] -= 1
        if segments.newest[before] < epoch:
            segments.held[before] += 1
            held_for[before] += 1


@kernel
def enter_segment(
    words: Words, index: int, slot: int, last: int, kept: Int64s, geo: Geometry, tables: TableArrays, places: Places,
    segments: SegmentArrays, held: Int32s,
) -> int:  # fmt: skip
    """Enter the rows of a stored segment whose index was checked; segments come in ascending (newest epoch, number), so
    that the newest version of a row comes last.

    Args:
        index: word offset of its index in the file.
        last: versions of rows for later epochs are left out.
        kept: int64, versions that are kept, ascending.
        held: int32 [kept, slots]: rows that have a newer version, under the last kept version that shows them.

    Returns:
        -1, or the number of a row that cannot be.
    """
    num = np.int64(words[index + COUNT] & COUNT_MASK)
    is_mixed = (words[index + COUNT] & MIXED) != np.uint64(0)
    newest = np.int64(words[index + NEWEST])
    for i in range(num):
        key = np.int64(words[index + KEYS + i])
        table = key >> _ROW_BITS
        if table >= len(tables.bases) or tables.bases[table] < 0:
            continue
        if tables.layout_ids[table] != geo.layout_id or (key & _ROW_MASK) >= tables.num_rows[table]:
            return i
        epoch = np.int64(words[index + KEYS + num + i]) if is_mixed else newest
        if epoch > last:
            continue
        at = tables.bases[table] + (key & _ROW_MASK)
        old = np.int64(places[at])
        if old != 0:
            before = old >> geo.place_bits
            segments.live[before] -= 1
            which = len(kept) - 1
            while which >= 0 and kept[which] >= epoch:
                which -= 1
            if which >= 0 and kept[which] >= segments.newest[before]:
                segments.held[before] += 1
                held[which, before] += 1
        places[at] = np.uint32(slot << geo.place_bits | i)
        segments.live[slot] += 1
    return -1


@kernel
def _copy_used(source: Places, target: Places) -> None:
    """Copy what is not zero, so that untouched memory stays untouched."""
    for start in range(0, len(source), _COPY_STEP):
        end = min(start + _COPY_STEP, len(source))
        used = False
        for i in range(start, end):
            used = used or source[i] != 0
        if used:
            for i in range(start, end):
                target[i] = source[i]


class Segments:
    """The segments of one layout, by slot, and which slots are free.

    A slot is given away again only when no reader can still hold a place in it (``RowMap.free_slots``).
    """

    def __init__(self, geo: Geometry) -> None:
        self.geo: Final = geo
        self.arrays = SegmentArrays(*(np.zeros(1, dtype) for dtype in _DTYPES))
        self.checksums: Words = np.zeros(1, np.uint64)
        self._free: list[int] = []

    @property
    def max_slots(self) -> int:
        return 1 << (32 - self.geo.place_bits)

    def take_slots(self, count: int) -> Int64s:
        """Free slots, in ascending order; arrays grow by half at a time, as new ones."""
        missing = count - len(self._free)
        if missing > 0:
            length = len(self.arrays.numbers)
            grown = min(self.max_slots, max(length + missing, length + length // 2))
            if grown < length + missing:
                raise TierstoreError(
                    f"the log holds {length - 1} segments of rows of one kind, and can hold no more; "
                    "run tierstore compact, or make tables of another dimension or optimizer"
                )
            self.arrays = SegmentArrays(*(_grown(column, grown) for column in self.arrays))
            self.checksums = _grown(self.checksums, grown)
            self._free.extend(range(grown - 1, length - 1, -1))
        taken = sorted(self._free.pop() for _ in range(count))
        return np.array(taken, np.int64)

    def give_slots(self, slots: Int64s) -> None:
        self._free.extend(slots.tolist())

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self.arrays) + self.checksums.nbytes


_DTYPES: Final = (np.int64, np.uint64, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)


def _grown(column: Any, length: int) -> Any:
    grown = np.zeros(length, column.dtype)
    grown[: len(column)] = column
    return grown


class RowMap:
    """Places of the rows of all tables, and the segments of all layouts. One thread at a time may change it, while any
    number read it: see ``View``.

    Attributes:
        places: uint32 [rows of all tables].
        tables: by table index.
        layouts: by table index.
        segments: by layout.
    """

    def __init__(self) -> None:
        self.layouts: dict[int, RowLayout] = {}
        self.places: Places = np.zeros(0, np.uint32)
        empty = np.zeros(0, np.int64)
        self.tables = TableArrays(empty, empty, empty)
        self.segments: dict[RowLayout, Segments] = {}
        self._held: dict[tuple[int, RowLayout], Int32s] = {}
        self._leaving: list[tuple[int, Segments, Int64s]] = []

    @property
    def size_bytes(self) -> int:
        """Of address space; memory is taken where rows exist."""
        held = sum(counts.nbytes for counts in self._held.values())
        return self.places.nbytes + held + sum(each.size_bytes for each in self.segments.values())

    def with_table(self, table_index: int, layout: RowLayout, num_rows: int) -> "RowMap":
        """A map that knows one table more; readers may go on using the old one."""
        other = RowMap()
        other.layouts = {**self.layouts, table_index: layout}
        other.segments = dict(self.segments)
        if layout not in other.segments:
            other.segments[layout] = Segments(geometry(layout, len(other.segments)))
        row = (len(self.places), num_rows, other.segments[layout].geo.layout_id)
        length = max(len(self.tables.bases), table_index + 1)
        columns = []
        for column, value in zip(self.tables, row, strict=True):
            grown = np.full(length, -1, np.int64)
            grown[: len(column)] = column
            grown[table_index] = value
            columns.append(grown)
        other.tables = TableArrays(*columns)
        other.places = zeros(len(self.places) + num_rows, np.uint32)
        _copy_used(self.places, other.places)
        other._held, other._leaving = self._held, self._leaving
        return other

    def held_under(self, version: int, layout: RowLayout) -> Int32s:
        """int32 [slots]: rows that have a newer version, and that the kept versions up to this one need."""
        length = len(self.segments[layout].arrays.numbers)
        counts = self._held.get((version, layout), np.zeros(0, np.int32))
        if len(counts) < length:
            counts = self._held[version, layout] = _grown(counts, length)
        return counts

    def release(self, kept: Collection[int]) -> None:
        """Rows that only versions need that are not kept any more are dead."""
        for version, layout in [pair for pair in self._held if pair[0] not in kept]:
            counts = self._held.pop((version, layout))
            self.segments[layout].arrays.held[: len(counts)] -= counts
