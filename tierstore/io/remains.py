"""The records of a damaged row file: which version is the last, its payload, and what the log is to hold."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, FormatError
from .btree import META_KEY, SEGMENTS_KEY, new_entries
from .checksum import bytes_checksum
from .mapped import FileMap
from .records import (
    HEAD_ITEM,
    LOG_ITEM,
    STORE_ITEM,
    Head,
    LogRecord,
    OtherFormatError,
    commit_item,
    payload_item,
    unpack_commit,
    unpack_head,
    unpack_log,
    unpack_store,
)
from .wreck import list_nodes

__all__ = ["Remains", "read_remains"]

_CHUNK_ENTRIES: Final = 1 << 16
_PAGE_HEADER_BYTES: Final = 16

T = TypeVar("T")


class Remains(NamedTuple):
    """What could be read beside segments.

    Attributes:
        store_id: None if its record is damaged.
        version: the current one; 0 if nothing was committed.
        is_certain: whether it is that of the tree that is saved.
        payload: None if it is damaged.
        log: of the tree that is saved; None if it is damaged.
        numbers: uint64, of the segments that this tree lists, as far as its leaves can be read.
        value_pages: that records take beside their leaves.
    """

    store_id: bytes | None
    version: int
    is_certain: bool
    payload: bytes | None
    log: LogRecord | None
    numbers: NDArray[np.uint64]
    value_pages: int


def read_remains(
    path: Path,
    file_map: FileMap,
    page_bytes: int,
    leaves: NDArray[np.int64],
    in_use: NDArray[np.bool_] | None,
    doubts: list[str],
) -> Remains:
    """Read the records on leaves of the tree that is saved; where there is no head among them, those of any age.

    Args:
        leaves: int64, pages that look like leaves.
        in_use: bool [pages of the file], of the tree that is saved; None if that is not known.
        doubts: receives what cannot be proven, in sentences.

    Raises:
        DamagedError: there is no record of versions. FormatError: the file is of an older release.
    """
    current = _Records(file_map, page_bytes, leaves[:0] if in_use is None else leaves[in_use[leaves]])
    log, head, records = current.read(LOG_ITEM, unpack_log), current.head(), current
    is_certain = head is not None
    if head is None:
        records = _Records(file_map, page_bytes, leaves)
        head = records.head()
    try:
        store_id = records.read(STORE_ITEM, unpack_store)
    except OtherFormatError as error:
        raise FormatError(f"{path}: {error}") from error
    if head is None:
        raise DamagedError(f"{path}: no record of versions can be read, so nothing says which rows are current.")
    version = head.current
    if not is_certain:
        doubts.append(f"The record of versions is damaged; the newest of earlier ones that is left says {version}.")
    payload = records.payload(version) if version else b""
    value_pages = 0 if in_use is None else records.value_pages(in_use)
    return Remains(store_id, version, is_certain, payload, log, current.numbers, value_pages)


class _Records:
    """The records on some leaves, by item."""

    def __init__(self, file_map: FileMap, page_bytes: int, leaves: NDArray[np.int64]) -> None:
        self._words = file_map.words
        self._page_bytes = page_bytes
        self._end = file_map.file_bytes()
        self._places: dict[int, list[tuple[int, int]]] = {}
        numbers, start = [np.empty(0, np.uint64)], 0
        while start < len(leaves):
            room = new_entries(_CHUNK_ENTRIES)
            start, count = list_nodes(file_map.halves, page_bytes // 2, self._end // page_bytes, leaves, start, room)
            kinds, items, places, sizes = (column[:count] for column in room)
            numbers.append(items[kinds == SEGMENTS_KEY])
            own = kinds == META_KEY
            for item, place, size in zip(*(column[own].tolist() for column in (items, places, sizes)), strict=True):
                self._places.setdefault(item, []).append((place, size))
        self.numbers = np.concatenate(numbers)

    def _all(self, item: int) -> list[bytes]:
        """What is at the places where an item is said to be."""
        raw, found = self._words.view(np.uint8), []
        for place, size in self._places.get(item, []):
            start = -place if place < 0 else place * self._page_bytes + _PAGE_HEADER_BYTES
            if start + size <= self._end:
                found.append(raw[start : start + size].tobytes())
        return found

    def _sound(self, item: int, unpack: "Callable[[bytes], T]") -> Iterator[T]:
        """What is sound of a record; OtherFormatError if it is of another release."""
        for stored in self._all(item):
            try:
                yield unpack(stored)
            except OtherFormatError:
                raise
            except (ValueError, struct.error):
                pass

    def read(self, item: int, unpack: "Callable[[bytes], T]") -> T | None:
        """A record, or None if it is missing or damaged; OtherFormatError if it is of another release."""
        return next(self._sound(item, unpack), None)

    def head(self) -> Head | None:
        """The newest: going back lowers the current version alone."""
        found = self._sound(HEAD_ITEM, unpack_head)
        return max(found, key=lambda head: (head.last, -head.current), default=None)

    def payload(self, version: int) -> bytes | None:
        """What a version was committed with; None if it is damaged."""
        record = self.read(commit_item(version), unpack_commit)
        if record is None or record.version != version:
            return None
        chunks = (self._all(payload_item(version, chunk)) for chunk in range(record.num_payload_chunks))
        payload = b"".join(found[0] for found in chunks if found)
        is_sound = len(payload) == record.payload_bytes and bytes_checksum(payload) == record.payload_checksum
        return payload if is_sound else None

    def value_pages(self, in_use: NDArray[np.bool_]) -> int:
        """Pages of the values that are on pages of their own, as far as they are in use and look like it."""
        found = {}
        for page, size in (place for places in self._places.values() for place in places if place[0] > 0):
            count, at = -(-(_PAGE_HEADER_BYTES + size) // self._page_bytes), page * self._page_bytes // 8
            if page < len(in_use) and in_use[page] and self._words[at] == page and self._words[at + 1] >> 32 == count:
                found[page] = count
        return sum(found.values())
