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
from typing import Final, TypeVar

import numpy as np

from ..errors import DamagedError, FormatError, TierstoreError
from ..rows import PAGE_HEADER_WORDS
from ..system.plainfile import read_plain_file
from .anchor import ANCHOR_NAME, Anchor, boot_id, newest_slot
from .btree import DAMAGED, META_KEY, META_READ_BYTES, SEGMENTS_KEY, Meta, list_tree, new_walk, sound_metas
from .checksum import bytes_checksum
from .indexes import Stored, listed_segments, numbers_hash
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
    stored: Stored
    is_whole: bool
    _places: dict[int, tuple[int, int]]
    """First half-word and bytes of each record."""

    def _bytes(self, item: int) -> bytes:
        place, size = self._places.get(item, (0, 0))
        end = min(2 * place + size, self.tree.file_map.file_bytes())
        return self.tree.file_map.words.view(np.uint8)[2 * place : end].tobytes()

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
    metas = [meta for meta in sound_metas(*{*anchored, *on_file}) if meta.page_bytes == page_bytes]
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


def _followed(path: Path, file_map: FileMap, meta: Meta) -> Remains:
    """What a meta page leads to."""
    tree = Tree(path, file_map, meta)
    pages = tree.pages()
    walk = new_walk(pages.page_halves, np.zeros((pages.limit >> 6) + 1, np.uint64))
    entries = list_tree(pages, meta.main, walk, tolerant=True)
    own, records = (entries[entries["kind"] == kind] for kind in (SEGMENTS_KEY, META_KEY))
    stored = listed_segments(own, meta.page_bytes)
    is_sound = not walk.result[DAMAGED] and bool(((stored["first_page"] > 0) & (stored["pages"] > 1)).all())
    places = dict(zip(records["number"].tolist(), records[["place", "size"]].tolist(), strict=True))
    remains = Remains(tree, stored, False, places)
    log = remains.read(LOG_ITEM, unpack_log)
    if log is None:
        remains.is_whole = is_sound and len(entries) == meta.main.entries
        return remains
    for every in (stored, _by_indexes(file_map, meta.page_bytes, stored)):
        if (len(np.unique(every["number"])), numbers_hash(every["number"])) == (log.num_segments, log.hash):
            remains.stored, remains.is_whole = every, True
            break
    return remains


def _by_indexes(file_map: FileMap, page_bytes: int, stored: Stored) -> Stored:
    """With the numbers that their indexes say: a key on a leaf may be damaged."""
    places = stored["first_page"] * (page_bytes // 8) + PAGE_HEADER_WORDS + NUMBER
    is_inside = (stored["first_page"] > 0) & (places < file_map.file_bytes() // 8)
    stored = stored.copy()
    stored["number"][is_inside] = file_map.words[places[is_inside]]
    return stored
