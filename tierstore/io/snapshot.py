"""One tree of the row file, that of one LMDB transaction: it stays as it is, and is walked by our own code.

Every page of the row file is part of LMDB's tree of segments, of its tree of free pages, or free. LMDB's writer
believes its pages and its list of free pages: by a damaged number it would overwrite segments that are in use. So
before LMDB follows them, both trees are walked, and a bitmap sees that no page is claimed twice and none is forgotten.
What the meta page counts must match as well, which is all that stands for a checksum there.

Source: LMDB 0.9's mdb.c. A record of the free list has for key the number of the transaction that freed its pages (8
bytes, native), and for value a count and that many page numbers, descending; there may be room behind them.
"""

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import DamagedError, StoreReplacedError, TruncatedError, UnreadableError
from ..kernels.arrays import Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..system.files import RESTORE
from . import btree
from .btree import Entries, Pages, WalkStatus, claim, number, wide
from .mapped import FileMap
from .meta import HEADER_BYTES, KEY_BYTES, META_READ_BYTES, Meta, sound_metas
from .sigbus import ASK_AGAIN

_OVERFLOW: Final = 0x04
_ATTEMPTS: Final = 100
_KEY: Final = struct.Struct(">QQ")


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
    """Mark the pages of the entries' values and, of the tree of free pages, the pages they list; returns how many of
    either kind. Headers of segments are left to the call that deletes one: this would read the whole file."""
    halves, overflows, free = pages.halves, 0, 0
    for i in range(len(entries)):
        page, size, status = entries[i]["page"], entries[i]["size"], 0
        if page != 0:
            num_pages = (HEADER_BYTES + size + pages.page_halves * 2 - 1) // (pages.page_halves * 2)
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


def check_page_use(pages: Pages, meta: Meta) -> tuple[int, int]:
    """Check both trees of a snapshot, the list of free pages, and what the meta page counts; the WalkStatus, and the
    page where it stopped. ``pages``: of the mapped file, as long as the tree of ``meta`` is pinned."""
    used: Words = np.zeros((meta.last_page >> 6) + 1, np.uint64)
    pages = pages._replace(limit=min(pages.limit, meta.last_page + 1))  # what is free may lie beyond the file's end
    claimed = 0
    for root, key_bytes in ((meta.main, KEY_BYTES), (meta.free, btree.FREE_KEY_BYTES)):
        walk, is_free_list = btree.new_walk(pages.page_halves, used), key_bytes == btree.FREE_KEY_BYTES
        entries, result = btree.list_tree(pages, root, walk, key_bytes=key_bytes), walk.result
        if result[btree.STATUS] == WalkStatus.DONE:
            overflows, free = _claim_values(pages, entries, is_free_list, meta.last_page, used, result)
        if result[btree.STATUS] != WalkStatus.DONE:
            return int(result[btree.STATUS]), int(result[btree.PAGE])
        # A transaction frees at least the root it replaced, so the list's last record is the transaction's own.
        newest = int(entries[-1]["number"]) if len(entries) else 0
        is_newest = not is_free_list or newest == meta.txn_id or meta.txn_id <= 1
        totals = (int(result[btree.BRANCHES]), int(result[btree.LEAVES]), overflows, len(entries))
        if not is_newest or totals != root[1:5]:
            return WalkStatus.BAD_TOTALS, meta.txn_id % 2
        claimed += sum(totals[:3]) + free
    if claimed != meta.last_page - 1:
        return WalkStatus.BAD_TOTALS, meta.txn_id % 2
    return WalkStatus.DONE, 0


class Tree:
    """What one meta page leads to. Nobody may write to its pages meanwhile; nothing in them is believed unchecked."""

    def __init__(self, path: Path, file_map: FileMap, meta: Meta) -> None:
        self.path = path
        self.file_map = file_map
        self.meta = meta
        self.page_bytes, self.txn_id = meta.page_bytes, meta.txn_id

    def limit_pages(self) -> int:
        return self.file_map.file_bytes() // self.page_bytes

    def pages(self) -> Pages:
        return Pages(self.file_map.halves, self.page_bytes // 2, self.limit_pages(), self.file_map.address)

    def get(self, key: bytes) -> bytes | None:
        with self.file_map.guard.watching():
            found = self.seek(*(np.array([word], np.uint64) for word in _KEY.unpack(key)))[0]
            if found["size"] < 0:
                return None
            start, size_bytes = int(found["place"]), int(found["size"])
            return self.file_map.halves[start : start + (size_bytes + 1) // 2].tobytes()[:size_bytes]

    def freed_since(self, txn_id: int) -> int:
        """Bytes that transactions after this one took out of use, and that are not in use again."""
        with self.file_map.guard.watching():
            pages = self.pages()
            entries = btree.list_tree(
                pages, self.meta.free, btree.new_walk(pages.page_halves), key_bytes=btree.FREE_KEY_BYTES
            )
            places = entries["place"][entries["number"] > txn_id]
            low, high = pages.halves[places].astype(np.int64), pages.halves[places + 1].astype(np.int64)
            return int((low | high << 16).sum()) * self.page_bytes

    def check_free_pages(self) -> None:
        with self.file_map.guard.watching():
            found = check_page_use(self.pages(), self.meta)
        self._require_sound(*found)

    def walk(self, first_key: int = 0) -> Entries:
        """Entries in key order from key word ``first_key`` on."""
        walk = btree.new_walk(self.page_bytes // 2)
        with self.file_map.guard.watching():
            entries = btree.list_tree(self.pages(), self.meta.main, walk, first_key)
        self._require_sound(*walk.result[:2])
        return entries

    def seek(self, kinds: Words, numbers: Words) -> Entries:
        """The entry of each key; of size -1 where there is none."""
        walk = btree.new_walk(self.page_bytes // 2)
        with self.file_map.guard.watching():
            entries = btree.find_entries(self.pages(), self.meta.main, kinds, numbers, walk)
        self._require_sound(*walk.result[:2])
        return entries

    def _require_sound(self, status: int, page: int) -> None:
        if status == WalkStatus.OUT_OF_FILE:
            raise TruncatedError(f"{self.path}: page {page} of its tree leads beyond the end of the file. {RESTORE}")
        if status != WalkStatus.DONE:
            raise DamagedError(
                f"{self.path}: page {page} of its tree is damaged ({WalkStatus(status).name}). {RESTORE}"
            )


class Snapshot(Tree):
    """The newest tree, kept from being written to by a lock on the file (``reader_locks.py``) until it is closed."""

    def __init__(self, path: Path, file_map: FileMap, page_bytes: int) -> None:
        meta = _pin(path, file_map, page_bytes)
        try:
            super().__init__(path, file_map.reaching(file_map.locks.size_bytes()), meta)
        except BaseException:
            file_map.locks.release(meta.txn_id)
            raise

    def close(self) -> None:
        self.file_map.locks.release(self.txn_id)


def _pin(path: Path, file_map: FileMap, page_bytes: int) -> Meta:
    """The newest tree's meta page, read once more after the tree was locked."""
    for _ in range(_ATTEMPTS):
        found = _newest(file_map, page_bytes)
        if found is None:
            continue
        file_map.locks.hold(found.txn_id)
        with contextlib.ExitStack() as stack:
            stack.callback(file_map.locks.release, found.txn_id)
            meta = _newest(file_map, page_bytes)
            if meta is not None and meta.txn_id == found.txn_id:
                stack.pop_all()
                return meta
    raise DamagedError(f"{path}: its meta pages cannot be read, or change all the time. {RESTORE}")


def _newest(file_map: FileMap, page_bytes: int) -> Meta | None:
    """The newer of the two meta pages, of which one may be damaged or in the middle of being written; None if they
    change."""
    both = metas_in(file_map, page_bytes)
    seen = tuple(file_map.words[start // 8 :][: META_READ_BYTES // 8].tobytes() for start in (0, page_bytes))
    if both != metas_in(file_map, page_bytes):
        return None
    if seen != both and all(len(page) == META_READ_BYTES for page in both):
        raise StoreReplacedError(
            f"{file_map.path}: what is mapped is not what is read. Another process was the first to write to this file "
            "of a lower layer, and the overlay copied it; open the store again"
        )
    return next(iter(sound_metas(*both)), None)


def metas_in(file_map: FileMap, page_bytes: int) -> tuple[bytes, ...]:
    """Both meta pages, read from the file: in the map others' refused pages would be in the way."""
    try:
        return tuple(os.pread(file_map.locks.descriptor, META_READ_BYTES, start) for start in (0, page_bytes))
    except OSError as error:
        file_map.file_bytes()
        raise UnreadableError(
            f"{file_map.path}: the device refuses its meta pages ({error}). {ASK_AGAIN} {RESTORE}"
        ) from error
