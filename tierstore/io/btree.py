"""LMDB's B-tree, read page by page: where each block lies, without touching the blocks.

Source of the page format: LMDB 0.9's mdb.c (Howard Chu), data format version 1; docs/format.md repeats what is used
here. Everything read is checked before it is followed: page numbers against the length of the file, flags, bounds, key
sizes, key order and depth, so that a damaged tree ends in a status and never in a wild read. LMDB itself does not
check; a store is therefore walked once before LMDB's own code touches its tree.

All pages read must be visible to a read transaction that stays open meanwhile.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from .mapped import queue_read

__all__ = [
    "META_KEY",
    "META_READ_BYTES",
    "NO_ROOT",
    "Entries",
    "Meta",
    "WalkStatus",
    "check_tree",
    "new_entries",
    "parse_meta",
    "seek_each",
    "walk",
]

Halves = NDArray[np.uint16]
Words = NDArray[np.uint64]
Int64s = NDArray[np.int64]

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
NO_ROOT: Final = (1 << 64) - 1
META_KEY: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""First key word of a record that is not a block; sorts after all blocks."""
META_READ_BYTES: Final = 152

_KEY_BYTES: Final = 16
_HEADER_BYTES: Final = 16
_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_META: Final = 0x08
_TRANSIENT: Final = 0xC010
"""P_DIRTY, P_LOOSE, P_KEEP: of use to LMDB in memory only."""
_BIG_DATA: Final = 0x01
_MAX_DEPTH: Final = 32


class WalkStatus(IntEnum):
    DONE = 0
    FULL = 1
    """The output is full; go on at the next key."""
    OUT_OF_FILE = 2
    BAD_PAGE = 3
    BAD_NODE = 4
    BAD_ORDER = 5


class Meta(NamedTuple):
    """What one of LMDB's two meta pages says."""

    page_bytes: int
    last_page: int
    txn_id: int
    main_root: int
    main_depth: int
    main_entries: int
    free_root: int
    free_depth: int


def parse_meta(page: bytes) -> Meta | str:
    """The meta page that starts with these ``META_READ_BYTES`` bytes, or what is wrong with it."""
    flags = struct.unpack_from("<H", page, 10)[0]
    magic, version = struct.unpack_from("<II", page, 16)
    if magic != MAGIC:
        return "it is not an LMDB file (no magic number)"
    if version != DATA_VERSION:
        return f"its LMDB data version is {version}, not {DATA_VERSION}"
    if not flags & _META:
        return "a meta page is damaged"
    page_bytes, _, free_depth, _, _, _, _, free_root = struct.unpack_from("<IHHQQQQQ", page, 40)
    _, _, main_depth, _, _, _, main_entries, main_root = struct.unpack_from("<IHHQQQQQ", page, 88)
    last_page, txn_id = struct.unpack_from("<QQ", page, 136)
    if page_bytes < 512 or page_bytes > 65536 or page_bytes & (page_bytes - 1):
        return f"a meta page is damaged (page size {page_bytes})"
    if max(main_depth, free_depth) > _MAX_DEPTH:
        return "a meta page is damaged (tree depth)"
    return Meta(page_bytes, last_page, txn_id, main_root, main_depth, main_entries, free_root, free_depth)


class Entries(NamedTuple):
    """Key, place and size of B-tree entries; the kernels' output."""

    block_keys: Words
    epochs: Words
    pages: Int64s
    """Page number of the value, or 0 where the value is small and lies in the tree."""
    sizes: Int64s
    """Bytes of the value."""


def new_entries(capacity: int) -> Entries:
    return Entries(
        np.empty(capacity, np.uint64),
        np.empty(capacity, np.uint64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
    )


@inline
def _half(halves: Halves, at: int) -> int:
    return np.int64(halves[at])  # type: ignore[return-value]


@inline
def _key_word(halves: Halves, at: int) -> np.uint64:
    word = np.uint64(0)
    for i in range(4):
        half = np.uint64(halves[at + i])
        swapped = ((half & np.uint64(0xFF)) << np.uint64(8)) | (half >> np.uint64(8))
        word = (word << np.uint64(16)) | swapped
    return word


@inline
def _number(halves: Halves, at: int) -> int:
    """A 64-bit page number; -1 if it is beyond any file."""
    if halves[at + 3] != 0:
        return -1
    return _half(halves, at) | (_half(halves, at + 1) << 16) | (_half(halves, at + 2) << 32)


@inline
def _count_keys(halves: Halves, page_halves: int, limit: int, page: int, flags: int) -> int:
    """Number of nodes of a page that looks as it should; else minus the WalkStatus."""
    if page < 2 or page >= limit:
        return -2
    at = page * page_halves
    if _number(halves, at) != page or (_half(halves, at + 5) & ~_TRANSIENT) != flags:
        return -3
    lower = _half(halves, at + 6)
    upper = _half(halves, at + 7)
    if lower <= _HEADER_BYTES or lower & 1 or upper < lower or upper > page_halves * 2:
        return -3
    return (lower - _HEADER_BYTES) >> 1


@inline
def _node(halves: Halves, page_halves: int, page: int, index: int, leaf: bool) -> int:
    """Position of a node's first half-word, or -1 if it is not a node of 16-byte keys inside its page."""
    at = page * page_halves
    offset = _half(halves, at + 8 + index)
    if offset & 1 or offset < _half(halves, at + 7) or offset + 8 > page_halves * 2:
        return -1
    node = at + (offset >> 1)
    key_bytes = _half(halves, node + 3)
    if leaf:
        if key_bytes != _KEY_BYTES:
            return -1
        flags = _half(halves, node + 2)
        size = 8 if flags == _BIG_DATA else (_half(halves, node) | (_half(halves, node + 1) << 16))
        if flags > _BIG_DATA or offset + 8 + _KEY_BYTES + size > page_halves * 2:
            return -1
    elif (key_bytes != _KEY_BYTES and index > 0) or offset + 8 + key_bytes > page_halves * 2:
        return -1
    return node


@inline
def _child(halves: Halves, node: int) -> int:
    return _half(halves, node) | (_half(halves, node + 1) << 16) | (_half(halves, node + 2) << 32)


@inline
def _key_before(halves: Halves, node: int, first: np.uint64, second: np.uint64) -> bool | np.bool:
    """Whether the node's key is less than (first, second)."""
    word = _key_word(halves, node + 4)
    if word != first:
        return word < first
    return _key_word(halves, node + 8) < second


@inline
def _search(
    halves: Halves, page_halves: int, page: int, num_keys: int, leaf: bool, first: np.uint64, second: np.uint64
) -> int:
    """First node of the page whose key is not less than the target; -1 for a damaged node."""
    low = 0 if leaf else 1  # the first key of a branch stands for everything smaller
    high = num_keys
    while low < high:
        middle = (low + high) >> 1
        node = _node(halves, page_halves, page, middle, leaf)
        if node < 0:
            return -1
        if _key_before(halves, node, first, second):
            low = middle + 1
        else:
            high = middle
    return low


@inline
def _queue_children(
    halves: Halves, page_halves: int, limit: int, page: int, start: int, num_keys: int, base: int
) -> None:
    for index in range(start, num_keys):
        node = _node(halves, page_halves, page, index, False)
        if node >= 0:
            child = _child(halves, node)
            if child < limit:
                queue_read(base + child * page_halves * 2, page_halves * 2)


@inline
def _descend(
    halves: Halves,
    page_halves: int,
    limit: int,
    level: int,
    depth: int,
    first: np.uint64,
    second: np.uint64,
    base: int,
    pages: Int64s,
    indexes: Int64s,
    counts: Int64s,
) -> int:
    """From ``pages[level]`` down to the leaf position of the target. 0 or minus a WalkStatus.

    With ``base`` (the map's address) not 0, the leaves of each lowest branch are queued for reading.
    """
    while True:
        page = pages[level]
        leaf = level == depth - 1
        num_keys = _count_keys(halves, page_halves, limit, page, _LEAF if leaf else _BRANCH)
        if num_keys < 0:
            return num_keys
        index = _search(halves, page_halves, page, num_keys, leaf, first, second)
        if index < 0:
            return -4
        counts[level] = num_keys
        if leaf:
            indexes[level] = index
            return 0
        # The child before the first key that is greater than the target holds it.
        if index < num_keys:
            node = _node(halves, page_halves, page, index, False)
            equal = _key_word(halves, node + 4) == first and _key_word(halves, node + 8) == second
            if not equal:
                index -= 1
        else:
            index -= 1
        node = _node(halves, page_halves, page, index, False)
        if node < 0:
            return -4
        indexes[level] = index
        if base != 0 and level == depth - 2:
            _queue_children(halves, page_halves, limit, page, index, num_keys, base)
        level += 1
        pages[level] = _child(halves, node)


@inline
def _next_leaf(
    halves: Halves,
    page_halves: int,
    limit: int,
    depth: int,
    base: int,
    pages: Int64s,
    indexes: Int64s,
    counts: Int64s,
) -> int:
    """Move to the first node of the next leaf: 0, 1 if there is none, or minus a WalkStatus."""
    level = depth - 2
    while level >= 0 and indexes[level] + 1 >= counts[level]:
        level -= 1
    if level < 0:
        return 1
    indexes[level] += 1
    node = _node(halves, page_halves, pages[level], indexes[level], False)
    if node < 0:
        return -4
    pages[level + 1] = _child(halves, node)
    zero = np.uint64(0)
    return _descend(halves, page_halves, limit, level + 1, depth, zero, zero, base, pages, indexes, counts)


@inline
def _emit(halves: Halves, page_halves: int, node: int, limit: int, entries: Entries, out: int) -> bool:
    """Write one entry; False if its value's pages are not all in the file."""
    size = _half(halves, node) | (_half(halves, node + 1) << 16)
    page = 0
    if _half(halves, node + 2) == _BIG_DATA:
        page = _number(halves, node + 12)
        page_bytes = page_halves * 2
        if page < 2 or page + (_HEADER_BYTES + size + page_bytes - 1) // page_bytes > limit:
            return False
    entries.block_keys[out] = _key_word(halves, node + 4)
    entries.epochs[out] = _key_word(halves, node + 8)
    entries.pages[out] = page
    entries.sizes[out] = size
    return True


@kernel
def walk(
    halves: Halves,
    base: int,
    page_halves: int,
    limit: int,
    root: int,
    depth: int,
    first: np.uint64,
    second: np.uint64,
    entries: Entries,
    result: Int64s,
) -> None:
    """List entries in key order from key (first, second) on.

    Args:
        halves: uint16 view of the mapped file; ``base`` is its address.
        limit: pages in the file.
        result: int64 [3]; receives the number of entries, the WalkStatus, and the page where it stopped.
    """
    pages = np.zeros(_MAX_DEPTH + 1, np.int64)
    indexes = np.zeros(_MAX_DEPTH + 1, np.int64)
    counts = np.zeros(_MAX_DEPTH + 1, np.int64)
    capacity = len(entries.pages)
    result[0] = 0
    result[1] = 0
    pages[0] = root
    status = _descend(halves, page_halves, limit, 0, depth, first, second, base, pages, indexes, counts)
    out = 0
    previous_first = np.uint64(0)
    previous_second = np.uint64(0)
    while status == 0:
        leaf = pages[depth - 1]
        index = indexes[depth - 1]
        num_keys = counts[depth - 1]
        while index < num_keys and out < capacity:
            node = _node(halves, page_halves, leaf, index, True)
            if node < 0:
                status = -4
                break
            if not _emit(halves, page_halves, node, limit, entries, out):
                status = -2
                break
            key_first = entries.block_keys[out]
            key_second = entries.epochs[out]
            if out > 0 and (
                key_first < previous_first or (key_first == previous_first and key_second <= previous_second)
            ):
                status = -5
                break
            previous_first = key_first
            previous_second = key_second
            index += 1
            out += 1
        if status != 0 or (out == capacity and index < num_keys):
            break
        status = _next_leaf(halves, page_halves, limit, depth, base, pages, indexes, counts)
    result[0] = out
    if status < 0:
        result[1] = -status
        level = depth - 1
        while level > 0 and pages[level] == 0:
            level -= 1
        result[2] = pages[level]
    elif status == 0:
        result[1] = 1


@kernel
def seek_each(
    halves: Halves,
    page_halves: int,
    limit: int,
    root: int,
    depth: int,
    block_keys: Words,
    epochs: Words,
    entries: Entries,
    result: Int64s,
) -> None:
    """For each (block_keys[i], epochs[i]), the first entry at or after it; past the end, key (META_KEY, META_KEY).

    ``result`` as in ``walk``.
    """
    pages = np.zeros(_MAX_DEPTH + 1, np.int64)
    indexes = np.zeros(_MAX_DEPTH + 1, np.int64)
    counts = np.zeros(_MAX_DEPTH + 1, np.int64)
    result[0] = 0
    result[1] = 0
    for i in range(len(block_keys)):
        pages[0] = root
        status = _descend(halves, page_halves, limit, 0, depth, block_keys[i], epochs[i], 0, pages, indexes, counts)
        if status == 0 and indexes[depth - 1] >= counts[depth - 1]:
            status = _next_leaf(halves, page_halves, limit, depth, 0, pages, indexes, counts)
        if status == 1:
            entries.block_keys[i] = META_KEY
            entries.epochs[i] = META_KEY
            entries.pages[i] = 0
            entries.sizes[i] = 0
            continue
        if status == 0:
            node = _node(halves, page_halves, pages[depth - 1], indexes[depth - 1], True)
            if node < 0:
                status = -4
            elif not _emit(halves, page_halves, node, limit, entries, i):
                status = -2
        if status < 0:
            result[1] = -status
            result[2] = pages[depth - 1]
            return
        result[0] = i + 1


@kernel
def check_tree(halves: Halves, page_halves: int, limit: int, root: int, depth: int, result: Int64s) -> None:
    """Check that every page of a tree is a page and lies in the file, whatever its keys; ``result`` as in ``walk``.

    For LMDB's own tree of free pages, whose keys and values are its business.
    """
    pages = np.zeros(_MAX_DEPTH + 1, np.int64)
    indexes = np.zeros(_MAX_DEPTH + 1, np.int64)
    result[0] = 0
    result[1] = 0
    pages[0] = root
    level = 0
    while level >= 0:
        leaf = level == depth - 1
        page = pages[level]
        num_keys = _count_keys(halves, page_halves, limit, page, _LEAF if leaf else _BRANCH)
        if indexes[level] == 0:
            result[0] += 1
            if result[0] > limit:  # more pages than the file has: the tree runs in circles
                num_keys = -3
        if num_keys < 0:
            result[1] = -num_keys
            result[2] = page
            return
        index = indexes[level]
        if index == num_keys:
            level -= 1
            continue
        indexes[level] = index + 1
        at = page * page_halves
        offset = _half(halves, at + 8 + index)
        if offset & 1 or offset < _half(halves, at + 7) or offset + 8 > page_halves * 2:
            result[1] = 4
            result[2] = page
            return
        node = at + (offset >> 1)
        if not leaf:
            level += 1
            pages[level] = _child(halves, node)
            indexes[level] = 0
        elif _half(halves, node + 2) == _BIG_DATA:
            key_halves = _half(halves, node + 3) >> 1
            if offset + 8 + 2 * key_halves + 8 > page_halves * 2:
                result[1] = 4
                result[2] = page
                return
            big = _number(halves, node + 4 + key_halves)
            if big < 2 or big >= limit:
                result[1] = 2
                result[2] = page
                return
