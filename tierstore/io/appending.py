"""One write transaction of the log: segments appended, segments deleted, and the record of it all."""

from dataclasses import replace
from typing import NamedTuple

import lmdb
import numpy as np

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import kernel
from ..rows import PAGE_HEADER_WORDS, RowLayout
from .checksum import bytes_checksum
from .gather import queue_segments
from .indexes import Indexes, StoredSegments, numbers_hash, segment_error
from .records import (
    LOG_ITEM,
    PAYLOAD_CHUNK_BYTES,
    CommitRecord,
    LogRecord,
    commit_item,
    item_key,
    pack_commit,
    pack_log,
    payload_item,
    segment_key,
)
from .segments import Geometry, build_segment, page_header_status
from .snapshot import Snapshot


class NewRows(NamedTuple):
    """Rows to be appended.

    Attributes:
        keys: int64 [n].
        slots: int32 [n], in the arenas.
        weights, state: the arenas, uint64 [slots, words].
        epochs: uint64 [1], of all rows, or [n].
    """

    keys: Int64s
    slots: Int32s
    weights: Words
    state: Words
    epochs: Words


class Change:
    """What one transaction does to the log. It counts only once the transaction is committed; numbers it has given to
    segments are not given again in any case.

    Attributes:
        record: as the log is then.
        pages: that were appended.
    """

    def __init__(self, txn: "lmdb.Transaction[bytes]", record: LogRecord) -> None:
        self._txn = txn
        self.record = record
        self.pages = 0

    def append(self, layout: RowLayout, geo: Geometry, new: NewRows) -> "Appended":
        """Put rows, in their order, as segments."""
        first, per_segment = self.record.next_number, geo.rows_per_segment
        image = np.empty(
            layout.segment_pages(min(per_segment, len(new.keys)), is_mixed=True) * geo.page_words, np.uint64
        )
        parts: list[tuple[int, ...]] = []
        for start in range(0, len(new.keys), per_segment):
            part = slice(start, start + per_segment)
            epochs = new.epochs[part] if len(new.epochs) > 1 else new.epochs
            if epochs.min() == epochs.max():
                epochs = epochs[:1]
            keys = new.keys[part]
            pages = layout.segment_pages(len(keys), is_mixed=len(epochs) > 1)
            value = image[: pages * geo.page_words - PAGE_HEADER_WORDS]
            number = first + len(parts)
            build_segment(
                geo, number, epochs, keys, new.slots[part], new.weights.reshape(-1), new.state.reshape(-1), value
            )
            self._txn.put(segment_key(number), value.data, dupdata=False)
            parts.append((number, pages, len(keys), int(epochs.max()), int(epochs.min()), int(keys[0])))
        numbers, pages_each, *rest = (np.array(column, np.int64) for column in zip(*parts, strict=True))
        self.pages += int(pages_each.sum())
        self._count(numbers.astype(np.uint64), 1)
        return Appended(numbers.astype(np.uint64), pages_each, *rest)

    def delete(self, stored: StoredSegments) -> None:
        """Delete segments, after ``require_headers``."""
        for number in stored.numbers.tolist():
            deleted = self._txn.delete(segment_key(number))
            assert deleted, "a segment in the tree could not be deleted"
        self._count(stored.numbers, -1)

    def _count(self, numbers: Words, sign: int) -> None:
        record = self.record
        self.record = replace(
            record,
            next_number=max(record.next_number, int(numbers.max(initial=np.uint64(0))) + 1),
            num_segments=record.num_segments + sign * len(numbers),
            hash=(record.hash + sign * numbers_hash(numbers)) % 2**64,
        )

    def finish(self) -> None:
        """Put the record of the log."""
        self._txn.put(item_key(LOG_ITEM), pack_log(self.record))


class Appended(NamedTuple):
    """Segments that were put, whose pages the committed tree tells; columns as in ``Indexes``."""

    numbers: Words
    pages: Int64s
    rows: Int64s
    newest: Int64s
    oldest: Int64s
    first_keys: Int64s

    def found_in(self, snapshot: Snapshot) -> Indexes:
        """Where the tree of their transaction, or a later one, has them."""
        entries = snapshot.seek(np.zeros_like(self.numbers), self.numbers)
        assert np.array_equal(entries.numbers, self.numbers), "a segment just written is not in the tree"
        stored = StoredSegments(self.numbers, entries.pages, self.pages)
        return Indexes(stored, self.rows, self.newest, self.oldest, self.first_keys)


def require_headers(snapshot: Snapshot, stored: StoredSegments) -> None:
    """Look at LMDB's way to segments, and at the page headers that it is going to believe when it deletes them.

    Raises:
        DamagedError: a page header is not that of such a segment, or something cannot be read.
    """
    snapshot.seek(np.zeros_like(stored.numbers), stored.numbers)
    file_map, page_bytes = snapshot.file_map.rows, snapshot.page_bytes
    queue_segments(file_map.address, page_bytes // 8, stored.first_pages, np.ones(len(stored.pages), np.int32))
    since = file_map.guard.begin()
    status, at = _check_headers(file_map.words, page_bytes // 8, snapshot.limit_pages(), stored)
    starts = stored.first_pages * page_bytes
    file_map.guard.require(since, starts, starts + PAGE_HEADER_WORDS * 8)
    if status:
        raise segment_error(snapshot, int(stored.numbers[at]), status)


@kernel
def _check_headers(words: Words, page_words: int, limit: int, stored: StoredSegments) -> tuple[int, int]:
    for i in range(len(stored.pages)):
        status = page_header_status(words, page_words, limit, stored.first_pages[i], stored.pages[i])
        if status != 0:
            return status, i
    return 0, 0


def put_version(txn: "lmdb.Transaction[bytes]", version: int, payload: bytes) -> CommitRecord:
    """Put the record of a version and its payload; returns the record."""
    record = CommitRecord(version=version, payload_bytes=len(payload), payload_checksum=bytes_checksum(payload))
    view = memoryview(payload)
    for chunk in range(record.num_payload_chunks):
        start = chunk * PAYLOAD_CHUNK_BYTES
        txn.put(item_key(payload_item(version, chunk)), view[start : start + PAYLOAD_CHUNK_BYTES])
    txn.put(item_key(commit_item(version)), pack_commit(record))
    return record
