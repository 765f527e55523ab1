"""LMDB's B-trees, read page by page: where each segment lies, without touching the segments.

Source of the page format: LMDB 0.9's mdb.c (Howard Chu), data format version 1. Everything read is checked before it is
followed: page numbers, flags, bounds, key sizes, key order and depth, so that a damaged tree ends in a status and never
in a wild read. LMDB itself does not check; so a store is walked once before LMDB's own code touches its tree.

All pages read must be of a tree that stays pinned meanwhile (``reader_locks.py``).
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from . import meta
from .mapped import queue_read
from .meta import BIG_DATA, HEADER_BYTES, KEY_BYTES, MAX_DEPTH, NO_ROOT, NODE_BYTES, Root

Halves = NDArray[np.uint16]
Entries = NDArray[Any]  # entries of a tree, of dtype ``ENTRY``

META_KEY: Final = np.uint64(meta.META_KEY)  # as kernels compare it
FREE_KEY_BYTES: Final = 8  # of the tree of free pages, in which a key is a transaction's number in native order

_BRANCH, _LEAF = 0x01, 0x02  # flags of pages
LASTING: Final = 0x3FEF  # the flags of a page that mean something on disk
_FIRST_ENTRIES: Final = 1 << 10
_CHUNK_ENTRIES: Final = 1 << 16

ENTRY: Final = np.dtype(
    [("kind", np.uint64), ("number", np.uint64), ("page", np.int64), ("size", np.int64), ("place", np.int64)]
)
"""Both words of the key; the first page of the value, or 0 where it is small and lies in the tree; its bytes, -1 where
there is no such entry; its first half-word."""


class WalkStatus(IntEnum):
    DONE = 0
    FULL = 1  # the output is full, and there may be more
    OUT_OF_FILE = 2
    BAD_PAGE = 3
    BAD_NODE = 4
    BAD_ORDER = 5
    USED_TWICE = 6  # a page is part of two things, or of one and free
    BAD_FREE_LIST = 7
    BAD_TOTALS = 8  # the meta page counts other pages or entries than there are


class Pages(NamedTuple):  # of the file, as the kernels see it
    halves: Halves
    page_halves: int
    limit: int  # pages in the file
    address: int  # of the map, or 0 to have no pages queued for reading


STATUS, PAGE, _LEVEL, BRANCHES, LEAVES, DAMAGED = range(6)  # places in ``Walk.result``


class Walk(NamedTuple):  # where a walk stands; made by ``new_walk``
    pages: Int64s  # by level, as the next two
    indexes: Int64s
    counts: Int64s
    sizes: Int64s  # zeros, of a page's nodes
    least: Words  # the next key is at least this one
    used: Words  # bitmap of pages; those of the tree are marked, and none is met twice. Empty to do without.
    result: Int64s  # WalkStatus, its page, level, pages met of either kind, pages and nodes passed over


def new_walk(page_halves: int, used: Words | None = None) -> Walk:
    places, indexes, counts = np.zeros((3, MAX_DEPTH + 1), np.int64)
    used, result = np.zeros(0, np.uint64) if used is None else used, np.array([WalkStatus.FULL, 0, -1, 0, 0, 0])
    return Walk(places, indexes, counts, np.zeros(page_halves, np.int64), np.zeros(2, np.uint64), used, result)


def list_tree(
    pages: Pages, root: Root, walk: Walk, first: int = 0, *, key_bytes: int = KEY_BYTES, tolerant: bool = False
) -> Entries:
    """Entries in key order from key word ``first`` on, as far as ``walk.result`` says. ``tolerant``: pass over what is
    damaged, and over the order of keys; else stop there, with a status."""
    parts = [np.empty(0, ENTRY)]
    if root.page == NO_ROOT:
        walk.result[STATUS] = WalkStatus.DONE
    while walk.result[STATUS] == WalkStatus.FULL:
        chunk = np.empty(min(_FIRST_ENTRIES << (len(parts) - 1), _CHUNK_ENTRIES), ENTRY)
        count = _list_entries(pages, root.page, root.depth, key_bytes, np.uint64(first), tolerant, walk, chunk)
        parts.append(chunk[:count])
    return np.concatenate(parts)


@inline
def half(halves: Halves, at: int) -> int:
    return np.int64(halves[at])  # type: ignore[return-value]


@inline
def wide(halves: Halves, at: int) -> int:
    return half(halves, at) | (half(halves, at + 1) << 16)


@inline
def key_word(halves: Halves, at: int) -> np.uint64:
    """A big-endian 64-bit number."""
    word = np.uint64(0)
    for i in range(4):
        part = np.uint64(halves[at + i])
        word = (word << np.uint64(16)) | ((part & np.uint64(0xFF)) << np.uint64(8)) | (part >> np.uint64(8))
    return word


@inline
def number(halves: Halves, at: int) -> int:
    """A native 64-bit number; -1 if it is beyond any file."""
    return -1 if halves[at + 3] != 0 else child_of(halves, at)


@inline
def child_of(halves: Halves, node: int) -> int:
    """The page that a branch's node leads to."""
    return wide(halves, node) | (half(halves, node + 2) << 32)


@inline
def claim(used: Words, page: int, count: int, end: int) -> int:
    """Mark pages as used; 0 or minus a WalkStatus."""
    if page < 2 or page + count > end:
        return -2
    for each in range(page, page + count):
        bit = np.uint64(1) << np.uint64(each & 63)
        if used[each >> 6] & bit:
            return -6
        used[each >> 6] |= bit
    return 0


@inline
def _node_bytes(halves: Halves, node: int, leaf: bool, first: bool, key_bytes: int) -> int:
    """What a node takes in its page, or -1 if it is none. The first key of a branch page stands for everything smaller
    and may be left out."""
    has_key = halves[node + 3] == key_bytes
    if not leaf:
        return NODE_BYTES + half(halves, node + 3) if has_key or (first and halves[node + 3] == 0) else -1
    flags = halves[node + 2]
    if not has_key or flags > BIG_DATA:
        return -1
    return (NODE_BYTES + key_bytes + (8 if flags == BIG_DATA else wide(halves, node)) + 1) & ~1


@inline
def _node(pages: Pages, page: int, index: int, leaf: bool, key_bytes: int, tolerant: bool) -> int:
    """Position of a node's first half-word, or -1 if it is no node with such a key inside its page. ``tolerant``: of a
    branch's node only the page that it leads to is wanted, whatever its key."""
    halves, at = pages.halves, page * pages.page_halves
    offset = half(halves, at + 8 + index)
    if offset & 1 or offset < half(halves, at + 7) or offset + NODE_BYTES > pages.page_halves * 2:
        return -1
    node = at + (offset >> 1)
    is_enough = tolerant and not leaf
    size = NODE_BYTES if is_enough else _node_bytes(halves, node, leaf, index == 0, key_bytes)
    return -1 if size < 0 or offset + size > pages.page_halves * 2 else node


@inline
def _nodes_tile(pages: Pages, page: int, num_keys: int, leaf: bool, key_bytes: int, sizes: Int64s) -> bool:
    """Whether the page's nodes lie side by side from its upper bound to its end, as LMDB moves them by their sizes.
    ``sizes``: int64 [page_halves], zeros; left so unless the answer is no."""
    at = page * pages.page_halves
    for i in range(num_keys):
        node = _node(pages, page, i, leaf, key_bytes, False)
        if node < 0:
            return False
        sizes[node - at] = _node_bytes(pages.halves, node, leaf, i == 0, key_bytes) >> 1
    place = half(pages.halves, at + 7) >> 1
    count = 0
    while place < pages.page_halves:
        node_halves = sizes[place]
        if node_halves == 0:
            return False
        sizes[place] = 0
        place += node_halves
        count += 1
    return place == pages.page_halves and count == num_keys


@inline
def _search(pages: Pages, page: int, num_keys: int, leaf: bool, first: np.uint64, second: np.uint64) -> int:
    """The node of a leaf whose key is the first not less than the target, or of a branch below which the target is; -1
    for a damaged one."""
    low = 0 if leaf else 1  # the first key of a branch stands for everything smaller
    high = num_keys
    while low < high:
        middle = (low + high) >> 1
        node = _node(pages, page, middle, leaf, KEY_BYTES, False)
        if node < 0:
            return -1
        word = key_word(pages.halves, node + 4)
        if word == first:
            word, target = key_word(pages.halves, node + 8), second
        else:
            target = first
        if word < target or (word == target and not leaf):
            low = middle + 1
        else:
            high = middle
    return low if leaf else low - 1


@inline
def _enter(
    pages: Pages, page: int, level: int, leaf: bool, key_bytes: int, first: np.uint64, second: np.uint64,
    tolerant: bool, walk: Walk,
) -> int:  # fmt: skip
    """Claim and check a page, which a walk goes on with at the target; 0 or minus a WalkStatus."""
    walk.pages[level] = walk.result[PAGE] = page
    walk.indexes[level] = walk.counts[level] = 0
    if len(walk.used) > 0:
        status = claim(walk.used, page, 1, pages.limit)
        if status != 0:
            return status
    if page < 2 or page >= pages.limit:
        return -2
    halves, at = pages.halves, page * pages.page_halves
    lower, upper = half(halves, at + 6), half(halves, at + 7)
    if number(halves, at) != page or (half(halves, at + 5) & LASTING) != (_LEAF if leaf else _BRANCH):
        return -3
    if lower <= HEADER_BYTES or (lower & 1 and not tolerant) or upper < lower or upper > pages.page_halves * 2:
        return -3
    num_keys = (lower - HEADER_BYTES) >> 1
    if not tolerant and not _nodes_tile(pages, page, num_keys, leaf, key_bytes, walk.sizes):
        return -4
    if first != 0 or second != 0:
        walk.indexes[level] = _search(pages, page, num_keys, leaf, first, second)
        if walk.indexes[level] < 0:
            return -4
    walk.counts[level] = num_keys
    walk.result[LEAVES if leaf else BRANCHES] += 1
    return 0


@inline
def _key_in_order(halves: Halves, node: int, key_bytes: int, leaf: bool, least: Words) -> bool:
    """Whether the node's key is not below ``least``; then raises ``least`` to what may come next. A branch's key is
    above every key before it and not above any after it."""
    if key_bytes == KEY_BYTES:
        first, second = key_word(halves, node + 4), key_word(halves, node + 8)
    else:
        first, second = np.uint64(child_of(halves, node + 4)), np.uint64(0)
        if halves[node + 7] != 0:
            return False
    if first < least[0] or (first == least[0] and second < least[1]):
        return False
    least[0] = first
    least[1] = second + np.uint64(1 if leaf else 0)
    return True


@inline
def _emit(pages: Pages, node: int, key_bytes: int, tolerant: bool, entry: Any) -> bool:
    """Write one entry; False if its value's pages are not all in the file, or, if tolerant, in no file."""
    halves, page_bytes = pages.halves, pages.page_halves * 2
    size, page, place = wide(halves, node), 0, node + (NODE_BYTES + key_bytes) // 2
    if half(halves, node + 2) == BIG_DATA:
        page = number(halves, place)
        num_pages = (HEADER_BYTES + size + page_bytes - 1) // page_bytes
        if page < 0 if tolerant else page < 2 or page + num_pages > pages.limit:
            return False
        place = page * pages.page_halves + HEADER_BYTES // 2
    if key_bytes == KEY_BYTES:
        entry["kind"], entry["number"] = key_word(halves, node + 4), key_word(halves, node + 8)
    else:
        entry["kind"], entry["number"] = np.uint64(0), np.uint64(child_of(halves, node + 4))
    entry["page"], entry["size"], entry["place"] = page, size, place
    return True


@kernel
def _list_entries(
    pages: Pages, root: int, depth: int, key_bytes: int, first: np.uint64, tolerant: bool, walk: Walk, entries: Entries
) -> int:
    """List entries until all are listed or ``entries`` is full, and go on when called again. Returns how many."""
    result, out, status, zero, page_bytes = walk.result, 0, 0, np.uint64(0), pages.page_halves * 2
    level = result[_LEVEL]
    if level < 0:
        level = 0
        status = _enter(pages, root, 0, depth == 1, key_bytes, first, zero, tolerant, walk)
    while status == 0 or tolerant:
        if status != 0:
            result[DAMAGED] += 1
            status = 0
        leaf = level == depth - 1
        page, index = walk.pages[level], walk.indexes[level]
        if index >= walk.counts[level]:
            if level == 0:
                result[STATUS] = 0
                return out
            level -= 1
            continue
        if leaf and out == len(entries):
            result[_LEVEL] = level
            return out
        walk.indexes[level] += 1
        result[PAGE] = page
        node = _node(pages, page, index, leaf, key_bytes, tolerant)
        has_key = not tolerant and (leaf or index > 0)
        if node < 0:
            status = -4
        elif has_key and not _key_in_order(pages.halves, node, key_bytes, leaf, walk.least):
            status = -5
        elif not leaf:
            child = child_of(pages.halves, node)
            for sibling in range(walk.counts[level] if pages.address != 0 and level == depth - 2 and index == 0 else 0):
                other = _node(pages, page, sibling, False, key_bytes, False)
                if other >= 0 and child_of(pages.halves, other) < pages.limit:
                    queue_read(pages.address + child_of(pages.halves, other) * page_bytes, page_bytes)
            level += 1
            status = _enter(pages, child, level, level == depth - 1, key_bytes, first, zero, tolerant, walk)
        elif _emit(pages, node, key_bytes, tolerant, entries[out]):
            out += 1
        else:
            status = -2
    result[STATUS] = -status
    return out


def find_entries(pages: Pages, root: Root, kinds: Words, numbers: Words, walk: Walk) -> Entries:
    """The entry of each key, in the tree of segments; of size -1 where there is none."""
    entries = np.zeros(len(kinds), ENTRY)
    entries["size"] = -1
    walk.result[STATUS] = WalkStatus.DONE
    if root.page != NO_ROOT:
        _find_entries(pages, root.page, root.depth, kinds, numbers, walk, entries)
    return entries


@kernel
def _find_entries(
    pages: Pages, root: int, depth: int, kinds: Words, numbers: Words, walk: Walk, entries: Entries
) -> None:
    for i in range(len(kinds)):
        page = root
        for level in range(depth):
            leaf = level == depth - 1
            status = _enter(pages, page, level, leaf, KEY_BYTES, kinds[i], numbers[i], True, walk)
            if status == 0 and walk.indexes[level] < walk.counts[level]:
                node = _node(pages, page, walk.indexes[level], leaf, KEY_BYTES, False)
                if node < 0:
                    status = -4
                elif not leaf:
                    page = child_of(pages.halves, node)
                elif key_word(pages.halves, node + 4) == kinds[i] and key_word(pages.halves, node + 8) == numbers[i]:
                    status = 0 if _emit(pages, node, KEY_BYTES, False, entries[i]) else -2
            if status != 0:
                walk.result[STATUS] = -status
                return
