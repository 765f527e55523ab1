"""Kernels that check stored blocks in the order in which they lie in the file.

In a file that has been in use, blocks that follow one another by key lie anywhere. Read in that order they come at the
device's random rate; by page, and in long runs, at its sequential one. So blocks are first entered under their page
numbers, for a range of pages at a time, and then checked from the first page of the range to the last.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS
from .blocks import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS, first_row_key, page_header_status, row_status
from .btree import META_KEY, Entries
from .gather import Geometry
from .mapped import queue_read

__all__ = [
    "Found",
    "PageRange",
    "TableShapes",
    "check_range",
    "new_range",
    "place_blocks",
    "queue_range",
    "table_shapes",
]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

NO_BLOCK: Final = np.uint64(META_KEY)
"""In a PageRange: no block starts at this page."""
_ROW_BITS: Final = KEY_ROW_BITS
_FOUND: Final = 256
_MERGED_PAGES: Final = 16
"""Pages between two blocks up to which reading them too is cheaper than another request."""


class TableShapes(NamedTuple):
    """What the kernels need of each table, by table index; a table that is not known has no rows in a block."""

    rows_per_block: Int64s
    row_words: Int64s
    pages_per_block: Int64s
    num_blocks: Int64s
    has_blocks: NDArray[np.bool_]
    """Set when a block of the table is placed."""


def table_shapes(geometries: dict[int, tuple[Geometry, int]]) -> TableShapes:
    """Shapes of tables whose geometry and number of blocks are given by table index."""
    length = max(geometries, default=-1) + 1
    rows, words, pages, blocks = np.zeros((4, length), np.int64)
    shapes = TableShapes(rows, words, pages, blocks, np.zeros(length, np.bool_))
    for table, (geo, num_blocks) in geometries.items():
        shapes.rows_per_block[table] = geo.rows_per_block
        shapes.row_words[table] = geo.row_words
        shapes.pages_per_block[table] = geo.pages_per_block
        shapes.num_blocks[table] = num_blocks
    return shapes


class PageRange(NamedTuple):
    """Blocks by the page they start at."""

    first_page: int
    block_keys: Words
    epochs: Words


def new_range(first_page: int, num_pages: int) -> PageRange:
    return PageRange(first_page, np.full(num_pages, NO_BLOCK, np.uint64), np.zeros(num_pages, np.uint64))


class Found(NamedTuple):
    """Damage, one place after another."""

    block_keys: Words
    statuses: Int64s
    rows: Int64s
    """Place of the row in its block, or -1 where it is not one row that is damaged."""


def new_found(shapes: TableShapes) -> Found:
    """Room for as much as one block may have, and for more at a time where blocks are small."""
    length = max(_FOUND, 4 + int(max(shapes.rows_per_block, default=0)))
    return Found(np.zeros(length, np.uint64), np.zeros(length, np.int64), np.zeros(length, np.int64))


@kernel
def place_blocks(
    entries: Entries, num_entries: int, epoch_limit: int, page_bytes: int, shapes: TableShapes, pages: PageRange
) -> int:
    """Enter blocks of known tables with epochs up to the limit that start in the range.

    Returns -1, or the position of an entry that cannot be a block of its table.
    """
    for i in range(num_entries):
        if entries.block_keys[i] == META_KEY:
            break
        key = np.int64(entries.block_keys[i])
        table = key >> _ROW_BITS
        if (
            table >= len(shapes.rows_per_block)
            or shapes.rows_per_block[table] == 0
            or np.int64(entries.epochs[i]) > epoch_limit
        ):
            continue
        if (
            entries.pages[i] == 0
            or key & ((1 << _ROW_BITS) - 1) >= shapes.num_blocks[table]
            or entries.sizes[i] != shapes.pages_per_block[table] * page_bytes - 8 * PAGE_HEADER_WORDS
        ):
            return i
        place = entries.pages[i] - pages.first_page
        if 0 <= place < len(pages.block_keys):
            shapes.has_blocks[table] = True
            pages.block_keys[place] = entries.block_keys[i]
            pages.epochs[place] = entries.epochs[i]
    return -1


@kernel
def queue_range(base: int, page_bytes: int, shapes: TableShapes, pages: PageRange, start: int, stop: int) -> None:
    """Start reading the blocks at places ``[start, stop)`` of the range, neighbours in one request."""
    run_start = -1
    run_end = -1
    for place in range(start, min(stop, len(pages.block_keys))):
        if pages.block_keys[place] == NO_BLOCK:
            continue
        page = pages.first_page + place
        if page > run_end + _MERGED_PAGES:
            if run_start >= 0:
                queue_read(base + run_start * page_bytes, (run_end - run_start) * page_bytes)
            run_start = page
        run_end = page + shapes.pages_per_block[np.int64(pages.block_keys[place]) >> _ROW_BITS]
    if run_start >= 0:
        queue_read(base + run_start * page_bytes, (run_end - run_start) * page_bytes)


@inline
def _note(found: Found, count: int, block_key: np.uint64, status: int, row: int) -> int:
    found.block_keys[count] = block_key
    found.statuses[count] = status
    found.rows[count] = row
    return count + 1


@inline
def _check_block(
    words: Words,
    page_words: int,
    limit: int,
    page: int,
    block_key: np.uint64,
    epoch: np.uint64,
    rows_per_block: int,
    row_words: int,
    pages_per_block: int,
    found: Found,
    count: int,
    result: Int64s,
) -> int:
    """Page header, block header, every row's checksum, zero padding; returns the places noted so far."""
    status = page_header_status(words, page_words, limit, page, pages_per_block)
    if status != 0:
        count = _note(found, count, block_key, status, -1)
    if status == 1:
        return count
    at = page * page_words + PAGE_HEADER_WORDS
    if words[at] != block_key or words[at + 1] != epoch:
        count = _note(found, count, block_key, 3, -1)
    key = first_row_key(np.int64(block_key), rows_per_block)
    place = at + BLOCK_HEADER_WORDS
    for i in range(rows_per_block):
        status = row_status(words, place, row_words, np.uint64(key + i))
        if status < 0:
            count = _note(found, count, block_key, 4, i)
        else:
            result[2] += status
        place += row_words + 1
    end = at + pages_per_block * page_words - PAGE_HEADER_WORDS
    while place < end and words[place] == np.uint64(0):
        place += 1
    return _note(found, count, block_key, 5, -1) if place < end else count


@kernel
def check_range(
    words: Words,
    page_words: int,
    limit: int,
    shapes: TableShapes,
    pages: PageRange,
    start: int,
    stop: int,
    found: Found,
    result: Int64s,
) -> None:
    """Check the blocks at places ``[start, stop)`` of the range.

    Args:
        limit: pages in the file.
        found: receives what is damaged; longer by three than a block has rows.
        result: int64 [5]; receives the place to go on at if ``found`` filled up, the number of places noted, rows
            present, blocks, pages.
    """
    result[:] = 0
    count = 0
    place = start
    while place < stop:
        block_key = pages.block_keys[place]
        if block_key != NO_BLOCK:
            table = np.int64(block_key) >> _ROW_BITS
            rows_per_block = shapes.rows_per_block[table]
            if count + rows_per_block + 3 > len(found.rows):
                break
            count = _check_block(
                words,
                page_words,
                limit,
                pages.first_page + place,
                block_key,
                pages.epochs[place],
                rows_per_block,
                shapes.row_words[table],
                shapes.pages_per_block[table],
                found,
                count,
                result,
            )
            result[3] += 1
            result[4] += shapes.pages_per_block[table]
        place += 1
    result[0] = place
    result[1] = count
