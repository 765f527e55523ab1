"""One write transaction of the log: segments appended, segments deleted, and the record of it all."""

from dataclasses import replace
from typing import NamedTuple

import lmdb
import numpy as np

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import kernel
from ..rows import PAGE_HEADER_WORDS, RowLayout
from .checksum import bytes_checksum
from .gather import queue_parts
from .indexes import STORED, Stored, byte_ranges, numbers_hash, segment_error
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

    def append(self, layout: RowLayout, geo: Geometry, new: NewRows) -> Stored:
        """Put rows, in their order, as segments; ``find_pages`` tells where they are once they are committed."""
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
            parts.append((number, 0, pages, len(keys), int(epochs.max()), int(epochs.min()), int(keys[0])))
        appended = np.array(parts, STORED)
        self.pages += int(appended["pages"].sum())
        self._count(appended, 1)
        return appended

    def delete(self, stored: Stored) -> None:
        """Delete segments, after ``require_headers``."""
        for number in stored["number"].tolist():
            deleted = self._txn.delete(segment_key(number))
            assert deleted, "a segment in the tree could not be deleted"
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        record, numbers = self.record, stored["number"]
        self.record = replace(
            record,
            next_number=max(record.next_number, int(numbers.max(initial=np.uint64(0))) + 1),
            num_segments=record.num_segments + sign * len(numbers),
            hash=(record.hash + sign * numbers_hash(numbers)) % 2**64,
        )

    def finish(self) -> None:
        """Put the record of the log."""
        self._txn.put(item_key(LOG_ITEM), pack_log(self.record))


def find_pages(snapshot: Snapshot, appended: Stored) -> None:
    """Fill in where segments are, in the tree of the transaction that put them, or a later one."""
    appended["first_page"] = snapshot.seek(np.zeros_like(appended["number"]), appended["number"].copy())["page"]
    assert appended["first_page"].all(), "a segment just written is not in the tree"


def require_headers(snapshot: Snapshot, stored: Stored) -> None:
    """Look at LMDB's way to segments, and at the page headers that it is going to believe when it deletes them.

    Raises:
        DamagedError: a page header is not that of such a segment, or something cannot be read.
    """
    snapshot.seek(np.zeros(len(stored), np.uint64), stored["number"].copy())
    file_map, page_bytes = snapshot.file_map.rows, snapshot.page_bytes
    starts, _ = byte_ranges(stored, page_bytes)
    stops = starts + PAGE_HEADER_WORDS * 8
    queue_parts(file_map.address, starts, stops)
    since = file_map.guard.begin()
    status, at = _check_headers(file_map.words, page_bytes // 8, snapshot.limit_pages(), stored)
    file_map.guard.require(since, starts, stops)
    if status:
        raise segment_error(snapshot, int(stored["number"][at]), status)


@kernel
def _check_headers(words: Words, page_words: int, limit: int, stored: Stored) -> tuple[int, int]:
    for i in range(len(stored)):
        status = page_header_status(words, page_words, limit, stored[i]["first_page"], stored[i]["pages"])
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
