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

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from . import btree
from .btree import Entries, Meta, Pages, WalkStatus, claim, number, wide

_OVERFLOW: Final = 0x04


class PageUse(NamedTuple):
    """What came of a check; ``page`` is where it stopped."""

    status: WalkStatus
    page: int


def pages_freed(words: Words, meta: Meta) -> int:
    """Pages that the newest transaction took out of use: the count in its record, the last of the list. ``words``: the
    file. Its tree of free pages must have been checked, or be what this process wrote since."""
    if meta.free.page == btree.NO_ROOT:
        return 0
    data, page, node, flags = words.data, meta.free.page, 0, 0
    for _ in range(meta.free.depth):
        at = page * meta.page_bytes
        (lower,) = struct.unpack_from("<H", data, at + 12)
        node = at + struct.unpack_from("<H", data, at + lower - 2)[0]
        low, high, flags = struct.unpack_from("<HHH", data, node)
        page = low | high << 16 | flags << 32
    txn_id, place = struct.unpack_from("<QQ", data, node + 8)
    if txn_id != meta.txn_id:
        return 0
    if flags & btree.BIG_DATA:
        (place,) = struct.unpack_from("<Q", data, place * meta.page_bytes + btree.HEADER_BYTES)
    return int(place)


def pages_freed_since(pages: Pages, meta: Meta, txn_id: int) -> int:
    """Pages that transactions after this one took out of use, and that are not in use again."""
    entries = btree.list_tree(pages, meta.free, btree.new_walk(pages.page_halves), key_bytes=btree.FREE_KEY_BYTES)
    places = entries["place"][entries["number"] > txn_id]
    low, high = pages.halves[places].astype(np.int64), pages.halves[places + 1].astype(np.int64)
    return int((low | high << 16).sum())


@inline
def _claim_free(pages: Pages, base: int, size: int, last_page: int, used: Words) -> int:
    """Mark the pages listed in a record of the free list, which starts at half-word ``base``; how many there are, or
    minus a WalkStatus."""
    if size < 8 or size & 7:
        return -7
    count = number(pages.halves, base)
    if count < 0 or count > (size >> 3) - 1:
        return -7
    previous = last_page + 1
    for i in range(1, count + 1):
        page = number(pages.halves, base + 4 * i)
        if page < 2 or page >= previous:
            return -7
        status = claim(used, page, 1, last_page + 1)
        if status != 0:
            return status
        previous = page
    return count


@kernel
def _claim_values(
    pages: Pages, entries: Entries, is_free_list: bool, last_page: int, used: Words, result: Int64s
) -> tuple[int, int]:
    """Mark the pages of the entries' values and, of the tree of free pages, the pages they list; returns how many these
    are, of either kind.

    The headers of segments are left unread: that would read the whole file, and the call that deletes one looks at it.
    """
    halves, overflows, free = pages.halves, 0, 0
    for i in range(len(entries)):
        page, size, status = entries[i]["page"], entries[i]["size"], 0
        if page != 0:
            num_pages = (btree.HEADER_BYTES + size + pages.page_halves * 2 - 1) // (pages.page_halves * 2)
            status = claim(used, page, num_pages, pages.limit)
            overflows += num_pages
            if status == 0 and (is_free_list or entries[i]["kind"] == btree.META_KEY):
                at = page * pages.page_halves
                flags = halves[at + 5] & btree.LASTING
                if number(halves, at) != page or flags != _OVERFLOW or wide(halves, at + 6) != num_pages:
                    status = -3
        if status == 0 and is_free_list:
            status = _claim_free(pages, entries[i]["place"], size, last_page, used)
            free += max(0, status)
        if status < 0:
            result[btree.STATUS] = -status
            result[btree.PAGE] = page
            break
    return overflows, free


def check_page_use(pages: Pages, meta: Meta) -> PageUse:
    """Check both trees of a snapshot, the list of free pages, and what the meta page counts. ``pages``: of the mapped
    file, as long as the tree of ``meta`` is pinned."""
    used: Words = np.zeros((meta.last_page >> 6) + 1, np.uint64)
    pages = pages._replace(limit=min(pages.limit, meta.last_page + 1))  # what is free may lie beyond the file's end
    claimed = 0
    for root, key_bytes in ((meta.main, btree.KEY_BYTES), (meta.free, btree.FREE_KEY_BYTES)):
        walk, is_free_list = btree.new_walk(pages.page_halves, used), key_bytes == btree.FREE_KEY_BYTES
        entries, result = btree.list_tree(pages, root, walk, key_bytes=key_bytes), walk.result
        if result[btree.STATUS] == WalkStatus.DONE:
            overflows, free = _claim_values(pages, entries, is_free_list, meta.last_page, used, result)
        if result[btree.STATUS] != WalkStatus.DONE:
            return PageUse(WalkStatus(int(result[btree.STATUS])), int(result[btree.PAGE]))
        # A transaction frees at least the root it replaced, so the list's last record is the transaction's own.
        newest = int(entries[-1]["number"]) if len(entries) else 0
        is_newest = not is_free_list or newest == meta.txn_id or meta.txn_id <= 1
        totals = (int(result[btree.BRANCHES]), int(result[btree.LEAVES]), overflows, len(entries))
        if not is_newest or totals != root[1:5]:
            return PageUse(WalkStatus.BAD_TOTALS, meta.txn_id % 2)
        claimed += sum(totals[:3]) + free
    if claimed != meta.last_page - 1:
        return PageUse(WalkStatus.BAD_TOTALS, meta.txn_id % 2)
    return PageUse(WalkStatus.DONE, 0)
