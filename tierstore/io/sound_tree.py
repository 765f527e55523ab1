"""What a damaged row file still leads to: of the trees that its meta pages name, the best one, as far as it can be
followed.

Each page of a tree is taken by itself: one that is not what it should be costs what lies below it and nothing else. A
tree is *whole* if it lists the segments that the record of the log counts, which has count and hash of their numbers;
without that record, if all its pages are sound and it has as many entries as the meta page says.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ..errors import DamagedError, FormatError, TierstoreError
from ..system.plainfile import read_plain_file
from .anchor import ANCHOR_NAME, Anchor, boot_id, newest_slot
from .btree import META_KEY, META_READ_BYTES, NO_ROOT, SEGMENTS_KEY, Meta, parse_meta
from .checksum import bytes_checksum
from .indexes import StoredSegments, numbers_hash
from .mapped import FileMap
from .records import (
    HEAD_ITEM,
    LOG_ITEM,
    STORE_ITEM,
    Head,
    OtherFormatError,
    commit_item,
    payload_item,
    unpack_commit,
    unpack_head,
    unpack_log,
    unpack_store,
)
from .segments import NUMBER
from .snapshot import Tree

_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_LASTING: Final = 0x3FEF
"""The flags of a page that mean something on disk."""
_BIG_DATA: Final = 0x01
_PAGE: Final = struct.Struct("<Q2xHHH")
_NODE: Final = struct.Struct("<HHHH")
_LEAF_NODE: Final = struct.Struct("<HHHH8s8s")
_HEADER_BYTES: Final = 16
_KEY_BYTES: Final = 16
_PLACE_BITS: Final = 48
"""Of a place in a file that can be."""
_MAX_ANCHOR_BYTES: Final = 1 << 16

T = TypeVar("T")


@dataclass
class Remains:
    """What one tree leads to.

    Attributes:
        stored: its segments. Where that makes the tree whole, their numbers are those that their indexes say.
        is_whole: whether these are certain to be all.
    """

    tree: Tree
    stored: StoredSegments
    is_whole: bool
    _places: dict[int, tuple[int, int]]
    """Byte and size of each record."""

    def _bytes(self, item: int) -> bytes:
        start, size = self._places.get(item, (0, 0))
        end = min(start + size, self.tree.file_map.file_bytes())
        return self.tree.file_map.words.view(np.uint8)[start:end].tobytes()

    def read(self, item: int, unpack: "Callable[[bytes], T]") -> T | None:
        """A record; None if it is missing or damaged. FormatError if it is of another release."""
        try:
            return unpack(self._bytes(item))
        except OtherFormatError as error:
            raise FormatError(f"{self.tree.path}: {error}") from error
        except (ValueError, struct.error):
            return None

    @cached_property
    def head(self) -> Head | None:
        return self.read(HEAD_ITEM, unpack_head)

    @property
    def version(self) -> int:
        """The current one; 0 if nothing was committed."""
        return self.head.current if self.head is not None else 0

    @property
    def store_id(self) -> bytes | None:
        return self.read(STORE_ITEM, unpack_store)

    @property
    def payload(self) -> bytes | None:
        """Of the current version; None if it is damaged."""
        record = self.read(commit_item(self.version), unpack_commit)
        if record is None or record.version != self.version:
            return None
        chunks = (self._bytes(payload_item(self.version, chunk)) for chunk in range(record.num_payload_chunks))
        payload = b"".join(chunk for chunk in chunks if chunk)
        is_sound = len(payload) == record.payload_bytes and bytes_checksum(payload) == record.payload_checksum
        return payload if is_sound else None


def choose_tree(path: Path, file_map: FileMap, page_bytes: int, store_id: bytes, doubts: list[str]) -> Remains:
    """The newest whole tree that holds every commit that returned, or else the newest with a record of versions.

    An anchored tree and all later ones hold every commit that returned, and an earlier one of the same versions does.

    Args:
        doubts: receives what cannot be proven, in sentences.

    Raises:
        DamagedError: no tree leads to a record of versions. FormatError: the file is of another release.
    """
    raw = file_map.words.view(np.uint8)
    on_file = [raw[at : at + META_READ_BYTES].tobytes() for at in (0, page_bytes)]
    anchor = _read_anchor(path, store_id, page_bytes)
    anchored = [] if anchor is None else list(anchor.metas)
    if anchor is not None and not _same_boot(anchor) and on_file != anchored:
        on_file = []  # of what was written after the anchor, any part may have been lost
    parsed = [parse_meta(meta) for meta in dict.fromkeys((*anchored, *on_file))]
    metas = [meta for meta in parsed if isinstance(meta, Meta) and meta.page_bytes == page_bytes]
    metas.sort(key=lambda meta: meta.txn_id, reverse=True)
    if anchor is not None:
        least = anchor.txn_id
    else:  # the later of two transactions in a row, if both are there to tell
        is_newest_known = len(metas) == 2 and metas[0].txn_id == metas[1].txn_id + 1
        least = metas[0].txn_id if is_newest_known else 1 << 63
    found = [each for each in (_followed(path, file_map, meta) for meta in metas) if each.head is not None]
    if not found:
        raise DamagedError(
            f"{path}: no tree leads to a record of versions, so nothing says which rows are current; restore the "
            "store's directory from a copy."
        )
    newest = found[0]
    found.sort(key=lambda each: (each.tree.txn_id >= least or each.head == newest.head, each.is_whole), reverse=True)
    if newest.tree.txn_id < least:
        doubts.append(
            f"The meta pages of {path.name}, or what they lead to, are damaged, and nothing proves that this tree is "
            "the newest: later commits may be missing."
        )
    if not found[0].is_whole:
        doubts.append(
            "A part of the tree that leads to the segments is damaged. Rows below it are lost, and any other may be "
            "older than one there: it is lost too, or taken with --stale-ok."
        )
    return found[0]


def _same_boot(anchor: Anchor) -> bool:
    current = boot_id()
    return anchor.boot_id == current and any(current)


def _read_anchor(path: Path, store_id: bytes, page_bytes: int) -> Anchor | None:
    """The anchor of this store, if it can be read."""
    try:
        anchor = newest_slot(read_plain_file(path.with_name(ANCHOR_NAME), _MAX_ANCHOR_BYTES))
    except (OSError, TierstoreError):
        return None
    same = anchor is not None and anchor.store_id == store_id and anchor.page_bytes == page_bytes
    return anchor if same else None


class _Walk:
    """The pages of a tree that are what they should be, level by level.

    Attributes:
        is_sound: whether all were so far.
    """

    def __init__(self, file_map: FileMap, page_bytes: int) -> None:
        self._raw = file_map.words.view(np.uint8)
        self._page_bytes = page_bytes
        self._limit = file_map.file_bytes() // page_bytes
        self._seen: set[int] = set()
        self.is_sound = True

    def children(self, page: int) -> list[int]:
        """The pages that a branch leads to."""
        data, offsets = self._nodes(page, _BRANCH)
        nodes = [_NODE.unpack_from(data, offset) for offset in offsets]
        return [low | high << 16 | top << 32 for low, high, top, _ in nodes]

    def entries(self, page: int) -> list[tuple[int, int, int, int]]:
        """Both words of the key, first byte and size of the value of each entry on a leaf."""
        data, offsets = self._nodes(page, _LEAF)
        found = []
        for offset in offsets:
            low, high, flags, key_bytes, kind, number = _LEAF_NODE.unpack_from(data, offset)
            size, start = low | high << 16, offset + _NODE.size + _KEY_BYTES
            stop = start + (8 if flags == _BIG_DATA else size)
            if key_bytes != _KEY_BYTES or flags > _BIG_DATA or stop > self._page_bytes:
                self.is_sound = False
                continue
            place = page * self._page_bytes + start
            if flags == _BIG_DATA:
                place = int.from_bytes(data[start:stop], "little") * self._page_bytes + _HEADER_BYTES
            if place >> _PLACE_BITS:
                self.is_sound = False
                continue
            found.append((int.from_bytes(kind, "big"), int.from_bytes(number, "big"), place, size))
        return found

    def _nodes(self, page: int, wanted: int) -> tuple[bytes, list[int]]:
        """A page and where its nodes begin; none if it is not such a page, or was met before."""
        if 2 <= page < self._limit and page not in self._seen:
            self._seen.add(page)
            data = self._raw[page * self._page_bytes : (page + 1) * self._page_bytes].tobytes()
            number, flags, lower, upper = _PAGE.unpack_from(data)
            if number == page and flags & _LASTING == wanted and _HEADER_BYTES < lower <= upper <= self._page_bytes:
                offsets = struct.unpack_from(f"<{(lower - _HEADER_BYTES) // 2}H", data, _HEADER_BYTES)
                room = (_LEAF_NODE if wanted == _LEAF else _NODE).size
                kept = [offset for offset in offsets if upper <= offset <= self._page_bytes - room]
                self.is_sound &= len(kept) == len(offsets)
                return data, kept
        self.is_sound = False
        return b"", []


def _followed(path: Path, file_map: FileMap, meta: Meta) -> Remains:
    """What a meta page leads to."""
    walk, pages = _Walk(file_map, meta.page_bytes), [] if meta.main_root == NO_ROOT else [meta.main_root]
    for _ in range(meta.main_depth - 1):
        pages = [child for page in pages for child in walk.children(page)]
    entries = [entry for page in pages for entry in walk.entries(page)]
    columns: Any = ([], [], [])
    for kind, number, place, size in entries:
        if kind == SEGMENTS_KEY:
            page, pages_each = place // meta.page_bytes, (size + _HEADER_BYTES) // meta.page_bytes
            walk.is_sound &= page * meta.page_bytes + _HEADER_BYTES == place and pages_each > 1
            for column, value in zip(columns, (number, page, pages_each), strict=True):
                column.append(value)
    numbers, first_pages, lengths = columns
    stored = StoredSegments(np.array(numbers, np.uint64), np.array(first_pages, np.int64), np.array(lengths, np.int64))
    records = {number: (place, size) for kind, number, place, size in entries if kind == META_KEY}
    remains = Remains(Tree(path, file_map, meta), stored, False, records)
    log = remains.read(LOG_ITEM, unpack_log)
    if log is None:
        remains.is_whole = walk.is_sound and len(entries) == meta.main_entries
        return remains
    for every in (stored, _by_indexes(file_map, meta.page_bytes, stored)):
        if (len(np.unique(every.numbers)), numbers_hash(every.numbers)) == (log.num_segments, log.hash):
            remains.stored, remains.is_whole = every, True
            break
    return remains


def _by_indexes(file_map: FileMap, page_bytes: int, stored: StoredSegments) -> StoredSegments:
    """With the numbers that their indexes say: a key on a leaf may be damaged."""
    places = stored.first_pages * (page_bytes // 8) + _HEADER_BYTES // 8 + NUMBER
    is_inside = (stored.first_pages > 0) & (places < file_map.file_bytes() // 8)
    numbers = stored.numbers.copy()
    numbers[is_inside] = file_map.words[places[is_inside]]
    return stored._replace(numbers=numbers)
