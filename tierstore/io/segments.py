"""Segments: rows appended together, with the list of their keys. docs/format.md draws one.

A segment is one LMDB value that fills whole pages: first its index, which names its rows, then blocks of rows. A block
fills ``pages_per_block`` pages and names its rows too, so that what is left of a damaged file explains itself.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import inline, kernel, prefetch_word
from ..layout import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS, PAIR_WORDS, SEGMENT_HEADER_WORDS, RowLayout
from .checksum import mix_key, row_checksum, words_hash
from .mapped import copy_words

_MAGIC: Final = np.uint64(int.from_bytes(b"tierlogs", "little"))
MIXED: Final = np.uint64(1 << 32)  # beside the number of rows: each has an epoch of its own, listed behind the keys
COUNT_MASK: Final = np.uint64(0xFFFF_FFFF)
_EPOCH_SHIFT: Final = np.uint64(24)
"""In the second word of a block; below are 16 bits of a checksum, _LAST_BLOCK, and seven bits of the block's number."""
_CHECK_SHIFT: Final = np.uint64(8)
_CHECK_MASK: Final = np.uint64(0xFFFF)
_LAST_BLOCK: Final = np.uint64(0x80)
MAX_BLOCKS: Final = 0x80  # of a segment; their numbers fit below _LAST_BLOCK
_OVERFLOW_FLAG: Final = np.uint64(0x04 << 16)
_FLAGS_AND_COUNT: Final = np.uint64(0xFFFF_FFFF_3FEF_0000)
"""Of a page header's second word: the flags that last, and the number of pages."""
PREFETCH_ROWS: Final = 8  # rows to be copied are fetched from memory so many before
_KEY_FACTOR: Final = np.uint64(0x9E3779B185EBCA87)
_NUMBER_FACTOR: Final = np.uint64(0xC2B2AE3D27D4EB4F)  # Odd, so that keys and numbers are spread over all seeds

# The index: where each word is, in words behind LMDB's header.
CHECKSUM: Final = 0
MAGIC: Final = 1
NUMBER: Final = 2
COUNT: Final = 3
NEWEST: Final = 4
OLDEST: Final = 5
KEYS: Final = SEGMENT_HEADER_WORDS


class SegmentStatus(IntEnum):
    DONE = 0
    OUT_OF_FILE = 1
    BAD_PAGE_HEADER = 2
    BAD_INDEX = 3
    BAD_BLOCK = 4
    BAD_ROW = 5
    BAD_PADDING = 6
    UNREADABLE = 7  # the device refuses a page of it


class Geometry(NamedTuple):
    """Sizes a kernel needs of a layout."""

    layout_id: int
    page_words: int
    pages_per_block: int
    rows_per_block: int
    weight_words: int
    state_words: int
    rows_per_segment: int
    place_bits: int  # of a place, for the row's number in its segment
    first_row: int
    row_stride: int
    pair_stride: int
    """Words: from the start of a block to its first row, from row to row, and from key to key. Keys and checksums of a
    block of one page stand before its rows, so that rows begin at whole cache lines if they fill some; in a block of
    several pages each stands before its row, so that both are on the same pages."""

    @property
    def row_words(self) -> int:
        return self.weight_words + self.state_words


def geometry(layout: RowLayout, layout_id: int) -> Geometry:
    row_words, rows = layout.weight_words + layout.state_words, layout.rows_per_block
    if layout.pages_per_block == 1:
        first_row, row_stride, pair_stride = BLOCK_HEADER_WORDS + PAIR_WORDS * rows, row_words, PAIR_WORDS
    else:
        first_row, row_stride = BLOCK_HEADER_WORDS + PAIR_WORDS, row_words + PAIR_WORDS
        pair_stride = row_stride
    return Geometry(
        layout_id,
        layout.page_bytes // 8,
        layout.pages_per_block,
        rows,
        layout.weight_words,
        layout.state_words,
        layout.rows_per_segment,
        max(1, (layout.rows_per_segment - 1).bit_length()),
        first_row,
        row_stride,
        pair_stride,
    )


@inline
def index_pages(page_words: int, num_rows: int, is_mixed: bool) -> int:
    """Pages of a segment before its first block."""
    words = PAGE_HEADER_WORDS + SEGMENT_HEADER_WORDS + num_rows * (2 if is_mixed else 1)
    return (words + page_words - 1) // page_words


def index_lengths(geo: Geometry, rows: Any, is_mixed: Any) -> Any:
    """``index_pages`` of several segments: int64 [n]."""
    words = PAGE_HEADER_WORDS + SEGMENT_HEADER_WORDS + np.asarray(rows, np.int64) * (1 + np.asarray(is_mixed, np.int64))
    return -(-words // geo.page_words)


@inline
def row_seed(key: np.uint64, number: np.uint64, index: np.uint64) -> np.uint64:
    """What a row's checksum begins with: the same bytes as another row, or in another place, have another."""
    return key * _KEY_FACTOR + number * _NUMBER_FACTOR + index


@inline
def block_word(number: np.uint64, newest: np.uint64, block: int, rows: int, is_last: bool) -> np.uint64:
    """The second word of a block, by which it is understood where the index is damaged.

    Args:
        number: of the segment, which is the first word.
        newest: epoch of the segment's rows.
        block: its number in the segment.
        rows: in this block. They are not in the word, but in its checksum: of the last block's places for rows it tells
            those that were never filled from those that were overwritten with zeros.
    """
    word = (newest << _EPOCH_SHIFT) | np.uint64(block) | (_LAST_BLOCK if is_last else np.uint64(0))
    check = mix_key(number, word | (np.uint64(rows) << _CHECK_SHIFT)) & _CHECK_MASK
    return word | (check << _CHECK_SHIFT)


@inline
def unpack_block_word(word: np.uint64) -> tuple[np.uint64, int, bool]:
    """What it says, right or not: the newest epoch, the block's number in the segment, whether it is the last one."""
    block = np.int64(word & np.uint64(MAX_BLOCKS - 1))
    return word >> _EPOCH_SHIFT, block, (word & _LAST_BLOCK) != np.uint64(0)  # type: ignore[return-value]


@inline
def page_header_status(words: Words, page_words: int, limit: int, page: int, pages: int) -> int:
    """SegmentStatus of the header that LMDB put before a value of so many pages; it frees as many as that says."""
    if page < 2 or page + pages > limit:
        return 1
    at = page * page_words
    expected = _OVERFLOW_FLAG | (np.uint64(pages) << np.uint64(32))
    if words[at] != np.uint64(page) or (words[at + 1] & _FLAGS_AND_COUNT) != expected:
        return 2
    return 0


@kernel
def build_segment(
    geo: Geometry, number: int, epochs: Words, keys: Int64s, slots: Int32s, weights: Words, state: Words, image: Words
) -> None:
    """Fill ``image``, the value of segment ``number``, with rows.

    Args:
        epochs: uint64 [1] for all rows, or [rows].
        keys: int64 [rows], at most ``rows_per_segment``.
        slots: int32 [rows], of the rows in the arenas.
        weights, state: flat views of the arenas. A row may change meanwhile: its checksum is that of the copy.
        image: uint64 [``segment_pages`` * page_words - PAGE_HEADER_WORDS].
    """
    num = len(keys)
    is_mixed = len(epochs) > 1
    first = index_pages(geo.page_words, num, is_mixed) * geo.page_words - PAGE_HEADER_WORDS
    image[MAGIC] = _MAGIC
    image[NUMBER] = np.uint64(number)
    image[COUNT] = np.uint64(num) | (MIXED if is_mixed else np.uint64(0))
    newest = oldest = epochs[0]
    for i in range(1, len(epochs)):
        newest, oldest = max(newest, epochs[i]), min(oldest, epochs[i])
    image[NEWEST], image[OLDEST] = newest, oldest
    end = KEYS + num
    for i in range(num):
        image[KEYS + i] = np.uint64(keys[i])
    if is_mixed:
        copy_words(image, end, epochs, 0, num)
        end += num
    image[CHECKSUM] = words_hash(image, MAGIC, end - MAGIC, np.uint64(number))
    image[end:first] = np.uint64(0)
    row_words = geo.weight_words + geo.state_words
    block_words = geo.pages_per_block * geo.page_words
    used = BLOCK_HEADER_WORDS + geo.rows_per_block * (row_words + 2)
    for block in range((num + geo.rows_per_block - 1) // geo.rows_per_block):
        start = first + block * block_words
        begin = block * geo.rows_per_block
        stop = min(num, begin + geo.rows_per_block)
        image[start] = np.uint64(number)
        image[start + 1] = block_word(image[NUMBER], image[NEWEST], block, stop - begin, stop == num)
        if stop - begin < geo.rows_per_block:
            image[start + BLOCK_HEADER_WORDS : start + used] = np.uint64(0)
        image[start + used : start + block_words] = np.uint64(0)
        for i in range(begin, stop):
            if i + PREFETCH_ROWS < num:
                prefetch_word(weights, np.int64(slots[i + PREFETCH_ROWS]) * geo.weight_words)
                prefetch_word(state, np.int64(slots[i + PREFETCH_ROWS]) * geo.state_words)
            slot = np.int64(slots[i])
            at = start + geo.first_row + (i - begin) * geo.row_stride
            copy_words(image, at, weights, slot * geo.weight_words, geo.weight_words)
            if geo.state_words > 0:
                copy_words(image, at + geo.weight_words, state, slot * geo.state_words, geo.state_words)
            pair = start + BLOCK_HEADER_WORDS + (i - begin) * geo.pair_stride
            key = np.uint64(keys[i])
            image[pair] = key
            image[pair + 1] = row_checksum(image, at, row_words, row_seed(key, np.uint64(number), np.uint64(i)))


@inline
def rows_listed(words: Words, at: int) -> tuple[int, bool]:
    """How many rows the index at word ``at`` lists, and whether it lists an epoch of each behind them."""
    count = words[at + COUNT]
    return np.int64(count & COUNT_MASK), (count & MIXED) != np.uint64(0)  # type: ignore[return-value]


@inline
def check_index(words: Words, page_words: int, limit: int, page: int, pages: int, number: np.uint64) -> int:
    """SegmentStatus of the index of segment ``number``, which the tree says begins at ``page`` and has ``pages``."""
    status = page_header_status(words, page_words, limit, page, pages)
    if status != 0:
        return status
    at = page * page_words + PAGE_HEADER_WORDS
    num, is_mixed = rows_listed(words, at)
    if words[at + MAGIC] != _MAGIC or words[at + NUMBER] != number or num < 1:
        return 3
    if index_pages(page_words, num, is_mixed) >= pages:
        return 3
    length = KEYS - MAGIC + num * (2 if is_mixed else 1)
    return 0 if words_hash(words, at + MAGIC, length, number) == words[at + CHECKSUM] else 3
