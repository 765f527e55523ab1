"""The kernel that checks every word of stored segments whose indexes are sound."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.jit import inline, kernel
from ..rows import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS
from .checksum import two_row_checksums
from .indexes import Indexes
from .row_map import TableArrays, can_be_stored
from .segments import COUNT, KEYS, MIXED, NEWEST, OLDEST, Geometry, SegmentStatus, block_word, row_seed

__all__ = ["Found", "check_segments", "new_found"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

_BAD_INDEX: Final = int(SegmentStatus.BAD_INDEX)
_BAD_BLOCK: Final = int(SegmentStatus.BAD_BLOCK)
_BAD_ROW: Final = int(SegmentStatus.BAD_ROW)
_BAD_PADDING: Final = int(SegmentStatus.BAD_PADDING)


class Found(NamedTuple):
    """Damage, one place after another, as far as there is room."""

    keys: Int64s
    """Of the row that is damaged; -1 where it is something else of the segment."""
    numbers: Words
    """Of the segments."""
    statuses: Int64s
    starts: Int64s
    stops: Int64s
    """The bytes ``[start, stop)`` of the file hold what is damaged."""

    def first(self, count: int) -> "Found":
        """Those places alone, of as many as there is room for."""
        return Found(
            self.keys[:count], self.numbers[:count], self.statuses[:count], self.starts[:count], self.stops[:count]
        )


def new_found(length: int) -> Found:
    keys, statuses, starts, stops = np.zeros((4, length), np.int64)
    return Found(keys, np.zeros(length, np.uint64), statuses, starts, stops)


@inline
def _note(found: Found, count: int, key: int | np.int64, number: np.uint64, status: int, start: int, stop: int) -> int:
    if count < len(found.keys):
        found.keys[count] = key
        found.numbers[count] = number
        found.statuses[count] = status
        found.starts[count] = start * 8
        found.stops[count] = stop * 8
    return count + 1


@inline
def _is_zero(words: Words, start: int, stop: int) -> bool:
    while start < stop and words[start] == np.uint64(0):
        start += 1
    return start >= stop


@inline
def _index_status(
    geo: Geometry, words: Words, at: int, num: int, is_mixed: bool, data: int, tables: TableArrays
) -> int:
    """SegmentStatus of what the index at word ``at`` says, whose segment's first block begins at word ``data``.

    Keys are of tables with this layout, or of such that are not known.
    """
    end = at + KEYS + num
    newest = oldest = words[end] if is_mixed else words[at + NEWEST]
    for i in range(num):
        if not can_be_stored(np.int64(words[at + KEYS + i]), geo.layout_id, tables):
            return _BAD_INDEX
        if is_mixed:
            newest = max(newest, words[end + i])
            oldest = min(oldest, words[end + i])
    if newest != words[at + NEWEST] or oldest != words[at + OLDEST]:
        return _BAD_INDEX
    if (words[at + COUNT] & MIXED != np.uint64(0)) != is_mixed:
        return _BAD_INDEX
    return 0 if _is_zero(words, end + num if is_mixed else end, data) else _BAD_PADDING


@inline
def _check_rows(
    geo: Geometry, words: Words, number: np.uint64, keys: int, start: int, first: int, num: int, lanes: Words,
    found: Found, count: int,
) -> int:  # fmt: skip
    """Check the ``num`` rows of the block at word ``start``, whose keys in the index begin at word ``keys``.

    ``first`` is the first row's number in the segment.
    """
    row_words = geo.weight_words + geo.state_words
    for a in range(0, num, 2):
        b = min(a + 1, num - 1)
        row_a = start + geo.first_row + a * geo.row_stride
        row_b = start + geo.first_row + b * geo.row_stride
        seed_a = row_seed(words[keys + a], number, np.uint64(first + a))
        seed_b = row_seed(words[keys + b], number, np.uint64(first + b))
        sum_a, sum_b = two_row_checksums(words, row_a, row_b, row_words, seed_a, seed_b, lanes)
        pair = start + BLOCK_HEADER_WORDS + a * geo.pair_stride
        if words[pair] != words[keys + a] or words[pair + 1] != sum_a:
            count = _note(found, count, np.int64(words[keys + a]), number, _BAD_ROW, pair, row_a + row_words)
        pair = start + BLOCK_HEADER_WORDS + b * geo.pair_stride
        if b > a and (words[pair] != words[keys + b] or words[pair + 1] != sum_b):
            count = _note(found, count, np.int64(words[keys + b]), number, _BAD_ROW, pair, row_b + row_words)
    return count


@inline
def _check_block(
    geo: Geometry, words: Words, number: np.uint64, header: np.uint64, keys: int, start: int, first: int, num: int,
    lanes: Words, found: Found, count: int,
) -> int:  # fmt: skip
    """Check one block, all of it; ``header`` is its second word."""
    stop = start + geo.pages_per_block * geo.page_words
    if words[start] != number or words[start + 1] != header:
        count = _note(found, count, -1, number, _BAD_BLOCK, start, start + BLOCK_HEADER_WORDS)
    count = _check_rows(geo, words, number, keys, start, first, num, lanes, found, count)
    # Between pairs and rows, if they lie apart, and behind the rows.
    pairs_end = start + BLOCK_HEADER_WORDS + num * geo.pair_stride
    rows_end = start + geo.first_row + (num - 1) * geo.row_stride + geo.weight_words + geo.state_words
    if not _is_zero(words, pairs_end, start + geo.first_row) or not _is_zero(words, rows_end, stop):
        count = _note(found, count, -1, number, _BAD_PADDING, pairs_end, stop)
    return count


@kernel
def check_segments(
    geo: Geometry, words: Words, indexes: Indexes, data_pages: Int64s, tables: TableArrays, lanes: Words,
    found: Found, count: int,
) -> int:  # fmt: skip
    """Check segments of one layout, whose indexes and sizes were found sound.

    Args:
        words: the file.
        data_pages: of their first blocks.
        lanes: uint64 [8], scratch.
        found: receives what is damaged, as far as there is room.
        count: places found before; returned with those of these segments added.
    """
    for s in range(len(data_pages)):
        number, num = indexes.stored.numbers[s], indexes.rows[s]
        at = indexes.stored.first_pages[s] * geo.page_words + PAGE_HEADER_WORDS
        data = data_pages[s] * geo.page_words
        status = _index_status(geo, words, at, num, indexes.newest[s] != indexes.oldest[s], data, tables)
        if status != 0:
            count = _note(found, count, -1, number, status, at, data)
        for block in range((num + geo.rows_per_block - 1) // geo.rows_per_block):
            first = block * geo.rows_per_block
            rows = min(geo.rows_per_block, num - first)
            header = block_word(number, np.uint64(indexes.newest[s]), block, rows, first + rows == num)
            count = _check_block(
                geo, words, number, header, at + KEYS + first, data + block * geo.pages_per_block * geo.page_words,
                first, rows, lanes, found, count,
            )  # fmt: skip
    return count
