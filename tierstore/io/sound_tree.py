"""What a damaged row file still leads to: of the trees that its meta pages name, the best one, as far as it can be
followed.

Each page of a tree is taken by itself: one that is not what it should be costs what lies below it and nothing else. A
tree is *whole* if it lists the segments that the record of the log counts, which has count and hash of their numbers;
without that record, if all its pages are sound and it has as many entries as the meta page says.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ..errors import DamagedError, FormatError, TierstoreError
from ..layout import PAGE_HEADER_WORDS
from ..system.plainfile import read_plain_file
from .anchor import ANCHOR_NAME, Anchor, is_of_this_boot, newest_slot
from .btree import DAMAGED, META_KEY, META_READ_BYTES, SEGMENTS_KEY, Meta, list_tree, new_walk, sound_metas
from .indexes import Stored, listed_segments, numbers_hash
from .mapped import FileMap
from .records import STORE_ITEM, OtherFormatError, item_key, unpack_store
from .segments import NUMBER
from .snapshot import Tree
from .stored_records import read_head, read_log, read_payload, read_record

_MAX_ANCHOR_BYTES: Final = 1 << 16

T = TypeVar("T")


def _if_sound(read: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return read(*arguments)
    except DamagedError:
        return None


class Remains(Tree):
    """What one tree leads to.

    Attributes:
        stored: its segments. Where that makes the tree whole, their numbers are those that their indexes say.
        is_whole: whether these are certain to be all.
        head: None if it is missing or damaged.
    """

    def __init__(self, path: Path, file_map: FileMap, meta: Meta) -> None:
        super().__init__(path, file_map, meta)
        pages = self.pages()
        walk = new_walk(pages.page_halves, np.zeros((pages.limit >> 6) + 1, np.uint64))
        entries = list_tree(pages, meta.main, walk, tolerant=True)
        own, records = (entries[entries["kind"] == kind] for kind in (SEGMENTS_KEY, META_KEY))
        self._places = dict(zip(records["number"].tolist(), records[["place", "size"]].tolist(), strict=True))
        self.head = _if_sound(read_head, self)
        self.stored = stored = listed_segments(own, meta.page_bytes)
        log = _if_sound(read_log, self)
        if log is None:
            is_sound = not walk.result[DAMAGED] and bool(((stored["first_page"] > 0) & (stored["pages"] > 1)).all())
            self.is_whole = is_sound and len(entries) == meta.main.entries
            return
        every = [
            each
            for each in (stored, self._by_indexes())
            if (len(np.unique(each["number"])), numbers_hash(each)) == (log.num_segments, log.hash)
        ]
        self.is_whole = bool(every)
        self.stored = every[0] if every else stored

    def _by_indexes(self) -> Stored:
        """The segments with the numbers that their indexes say: a key on a leaf may be damaged."""
        stored = self.stored.copy()
        places = stored["first_page"] * (self.page_bytes // 8) + PAGE_HEADER_WORDS + NUMBER
        is_inside = (stored["first_page"] > 0) & (places < self.file_map.file_bytes() // 8)
        stored["number"][is_inside] = self.file_map.words[places[is_inside]]
        return stored

    def get(self, key: bytes) -> bytes | None:
        """A record, as far as it lies in the file."""
        place, size = self._places.get(int.from_bytes(key[8:], "big"), (0, 0))
        end = min(2 * place + size, self.file_map.file_bytes())
        return self.file_map.words.view(np.uint8)[2 * place : end].tobytes()

    @property
    def version(self) -> int:
        """The current one; 0 if nothing was committed."""
        return self.head.current if self.head is not None else 0

    @property
    def store_id(self) -> bytes | None:
        """None if its record is missing or damaged. FormatError if it is of another release."""
        try:
            return unpack_store(self.get(item_key(STORE_ITEM)) or b"")
        except OtherFormatError as error:
            raise FormatError(f"{self.path}: {error}") from error
        except (ValueError, struct.error):
            return None

    @property
    def payload(self) -> bytes | None:
        """Of the current version; None if it is damaged."""
        record = _if_sound(read_record, self, self.version)
        return None if record is None else _if_sound(read_payload, self, record)


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
    if anchor is not None and not is_of_this_boot(anchor) and on_file != anchored:
        on_file = []  # of what was written after the anchor, any part may have been lost
    metas = [meta for meta in sound_metas(*dict.fromkeys((*anchored, *on_file))) if meta.page_bytes == page_bytes]
    if anchor is not None:
        least = anchor.txn_id
    else:  # the later of two transactions in a row, if both are there to tell
        is_newest_known = len(metas) == 2 and metas[0].txn_id == metas[1].txn_id + 1
        least = metas[0].txn_id if is_newest_known else 1 << 63
    found = [each for each in (Remains(path, file_map, meta) for meta in metas) if each.head is not None]
    if not found:
        raise DamagedError(
            f"{path}: no tree leads to a record of versions, so nothing says which rows are current; restore the "
            "store's directory from a copy."
        )
    newest = found[0]
    found.sort(key=lambda each: (each.txn_id >= least or each.head == newest.head, each.is_whole), reverse=True)
    if newest.txn_id < least:
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


def _read_anchor(path: Path, store_id: bytes, page_bytes: int) -> Anchor | None:
    """The anchor of this store, if it can be read."""
    try:
        anchor = newest_slot(read_plain_file(path.with_name(ANCHOR_NAME), _MAX_ANCHOR_BYTES))
    except (OSError, TierstoreError):
        return None
    same = anchor is not None and anchor.store_id == store_id and anchor.page_bytes == page_bytes
    return anchor if same else None
