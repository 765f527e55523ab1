"""The records of a damaged row file: which version is the last, and its payload."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np

from ..errors import DamagedError
from .btree import META_KEY, Entries
from .checksum import bytes_checksum
from .mapped import FileMap
from .records import (
    HEAD_ITEM,
    STORE_ITEM,
    CommitRecord,
    commit_item,
    payload_item,
    unpack_commit,
    unpack_head,
    unpack_store,
    version_of_item,
)
from .survivors import old_records
from .wreck import GAP

__all__ = ["Remains", "read_remains"]

_PAGE_HEADER_BYTES: Final = 16

T = TypeVar("T")


class Remains(NamedTuple):
    """What could be read beside blocks.

    Attributes:
        store_id: None if its record is damaged.
        record: of the last version; version 0 if nothing was committed.
        has_totals: whether the record says which blocks the version has.
        payload: None if it is damaged.
    """

    store_id: bytes | None
    record: CommitRecord
    has_totals: bool
    payload: bytes | None


def read_remains(path: Path, file_map: FileMap, page_bytes: int, listed: Entries, doubts: list[str]) -> Remains:
    """Read the records among the entries of a tree.

    Args:
        listed: of ``survivors.list_entries``.
        doubts: receives what cannot be proven, in sentences.

    Raises:
        DamagedError: there is no record of any version.
    """
    items = _Items(file_map, page_bytes, listed)
    store_id = items.read(STORE_ITEM, unpack_store)
    head = items.read(HEAD_ITEM, unpack_head)
    if head is not None and not head.kept:
        return Remains(store_id, CommitRecord(tables={}), has_totals=True, payload=b"")
    if head is not None:
        return _of_version(items, head.current, store_id, doubts)
    version = items.highest_version()
    if not version:
        items = _Items(file_map, page_bytes, old_records(file_map, page_bytes))
        version = items.highest_version()
    if not version:
        raise DamagedError(f"{path}: no record of any version can be read, so nothing says which rows are current.")
    doubts.append(f"The record of versions is damaged; {version} is the highest of which a commit record was found.")
    return _of_version(items, version, store_id, doubts)


def _of_version(items: "_Items", version: int, store_id: bytes | None, doubts: list[str]) -> Remains:
    record = items.commit(version)
    if record is None:
        doubts.append(f"The commit record of version {version} is damaged: nothing says how many blocks it has.")
        return Remains(store_id, CommitRecord(version=version, tables={}), has_totals=False, payload=None)
    chunks = [items.bytes_of(payload_item(version, number)) for number in range(record.num_payload_chunks)]
    payload = b"".join(chunk or b"" for chunk in chunks)
    is_sound = len(payload) == record.payload_bytes and bytes_checksum(payload) == record.payload_checksum
    return Remains(store_id, record, has_totals=True, payload=payload if is_sound else None)


class _Items:
    """The records of a tree, by number."""

    def __init__(self, file_map: FileMap, page_bytes: int, listed: Entries) -> None:
        self._raw = file_map.words.view(np.uint8)
        is_item = (listed.sizes != GAP) & (listed.block_keys == META_KEY)
        columns = (listed.epochs[is_item], listed.pages[is_item], listed.sizes[is_item])
        self._places: dict[int, list[tuple[int, int]]] = {}
        for item, page, size in zip(*(column.tolist() for column in columns), strict=True):
            start = -page if page < 0 else page * page_bytes + _PAGE_HEADER_BYTES
            self._places.setdefault(item, []).append((start, size))
        self._end = file_map.file_bytes()

    def bytes_of(self, item: int) -> bytes | None:
        """The first of the places where an item is said to be."""
        return next(iter(self._all(item)), None)

    def _all(self, item: int) -> list[bytes]:
        places = self._places.get(item, [])
        return [self._raw[start : start + size].tobytes() for start, size in places if start + size <= self._end]

    def read(self, item: int, unpack: "Callable[[bytes], T]") -> T | None:
        """A record, or None if it is missing or does not match its checksum."""
        for stored in self._all(item):
            with contextlib.suppress(ValueError):
                return unpack(stored)
        return None

    def commit(self, version: int) -> CommitRecord | None:
        """The commit record of a version."""
        record = self.read(commit_item(version), unpack_commit)
        return record if record is not None and record.version == version else None

    def highest_version(self) -> int:
        """Of those whose commit record can be read; 0 if there is none."""
        versions = {version_of_item(item) for item in self._places}
        return max((version for version in versions if version and self.commit(version)), default=0)
