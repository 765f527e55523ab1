"""The indexes of the segments in a tree: which rows each has, read without reading rows."""

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, TruncatedError, UnreadableError
from ..kernels.arrays import Int64s, Words
from ..kernels.jit import kernel
from ..rows import PAGE_HEADER_WORDS
from ..system.oserrors import RESTORE
from .btree import HEADER_BYTES, SEGMENTS_KEY, Entries
from .checksum import mix_key
from .guard import ASK_AGAIN, Guard, PageRuns
from .mapped import queue_read
from .segments import COUNT, COUNT_MASK, KEYS, NEWEST, OLDEST, SegmentStatus, check_index
from .snapshot import Tree

_QUEUED: Final = 256
"""Indexes whose reading is begun ahead."""


Stored = NDArray[Any]
"""Segments of a tree, of dtype ``STORED``, by ascending number."""

STORED: Final = np.dtype(
    [("number", np.uint64), ("first_page", np.int64), ("pages", np.int64)]
    + [(name, np.int64) for name in ("rows", "newest", "oldest", "first_key")]
)
"""What the tree tells of a segment, and then what its index does: how many rows, the largest and the least epoch of
them, and the key of the first one, which tells the layout. These are 0 where the index was not read."""


def stored_segments(tree: Tree) -> Stored:
    """The segments of a tree; their indexes are not read.

    Raises:
        DamagedError: the tree is damaged.
    """
    entries = tree.walk()
    entries = entries[entries["kind"] == SEGMENTS_KEY]
    if (bad := (entries["size"] + HEADER_BYTES) % tree.page_bytes != 0).any():
        number = entries["number"][int(np.argmax(bad))]
        raise DamagedError(f"{tree.path}: its tree has segment {number}, which does not fill its pages. {RESTORE}")
    return listed_segments(entries, tree.page_bytes)


def listed_segments(entries: Entries, page_bytes: int) -> Stored:
    """The segments of these entries of a tree."""
    stored = np.zeros(len(entries), STORED)
    stored["number"], stored["first_page"] = entries["number"], entries["page"]
    stored["pages"] = (entries["size"] + HEADER_BYTES) // page_bytes
    return stored


def numbers_hash(stored: Stored) -> int:
    """Sum of ``checksum.mix_key`` of the numbers of segments, modulo 2**64."""
    return int(_hash(stored))


@kernel
def _hash(stored: Stored) -> np.uint64:
    total = np.uint64(0)
    for i in range(len(stored)):
        total += mix_key(np.uint64(0), stored[i]["number"])
    return total


@kernel
def _read(words: Words, address: int, page_words: int, limit: int, stored: Stored, statuses: Int64s) -> None:
    """Check indexes, and fill in what they say where they are sound."""
    for ahead in range(len(stored) + _QUEUED):
        if ahead < len(stored) and stored[ahead]["first_page"] < limit:
            queue_read(address + stored[ahead]["first_page"] * page_words * 8, page_words * 8)
        i = ahead - _QUEUED
        if i < 0:
            continue
        first_page, pages = stored[i]["first_page"], stored[i]["pages"]
        statuses[i] = check_index(words, page_words, limit, first_page, pages, stored[i]["number"])
        if statuses[i] == 0:
            at = first_page * page_words + PAGE_HEADER_WORDS
            stored[i]["rows"] = words[at + COUNT] & COUNT_MASK
            stored[i]["newest"] = words[at + NEWEST]
            stored[i]["oldest"] = words[at + OLDEST]
            stored[i]["first_key"] = words[at + KEYS]


def look_at_indexes(tree: Tree, stored: Stored) -> Int64s:
    """Fill in what the indexes say of these segments, where they are what was written; the SegmentStatus of each."""
    file_map, statuses = tree.file_map.rows, np.zeros(len(stored), np.int64)
    since = file_map.guard.begin()
    _read(file_map.words, file_map.address, tree.page_bytes // 8, tree.limit_pages(), stored, statuses)
    if not file_map.guard.is_clean(since):
        refused = file_map.guard.refused(since)
        met = refused.meet(*byte_ranges(stored, tree.page_bytes))
        statuses[met] = refused_status(file_map.guard, refused)
    return statuses


def byte_ranges(stored: Stored, page_bytes: int) -> tuple[Int64s, Int64s]:
    """Where in the file segments begin and end."""
    return stored["first_page"] * page_bytes, (stored["first_page"] + stored["pages"]) * page_bytes


def read_indexes(tree: Tree, stored: Stored) -> Stored:
    """These segments, with what their indexes say.

    Raises:
        DamagedError: one is not what was written, or cannot be read.
    """
    stored = stored.copy()
    statuses = look_at_indexes(tree, stored)
    if statuses.any():
        at = int(np.argmax(statuses > 0))
        raise segment_error(tree, int(stored["number"][at]), int(statuses[at]))
    return stored


def refused_status(guard: Guard, refused: PageRuns) -> SegmentStatus:
    """Of what lies on pages that were refused."""
    return SegmentStatus.OUT_OF_FILE if guard.is_cut_short(refused) else SegmentStatus.UNREADABLE


def segment_error(tree: Tree, number: int, status: int) -> DamagedError:
    """What a SegmentStatus other than DONE amounts to."""
    return damage_error(tree.path, status, damage_words(f"segment {number}", status))


def damage_words(what: str, status: int) -> str:
    """Says what a SegmentStatus means for something, a segment or a row."""
    if status == SegmentStatus.OUT_OF_FILE:
        return f"{what} lies beyond the end of the file"
    if status == SegmentStatus.UNREADABLE:
        return f"{what} cannot be read: the device refuses a page of it"
    if status == SegmentStatus.BAD_ROW:
        return f"{what} does not match its checksum"
    return f"{what} is damaged ({SegmentStatus(status).name})"


def damage_error(path: Path, status: int, words: str) -> DamagedError:
    """The error for what ``damage_words`` says, of the class of this status."""
    if status == SegmentStatus.UNREADABLE:
        return UnreadableError(f"{path}: {words}. {ASK_AGAIN} {RESTORE}")
    kind = TruncatedError if status == SegmentStatus.OUT_OF_FILE else ChecksumError
    return kind(f"{path}: {words}. {RESTORE}")
