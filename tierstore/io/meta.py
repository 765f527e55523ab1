"""LMDB's meta pages, and records of a row file that are looked up without compiled code: numba takes a second to load.

Source of the page format: LMDB 0.9's mdb.c (Howard Chu), data format version 1.
"""

import os
import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ..errors import FormatError, TruncatedError
from ..system.files import RESTORE, open_plain_file

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
NO_ROOT: Final = (1 << 64) - 1
META_KEY: Final = (1 << 64) - 1  # first key word of a record; sorts after all segments
SEGMENTS_KEY: Final = 0  # first key word of a segment; the second is its number
META_READ_BYTES: Final = 152
MAX_PAGES: Final = 1 << 33  # 32 TiB: a writer maps the file three times, and a process has 128 TiB of address space
MAX_DEPTH: Final = 32
HEADER_BYTES: Final = 16
KEY_BYTES: Final = 16
NODE_BYTES: Final = 8
BIG_DATA: Final = 0x01  # the flag of a node whose value lies on pages of its own

_META: Final = 0x08  # the flag of a meta page
_INTEGER_KEYS: Final = 0x08
_ENVIRONMENT_FLAGS: Final = 0x4000  # MDB_NOSUBDIR, which LMDB keeps among the flags of its tree of free pages
_ATTEMPTS: Final = 5


def bytes_checksum(data: bytes) -> int:
    """XXH64 with seed 0, of metadata."""
    return xxhash.xxh64_intdigest(data)


class Root(NamedTuple):  # of a tree, and what LMDB counts of it
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    page: int


class Meta(NamedTuple):  # what one of LMDB's two meta pages says
    page_bytes: int
    last_page: int
    txn_id: int
    main: Root
    free: Root


def parse_meta(page: bytes) -> Meta | str:
    """The meta page that starts with these ``META_READ_BYTES`` bytes, or what is wrong with it."""
    if len(page) < META_READ_BYTES:
        return "the file ends inside its header"
    (flags,), (magic, version) = struct.unpack_from("<H", page, 10), struct.unpack_from("<II", page, 16)
    if magic != MAGIC:
        return "it is not an LMDB file (no magic number)"
    if version != DATA_VERSION:
        return f"its LMDB data version is {version}, not {DATA_VERSION}"
    if not flags & _META:
        return "a meta page is damaged"
    page_bytes, free_flags, *free = struct.unpack_from("<IHHQQQQQ", page, 40)
    main_pad, main_flags, *main = struct.unpack_from("<IHHQQQQQ", page, 88)
    last_page, txn_id = struct.unpack_from("<QQ", page, 136)
    meta = Meta(page_bytes, last_page, txn_id, Root(*main), Root(*free))
    if page_bytes < 512 or page_bytes > 65536 or page_bytes & (page_bytes - 1):
        return f"a meta page is damaged (page size {page_bytes})"
    if main_flags or main_pad or free_flags & ~_ENVIRONMENT_FLAGS != _INTEGER_KEYS:
        return "a meta page is damaged (flags)"
    for root in (meta.main, meta.free):
        if root.depth > MAX_DEPTH or (root.depth == 0) != (root.page == NO_ROOT):
            return "a meta page is damaged (tree depth)"
        if root.page != NO_ROOT and root.page > last_page:
            return "a meta page is damaged (root)"
    return meta if last_page < MAX_PAGES else f"a meta page is damaged ({last_page + 1} pages)"


def sound_metas(*pages: bytes) -> list[Meta]:
    """Those of these meta pages that are some, the newest first."""
    metas = (meta for meta in map(parse_meta, pages) if isinstance(meta, Meta))
    return sorted(metas, key=lambda meta: meta.txn_id, reverse=True)


def newer_meta(even: Meta, odd: Meta) -> Meta | None:
    """The newer of a file's two meta pages; None if they are not in step, where LMDB might take the older of two trees
    for the newer. Transaction n writes meta page n % 2 and leaves that of n - 1 as it is."""
    is_in_step = even.txn_id == odd.txn_id == 0 or (even.txn_id % 2 == 0 and abs(even.txn_id - odd.txn_id) == 1)
    return max(even, odd, key=lambda meta: meta.txn_id) if is_in_step else None


def repoint(page: bytes, meta: Meta, txn_id: int) -> bytes:
    """A meta page of the same file, ``META_READ_BYTES`` of it, that leads to the tree of ``meta`` by another number."""
    free = page[40:46] + struct.pack("<HQQQQQ", *meta.free)
    main = struct.pack("<IHHQQQQQ", 0, 0, *meta.main)
    return page[:40] + free + main + struct.pack("<QQ", meta.last_page, txn_id)


def newest_meta(path: Path) -> Meta:
    """The newer meta page of a file that is LMDB's, of the right version. FormatError, TruncatedError."""
    for _ in range(_ATTEMPTS):  # a writer may replace one while the other is read
        with path.open("rb", buffering=0) as file:
            even = _read_meta(path, file.fileno(), 0)
            odd = _read_meta(path, file.fileno(), even.page_bytes)
        if even.page_bytes != odd.page_bytes:
            raise FormatError(f"{path}: its two meta pages disagree on the page size. {RESTORE}")
        if (meta := newer_meta(even, odd)) is not None:
            return meta
    raise FormatError(f"{path}: its two meta pages are not those of successive transactions. {RESTORE}")


def _read_meta(path: Path, descriptor: int, place: int) -> Meta:
    page, size = os.pread(descriptor, META_READ_BYTES, place), os.fstat(descriptor).st_size
    if len(page) < META_READ_BYTES:
        raise TruncatedError(f"{path}: {size} bytes are too few for the two meta pages of an LMDB file. {RESTORE}")
    if isinstance(meta := parse_meta(page), str):
        raise FormatError(f"{path}: {meta}. {RESTORE}")
    return meta


class PlainTree:
    """The newest tree of a row file, read without compiled code and without a lock; to be closed. LMDB's transaction
    n + 1 leaves tree n whole; so what was read is what was written, if ``is_whole`` says so afterwards. A damaged tree
    gives any ValueError, IndexError or ``struct.error``."""

    def __init__(self, path: Path) -> None:
        self.path, self.meta = path, newest_meta(path)
        self._file = open_plain_file(path)
        self.close = self._file.close

    def is_whole(self) -> bool:
        return newest_meta(self.path).txn_id - self.meta.txn_id in (0, 1)

    def _read(self, page: int, start: int, size: int) -> bytes:
        """So many bytes from one of a page on. ValueError: the file has not so many."""
        page_bytes = self.meta.page_bytes
        place = page * page_bytes + start
        is_inside = place + size <= (self.meta.last_page + 1) * page_bytes
        if not is_inside or len(data := os.pread(self._file.fileno(), size, place)) < size:
            raise ValueError(f"page {page} is none, or does not hold {size} bytes")
        return data

    def get(self, key: bytes) -> bytes | None:
        depth, *_, page = self.meta.main
        if not depth:
            return None
        for level in range(depth, 0, -1):
            data = self._read(page, 0, self.meta.page_bytes)
            (lower,) = struct.unpack_from("<H", data, 12)
            nodes = struct.unpack_from(f"<{(lower - HEADER_BYTES) // 2}H", data, HEADER_BYTES)
            keys = [data[node + NODE_BYTES : node + NODE_BYTES + KEY_BYTES] for node in nodes]
            place = bisect_left(keys, key) if level == 1 else bisect_right(keys, key, 1) - 1
            if place == len(keys) or (level == 1 and keys[place] != key):
                return None
            size, flags = struct.unpack_from("<IH", data, node := nodes[place])
            page = size | flags << 32  # of a branch's node
        start = node + NODE_BYTES + KEY_BYTES
        if not flags & BIG_DATA:
            return data[start : start + size]
        (page,) = struct.unpack_from("<Q", data, start)
        return self._read(page, HEADER_BYTES, size)
