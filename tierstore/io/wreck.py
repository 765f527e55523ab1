"""Kernels that take what is sound out of a damaged row file: entries of a broken tree, blocks by their headers, rows.

Nothing here trusts the order of keys: one changed bit in a key would make all that follows it look wrong. What an entry
says is held against the header of the block it leads to instead.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import kernel
from ..rows import KEY_ROW_BITS
from .blocks import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS, first_row_key, page_header_status, row_status
from .btree import MAX_DEPTH, Entries, Halves, child_of, count_keys, half, key_word, number
from .gather import Geometry
from .mapped import copy_words
from .scrub import TableShapes

__all__ = ["GAP", "Walk", "list_sound", "new_walk", "read_headers", "scan_blocks", "take_rows"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

GAP: Final = -1
"""In place of a size: here something of the tree could not be read."""
_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_BIG_DATA: Final = 0x01
_KEY_BYTES: Final = 16
_NODE_BYTES: Final = 8


class Walk(NamedTuple):
    """Where a walk stands, so that it can go on in another call."""

    pages: Int64s
    indexes: Int64s
    counts: Int64s
    level: Int64s
    """int64 [1]; -1 when all was walked."""
    seen: NDArray[np.bool_]
    """Pages of the tree that were entered: a tree that runs in circles ends."""


def new_walk(root: int, depth: int, limit: int) -> Walk:
    """The beginning of a tree; ``limit``: pages in the file."""
    pages, indexes, counts = np.zeros((3, MAX_DEPTH + 1), np.int64)
    pages[0] = root if depth else 0
    return Walk(pages, indexes, counts, np.array([0 if depth else -1], np.int64), np.zeros(limit, np.bool_))


@kernel
def list_sound(halves: Halves, page_halves: int, limit: int, depth: int, walk: Walk, entries: Entries) -> int:
    """List the entries that can be read, in the order in which they lie in the tree; how many, 0 at the end.

    An entry's ``pages`` is the page of its value, or minus the byte at which a small value lies in the tree. Where a
    page or a node cannot be read there is one entry with ``GAP`` for a size.
    """
    out = 0
    while walk.level[0] >= 0 and out < len(entries.pages):
        level = walk.level[0]
        leaf = level == depth - 1
        page = walk.pages[level]
        index = walk.indexes[level]
        walk.indexes[level] += 1
        if index == 0:
            fresh = 2 <= page < limit and not walk.seen[page]
            walk.counts[level] = -1
            if fresh:
                walk.seen[page] = True
                walk.counts[level] = count_keys(halves, page_halves, limit, page, _LEAF if leaf else _BRANCH)
            if walk.counts[level] < 0:
                entries.sizes[out] = GAP
                out += 1
        if index >= walk.counts[level]:
            walk.level[0] -= 1
            continue
        offset = half(halves, page * page_halves + 8 + index)
        node = page * page_halves + (offset >> 1)
        if offset & 1 or offset + _NODE_BYTES + (_KEY_BYTES if leaf else 0) > page_halves * 2:
            entries.sizes[out] = GAP
            out += 1
        elif not leaf:
            walk.level[0] += 1
            walk.pages[level + 1] = child_of(halves, node)
            walk.indexes[level + 1] = 0
        else:
            _read_node(halves, page_halves, limit, offset, node, entries, out)
            out += 1
    return out


@kernel
def _read_node(
    halves: Halves, page_halves: int, limit: int, offset: int, node: int, entries: Entries, out: int
) -> None:
    page_bytes = page_halves * 2
    size = half(halves, node) | (half(halves, node + 1) << 16)
    flags = halves[node + 2]
    place = -2 * (node + (_NODE_BYTES + _KEY_BYTES) // 2)
    room = size
    if flags == _BIG_DATA:
        room = 8
    sound = halves[node + 3] == _KEY_BYTES and flags <= _BIG_DATA
    sound = sound and offset + _NODE_BYTES + _KEY_BYTES + room <= page_bytes
    if sound and flags == _BIG_DATA:
        place = number(halves, node + 12)
        sound = place >= 2 and place + (8 * PAGE_HEADER_WORDS + size + page_bytes - 1) // page_bytes <= limit
    entries.block_keys[out] = key_word(halves, node + 4)
    entries.epochs[out] = key_word(halves, node + 8)
    entries.pages[out] = place
    entries.sizes[out] = size if sound else GAP


@kernel
def read_headers(words: Words, page_words: int, limit: int, pages: Int64s, block_keys: Words, epochs: Words) -> None:
    """Block key and epoch that the blocks at ``pages`` give themselves; of pages outside the file zeros."""
    for i in range(len(pages)):
        block_keys[i] = 0
        epochs[i] = 0
        if 2 <= pages[i] < limit:
            at = pages[i] * page_words + PAGE_HEADER_WORDS
            block_keys[i] = words[at]
            epochs[i] = words[at + 1]


@kernel
def scan_blocks(
    words: Words, page_words: int, limit: int, start: int, shapes: TableShapes, version: int, entries: Entries
) -> int:
    """List what looks like a block of a known table with an epoch up to the version, by its two headers.

    Goes from page ``start`` on for as many pages as ``entries`` has room; returns the number found.
    """
    out = 0
    for page in range(start, min(limit, start + len(entries.pages))):
        at = page * page_words + PAGE_HEADER_WORDS
        key = np.int64(words[at])
        epoch = np.int64(words[at + 1])
        table = key >> _ROW_BITS
        if table < 0 or table >= len(shapes.pages_per_block) or epoch < 1 or epoch > version:
            continue
        if key & _ROW_MASK >= shapes.num_blocks[table] or shapes.pages_per_block[table] == 0:
            continue
        if page_header_status(words, page_words, limit, page, shapes.pages_per_block[table]) == 0:
            entries.block_keys[out] = np.uint64(key)
            entries.epochs[out] = np.uint64(epoch)
            entries.pages[out] = page
            out += 1
    return out


@kernel
def take_rows(
    geo: Geometry,
    words: Words,
    limit: int,
    num_rows: int,
    block_keys: Words,
    pages: Int64s,
    start: int,
    keys: Int64s,
    weights: Words,
    state: Words,
    lost: Int64s,
    result: Int64s,
) -> None:
    """Copy the sound rows of blocks of one table, from the block at place ``start`` on, as long as there is room.

    Args:
        num_rows: of the table; places beyond it are none of its rows.
        keys: int64 [n], receives the rows' keys; ``weights`` and ``state`` are [n, words], ``lost`` int64 [n] receives
            the keys of damaged rows. n is at least the rows of a block.
        result: int64 [3]; receives the place to go on at, the number of rows copied, and of rows lost.
    """
    row_words = geo.weight_words + geo.state_words
    taken = 0
    missing = 0
    place = start
    while place < len(pages):
        if max(taken, missing) + geo.rows_per_block > len(keys):
            break
        first = np.int64(first_row_key(np.int64(block_keys[place]), geo.rows_per_block))
        rows_left = num_rows - (first & _ROW_MASK)
        in_file = pages[place] >= 2 and pages[place] + geo.pages_per_block <= limit
        at = pages[place] * geo.page_words + PAGE_HEADER_WORDS + BLOCK_HEADER_WORDS
        for i in range(geo.rows_per_block if geo.rows_per_block < rows_left else rows_left):
            row = at + i * (row_words + 1)
            status = row_status(words, row, row_words, np.uint64(first + i)) if in_file else -1
            if status < 0:
                lost[missing] = first + i
                missing += 1
            elif status > 0:
                keys[taken] = first + i
                copy_words(weights.reshape(-1), taken * geo.weight_words, words, row, geo.weight_words)
                copy_words(state.reshape(-1), taken * geo.state_words, words, row + geo.weight_words, geo.state_words)
                taken += 1
        place += 1
    result[0] = place
    result[1] = taken
    result[2] = missing
