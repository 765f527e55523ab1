"""One tree of the row file, that of one LMDB transaction: it stays as it is, and is walked by our own code."""

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import DamagedError, StoreReplacedError, TruncatedError, UnreadableError
from ..kernels.arrays import Words
from ..system.files import RESTORE
from . import btree
from .btree import Entries, Meta, Pages, WalkStatus, sound_metas
from .free_list import check_page_use, pages_freed, pages_freed_since
from .mapped import FileMap
from .sigbus import ASK_AGAIN

_ATTEMPTS: Final = 100
_KEY: Final = struct.Struct(">QQ")


class Tree:
    """What one meta page leads to. Nobody may write to its pages meanwhile; nothing in them is believed unchecked."""

    def __init__(self, path: Path, file_map: FileMap, meta: Meta) -> None:
        self.path = path
        self.file_map = file_map
        self.meta = meta
        self.page_bytes, self.txn_id = meta.page_bytes, meta.txn_id

    def limit_pages(self) -> int:
        """Pages the file has now."""
        return self.file_map.file_bytes() // self.page_bytes

    def pages(self) -> Pages:
        return btree.pages_of(self.file_map, self.page_bytes)

    def get(self, key: bytes) -> bytes | None:
        """A small record."""
        with self.file_map.guard.watching():
            found = self.seek(*(np.array([word], np.uint64) for word in _KEY.unpack(key)))[0]
            if found["size"] < 0:
                return None
            start, size_bytes = int(found["place"]), int(found["size"])
            return self.file_map.halves[start : start + (size_bytes + 1) // 2].tobytes()[:size_bytes]

    @property
    def freed_bytes(self) -> int:
        """What its transaction took out of use: copied pages of the tree, and segments deleted."""
        with self.file_map.guard.watching():
            return pages_freed(self.file_map.words, self.meta) * self.page_bytes

    def freed_since(self, txn_id: int) -> int:
        """Bytes that transactions after this one took out of use, and that are not in use again."""
        with self.file_map.guard.watching():
            return pages_freed_since(self.pages(), self.meta, txn_id) * self.page_bytes

    def check_free_pages(self) -> None:
        """Check that each page has one use; LMDB's writer believes its tree and its list of free pages unchecked."""
        with self.file_map.guard.watching():
            found = check_page_use(self.pages(), self.meta)
        self._require_sound(found.status, found.page)

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
    both = [meta_page(file_map, start) for start in (0, page_bytes)]
    seen = [file_map.words[start // 8 :][: btree.META_READ_BYTES // 8].tobytes() for start in (0, page_bytes)]
    if both != [meta_page(file_map, start) for start in (0, page_bytes)]:
        return None
    if seen != both and all(len(page) == btree.META_READ_BYTES for page in both):
        raise StoreReplacedError(
            f"{file_map.path}: what is mapped is not what is read. Another process was the first to write to this file "
            "of a lower layer, and the overlay copied it; open the store again"
        )
    return next(iter(sound_metas(*both)), None)


def meta_page(file_map: FileMap, start: int) -> bytes:
    """Read from the file, so that its guard has nothing to tell: others' refused pages would be in the way."""
    try:
        return os.pread(file_map.locks.descriptor, btree.META_READ_BYTES, start)
    except OSError as error:
        file_map.file_bytes()
        raise UnreadableError(
            f"{file_map.path}: the device refuses its meta pages ({error}). {ASK_AGAIN} {RESTORE}"
        ) from error
