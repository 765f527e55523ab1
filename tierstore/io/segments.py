"""Segments: rows appended together, with the list of their keys. docs/format.md draws one.

A segment is one LMDB value that fills whole pages: first its index, which names its rows, then blocks of rows. A block
fills ``pages_per_block`` pages and names its rows too, so that what is left of a damaged file explains itself.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS, PAIR_WORDS, SEGMENT_HEADER_WORDS, RowLayout
from .checksum import row_checksum
from .mapped import copy_words

__all__ = ["Geometry", "IndexStatus", "build_segment", "check_index", "geometry", "index_pages", "row_seed"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_MAGIC: Final = np.uint64(int.from_bytes(b"tierlogs", "little"))
MIXED: Final = np.uint64(1 << 32)
"""Beside the number of rows: each has an epoch of its own, listed behind the keys."""
COUNT_MASK: Final = np.uint64(0xFFFF_FFFF)
_ORDINAL_BITS: Final = np.uint64(24)
_OVERFLOW_FLAG: Final = np.uint64(0x04 << 16)
_FLAGS_AND_COUNT: Final = np.uint64(0xFFFF_FFFF_3FEF_0000)
"""Of a page header's second word: the flags that last, and the number of pages."""
_SEED: Final = np.uint64(0x9E3779B185EBCA87)
_INDEX_BITS: Final = np.uint64(20)

# The index: where each word is, in words behind LMDB's header.
CHECKSUM: Final = 0
MAGIC: Final = 1
NUMBER: Final = 2
COUNT: Final = 3
NEWEST: Final = 4
OLDEST: Final = 5
KEYS: Final = SEGMENT_HEADER_WORDS


class IndexStatus(IntEnum):
    DONE = 0
    OUT_OF_FILE = 1
    BAD_PAGE_HEADER = 2
    BAD_INDEX = 3


class Geometry(NamedTuple):
    """Sizes a kernel needs of a layout."""

    layout_id: int
    page_words: int
    pages_per_block: int
    rows_per_block: int
    weight_words: int
    state_words: int
    rows_per_segment: int
    place_bits: int
    """Of a place, for the row's number in its segment."""
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


@inline
def row_seed(key: np.uint64, number: np.uint64, index: np.uint64) -> np.uint64:
    """What a row's checksum begins with: the same bytes as another row, or in another place, have another."""
    return key * _SEED + ((number << _INDEX_BITS) | index)


@kernel
def build_segment(
    geo: Geometry,
    number: int,
    epochs: Words,
    keys: Int64s,
    slots: Int32s,
    weights: Words,
    state: Words,
    image: Words,
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
    image[NEWEST] = epochs.max()
    image[OLDEST] = epochs.min()
    end = KEYS + num
    for i in range(num):
        image[KEYS + i] = np.uint64(keys[i])
    if is_mixed:
        image[end : end + num] = epochs
        end += num
    image[CHECKSUM] = row_checksum(image, MAGIC, end - MAGIC, np.uint64(number))
    image[end:first] = np.uint64(0)
    row_words = geo.weight_words + geo.state_words
    block_words = geo.pages_per_block * geo.page_words
    used = BLOCK_HEADER_WORDS + geo.rows_per_block * (row_words + 2)
    for block in range((num + geo.rows_per_block - 1) // geo.rows_per_block):
        start = first + block * block_words
        begin = block * geo.rows_per_block
        stop = min(num, begin + geo.rows_per_block)
        image[start] = np.uint64(number)
        image[start + 1] = (image[NEWEST] << _ORDINAL_BITS) | np.uint64(block)
        if stop - begin < geo.rows_per_block:
            image[start + BLOCK_HEADER_WORDS : start + used] = np.uint64(0)
        image[start + used : start + block_words] = np.uint64(0)
        for i in range(begin, stop):
            slot = np.int64(slots[i])
            at = start + geo.first_row + (i - begin) * geo.row_stride
            copy_words(image, at, weights, slot * geo.weight_words, geo.weight_words)
            if geo.state_words > 0:
                copy_words(image, at + geo.weight_words, state, slot * geo.state_words, geo.state_words)
            pair = start + BLOCK_HEADER_WORDS + (i - begin) * geo.pair_stride
            key = np.uint64(keys[i])
            image[pair] = key
            image[pair + 1] = row_checksum(image, at, row_words, row_seed(key, np.uint64(number), np.uint64(i)))


@kernel
def check_index(
    words: Words, page_words: int, limit: int, page: int, pages: int, number: int, max_rows: int
) -> tuple[int, int]:
    """IndexStatus of the index of segment ``number``, which the tree says begins at ``page`` and has ``pages``; and the
    page of its first block."""
    if page < 2 or page + pages > limit:
        return 1, 0
    at = page * page_words
    expected = _OVERFLOW_FLAG | (np.uint64(pages) << np.uint64(32))
    if words[at] != np.uint64(page) or (words[at + 1] & _FLAGS_AND_COUNT) != expected:
        return 2, 0
    at += PAGE_HEADER_WORDS
    num = np.int64(words[at + COUNT] & COUNT_MASK)
    is_mixed = (words[at + COUNT] & MIXED) != np.uint64(0)
    if words[at + MAGIC] != _MAGIC or words[at + NUMBER] != np.uint64(number) or num < 1 or num > max_rows:
        return 3, 0
    first = index_pages(page_words, num, is_mixed)
    if first > pages:
        return 3, 0
    length = KEYS - MAGIC + num * (2 if is_mixed else 1)
    if row_checksum(words, at + MAGIC, length, np.uint64(number)) != words[at + CHECKSUM]:
        return 3, 0
    return 0, page + first
