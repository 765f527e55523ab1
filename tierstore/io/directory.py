"""Block number -> page number in the LMDB file, for all tables in one flat array.

An entry is a uint32 page number, 0 for a block that was never written; untouched parts of the array take no memory. It
is built from a walk of the B-tree and refreshed, entry by entry, after each write.

Why entries may change under a reader: a reader holds a lease on a snapshot, that is, on the tree of some transaction t,
by a lock that the writer asks for (``pins.py``). LMDB reuses a page only if it was freed by a transaction older than
every tree that is held so, and a lease on t keeps every page that was part of the tree at t *or at any time after t*. A
writer publishes an entry only after the transaction that wrote the page is on disk and visible. Whether a reader at t
finds the old page number (in the tree at t) or the new one (in a later tree), its page therefore stays as it is until
the lease ends. And a reader that starts after the writer took the next snapshot finds only new numbers: entries are
published before the snapshot is. Entries are aligned 32-bit words, which no processor tears.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import kernel
from ..rows import KEY_ROW_BITS, RowLayout
from .btree import META_KEY, Entries
from .checksum import mix_key
from .mapped import zeros

__all__ = ["Directory", "TableArrays", "fill_pages", "tally"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_COPY_STEP: Final = 1024
_LIST_STEP: Final = 1 << 17


class TableArrays(NamedTuple):
    """What kernels know of each table, by table index; a table not added has base -1."""

    bases: Int64s
    """Directory position of block 0."""
    num_rows: Int64s
    num_blocks: Int64s
    layout_ids: Int64s
    block_bytes: Int64s


@kernel
def fill_pages(entries: Entries, num_entries: int, version: int, tables: TableArrays, pages: NDArray[np.uint32]) -> int:
    """Enter blocks of known tables with epochs up to ``version``; in key order, so that the newest remains.

    Returns -1, or the position of an entry that cannot be a block of its table.
    """
    for i in range(num_entries):
        if entries.block_keys[i] == META_KEY:
            break
        key = np.int64(entries.block_keys[i])
        table = key >> _ROW_BITS
        if table >= len(tables.bases) or tables.bases[table] < 0 or np.int64(entries.epochs[i]) > version:
            continue
        block = key & _ROW_MASK
        if (
            block >= tables.num_blocks[table]
            or entries.sizes[i] != tables.block_bytes[table]
            or entries.pages[i] == 0
            or entries.pages[i] > 0xFFFFFFFF
        ):
            return i
        pages[tables.bases[table] + block] = np.uint32(entries.pages[i])
    return -1


@kernel
def tally(block_keys: Words, epochs: Words, counts: Int64s, hashes: Words) -> None:
    """Add blocks to each table's count and directory hash."""
    for i in range(len(block_keys)):
        table = np.int64(block_keys[i]) >> _ROW_BITS
        counts[table] += 1
        hashes[table] += mix_key(block_keys[i], epochs[i])


@kernel
def _mark(positions: Int64s, written: Words) -> None:
    for i in range(len(positions)):
        written[positions[i] >> 6] |= np.uint64(1) << np.uint64(positions[i] & 63)


@kernel
def _list_marked(first: int, num_blocks: int, key: int, written: Words, out: Words) -> int:
    """Write the block keys of the marked positions among ``[first, first + num_blocks)``; returns how many."""
    count = 0
    position = first
    end = first + num_blocks
    while position < end:
        word = written[position >> 6] >> np.uint64(position & 63)
        if word == np.uint64(0):
            position = (position | 63) + 1
            continue
        if word & np.uint64(1):
            out[count] = np.uint64(key + position - first)
            count += 1
        position += 1
    return count


@kernel
def _copy_used(source: NDArray[np.uint32], target: NDArray[np.uint32]) -> None:
    """Copy what is not zero, so that untouched memory stays untouched."""
    for start in range(0, len(source), _COPY_STEP):
        end = min(start + _COPY_STEP, len(source))
        used = False
        for i in range(start, end):
            used = used or source[i] != 0
        if used:
            for i in range(start, end):
                target[i] = source[i]


@kernel
def _compare(
    places: Int64s,
    bases: Int64s,
    rows_per_block: Int64s,
    pages: NDArray[np.uint32],
    other_pages: NDArray[np.uint32],
    differs: NDArray[np.bool_],
) -> None:
    """``differs[i]``: whether the block of ``places[i]`` has not the same page in both."""
    for i in range(places.size):
        table = places[i] >> _ROW_BITS
        position = bases[table] + (places[i] & _ROW_MASK) // rows_per_block[table]
        differs[i] = pages[position] != other_pages[position]


class Directory:
    """The flat array, the tables' places in it, and which blocks were written at which epoch while it existed.

    Attributes:
        pages: uint32 [blocks of all tables].
        tables: by table index.
        layouts: by table index.
        is_blank: no block was entered yet, so that there is nothing to copy where a table is added.
    """

    def __init__(self) -> None:
        self.layouts: dict[int, RowLayout] = {}
        self.pages: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._written: dict[int, Words] = {}
        self.is_blank = True
        empty = np.zeros(0, np.int64)
        self.tables = TableArrays(empty, empty, empty, empty, empty)
        self._layout_ids: dict[RowLayout, int] = {}

    @property
    def size_bytes(self) -> int:
        return self.pages.nbytes + sum(marks.nbytes for marks in self._written.values())

    def layout_id(self, layout: RowLayout) -> int:
        return self._layout_ids[layout]

    def with_table(self, table_index: int, layout: RowLayout, num_rows: int) -> "Directory":
        """A directory that knows one table more; readers may go on using the old one."""
        other = Directory()
        other.layouts = {**self.layouts, table_index: layout}
        other._layout_ids = dict(self._layout_ids)
        layout_id = other._layout_ids.setdefault(layout, len(other._layout_ids))
        num_blocks = layout.num_blocks(num_rows)
        base = len(self.pages)
        row = (base, num_rows, num_blocks, layout_id, layout.block_bytes)
        length = max(len(self.tables.bases), table_index + 1)
        columns = []
        for column, value in zip(self.tables, row, strict=True):
            grown = np.full(length, -1, np.int64)
            grown[: len(column)] = column
            grown[table_index] = value
            columns.append(grown)
        other.tables = TableArrays(*columns)
        other.pages = zeros(base + num_blocks, np.uint32)
        other.is_blank = self.is_blank
        if not self.is_blank:
            _copy_used(self.pages, other.pages)
        for epoch, marks in self._written.items():
            other._marks(epoch)[: len(marks)] |= marks
        return other

    def without_tables(self, first: int) -> "Directory":
        """One that does not know the tables from index ``first`` on, which were added last; for readers, who may go on
        using the old one."""
        other = Directory()
        other.layouts = {index: layout for index, layout in self.layouts.items() if index < first}
        other.tables = TableArrays(*(column[:first] for column in self.tables))
        other._layout_ids = self._layout_ids
        other.pages, other.is_blank = self.pages[: int(self.tables.bases[first])], self.is_blank
        return other

    def emptied(self) -> "Directory":
        """The same tables without any block."""
        other = Directory()
        other.layouts, other.tables, other._layout_ids = self.layouts, self.tables, self._layout_ids
        other.pages = zeros(len(self.pages), np.uint32)
        return other

    def positions(self, block_keys: Words) -> Int64s:
        """Where in ``pages`` the blocks' entries are."""
        keys = block_keys.astype(np.int64)
        positions: Int64s = self.tables.bases[keys >> _ROW_BITS] + (keys & _ROW_MASK)
        return positions

    @cached_property
    def _rows_per_block(self) -> Int64s:
        """By table index."""
        rows = np.ones(len(self.tables.bases), np.int64)
        for table, layout in self.layouts.items():
            rows[table] = layout.rows_per_block
        return rows

    def differs(self, other: "Directory", places: Int64s) -> NDArray[np.bool_]:
        """bool [n]: whether the blocks of the rows at these places (``ColdTier.place``) are elsewhere in another
        directory of the same tables."""
        differs = np.empty(len(places), np.bool_)
        _compare(places, self.tables.bases, self._rows_per_block, self.pages, other.pages, differs)
        return differs

    def _marks(self, epoch: int) -> Words:
        """One bit a block: whether it was written at this epoch."""
        if epoch not in self._written:
            self._written[epoch] = np.zeros(len(self.pages) // 64 + 1, np.uint64)
        return self._written[epoch]

    def publish(self, positions: Int64s, pages: Int64s, epoch: int) -> None:
        """Enter blocks freshly written at this epoch."""
        self.is_blank = False
        self.pages[positions] = pages.astype(np.uint32)
        _mark(positions, self._marks(epoch))

    def written_blocks(self, after: int, up_to: int) -> Iterator[Words]:
        """Keys of the blocks written at epochs in (after, up_to], ascending, in chunks."""
        chosen = [marks for epoch, marks in self._written.items() if after < epoch <= up_to]
        if not chosen:
            return
        written: Words = np.bitwise_or.reduce(chosen)
        out = np.empty(_LIST_STEP, np.uint64)
        for table in sorted(self.layouts):
            base, num_blocks = int(self.tables.bases[table]), int(self.tables.num_blocks[table])
            for first in range(0, num_blocks, _LIST_STEP):
                length = min(_LIST_STEP, num_blocks - first)
                count = _list_marked(base + first, length, (table << _ROW_BITS) + first, written, out)
                if count:
                    yield out[:count].copy()

    def forget_written(self, up_to: int) -> None:
        """Drop the marks of epochs that nobody will ask for again."""
        self._written = {epoch: marks for epoch, marks in self._written.items() if epoch > up_to}
