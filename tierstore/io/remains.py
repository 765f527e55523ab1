"""The records of a damaged row file: which version is the last, and its payload."""

import contextlib
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np

from ..errors import DamagedError
from .btree import META_KEY, Entries
from .checksum import bytes_checksum
from .mapped import FileMap
from .placement import Placement, unpack_placement
from .records import (
    HEAD_ITEM,
    PLACEMENT_COPIES,
    PLACEMENT_MAGIC,
    STORE_ITEM,
    CommitRecord,
    StoreRecord,
    commit_item,
    payload_item,
    placement_chunk_bytes,
    placement_item,
    unpack_commit,
    unpack_head,
    unpack_placement_chunk,
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
        placement: where rows lie, if not at their own places.
    """

    store_id: bytes | None
    record: CommitRecord
    has_totals: bool
    payload: bytes | None
    placement: Placement | None = None


def read_remains(
    path: Path, file_map: FileMap, page_bytes: int, listed: Entries, is_placed: bool, doubts: list[str]
) -> Remains:
    """Read the records among the entries of a tree.

    A row that was moved lies at a place that is no row's own. So a placement that cannot be read costs the rows that it
    is about, and no other row is taken for one of them.

    Args:
        listed: of ``survivors.list_entries``.
        is_placed: the manifest says that there is a placement.
        doubts: receives what cannot be proven, in sentences.

    Raises:
        DamagedError: there is no record of any version.
    """
    items = _Items(file_map, page_bytes, listed)
    stored = items.read(STORE_ITEM, unpack_store)
    remains = _last_version(path, file_map, page_bytes, items, stored.store_id if stored else None, doubts)
    if not is_placed and (stored is None or not stored.placement_bytes):
        return remains
    placement = items.placement(stored)
    if placement is None:
        doubts.append("The record of where rows lie is damaged: the rows that were moved are lost.")
    return remains._replace(placement=placement)


def _last_version(
    path: Path, file_map: FileMap, page_bytes: int, items: "_Items", store_id: bytes | None, doubts: list[str]
) -> Remains:
    """The last version of which there are records."""
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
        self._page_bytes = page_bytes
        self._raw = file_map.words.view(np.uint8)[: file_map.file_bytes()]
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
            with contextlib.suppress(ValueError, struct.error):
                return unpack(stored)
        return None

    def placement(self, stored: StoreRecord | None) -> Placement | None:
        """The placement, each part of it from a copy that is sound, if there is one; None if not."""
        parts: list[bytes] = []
        while stored is None or len(parts) < stored.num_placement_chunks:
            unpack = partial(unpack_placement_chunk, chunk=len(parts))
            items = [placement_item(len(parts), copy) for copy in range(PLACEMENT_COPIES)]
            listed = (self.read(item, unpack) for item in items)
            part = next((part for part in listed if part is not None), None)
            part = self._scanned(len(parts)) if part is None else part
            if part is None:
                break
            parts.append(part)
        with contextlib.suppress(ValueError, struct.error):
            return unpack_placement(b"".join(parts))  # refuses what is cut short
        return None

    def _scanned(self, chunk: int) -> bytes | None:
        """A part of the placement, wherever it lies in the file."""
        page_words = self._page_bytes // 8
        pages = len(self._raw) // self._page_bytes
        firsts = self._raw[: pages * self._page_bytes].view(np.uint64).reshape(pages, page_words)[:, 2:4]
        magic = np.uint64(int.from_bytes(PLACEMENT_MAGIC, "little"))
        for page in np.flatnonzero((firsts[:, 0] == magic) & (firsts[:, 1] == np.uint64(chunk))).tolist():
            start = page * self._page_bytes + _PAGE_HEADER_BYTES
            size = placement_chunk_bytes(self._raw[start : start + 24].tobytes())
            with contextlib.suppress(ValueError, struct.error):
                return unpack_placement_chunk(self._raw[start : start + size].tobytes(), chunk)
        return None

    def commit(self, version: int) -> CommitRecord | None:
        """The commit record of a version."""
        record = self.read(commit_item(version), unpack_commit)
        return record if record is not None and record.version == version else None

    def highest_version(self) -> int:
        """Of those whose commit record can be read; 0 if there is none."""
        versions = {version_of_item(item) for item in self._places}
        return max((version for version in versions if version and self.commit(version)), default=0)
