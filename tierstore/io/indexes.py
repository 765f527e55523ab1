"""The indexes of the segments in a tree: which rows each has, read without reading rows."""

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, FormatError, TruncatedError, UnreadableError
from ..kernels.arrays import Int64s, Words
from ..kernels.jit import kernel
from ..rows import PAGE_HEADER_WORDS
from ..system.oserrors import RESTORE
from .btree import SEGMENTS_KEY
from .checksum import mix_key
from .guard import ASK_AGAIN, Guard, PageRuns
from .mapped import queue_read
from .records import LOG_ITEM, LogRecord, item_key, unpack_log
from .segments import COUNT, COUNT_MASK, KEYS, NEWEST, OLDEST, SegmentStatus, check_index
from .snapshot import Tree

_QUEUED: Final = 256
"""Indexes whose reading is begun ahead."""


class StoredSegments(NamedTuple):
    """The segments that a tree lists, by ascending number."""

    numbers: Words
    first_pages: Int64s
    pages: Int64s
    """How many pages each has."""

    def chosen(self, which: "NDArray[np.bool_] | Int64s | slice") -> "StoredSegments":
        return StoredSegments(self.numbers[which], self.first_pages[which], self.pages[which])


class Indexes(NamedTuple):
    """What the indexes of segments say, in the order of ``stored``."""

    stored: StoredSegments
    rows: Int64s
    newest: Int64s
    oldest: Int64s
    """The largest and the least epoch of its rows."""
    first_keys: Int64s
    """Of its first row: all are of one layout."""

    def chosen(self, which: "NDArray[np.bool_] | Int64s") -> "Indexes":
        return Indexes(self.stored.chosen(which), *(column[which] for column in self[1:]))

    def joined(self, more: "Indexes") -> "Indexes":
        """These and more."""
        stored = StoredSegments._make(map(np.concatenate, zip(self.stored, more.stored, strict=True)))
        return Indexes(stored, *map(np.concatenate, zip(self[1:], more[1:], strict=True)))


def no_indexes() -> Indexes:
    """Of no segments."""
    columns = [np.empty(0, np.int64) for _ in range(6)]
    return Indexes(StoredSegments(np.empty(0, np.uint64), *columns[:2]), *columns[2:])


def stored_segments(tree: Tree) -> StoredSegments:
    """The segments of a tree.

    Raises:
        DamagedError: the tree is damaged.
    """
    parts = [(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))]
    for entries, count in tree.walk():
        own = entries.kinds[:count] == SEGMENTS_KEY
        sizes = entries.sizes[:count][own]
        if (bad := (sizes + 16) % tree.page_bytes != 0).any():
            raise DamagedError(
                f"{tree.path}: its tree has segment {entries.numbers[:count][own][int(np.argmax(bad))]}, which does "
                f"not fill its pages. {RESTORE}"
            )
        parts.append((entries.numbers[:count][own], entries.pages[:count][own], (sizes + 16) // tree.page_bytes))
        if not own.all():
            break
    return StoredSegments(*map(np.concatenate, zip(*parts, strict=True)))


def require_logged(tree: Tree, stored: StoredSegments) -> LogRecord:
    """Compare the segments with what the writer counted: one that went missing is found here.

    Raises:
        FormatError: the record of the log is damaged. DamagedError: there are other segments than it counts.
    """
    found = tree.get(item_key(LOG_ITEM))
    try:
        if found is None:
            raise ValueError("it is missing")
        log = unpack_log(found)
    except ValueError as error:
        raise FormatError(f"{tree.path}: its record of the log is damaged: {error}. {RESTORE}") from error
    if (len(stored.numbers), numbers_hash(stored.numbers)) != (log.num_segments, log.hash):
        raise DamagedError(
            f"{tree.path}: its tree has {len(stored.numbers):,} segments, and its record of the log counts "
            f"{log.num_segments:,} others. {RESTORE}"
        )
    return log


def numbers_hash(numbers: Words) -> int:
    """Sum of ``checksum.mix_key`` of the numbers of segments, modulo 2**64."""
    return int(_hash(np.ascontiguousarray(numbers)))


@kernel
def _hash(numbers: Words) -> np.uint64:
    total = np.uint64(0)
    for i in range(len(numbers)):
        total += mix_key(np.uint64(0), numbers[i])
    return total


@kernel
def _read(
    words: Words, address: int, page_words: int, limit: int, stored: StoredSegments, statuses: Int64s, rows: Int64s,
    newest: Int64s, oldest: Int64s, first_keys: Int64s,
) -> None:  # fmt: skip
    """Check indexes and fill the columns of ``Indexes`` where they are sound."""
    for ahead in range(len(rows) + _QUEUED):
        if ahead < len(rows) and stored.first_pages[ahead] < limit:
            queue_read(address + stored.first_pages[ahead] * page_words * 8, page_words * 8)
        i = ahead - _QUEUED
        if i < 0:
            continue
        statuses[i] = check_index(words, page_words, limit, stored.first_pages[i], stored.pages[i], stored.numbers[i])
        if statuses[i] == 0:
            at = stored.first_pages[i] * page_words + PAGE_HEADER_WORDS
            rows[i] = np.int64(words[at + COUNT] & COUNT_MASK)
            newest[i] = np.int64(words[at + NEWEST])
            oldest[i] = np.int64(words[at + OLDEST])
            first_keys[i] = np.int64(words[at + KEYS])


def look_at_indexes(tree: Tree, stored: StoredSegments) -> tuple[Indexes, Int64s]:
    """The indexes of these segments, zeros where one is not what was written, and the SegmentStatus of each."""
    file_map, count = tree.file_map.rows, len(stored.numbers)
    statuses, *columns = (np.zeros(count, np.int64) for _ in range(5))
    since = file_map.guard.begin()
    _read(
        file_map.words, file_map.address, tree.page_bytes // 8, tree.limit_pages(), stored, statuses, *columns
    )  # fmt: skip
    if not file_map.guard.is_clean(since):
        starts = stored.first_pages * tree.page_bytes
        refused = file_map.guard.refused(since)
        met = refused.meet(starts, starts + stored.pages * tree.page_bytes)
        statuses[met] = refused_status(file_map.guard, refused)
    return Indexes(stored, *columns), statuses


def read_indexes(tree: Tree, stored: StoredSegments) -> Indexes:
    """The indexes of these segments.

    Raises:
        DamagedError: one is not what was written, or cannot be read.
    """
    indexes, statuses = look_at_indexes(tree, stored)
    if statuses.any():
        at = int(np.argmax(statuses > 0))
        raise segment_error(tree, int(stored.numbers[at]), int(statuses[at]))
    return indexes


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
