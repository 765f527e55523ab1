"""Which place in the log each row has: uint32 a row, and what is known of each segment.

A place is ``slot << place_bits | index``: the segment's slot, a small number that is used again when the segment is
gone, and the row's number in the segment. 0 stands for a row that was never written, so slot 0 is never used.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS
from .segments import COUNT, COUNT_MASK, KEYS, MIXED, NEWEST, Geometry

__all__ = ["SegmentArrays", "TableArrays", "publish"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]
Places = NDArray[np.uint32]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1


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
