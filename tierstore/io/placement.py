"""Where rows lie that do not lie at their own places: a packed copy keeps rows that are read together side by side.

A row's own place is its key. Rows that were *moved* lie in an *area*: places behind the last block of one of the tables
of their layout, in an order that was chosen when the copy was made. The places they left stay empty. All that stores,
checks and finds blocks goes by place; the cold tier translates at its edge, and nothing else knows. A placement never
changes: it is kept among the records of the row file, twice, and a new one is another copy of the store.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout
from .mapped import zeros

__all__ = ["Area", "Placement", "unpack_placement"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = MAX_ROWS - 1
MAX_AREA_ROWS: Final = 1 << 32


class Area(NamedTuple):
    """Rows of one layout in the order in which they lie."""

    table: int
    """Behind whose rows they lie."""
    first: int
    """Place of the first of them: that of the first block after the table's own."""
    keys: Int64s
    """Of tables of one layout, each key once."""

    @property
    def start(self) -> int:
        """The first place, as a key."""
        return (self.table << KEY_ROW_BITS) + self.first


class _Index(NamedTuple):
    """Key -> place. The first four by table index."""

    bases: Int64s
    """Where in ``bits`` the table's row 0 is; -1 for a table of which no row was moved."""
    lengths: Int64s
    """Words of ``bits`` that the table has."""
    starts: Int64s
    """The first place of the area that the table's rows were moved to, as a key."""
    num_rows: Int64s
    """Of a table with an area behind it; of others as many as there may be."""
    bits: Words
    """[words, 2]: which of 64 rows were moved, and how many moved rows come before them where there is any. Untouched
    parts take no memory."""
    positions: NDArray[np.uint32]
    """Of each moved row, by ascending key, in its area."""


@inline
def _count_bits(word: np.uint64) -> np.int64:
    """How many bits are set, by sums of ever wider fields."""
    pairs = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    mask = np.uint64(0x3333333333333333)
    nibbles = (pairs & mask) + ((pairs >> np.uint64(2)) & mask)
    bytes_ = (nibbles + (nibbles >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    for shift in (8, 16, 32):
        bytes_ += bytes_ >> np.uint64(shift)
    return np.int64(bytes_ & np.uint64(0x7F))


@kernel
def _mark(keys: Int64s, bases: Int64s, bits: Words) -> None:
    """Enter moved rows, ascending by key."""
    for i in range(len(keys)):
        row = keys[i] & _ROW_MASK
        word = bases[keys[i] >> _ROW_BITS] + (row >> 6)
        if bits[word, 0] == np.uint64(0):
            bits[word, 1] = np.uint64(i)
        bits[word, 0] |= np.uint64(1) << np.uint64(row & 63)


@kernel
def _find_places(index: _Index, keys: Int64s, places: Int64s) -> None:
    """Of each key its place; of a row that cannot be, one that cannot be either."""
    for i in range(len(keys)):
        places[i] = keys[i]
        table = keys[i] >> _ROW_BITS
        row = keys[i] & _ROW_MASK
        if table < 0 or table >= len(index.bases):
            continue
        if row >= index.num_rows[table]:
            places[i] = (table << _ROW_BITS) | _ROW_MASK
            continue
        if index.bases[table] < 0 or (row >> 6) >= index.lengths[table]:
            continue
        word = index.bases[table] + (row >> 6)
        bit = np.uint64(1) << np.uint64(row & 63)
        if index.bits[word, 0] & bit:
            before = _count_bits(index.bits[word, 0] & (bit - np.uint64(1)))
            places[i] = index.starts[table] + index.positions[np.int64(index.bits[word, 1]) + before]


class Placement:
    """Row keys to places and back.

    Raises:
        ValueError: the areas cannot be; says why.
    """

    def __init__(self, areas: Sequence[Area]) -> None:
        self.areas: Final = tuple(areas)
        for area in self.areas:
            _check(area)
        keys = np.concatenate([np.empty(0, np.int64), *(area.keys for area in self.areas)])
        order = np.argsort(keys)
        keys = keys[order]
        if (keys[1:] == keys[:-1]).any():
            raise ValueError("a row has two places")
        positions = np.concatenate([np.empty(0, np.uint32), *(_counted(area) for area in self.areas)])
        self._index = _new_index(self.areas, keys, positions[order])
        _mark(keys, self._index.bases, self._index.bits)

    @property
    def num_rows(self) -> int:
        """Rows that were moved."""
        return len(self._index.positions)

    @property
    def size_bytes(self) -> int:
        """12 bytes a row that was moved, and up to 2 bits a row of tables that have such."""
        return sum(area.keys.nbytes for area in self.areas) + sum(column.nbytes for column in self._index)

    def stored_rows(self, table_index: int, layout: RowLayout, num_rows: int) -> int:
        """Places of a table, an area behind it included.

        Raises:
            ValueError: the placement is not one of such a table; says why.
        """
        index = self._index
        if table_index < len(index.bases) and index.bases[table_index] >= 0:
            last = index.bases[table_index] + index.lengths[table_index] - 1
            highest = 64 * int(index.lengths[table_index]) - 64 + int(index.bits[last, 0]).bit_length() - 1
            if highest >= num_rows:
                raise ValueError(f"it has row {highest} of table {table_index}, which has {num_rows} rows")
        for area in self.areas:
            if area.table == table_index:
                if area.first != layout.num_blocks(num_rows) * layout.rows_per_block:
                    raise ValueError(f"its area behind table {table_index} begins at {area.first}")
                index.num_rows[table_index] = num_rows
                return area.first + len(area.keys)
        return num_rows

    def places(self, keys: Int64s) -> Int64s:
        """int64, as long as ``keys``: where these rows lie. What is no row gets a place that is none."""
        places = np.empty_like(keys)
        _find_places(self._index, keys, places)
        return places

    def rows_at(self, places: Int64s) -> Int64s:
        """The keys of the rows that lie at these places, in their order; places without a row are left out."""
        keys = places.copy()
        for area in self.areas:
            inside = (places >= area.start) & (places < area.start + len(area.keys))
            keys[inside] = area.keys[places[inside] - area.start]
        found: Int64s = keys[self.places(keys) == places]
        return found

    def row_at(self, place: int) -> int:
        """The key of the row at a place, or the place itself if there is none."""
        keys = self.rows_at(np.array([place], np.int64))
        return int(keys[0]) if len(keys) else place

    def pack(self) -> bytes:
        """Words: the number of areas; of each table, first place and number of rows, then the keys."""
        parts = [struct.pack("<Q", len(self.areas))]
        for area in self.areas:
            parts += [struct.pack("<QQQ", area.table, area.first, len(area.keys)), area.keys.astype("<i8").tobytes()]
        return b"".join(parts)


def unpack_placement(data: bytes) -> Placement:
    """Inverse of ``Placement.pack``; ValueError or struct.error for anything else."""
    (num_areas,) = struct.unpack_from("<Q", data)
    areas, at = [], 8
    for _ in range(num_areas):
        table, first, count = struct.unpack_from("<QQQ", data, at)
        at += 24
        if count > (len(data) - at) // 8:
            raise ValueError("it is cut short")
        areas.append(Area(table, first, np.frombuffer(data, "<i8", count, at).astype(np.int64)))
        at += 8 * count
    if at != len(data):
        raise ValueError("it has the wrong length")
    return Placement(areas)


def _check(area: Area) -> None:
    if not 0 <= area.table < MAX_TABLES or area.first < 1 or not 0 < len(area.keys) <= MAX_AREA_ROWS:
        raise ValueError("an area is out of range")
    if area.first + len(area.keys) >= MAX_ROWS:
        raise ValueError(f"there is no room for an area behind table {area.table}")
    if int(area.keys.min()) < 0 or int(area.keys.max()) >> KEY_ROW_BITS >= MAX_TABLES:
        raise ValueError("it has a row of a table that cannot be")


def _counted(area: Area) -> NDArray[np.uint32]:
    return np.arange(len(area.keys), dtype=np.uint32)


def _new_index(areas: tuple[Area, ...], keys: Int64s, positions: NDArray[np.uint32]) -> _Index:
    """The index with no row marked yet; ``keys`` ascend."""
    length = 1 + max([int(keys[-1]) >> KEY_ROW_BITS if len(keys) else -1, *(area.table for area in areas)])
    bases, lengths, starts = np.full(length, -1, np.int64), np.zeros(length, np.int64), np.zeros(length, np.int64)
    lasts = np.flatnonzero(np.diff(keys >> KEY_ROW_BITS, append=-1))
    num_words = 0
    for key in keys[lasts].tolist():
        table = key >> KEY_ROW_BITS
        bases[table], lengths[table] = num_words, ((key & _ROW_MASK) >> 6) + 1
        num_words += int(lengths[table])
    owner: dict[int, int] = {}
    for number, area in enumerate(areas):
        for table in np.unique(area.keys >> KEY_ROW_BITS).tolist():
            if owner.setdefault(table, number) != number:
                raise ValueError(f"rows of table {table} lie in two areas")
            starts[table] = area.start
    if len({area.table for area in areas}) < len(areas):
        raise ValueError("two areas lie behind one table")
    num_rows = np.full(length, MAX_ROWS, np.int64)
    return _Index(bases, lengths, starts, num_rows, zeros(2 * num_words, np.uint64).reshape(-1, 2), positions)
