"""The flat array of places that ``row_map.py`` explains, and the kernels that enter rows and list them."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError
from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..system.sizes import format_size
from .known_segments import SegmentArrays
from .mapped import prefetch_word, zeros
from .segments import KEYS, NEWEST, Geometry, rows_listed

Places = NDArray[np.uint32] | NDArray[np.int64]

NARROW: Final = np.dtype(np.uint32)
_WIDE: Final = np.dtype(np.int64)
_COPY_STEP: Final = 1024
_AHEAD: Final = 16


class TableArrays(NamedTuple):
    """What kernels know of each table, by table index; a table that was dropped has base -1, and one that was not added
    layout -1 too."""

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
def is_dropped(table: int | np.int64, tables: TableArrays) -> bool:
    """Whether the rows of a table that is not known are nobody's."""
    return table < len(tables.bases) and tables.layout_ids[table] >= 0  # type: ignore[return-value]


@inline
def can_be_stored(key: np.int64, layout_id: int, tables: TableArrays) -> bool:
    """Whether a segment of this layout may have the key: of a row of a table with it, or of an unknown table."""
    table = key >> KEY_ROW_BITS
    if not is_known(table, tables):
        return bool(table >= 0)
    return bool(tables.layout_ids[table] == layout_id and (key & ROW_MASK) < tables.num_rows[table])


@kernel
def publish(
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
        places[at] = slot << place_bits | index
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
def enter(
    words: Words, indexes: Int64s, slots: Int64s, last: int, kept: Int64s, geo: Geometry, tables: TableArrays,
    places: Places, regions: Regions, segments: SegmentArrays, beaten: Int64s, beaten_slots: Int64s,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Enter the rows of stored segments, which come in any order.

    Args:
        indexes: word offset of each one's index, which was checked.
        last: rows of later epochs are left out.
        kept: int64, versions that are kept, ascending.
        beaten, beaten_slots: int64 [rows], receive the positions in ``places`` of the rows that have a newer version
            and may be held, and the slots that they are in.

    Returns:
        -1 or the position of a segment that holds what cannot be; rows of tables that are not known; rows that are
        dead; rows that are beaten.
    """
    unknown, dead, count = 0, 0, 0
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
                return s, unknown, dead, count
            epoch = np.int64(words[at + KEYS + num + i]) if is_mixed else segments.newest[slot]
            if epoch > last:
                continue
            if not is_known(table, tables):
                if is_dropped(table, tables):
                    dead += 1
                else:
                    segments.held[slot] += 1
                    unknown += 1
                continue
            position = tables.bases[table] + (key & ROW_MASK)
            old = np.int64(places[position])
            winner, loser = slot, old >> geo.place_bits
            if old == 0:
                regions.stored[position >> regions.row_bits] += 1
            else:
                if _is_older(segments, slot, loser):
                    winner, loser = loser, slot
                which = _last_before(kept, segments.newest[winner])
                if which >= 0 and kept[which] >= segments.oldest[loser]:
                    beaten[count] = position
                    beaten_slots[count] = loser
                    count += 1
                else:
                    dead += 1
                if winner != slot:
                    continue
                segments.live[loser] -= 1
            places[position] = slot << geo.place_bits | i
            segments.live[slot] += 1
    return -1, unknown, dead, count


@inline
def _is_older(segments: SegmentArrays, slot: int, other: int | np.int64) -> bool:
    """Whether a row in one segment is older than the same row in another."""
    if segments.newest[slot] != segments.newest[other]:
        return segments.newest[slot] < segments.newest[other]  # type: ignore[no-any-return]
    return segments.numbers[slot] < segments.numbers[other]  # type: ignore[no-any-return]


@inline
def _last_before(kept: Int64s, epoch: int) -> int:
    """Which of the kept versions, ascending, is the last below an epoch; -1 if none is."""
    which = len(kept) - 1
    while which >= 0 and kept[which] >= epoch:
        which -= 1
    return which


@kernel
def list_live(
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
            if np.int64(places[tables.bases[table] + (key & ROW_MASK)]) == (slots[s] << place_bits | i):
                keys[count] = key
                epochs[count] = epoch
                count += 1
    return count


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
    """Of so many rows, without segments.

    Raises:
        BudgetError: the system refuses memory for them.
    """
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


@kernel
def list_differing(
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
