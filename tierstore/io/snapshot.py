"""One tree of the row file, that of one LMDB transaction: it stays as it is, and is walked by our own code."""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import DamagedError, TruncatedError, UnreadableError
from ..kernels.arrays import Words
from ..system.oserrors import RESTORE
from .btree import META_KEY, META_READ_BYTES, NO_ROOT, Entries, Meta, WalkStatus, list_entries, new_entries, parse_meta
from .free_list import check_page_use, pages_freed
from .guard import ASK_AGAIN
from .mapped import FileMap

_CHUNK_ENTRIES: Final = 1 << 16
_ATTEMPTS: Final = 100
_KEY: Final = struct.Struct(">QQ")


def raise_for_walk(path: Path, status: int, page: int) -> None:
    """Raise what a failed walk amounts to; nothing if it did not fail."""
    if status in (WalkStatus.DONE, WalkStatus.FULL):
        return
    if status == WalkStatus.OUT_OF_FILE:
        raise TruncatedError(f"{path}: page {page} of its tree leads beyond the end of the file. {RESTORE}")
    raise DamagedError(f"{path}: page {page} of its tree is damaged ({WalkStatus(status).name}). {RESTORE}")


class Tree:
    """What one meta page leads to. Nobody may write to its pages meanwhile; nothing in them is believed unchecked."""

    def __init__(self, path: Path, file_map: FileMap, meta: Meta) -> None:
        self.path = path
        self.file_map = file_map
        self.meta = meta
        self.page_bytes = meta.page_bytes

    @property
    def is_empty(self) -> bool:
        return self.meta.main_root == NO_ROOT

    @property
    def txn_id(self) -> int:
        return self.meta.txn_id

    def limit_pages(self) -> int:
        """Pages the file has now."""
        return self.file_map.file_bytes() // self.page_bytes

    def get(self, key: bytes) -> bytes | None:
        """A small record."""
        if self.is_empty:
            return None
        first, second = np.array(_KEY.unpack(key), np.uint64)
        with self.file_map.guard.watching():
            found = self.seek(first[None], second[None])
            if found.kinds[0] != first or found.numbers[0] != second:
                return None
            start, size_bytes = int(found.places[0]), int(found.sizes[0])
            return self.file_map.halves[start : start + (size_bytes + 1) // 2].tobytes()[:size_bytes]

    @property
    def freed_bytes(self) -> int:
        """What its transaction took out of use: copied pages of the tree, and segments deleted."""
        with self.file_map.guard.watching():
            return pages_freed(self.file_map.words, self.meta) * self.page_bytes

    def check_free_pages(self) -> None:
        """Check that each page has one use; LMDB's writer believes its tree and its list of free pages unchecked."""
        with self.file_map.guard.watching():
            found = check_page_use(self.file_map.halves, self.meta, self.limit_pages())
        raise_for_walk(self.path, found.status, found.page)

    def walk(self, first_key: int = 0) -> Iterator[tuple[Entries, int]]:
        """Entries in key order from key word ``first_key`` on, in chunks; each is valid until the next is asked for."""
        if self.is_empty:
            return
        entries = new_entries(_CHUNK_ENTRIES)
        first, second, status = np.uint64(first_key), np.uint64(0), WalkStatus.FULL
        while status == WalkStatus.FULL:
            count, status = self._list(np.array([first]), np.array([second]), _CHUNK_ENTRIES, entries)
            if count:
                first, second = _next_key(entries.kinds[count - 1], entries.numbers[count - 1])
                yield entries, count

    def seek(self, kinds: Words, numbers: Words) -> Entries:
        """For each key the first entry at or after it; past the end, key (META_KEY, META_KEY)."""
        entries = new_entries(len(kinds))
        self._list(kinds, numbers, 1, entries)
        return entries

    def _list(self, kinds: Words, numbers: Words, each: int, entries: Entries) -> tuple[int, WalkStatus]:
        """See ``list_entries``; how many there are, and DONE or FULL."""
        file_map, meta, result = self.file_map, self.meta, np.zeros(3, np.int64)
        base = file_map.address if each > 1 else 0
        with file_map.guard.watching():
            list_entries(
                file_map.halves, base, self.page_bytes // 2, self.limit_pages(), meta.main_root, meta.main_depth,
                kinds, numbers, each, entries, result,
            )  # fmt: skip
        count, status, page = result.tolist()
        raise_for_walk(self.path, status, page)
        return count, WalkStatus(status)


class Snapshot(Tree):
    """The newest tree, kept from being written to by a lock on the file (``pins.py``) until it is closed."""

    def __init__(self, path: Path, file_map: FileMap, page_bytes: int) -> None:
        super().__init__(path, file_map, _pin(path, file_map, page_bytes))

    def close(self) -> None:
        self.file_map.pins.release(self.txn_id)


def _next_key(first: np.uint64, second: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The least key after this one; the greatest is its own successor, at which a walk ends."""
    if second != META_KEY:
        return first, second + np.uint64(1)
    return (first + np.uint64(1), np.uint64(0)) if first != META_KEY else (first, second)


def _pin(path: Path, file_map: FileMap, page_bytes: int) -> Meta:
    """The newest tree's meta page, read once more after the tree was locked."""
    for _ in range(_ATTEMPTS):
        found = _newest(file_map, page_bytes)
        if found is None:
            continue
        file_map.pins.hold(found.txn_id)
        with contextlib.ExitStack() as stack:
            stack.callback(file_map.pins.release, found.txn_id)
            meta = _newest(file_map, page_bytes)
            if meta is not None and meta.txn_id == found.txn_id:
                stack.pop_all()
                return meta
    raise _unreadable(path)


def _unreadable(path: Path) -> DamagedError:
    return DamagedError(f"{path}: its meta pages cannot be read, or change all the time. {RESTORE}")


def _newest(file_map: FileMap, page_bytes: int) -> Meta | None:
    """The newer of the two meta pages, of which one may be damaged or in the middle of being written; None if they
    change."""
    both = [_meta_page(file_map, start) for start in (0, page_bytes)]
    if both != [_meta_page(file_map, start) for start in (0, page_bytes)]:
        return None
    return max((meta for meta in map(_parsed, both) if meta is not None), key=lambda meta: meta.txn_id, default=None)


def _meta_page(file_map: FileMap, start: int) -> bytes:
    """Read from the file, so that its guard has nothing to tell: others' refused pages would be in the way."""
    try:
        return os.pread(file_map.pins.descriptor, META_READ_BYTES, start)
    except OSError as error:
        file_map.file_bytes()
        raise UnreadableError(
            f"{file_map.path}: the device refuses its meta pages ({error}). {ASK_AGAIN} {RESTORE}"
        ) from error


def _parsed(page: bytes) -> Meta | None:
    meta = parse_meta(page)
    return None if isinstance(meta, str) else meta
