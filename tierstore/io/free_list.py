"""Every page of the row file has one use: part of LMDB's tree of segments, of its tree of free pages, or free.

LMDB's writer believes its pages and the list of free pages it keeps in a tree of its own: a damaged page number there
makes it overwrite segments that are in use, a damaged length makes it read past the list's end. So before LMDB follows
them, both trees are walked, and a bitmap, one bit a page of the file, sees that none is claimed twice and none is
forgotten. What the meta page counts must then match as well, which is all that stands for a checksum there.

Source: LMDB 0.9's mdb.c. A record of the free list has for key the number of the transaction that freed its pages (8
bytes, native), and for value a count and that many page numbers, descending; there may be room behind them.
"""

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import inline, kernel
from .btree import (
    MAX_DEPTH,
    META_KEY,
    NO_ROOT,
    Halves,
    Meta,
    TreeTotals,
    WalkStatus,
    child_of,
    count_keys,
    half,
    key_word,
    number,
)
from .mapped import zeros

_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_OVERFLOW: Final = 0x04
_LASTING: Final = 0x3FEF
"""The flags of a page that mean something on disk."""
_BIG_DATA: Final = 0x01
_PAGE_HEADER: Final = 16
_NODE_HEADER: Final = 8
_MAIN_KEY_BYTES: Final = 16
_FREE_KEY_BYTES: Final = 8

# Places in ``result``.
_STATUS: Final = 0
_PAGE: Final = 1
_BRANCHES: Final = 2
_LEAVES: Final = 3
_OVERFLOWS: Final = 4
_ENTRIES: Final = 5
_NEWEST: Final = 6
_FREE: Final = 7
_RESULTS: Final = 8


class PageUse(NamedTuple):
    """What came of a check; ``page`` is where it stopped."""

    status: WalkStatus
    page: int
    free_pages: int


def pages_freed(words: Words, meta: Meta) -> int:
    """Pages that the newest transaction took out of use: the count in its record, the last of the list.

    Args:
        words: the file. Its tree of free pages must have been checked, or be what this process wrote since.
    """
    if meta.free_root == NO_ROOT:
        return 0
    data, page, node, flags = words.data, meta.free_root, 0, 0
    for _ in range(meta.free_depth):
        at = page * meta.page_bytes
        (lower,) = struct.unpack_from("<H", data, at + 12)
        node = at + struct.unpack_from("<H", data, at + lower - 2)[0]
        low, high, flags = struct.unpack_from("<HHH", data, node)
        page = low | high << 16 | flags << 32
    txn_id, place = struct.unpack_from("<QQ", data, node + _NODE_HEADER)
    if txn_id != meta.txn_id:
        return 0
    if flags & _BIG_DATA:
        (place,) = struct.unpack_from("<Q", data, place * meta.page_bytes + _PAGE_HEADER)
    return int(place)


@inline
def _word(halves: Halves, at: int) -> np.uint64:
    """A native 64-bit number at an even address."""
    word = np.uint64(0)
    for i in range(4):
        word |= np.uint64(halves[at + i]) << np.uint64(16 * i)
    return word


@inline
def _claim(used: Words, page: int, count: int, end: int) -> int:
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
    """What a node takes in its page, or -1 if it is none."""
    has_key = halves[node + 3] == key_bytes
    if not leaf:
        # The first key of a branch page stands for everything smaller and may be left out.
        return _NODE_HEADER + half(halves, node + 3) if has_key or (first and halves[node + 3] == 0) else -1
    flags = halves[node + 2]
    if not has_key or flags > _BIG_DATA:
        return -1
    size = 8 if flags == _BIG_DATA else half(halves, node) | (half(halves, node + 1) << 16)
    return (_NODE_HEADER + key_bytes + size + 1) & ~1


@inline
def _nodes_tile(
    halves: Halves, page_halves: int, page: int, num_keys: int, leaf: bool, key_bytes: int, sizes: Int64s
) -> bool:
    """Whether the page's nodes lie side by side from its upper bound to its end, as LMDB moves them by their sizes.

    ``sizes``: int64 [page_halves], zeros; left so unless the answer is no.
    """
    at = page * page_halves
    upper = half(halves, at + 7) >> 1
    for i in range(num_keys):
        offset = half(halves, at + 8 + i)
        place = offset >> 1
        if offset & 1 or place < upper or place + _NODE_HEADER // 2 > page_halves:
            return False
        node_bytes = _node_bytes(halves, at + place, leaf, i == 0, key_bytes)
        if node_bytes < 0 or place + (node_bytes >> 1) > page_halves:
            return False
        sizes[place] = node_bytes >> 1
    place = upper
    count = 0
    while place < page_halves:
        node_halves = sizes[place]
        if node_halves == 0:
            return False
        sizes[place] = 0
        place += node_halves
        count += 1
    return place == page_halves and count == num_keys


@inline
def _key_in_order(halves: Halves, node: int, key_bytes: int, leaf: bool, least: Words) -> bool:
    """Whether the node's key is not below ``least``; then raises ``least`` to what may come next.

    A branch's key is above every key before it and not above any after it.
    """
    if key_bytes == _MAIN_KEY_BYTES:
        first, second = key_word(halves, node + 4), key_word(halves, node + 8)
    else:
        first, second = _word(halves, node + 4), np.uint64(0)
    if first < least[0] or (first == least[0] and second < least[1]):
        return False
    least[0] = first
    least[1] = second + np.uint64(1 if leaf else 0)
    return True


@inline
def _claim_free(halves: Halves, base: int, size: int, last_page: int, used: Words, result: Int64s) -> int:
    """Mark the pages listed in a record of the free list, which starts at half-word ``base``."""
    if size < 8 or size & 7:
        return -7
    count = number(halves, base)
    if count < 0 or count > (size >> 3) - 1:
        return -7
    previous = last_page + 1
    for i in range(1, count + 1):
        page = number(halves, base + 4 * i)
        if page < 2 or page >= previous:
            return -7
        status = _claim(used, page, 1, last_page + 1)
        if status != 0:
            return status
        previous = page
    result[_FREE] += count
    return 0


@inline
def _claim_value(
    halves: Halves,
    page_halves: int,
    limit: int,
    last_page: int,
    node: int,
    key_bytes: int,
    used: Words,
    result: Int64s,
) -> int:
    """Mark the pages of an entry's value and, in the tree of free pages, the pages it lists.

    The headers of segments are left unread: that would read the whole file, and whoever deletes one looks at it.
    """
    is_free_list = key_bytes == _FREE_KEY_BYTES
    size = half(halves, node) | (half(halves, node + 1) << 16)
    base = node + 4 + key_bytes // 2
    if halves[node + 2] == _BIG_DATA:
        page = number(halves, base)
        pages_each = (_PAGE_HEADER + size + page_halves * 2 - 1) // (page_halves * 2)
        status = _claim(used, page, pages_each, min(limit, last_page + 1))
        if status != 0:
            return status
        result[_OVERFLOWS] += pages_each
        if is_free_list or key_word(halves, node + 4) == META_KEY:
            at = page * page_halves
            flags = halves[at + 5] & _LASTING
            pages_said = half(halves, at + 6) | (half(halves, at + 7) << 16)
            if number(halves, at) != page or flags != _OVERFLOW or pages_said != pages_each:
                result[_PAGE] = page
                return -3
        base = page * page_halves + _PAGE_HEADER // 2
    result[_ENTRIES] += 1
    if not is_free_list:
        return 0
    result[_NEWEST] = number(halves, node + 4)
    return _claim_free(halves, base, size, last_page, used, result)


@inline
def _enter(
    halves: Halves,
    page_halves: int,
    end: int,
    page: int,
    leaf: bool,
    key_bytes: int,
    used: Words,
    sizes: Int64s,
    result: Int64s,
) -> int:
    """Claim and check one page of a tree; its number of keys, or minus a WalkStatus."""
    result[_PAGE] = page
    status = _claim(used, page, 1, end)
    if status != 0:
        return status
    num_keys = count_keys(halves, page_halves, end, page, _LEAF if leaf else _BRANCH)
    if num_keys >= 0 and not _nodes_tile(halves, page_halves, page, num_keys, leaf, key_bytes, sizes):
        return -4
    result[_LEAVES if leaf else _BRANCHES] += 1
    return num_keys


@kernel
def _use_tree(
    halves: Halves,
    page_halves: int,
    limit: int,
    last_page: int,
    root: int,
    depth: int,
    key_bytes: int,
    used: Words,
    result: Int64s,
) -> None:
    """Check one of the two trees and mark in ``used`` every page it claims.

    Args:
        limit: pages in the file; what is free may lie beyond.
        key_bytes: 16 for the tree of segments, 8 for that of free pages.
        used: uint64 bitmap of the pages up to ``last_page``.
        result: int64 [8], zeroed; see the names above.
    """
    pages = np.zeros(MAX_DEPTH + 1, np.int64)
    indexes = np.zeros(MAX_DEPTH + 1, np.int64)
    counts = np.zeros(MAX_DEPTH + 1, np.int64)
    sizes = np.zeros(page_halves, np.int64)
    least = np.zeros(2, np.uint64)
    end = min(limit, last_page + 1)
    pages[0] = root
    level = 0
    while level >= 0:
        leaf = level == depth - 1
        page = pages[level]
        index = indexes[level]
        if index == 0:
            counts[level] = _enter(halves, page_halves, end, page, leaf, key_bytes, used, sizes, result)
            if counts[level] < 0:
                result[_STATUS] = -counts[level]
                return
        if index == counts[level]:
            level -= 1
            continue
        indexes[level] += 1
        at = page * page_halves
        node = at + (half(halves, at + 8 + index) >> 1)
        result[_PAGE] = page
        if (leaf or index > 0) and not _key_in_order(halves, node, key_bytes, leaf, least):
            result[_STATUS] = 5
            return
        if leaf:
            status = _claim_value(halves, page_halves, limit, last_page, node, key_bytes, used, result)
            if status != 0:
                result[_STATUS] = -status
                return
        else:
            level += 1
            pages[level] = child_of(halves, node)
            indexes[level] = 0


def _claimed(halves: Halves, meta: Meta, limit: int, key_bytes: int, used: Words) -> Int64s:
    """Check one of the two trees, and the list of free pages if it is that one; the result of ``_use_tree``."""
    is_main = key_bytes == _MAIN_KEY_BYTES
    root, depth = (meta.main_root, meta.main_depth) if is_main else (meta.free_root, meta.free_depth)
    result = np.zeros(_RESULTS, np.int64)
    if root != NO_ROOT:
        root = min(root, meta.last_page + 1)
        _use_tree(halves, meta.page_bytes // 2, limit, meta.last_page, root, depth, key_bytes, used, result)
    totals = TreeTotals(*result[_BRANCHES : _ENTRIES + 1].tolist())
    # A transaction frees at least the root it replaced, so the list's last record is the transaction's own.
    is_newest = is_main or result[_NEWEST] == meta.txn_id or meta.txn_id <= 1
    if result[_STATUS] == WalkStatus.DONE and not (is_newest and totals == (meta.main if is_main else meta.free)):
        result[_STATUS], result[_PAGE] = WalkStatus.BAD_TOTALS, meta.txn_id % 2
    return result


def check_page_use(halves: Halves, meta: Meta, limit: int) -> PageUse:
    """Check both trees of a snapshot, the list of free pages, and what the meta page counts.

    Args:
        halves: uint16 view of the mapped file, as long as the tree of ``meta`` is pinned.
        limit: pages in the file.
    """
    used: NDArray[np.uint64] = zeros((meta.last_page >> 6) + 1, np.uint64)
    claimed = free = 0
    for key_bytes in (_MAIN_KEY_BYTES, _FREE_KEY_BYTES):
        result = _claimed(halves, meta, limit, key_bytes, used)
        if result[_STATUS] != WalkStatus.DONE:
            return PageUse(WalkStatus(int(result[_STATUS])), int(result[_PAGE]), 0)
        claimed += int(result[_BRANCHES] + result[_LEAVES] + result[_OVERFLOWS] + result[_FREE])
        free = int(result[_FREE])
    if claimed != meta.last_page - 1:
        return PageUse(WalkStatus.BAD_TOTALS, meta.txn_id % 2, 0)
    return PageUse(WalkStatus.DONE, 0, free)
