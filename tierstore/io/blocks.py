"""Block images: built for a write, checked for a read of everything. docs/format.md draws a block."""

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS
from .checksum import absent_checksum, row_checksum
from .gather import Geometry
from .mapped import copy_words

__all__ = [
    "BLOCK_HEADER_WORDS",
    "PAGE_HEADER_WORDS",
    "BlockStatus",
    "build_blocks",
    "check_page_headers",
    "first_row_key",
    "page_header_status",
    "row_status",
]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
PAGE_HEADER_WORDS: Final = 2
BLOCK_HEADER_WORDS: Final = 2
_OVERFLOW_FLAG: Final = np.uint64(0x04 << 16)
_FLAGS_AND_COUNT: Final = np.uint64(0xFFFF_FFFF_3FEF_0000)
"""Of a page header's second word: the flags that last, and the number of pages."""


class BlockStatus(IntEnum):
    DONE = 0
    OUT_OF_FILE = 1
    BAD_PAGE_HEADER = 2
    BAD_HEADER = 3
    BAD_ROW = 4
    BAD_PADDING = 5
    UNREADABLE = 6
    """The device refuses a page of it."""


@inline
def page_header_status(words: Words, page_words: int, limit: int, page: int, pages_per_block: int) -> int:
    """BlockStatus of the header LMDB put before a block."""
    if page < 2 or page + pages_per_block > limit:
        return 1
    at = page * page_words
    expected = _OVERFLOW_FLAG | (np.uint64(pages_per_block) << np.uint64(32))
    if words[at] != np.uint64(page) or (words[at + 1] & _FLAGS_AND_COUNT) != expected:
        return 2
    return 0


@inline
def row_status(words: Words, start: int, row_words: int, seed: np.uint64) -> int:
    """1 for a good row, 0 for an absent one, -1 for a damaged one."""
    stored = words[start + row_words]
    if stored == absent_checksum(seed):
        for j in range(start, start + row_words):
            if words[j] != np.uint64(0):
                return -1
        return 0
    return 1 if row_checksum(words, start, row_words, seed) == stored else -1


@inline
def first_row_key(block_key: int | np.int64, rows_per_block: int) -> int | np.int64:
    """Key of a block's first row."""
    return (block_key & ~_ROW_MASK) | ((block_key & _ROW_MASK) * rows_per_block)


@inline
def _copy_old(
    geo: Geometry, words: Words, limit: int, page: int, block_key: int | np.int64, epoch: int, rows: bool, image: Words
) -> int:
    """Start an image from the block's stored version; -1, or 16 * position of a bad row + BlockStatus."""
    status = page_header_status(words, geo.page_words, limit, page, geo.pages_per_block)
    if status != 0:
        return status
    at = page * geo.page_words + PAGE_HEADER_WORDS
    if words[at] != np.uint64(block_key) or words[at + 1] == np.uint64(0) or words[at + 1] > np.uint64(epoch):
        return 3
    if not rows:
        return -1
    row_words = geo.weight_words + geo.state_words
    key = first_row_key(block_key, geo.rows_per_block)
    for i in range(geo.rows_per_block):
        place = BLOCK_HEADER_WORDS + i * (row_words + 1)
        if row_status(words, at + place, row_words, np.uint64(key + i)) < 0:
            return 16 * i + 4
        copy_words(image, place, words, at + place, row_words + 1)
    return -1


@inline
def _clear_rows(geo: Geometry, block_key: int | np.int64, image: Words) -> None:
    row_words = geo.weight_words + geo.state_words
    key = first_row_key(block_key, geo.rows_per_block)
    for i in range(geo.rows_per_block):
        place = BLOCK_HEADER_WORDS + i * (row_words + 1)
        image[place : place + row_words] = np.uint64(0)
        image[place + row_words] = absent_checksum(np.uint64(key + i))


@kernel
def build_blocks(
    geo: Geometry,
    words: Words,
    limit: int,
    epoch: int,
    block_keys: Words,
    old_pages: Int64s,
    starts: Int64s,
    order: Int64s,
    keys: Int64s,
    slots: Int32s,
    weights: Words,
    state: Words,
    images: Words,
    result: Int64s,
) -> None:
    """Fill ``images[b]`` with block ``block_keys[b]``: its stored rows, verified, under the new ones.

    Args:
        old_pages: int64 [blocks], where the stored version is, or 0.
        starts: int64 [blocks + 1]; ``order[starts[b]:starts[b + 1]]`` are the positions in ``keys`` of the block's new
            rows.
        weights, state: flat views of the arenas. A row may change meanwhile: its checksum is that of the copy.
        images: uint64 [>= blocks, words of a block].
        result: int64 [3], zeroed; receives BlockStatus, the block's position, the row's place in it.
    """
    row_words = geo.weight_words + geo.state_words
    end_of_rows = BLOCK_HEADER_WORDS + geo.rows_per_block * (row_words + 1)
    for b in range(len(block_keys)):
        image = images[b]
        block_key = np.int64(block_keys[b])
        covered = starts[b + 1] - starts[b] == geo.rows_per_block
        if old_pages[b] != 0:
            status = _copy_old(geo, words, limit, old_pages[b], block_key, epoch, not covered, image)
            if status >= 0:
                result[0] = status & 15
                result[1] = b
                result[2] = status >> 4
                return
        elif not covered:
            _clear_rows(geo, block_key, image)
        image[0] = block_keys[b]
        image[1] = np.uint64(epoch)
        image[end_of_rows:] = np.uint64(0)
        first = (block_key & _ROW_MASK) * geo.rows_per_block
        for i in range(starts[b], starts[b + 1]):
            source = order[i]
            place = BLOCK_HEADER_WORDS + ((keys[source] & _ROW_MASK) - first) * (row_words + 1)
            slot = np.int64(slots[source])
            copy_words(image, place, weights, slot * geo.weight_words, geo.weight_words)
            copy_words(image, place + geo.weight_words, state, slot * geo.state_words, geo.state_words)
            image[place + row_words] = row_checksum(image, place, row_words, np.uint64(keys[source]))


@kernel
def check_page_headers(
    words: Words, page_words: int, limit: int, pages: Int64s, pages_each: Int64s, result: Int64s
) -> None:
    """Check the page headers of values about to be deleted: LMDB frees as many pages as the header says.

    ``result``: int64 [2], zeroed; receives BlockStatus and the position.
    """
    for i in range(len(pages)):
        if pages[i] != 0:
            status = page_header_status(words, page_words, limit, pages[i], pages_each[i])
            if status != 0:
                result[0] = status
                result[1] = i
                return
