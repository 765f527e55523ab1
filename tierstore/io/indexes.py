"""The indexes of the segments in a tree: which rows each has, read without reading rows."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, TruncatedError, UnreadableError
from ..kernels.arrays import Int64s, Words
from ..kernels.jit import kernel
from ..layout import PAGE_HEADER_WORDS
from ..system.oserrors import RESTORE
from .btree import HEADER_BYTES, SEGMENTS_KEY, Entries
from .checksum import mix_key
from .mapped import queue_parts, queue_read
from .segments import (
    COUNT,
    COUNT_MASK,
    KEYS,
    NEWEST,
    OLDEST,
    SegmentStatus,
    check_index,
    index_pages,
    page_header_status,
    rows_listed,
)
from .sigbus import ASK_AGAIN, Guard, PageRuns
from .snapshot import Tree

_LOG: Final = logging.getLogger("tierstore")

_PART_SEGMENTS: Final = 1024
_PARTS_AHEAD: Final = 4  # parts that are queued for reading while one is used
_LOGGED_EVERY_SECONDS: Final = 5.0

Stored = NDArray[Any]  # segments of a tree, of dtype ``STORED``, by ascending number

STORED: Final = np.dtype(
    [("number", np.uint64), ("first_page", np.int64), ("pages", np.int64)]
    + [(name, np.int64) for name in ("rows", "newest", "oldest", "first_key")]
)
"""What the tree says of a segment, and then what its index says, 0 where that was not read: rows, the largest and the
least epoch of them, and the key of the first one, from which the layout follows."""


def stored_segments(tree: Tree) -> Stored:
    """The segments of a tree; their indexes are not read. DamagedError: the tree is damaged."""
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
    """Check indexes, whose first pages are queued for reading, and fill in what they say where they are sound."""
    for i in range(len(stored)):
        first_page, pages = stored[i]["first_page"], stored[i]["pages"]
        if page_header_status(words, page_words, limit, first_page, pages) == 0:
            num, is_mixed = rows_listed(words, first_page * page_words + PAGE_HEADER_WORDS)
            length = index_pages(page_words, num, is_mixed)
            if 1 < length < pages:
                queue_read(address + (first_page + 1) * page_words * 8, (length - 1) * page_words * 8)
    for i in range(len(stored)):
        first_page, pages = stored[i]["first_page"], stored[i]["pages"]
        statuses[i] = check_index(words, page_words, limit, first_page, pages, stored[i]["number"])
        if statuses[i] == 0:
            at = first_page * page_words + PAGE_HEADER_WORDS
            stored[i]["rows"] = words[at + COUNT] & COUNT_MASK
            stored[i]["newest"] = words[at + NEWEST]
            stored[i]["oldest"] = words[at + OLDEST]
            stored[i]["first_key"] = words[at + KEYS]


def read_ahead(count: int, size: int, queue: Callable[[slice], None]) -> Iterator[slice]:
    """Slices of ``count`` things, ``size`` at a time, in order. ``queue`` starts reading one, a few slices ahead.

    In a thread of its own: the system takes about as long to queue pages as we take to look at them.
    """
    slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if len(slices) < 2:  # a thread would take longer to start
        for each in slices:
            queue(each)
            yield each
        return
    with ThreadPoolExecutor(1, "tierstore-read-ahead") as executor:
        queued = deque(executor.submit(queue, each) for each in slices[:_PARTS_AHEAD])
        try:
            for number, each in enumerate(slices):
                queued.extend(executor.submit(queue, later) for later in slices[number + _PARTS_AHEAD :][:1])
                queued.popleft().result()
                yield each
        finally:
            executor.shutdown(cancel_futures=True)


def _look_at(tree: Tree, stored: Stored, order: Int64s | None = None) -> Iterator[tuple[slice, Stored, Int64s]]:
    """Parts with what their indexes say, where these are what was written, and the SegmentStatus of each segment.
    ``order``: of parts that are copies, so that few are in memory; else all is filled in where it lies."""
    file_map, limit, page_bytes = tree.file_map.rows, tree.limit_pages(), tree.page_bytes

    def chosen(part: slice) -> Any:
        return part if order is None else order[part]

    def queue(part: slice) -> None:
        inside = stored["first_page"][chosen(part)]
        starts = inside[inside < limit] * page_bytes
        queue_parts(file_map.address, starts, starts + page_bytes)

    for part in read_ahead(len(stored), _PART_SEGMENTS, queue):
        own, since = stored[chosen(part)], file_map.guard.begin()
        statuses = np.zeros(len(own), np.int64)
        _read(file_map.words, file_map.address, page_bytes // 8, limit, own, statuses)
        if not file_map.guard.is_clean(since):
            refused = file_map.guard.refused(since)
            statuses[refused.meet(*byte_ranges(own, page_bytes))] = refused_status(file_map.guard, refused)
        yield part, own, statuses


def look_at_indexes(tree: Tree, stored: Stored) -> Int64s:
    """Fill in what the indexes say of these segments, where they are what was written; the SegmentStatus of each."""
    return np.concatenate([np.zeros(0, np.int64), *(statuses for _, _, statuses in _look_at(tree, stored))])


def byte_ranges(stored: Stored, page_bytes: int) -> tuple[Int64s, Int64s]:
    """Where in the file segments begin and end."""
    return stored["first_page"] * page_bytes, (stored["first_page"] + stored["pages"]) * page_bytes


def read_indexes(tree: Tree, stored: Stored) -> Stored:
    """These segments, with what their indexes say. DamagedError: one is not what was written, or cannot be read."""
    stored = stored.copy()
    for _, own, statuses in _look_at(tree, stored):
        _require_sound(tree, own, statuses)
    return stored


def read_parts(tree: Tree, stored: Stored) -> Iterator[Stored]:
    """These segments, a part at a time as they lie in the file, with what their indexes say. What takes long is logged.
    DamagedError: as ``read_indexes``."""
    last_logged = time.monotonic()
    for part, own, statuses in _look_at(tree, stored, np.argsort(stored["first_page"])):
        _require_sound(tree, own, statuses)
        yield own
        if part.stop < len(stored) and time.monotonic() - last_logged > _LOGGED_EVERY_SECONDS:
            last_logged = time.monotonic()
            log = _LOG.info if _LOG.hasHandlers() else _LOG.warning
            log("%s: read the indexes of %d of %d segments, to find its rows", tree.path, part.stop, len(stored))


def _require_sound(tree: Tree, stored: Stored, statuses: Int64s) -> None:
    if statuses.any():
        at = int(np.argmax(statuses > 0))
        raise segment_error(tree, int(stored["number"][at]), int(statuses[at]))


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
