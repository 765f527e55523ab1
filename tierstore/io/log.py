"""The log of one row file, for its one writer: rows appended, segments cleaned and deleted, each in one transaction.

After a transaction the map of rows and what readers are shown follow it; after an error, by ``Writer.catch_up``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NamedTuple

import lmdb
import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Int64s, Words
from ..kernels.jit import kernel
from ..layout import PAGE_HEADER_WORDS
from ..system.killpoints import reach
from ..system.oserrors import RESTORE
from .cleaning import Cleaner
from .mapped import queue_parts
from .places import Segments
from .reads import KeyedRows, RowReader
from .records import LOG_ITEM, STORE_ITEM, LogRecord, item_key, pack_store, pack_words, read_log, segment_key
from .row_file import OpenFile, SuperblockWriter
from .row_map import RowMap
from .segments import (
    NEWEST,
    OLDEST,
    STORED,
    Stored,
    build_segment,
    byte_ranges,
    numbers_hash,
    page_header_status,
    segment_error,
)
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")

Dead = list[tuple[Segments, Int64s]]

_CLEANED_PAGES: Final = 128
"""In a transaction that only cleans, victims are chosen as if so many pages had been appended before."""
_DELETED_PAGES: Final = 2048
"""Of the segments that a transaction deletes, about: LMDB lists them in a value of a few pages."""
_DROPPED_TOGETHER: Final = 512
_LIFE: Final = 1 << 32
"""Each process that writes begins at the next multiple: no number that one gave away and lost is given again."""


class Written(NamedTuple):
    """What a call appended."""

    pages: int  # of the rows that were given
    rows_moved: int = 0
    pages_read: int = 0
    pages_moved: int = 0  # by cleaning: rows, the pages that they were on, and those that they are on


class Log:
    """See the module's docstring. The caller sees to it that one thread at a time is in here.

    Args:
        slack: see ``LmdbColdTier``.
        transaction: makes a write transaction, which puts at most so many bytes.
    """

    def __init__(
        self,
        file: OpenFile,
        anchors: SuperblockWriter,
        slack: float,
        transaction: "Callable[[int], AbstractContextManager[lmdb.Transaction[bytes]]]",
    ) -> None:
        self._file = file
        self._view = file.view
        self._anchors = anchors
        self._cleaner = Cleaner(slack, RowReader(verify=True))
        self._transaction = transaction
        self._record = file.logged
        self._appended = 0
        self._is_numbered = False  # whether this process has numbers of segments of its own

    @contextmanager
    def _changing(self, size_bytes: int = 0) -> "Iterator[lmdb.Transaction[bytes]]":
        """A transaction that changes the log."""
        with self._transaction(size_bytes) as txn:
            yield txn
            txn.put(item_key(LOG_ITEM), pack_words(*self._record))

    def catch_up(self, snapshot: Snapshot) -> None:
        """Count what the newest tree has. Numbers that were given to segments are not given again in any case."""
        found = read_log(snapshot)
        self._record = found._replace(next_number=max(found.next_number, self._record.next_number))

    def _put(self, txn: "lmdb.Transaction[bytes]", segments: Segments, new: KeyedRows) -> Stored:
        """Put rows, in their order, as segments; ``_find_pages`` tells where they are once they are committed."""
        layout, geo, first = segments.layout, segments.geo, self._record.next_number
        per_segment = geo.rows_per_segment
        most = layout.segment_pages(min(per_segment, len(new.keys)), is_mixed=True)
        image = np.empty(most * geo.page_words, np.uint64)
        weights, state = new.weights.reshape(-1), new.state.reshape(-1)
        parts: list[tuple[int, ...]] = []
        for start in range(0, len(new.keys), per_segment):
            part = slice(start, start + per_segment)
            epochs = new.epochs[part] if len(new.epochs) > 1 else new.epochs
            if len(epochs) > 1 and (epochs == epochs[0]).all():
                epochs = epochs[:1]
            keys = new.keys[part]
            pages = layout.segment_pages(len(keys), is_mixed=len(epochs) > 1)
            value = image[: pages * geo.page_words - PAGE_HEADER_WORDS]
            number = first + len(parts)
            build_segment(geo, number, epochs, keys, new.slots[part], weights, state, value)
            txn.put(segment_key(number), value.data, dupdata=False)
            parts.append((number, 0, pages, len(keys), int(value[NEWEST]), int(value[OLDEST]), int(keys[0])))
        stored = np.array(parts, STORED)
        self._count(stored, 1)
        return stored

    def _delete(self, txn: "lmdb.Transaction[bytes]", stored: Stored) -> None:
        """Delete segments, after ``require_headers``."""
        for number in stored["number"].tolist():
            if not txn.delete(segment_key(number)):
                raise DamagedError(f"{self._file.path}: its tree has lost segment {number}. {RESTORE}")
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        record = self._record
        self._record = LogRecord(
            next_number=max(record.next_number, int(stored["number"].max(initial=np.uint64(0))) + 1),
            num_segments=record.num_segments + sign * len(stored),
            hash=(record.hash + sign * numbers_hash(stored)) % 2**64,
        )

    def append(self, rows: RowMap, segments: Segments, new: KeyedRows | None, kept: tuple[int, ...]) -> Written:
        """Append rows of one layout and one epoch, and clean a little.

        Args:
            new: None to clean only.
            kept: versions, ascending; the last one is current.
        """
        self._take_numbers()
        layout, current = segments.layout, kept[-1] if kept else 0
        moved = self._cleaner.collect(self._view.snapshot, rows, segments, kept)
        dead = _some_dead(rows, self._view.snapshot)
        segments.reuse(self._view.oldest())
        counts = [len(each.keys) for each in (moved, new) if each is not None]
        rows.make_room(layout, counts)
        self._look_ahead()
        moved_to = put = np.empty(0, STORED)
        pages = sum(layout.pages_for(count, is_mixed=True) for count in counts)
        with self._changing(pages * self._view.snapshot.page_bytes) as txn:
            self._delete_dead(txn, dead)
            if moved is not None:
                moved_to = self._put(txn, segments, moved)
                reach("cleaning: rows put")
            if new is not None:
                put = self._put(txn, segments, new)
            reach("write-back: segments put")
        reach("write-back: transaction committed")
        pages, pages_moved = int(put["pages"].sum()), int(moved_to["pages"].sum())
        with self._file.following() as snapshot:
            _forget(dead, txn_id := snapshot.txn_id)
            if moved is not None:  # first: a row may be moved, and newer in what is new
                _find_pages(snapshot, moved_to)
                rows.publish(layout, moved_to, moved.keys, current=current, txn_id=txn_id, is_moved=True)
                reach("cleaning: rows published")
            if new is not None:
                _find_pages(snapshot, put)
                rows.publish(layout, put, new.keys, current=current, txn_id=txn_id)
        reach("write-back: segments published")
        self._wrote(rows, pages + pages_moved)
        self._appended += pages
        if new is not None:
            self._cleaner.plan(snapshot, segments, kept, pages)
        return Written(pages) if moved is None else Written(pages, len(moved.keys), moved.pages, pages_moved)

    def clean(self, rows: RowMap, kept: tuple[int, ...]) -> Written | None:
        """Clean a little, arguments as for ``append``; None if there is nothing to clean."""
        for segments in rows.segments.values():
            if self._cleaner.plan(self._view.snapshot, segments, kept, _CLEANED_PAGES):
                return self.append(rows, segments, None, kept)
        return None

    def take_turns(self, rows: RowMap) -> int:
        """How often to ``clean`` and ``delete_dead``, at most, for what was appended since the last call and what is
        dead by now: while others write there is always more."""
        dead = sum(segments.dead_pages for segments in rows.segments.values())
        turns, self._appended = 2 + self._appended // _CLEANED_PAGES + dead // _DELETED_PAGES, 0
        return turns

    def _wrote(self, rows: RowMap, pages: int) -> None:
        """Have an anchor set if it is time: a device that failed to sync once may have dropped what it was to keep."""
        snapshot, live = self._view.snapshot, sum(segments.pages for segments in rows.segments.values())
        self._anchors.wrote(max(pages * snapshot.page_bytes, snapshot.freed_bytes), live * snapshot.page_bytes)

    def _take_numbers(self) -> None:
        """Begin where no process before has numbered segments, and see that none after will."""
        if self._is_numbered:
            return
        self._view.snapshot.file_map.pins.require_in_place()  # an anchor is to be set next to it
        record = self._record._replace(next_number=(self._record.next_number // _LIFE + 1) * _LIFE)
        with self._transaction(0) as txn:
            txn.put(item_key(LOG_ITEM), pack_words(*record))
            txn.put(item_key(STORE_ITEM), pack_store(self._file.store_id))  # the file may have been an older release's
        self._record = record
        reach("log: numbers taken")
        self._file.follow(self._file.new_snapshot())
        self._anchors.set()
        self._is_numbered = True

    def _look_ahead(self) -> None:
        """Read LMDB's way to what is appended: a page that LMDB cannot read ends the process."""
        self._view.snapshot.seek(np.zeros(1, np.uint64), np.array([self._record.next_number], np.uint64))

    def delete_dead(self, rows: RowMap) -> bool:
        """Delete some of the segments whose rows nobody needs; False if there are none."""
        dead = _some_dead(rows, self._view.snapshot)
        if not dead:
            return False
        self._look_ahead()
        with self._changing() as txn:
            self._delete_dead(txn, dead)
            reach("prune: segments deleted")
        reach("prune: transaction committed")
        with self._file.following() as snapshot:
            _forget(dead, snapshot.txn_id)
        self._wrote(rows, 0)
        return True

    def _delete_dead(self, txn: "lmdb.Transaction[bytes]", dead: Dead) -> None:
        for segments, slots in dead:
            self._delete(txn, segments.stored(slots))

    def drop(self, stored: Stored) -> None:
        """Delete segments that no map leads to."""
        for start in range(0, len(stored), _DROPPED_TOGETHER):
            part = stored[start : start + _DROPPED_TOGETHER]
            require_headers(self._view.snapshot, part)
            self._look_ahead()
            with self._changing() as txn:
                self._delete(txn, part)
                reach("rollback: segments deleted")
            self._file.follow(self._file.new_snapshot())


def _some_dead(rows: RowMap, snapshot: Snapshot) -> Dead:
    """Some segments that are to be deleted, by layout. One that is damaged stays, until the file is opened again."""
    found: Dead = []
    room = _DELETED_PAGES
    for segments in rows.segments.values():
        slots = segments.next_dead(room)
        if len(slots):
            try:
                require_headers(snapshot, segments.stored(slots))
            except DamagedError:
                sound = np.array([s for s in slots.tolist() if _can_be_deleted(segments, s, snapshot)], np.int64)
                segments.spare(slots, sound)
                slots = sound
            found.append((segments, slots))
            room -= int(segments.arrays.pages[slots].sum())
        if room <= 0:
            break
    return [each for each in found if len(each[1])]


def _can_be_deleted(segments: Segments, slot: int, snapshot: Snapshot) -> bool:
    try:
        require_headers(snapshot, segments.stored(np.array([slot])))
    except DamagedError as error:
        _LOG.warning("a segment that nobody needs is damaged, and stays (%s)", error)
        return False
    return True


def _forget(dead: Dead, txn_id: int) -> None:
    for segments, slots in dead:
        segments.delete(slots, txn_id)


def _find_pages(snapshot: Snapshot, put: Stored) -> None:
    """Fill in where segments are, in the tree of the transaction that put them, or a later one."""
    put["first_page"] = snapshot.seek(np.zeros(len(put), np.uint64), put["number"].copy())["page"]
    if not put["first_page"].all():
        raise DamagedError(f"{snapshot.path}: a segment that was just written is not in its tree. {RESTORE}")


def require_headers(snapshot: Snapshot, stored: Stored) -> None:
    """Look at LMDB's way to segments, and at the page headers that it is going to believe when it deletes them.
    DamagedError: a page header is not that of such a segment, or something cannot be read."""
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
