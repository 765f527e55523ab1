"""LMDB's B-tree, read page by page: where each segment lies, without touching the segments.

Source of the page format: LMDB 0.9's mdb.c (Howard Chu), data format version 1; docs/format.md repeats what is used
here. Everything read is checked before it is followed: page numbers against the length of the file, flags, bounds, key
sizes, key order and depth, so that a damaged tree ends in a status and never in a wild read. LMDB itself does not
check; a store is therefore walked once before LMDB's own code touches its tree.

All pages read must be of a tree that stays pinned meanwhile (``pins.py``).
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import inline, kernel
from .mapped import queue_read

Halves = NDArray[np.uint16]

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
NO_ROOT: Final = (1 << 64) - 1
META_KEY: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""First key word of a record; sorts after all segments."""
SEGMENTS_KEY: Final = np.uint64(0)
"""First key word of a segment; the second is its number."""
META_READ_BYTES: Final = 152
MAX_PAGES: Final = 1 << 32
"""Page numbers are held in 32 bits."""

_KEY_BYTES: Final = 16
_HEADER_BYTES: Final = 16
_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_META: Final = 0x08
_TRANSIENT: Final = 0xC010
"""P_DIRTY, P_LOOSE, P_KEEP: of use to LMDB in memory only."""
_BIG_DATA: Final = 0x01
_INTEGER_KEYS: Final = 0x08
_ENVIRONMENT_FLAGS: Final = 0x4000
"""MDB_NOSUBDIR, which LMDB keeps among the flags of its tree of free pages."""
MAX_DEPTH: Final = 32


class WalkStatus(IntEnum):
    DONE = 0
    FULL = 1
    """The output is full; go on at the next key."""
    OUT_OF_FILE = 2
    BAD_PAGE = 3
    BAD_NODE = 4
    BAD_ORDER = 5
    USED_TWICE = 6
    """A page is part of two things, or of one and free."""
    BAD_FREE_LIST = 7
    BAD_TOTALS = 8
    """The meta page counts other pages or entries than there are."""


class TreeTotals(NamedTuple):
    """What LMDB counts of a tree."""

    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int


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
    main: TreeTotals
    free: TreeTotals


def parse_meta(page: bytes) -> Meta | str:
    """The meta page that starts with these ``META_READ_BYTES`` bytes, or what is wrong with it."""
    if len(page) < META_READ_BYTES:
        return "the file ends inside its header"
    flags = struct.unpack_from("<H", page, 10)[0]
    magic, version = struct.unpack_from("<II", page, 16)
    if magic != MAGIC:
        return "it is not an LMDB file (no magic number)"
    if version != DATA_VERSION:
        return f"its LMDB data version is {version}, not {DATA_VERSION}"
    if not flags & _META:
        return "a meta page is damaged"
    page_bytes, free_flags, free_depth, *free, free_root = struct.unpack_from("<IHHQQQQQ", page, 40)
    main_pad, main_flags, main_depth, *main, main_root = struct.unpack_from("<IHHQQQQQ", page, 88)
    last_page, txn_id = struct.unpack_from("<QQ", page, 136)
    if page_bytes < 512 or page_bytes > 65536 or page_bytes & (page_bytes - 1):
        return f"a meta page is damaged (page size {page_bytes})"
    if main_flags or main_pad or free_flags & ~_ENVIRONMENT_FLAGS != _INTEGER_KEYS:
        return "a meta page is damaged (flags)"
    for depth, root in ((main_depth, main_root), (free_depth, free_root)):
        if depth > MAX_DEPTH or (depth == 0) != (root == NO_ROOT):
            return "a meta page is damaged (tree depth)"
        if root != NO_ROOT and root > last_page:
            return "a meta page is damaged (root)"
    if last_page >= MAX_PAGES:
        return f"a meta page is damaged ({last_page + 1} pages)"
    totals = TreeTotals(*main), TreeTotals(*free)
    return Meta(page_bytes, last_page, txn_id, main_root, main_depth, main[3], free_root, free_depth, *totals)


def repoint(page: bytes, meta: Meta, txn_id: int) -> bytes:
    """A meta page of the same file, ``META_READ_BYTES`` of it, that leads to the tree of ``meta`` by another number."""
    free_flags = struct.unpack_from("<H", page, 44)[0]
    free = struct.pack("<IHHQQQQQ", meta.page_bytes, free_flags, meta.free_depth, *meta.free, meta.free_root)
    main = struct.pack("<IHHQQQQQ", 0, 0, meta.main_depth, *meta.main, meta.main_root)
    return page[:40] + free + main + struct.pack("<QQ", meta.last_page, txn_id)


class Entries(NamedTuple):
    """Key, place and size of B-tree entries; the kernels' output."""

    kinds: Words
    numbers: Words
    pages: Int64s
    """Page number of the value, or 0 where the value is small and lies in the tree."""
    sizes: Int64s
    """Bytes of the value."""
    places: Int64s
    """The value's first half-word."""


def new_entries(capacity: int) -> Entries:
    keys, others = np.empty((2, capacity), np.uint64), np.empty((3, capacity), np.int64)
    return Entries(keys[0], keys[1], others[0], others[1], others[2])


@inline
def half(halves: Halves, at: int) -> int:
    return np.int64(halves[at])  # type: ignore[return-value]


@inline
def key_word(halves: Halves, at: int) -> np.uint64:
    """A big-endian 64-bit number."""
    word = np.uint64(0)
    for i in range(4):
        half = np.uint64(halves[at + i])
        swapped = ((half & np.uint64(0xFF)) << np.uint64(8)) | (half >> np.uint64(8))
        word = (word << np.uint64(16)) | swapped
    return word


@inline
def number(halves: Halves, at: int) -> int:
    """A native 64-bit page number; -1 if it is beyond any file."""
    if halves[at + 3] != 0:
        return -1
    return half(halves, at) | (half(halves, at + 1) << 16) | (half(halves, at + 2) << 32)


@inline
def count_keys(halves: Halves, page_halves: int, limit: int, page: int, flags: int) -> int:
    """Number of nodes of a page that looks as it should; else minus the WalkStatus."""
    if page < 2 or page >= limit:
        return -2
    at = page * page_halves
    if number(halves, at) != page or (half(halves, at + 5) & ~_TRANSIENT) != flags:
        return -3
    lower = half(halves, at + 6)
    upper = half(halves, at + 7)
    if lower <= _HEADER_BYTES or lower & 1 or upper < lower or upper > page_halves * 2:
        return -3
    return (lower - _HEADER_BYTES) >> 1


@inline
def _node(halves: Halves, page_halves: int, page: int, index: int, leaf: bool) -> int:
    """Position of a node's first half-word, or -1 if it is not a node of 16-byte keys inside its page."""
    at = page * page_halves
    offset = half(halves, at + 8 + index)
    if offset & 1 or offset < half(halves, at + 7) or offset + 8 > page_halves * 2:
        return -1
    node = at + (offset >> 1)
    key_bytes = half(halves, node + 3)
    if leaf:
        if key_bytes != _KEY_BYTES:
            return -1
        flags = half(halves, node + 2)
        size = 8 if flags == _BIG_DATA else (half(halves, node) | (half(halves, node + 1) << 16))
        if flags > _BIG_DATA or offset + 8 + _KEY_BYTES + size > page_halves * 2:
            return -1
    elif (key_bytes != _KEY_BYTES and index > 0) or offset + 8 + key_bytes > page_halves * 2:
        return -1
    return node


@inline
def child_of(halves: Halves, node: int) -> int:
    """The page that a branch's node leads to."""
    return half(halves, node) | (half(halves, node + 1) << 16) | (half(halves, node + 2) << 32)


@inline
def _key_before(halves: Halves, node: int, first: np.uint64, second: np.uint64) -> bool | np.bool:
    """Whether the node's key is less than (first, second)."""
    word = key_word(halves, node + 4)
    if word != first:
        return word < first
    return key_word(halves, node + 8) < second


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
            child = child_of(halves, node)
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
        num_keys = count_keys(halves, page_halves, limit, page, _LEAF if leaf else _BRANCH)
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
            equal = key_word(halves, node + 4) == first and key_word(halves, node + 8) == second
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
        pages[level] = child_of(halves, node)


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
    pages[level + 1] = child_of(halves, node)
    zero = np.uint64(0)
    return _descend(halves, page_halves, limit, level + 1, depth, zero, zero, base, pages, indexes, counts)


@inline
def _emit(halves: Halves, page_halves: int, node: int, limit: int, entries: Entries, out: int) -> bool:
    """Write one entry; False if its value's pages are not all in the file."""
    size = half(halves, node) | (half(halves, node + 1) << 16)
    page = 0
    if half(halves, node + 2) == _BIG_DATA:
        page = number(halves, node + 12)
        page_bytes = page_halves * 2
        if page < 2 or page + (_HEADER_BYTES + size + page_bytes - 1) // page_bytes > limit:
            return False
    entries.kinds[out] = key_word(halves, node + 4)
    entries.numbers[out] = key_word(halves, node + 8)
    entries.pages[out] = page
    entries.sizes[out] = size
    entries.places[out] = page * page_halves + _HEADER_BYTES // 2 if page else node + 4 + _KEY_BYTES // 2
    return True


@inline
def _is_after(entries: Entries, i: int) -> bool:
    """Whether an entry's key is greater than that of the one before it."""
    if entries.kinds[i] != entries.kinds[i - 1]:
        return bool(entries.kinds[i] > entries.kinds[i - 1])
    return bool(entries.numbers[i] > entries.numbers[i - 1])


@kernel
def list_entries(
    halves: Halves, base: int, page_halves: int, limit: int, root: int, depth: int, kinds: Words, numbers: Words,
    each: int, entries: Entries, result: Int64s,
) -> None:  # fmt: skip
    """List entries in key order, from each key (kinds[i], numbers[i]) on, ``each`` of them if there are so many. Where
    one is wanted and there is none, it has the key (META_KEY, META_KEY).

    Args:
        halves: uint16 view of the mapped file; ``base`` is its address, or 0 to have no pages queued for reading.
        limit: pages in the file.
        result: int64 [3]; receives the number of entries, the WalkStatus, and the page where it stopped.
    """
    pages = np.zeros(MAX_DEPTH + 1, np.int64)
    indexes = np.zeros(MAX_DEPTH + 1, np.int64)
    counts = np.zeros(MAX_DEPTH + 1, np.int64)
    pages[0] = root
    leaf = depth - 1
    out = status = 0
    for i in range(len(kinds)):
        first = out
        status = _descend(halves, page_halves, limit, 0, depth, kinds[i], numbers[i], base, pages, indexes, counts)
        while status == 0 and out < first + each:
            if indexes[leaf] >= counts[leaf]:
                status = _next_leaf(halves, page_halves, limit, depth, base, pages, indexes, counts)
                continue
            node = _node(halves, page_halves, pages[leaf], indexes[leaf], True)
            if node < 0:
                status = -4
            elif not _emit(halves, page_halves, node, limit, entries, out):
                status = -2
            elif out > first and not _is_after(entries, out):
                status = -5
            else:
                out += 1
                indexes[leaf] += 1
        if status < 0:
            break
        if status == 1 and each == 1:
            entries.kinds[out] = entries.numbers[out] = META_KEY
            entries.pages[out] = entries.sizes[out] = entries.places[out] = 0
            out += 1
            status = 0
    result[0] = out
    result[1] = 0 if status == 1 else 1 if status == 0 else -status
    while status < 0 and leaf > 0 and pages[leaf] == 0:
        leaf -= 1
    result[2] = pages[leaf]
