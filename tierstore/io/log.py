"""The log of one row file, for its one writer: rows appended, segments cleaned and deleted, each in one transaction.

After a transaction the map of rows and what readers are shown follow it. If they cannot, an error leaves
``OpenFile.must_succeed``, and the caller stops.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

import lmdb
import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Int64s
from ..system.killpoints import reach
from .anchor import AnchorKeeper
from .appending import Change, NewRows, find_pages, require_headers
from .cleaning import Cleaner
from .indexes import Stored
from .opened import OpenFile
from .reads import RowReader
from .records import LOG_ITEM, item_key, pack_log
from .row_map import RowMap
from .slots import Segments
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")

Dead = list[tuple[Segments, Int64s]]

_CLEANED_PAGES: Final = 64
"""In a transaction that only cleans, victims are chosen as if so many pages had been appended before."""
_DELETED_TOGETHER: Final = 512
_LIFE: Final = 1 << 32
"""Each process that writes begins at the next multiple: no number that one gave away and lost is given again."""


class Written(NamedTuple):
    """What a call appended.

    Attributes:
        pages: of the rows that were given.
        rows_moved, pages_read, pages_moved: by cleaning: rows, the pages that they were on, and those that they are on.
    """

    pages: int
    rows_moved: int = 0
    pages_read: int = 0
    pages_moved: int = 0


class Log:
    """See the module's docstring. The caller sees to it that one thread at a time is in here.

    Args:
        slack: see ``LmdbColdTier``.
        transaction: makes a write transaction.
    """

    def __init__(
        self,
        file: OpenFile,
        anchors: AnchorKeeper,
        slack: float,
        transaction: "Callable[[], AbstractContextManager[lmdb.Transaction[bytes]]]",
    ) -> None:
        self._file = file
        self._view = file.view
        self._anchors = anchors
        self._cleaner = Cleaner(slack, RowReader(file.map.rows, verify=True))
        self._transaction = transaction
        self._record = file.logged
        self._appended = 0
        self._is_numbered = False  # whether this process has numbers of segments of its own

    @contextmanager
    def _changing(self) -> Iterator[Change]:
        """A transaction that changes the log."""
        change: Change | None = None
        try:
            with self._transaction() as txn:
                change = Change(txn, self._record)
                yield change
                change.finish()
        except BaseException:
            if change is not None:
                self._record = replace(self._record, next_number=change.record.next_number)
            raise
        self._record = change.record

    def append(self, rows: RowMap, segments: Segments, new: NewRows | None, kept: tuple[int, ...]) -> Written:
        """Append rows of one layout and one epoch, and clean a little.

        Args:
            new: None to clean only.
            kept: versions, ascending; the last one is current.
        """
        self._take_numbers()
        layout, geo, snapshot = segments.layout, segments.geo, self._view.snapshot
        moved = self._cleaner.collect(snapshot, rows, segments, kept)
        dead = _some_dead(rows, snapshot)
        segments.reuse(self._view.oldest())
        segments.require_room(len(each.keys) for each in (moved and moved.rows, new) if each is not None)
        self._look_ahead()
        with self._changing() as change:
            _delete(change, dead)
            moved_to = None
            if moved is not None:
                moved_to = change.append(layout, geo, moved.rows)
                reach("cleaning: rows put")
            pages_moved = change.pages
            appended = None if new is None else change.append(layout, geo, new)
            reach("write-back: segments put")
        reach("write-back: transaction committed")
        with self._file.must_succeed():
            snapshot = self._file.new_snapshot()
            _forget(dead, txn_id := snapshot.txn_id)
            if moved is not None and moved_to is not None:  # first: a row may be moved, and newer in what is new
                find_pages(snapshot, moved_to)
                rows.publish_moved(layout, moved_to, moved.rows.keys, txn_id=txn_id)
                reach("cleaning: rows published")
            if new is not None and appended is not None:
                find_pages(snapshot, appended)
                rows.publish(layout, appended, new.keys, current=kept[-1] if kept else 0, txn_id=txn_id)
            self._view.move(snapshot)
            reach("write-back: segments published")
            self._wrote(rows, change.pages)
        pages = change.pages - pages_moved
        self._appended += pages
        if new is not None:
            self._cleaner.plan(snapshot, segments, kept, pages)
        return Written(pages) if moved is None else Written(pages, len(moved.rows.keys), moved.pages, pages_moved)

    def clean(self, rows: RowMap, kept: tuple[int, ...]) -> Written | None:
        """Clean a little, arguments as for ``append``; None if there is nothing to clean."""
        for segments in rows.segments.values():
            if self._cleaner.plan(self._view.snapshot, segments, kept, _CLEANED_PAGES):
                return self.append(rows, segments, None, kept)
        return None

    def take_turns(self, rows: RowMap) -> int:
        """How often to ``clean`` and ``delete_dead``, at most, for what was appended since the last call and what is
        dead by now: while others write there is always more."""
        dead = sum(len(segments.dead) for segments in rows.segments.values())
        turns, self._appended = 2 + self._appended // _CLEANED_PAGES + dead // _DELETED_TOGETHER, 0
        return turns

    def _wrote(self, rows: RowMap, pages: int) -> None:
        """Have an anchor set if it is time: a device that failed to sync once may have dropped what it was to keep."""
        snapshot, live = self._view.snapshot, sum(segments.pages for segments in rows.segments.values())
        self._anchors.wrote(max(pages * snapshot.page_bytes, snapshot.freed_bytes), live * snapshot.page_bytes)

    def _take_numbers(self) -> None:
        """Begin where no process before has numbered segments, and see that none after will."""
        if self._is_numbered:
            return
        self._view.snapshot.file_map.require_in_place()  # an anchor is to be set beside it
        record = replace(self._record, next_number=(self._record.next_number // _LIFE + 1) * _LIFE)
        with self._transaction() as txn:
            txn.put(item_key(LOG_ITEM), pack_log(record))
        self._record, self._is_numbered = record, True
        reach("log: numbers taken")
        with self._file.must_succeed():
            self._view.move(self._file.new_snapshot())
            self._anchors.set()

    def _look_ahead(self) -> None:
        """Read LMDB's way to what is appended: a page that LMDB cannot read ends the process."""
        self._view.snapshot.seek(np.zeros(1, np.uint64), np.array([self._record.next_number], np.uint64))

    def delete_dead(self, rows: RowMap) -> bool:
        """Delete some of the segments whose rows nobody needs; False if there are none."""
        dead = _some_dead(rows, self._view.snapshot)
        if not dead:
            return False
        self._look_ahead()
        with self._changing() as change:
            _delete(change, dead)
            reach("prune: segments deleted")
        reach("prune: transaction committed")
        with self._file.must_succeed():
            snapshot = self._file.new_snapshot()
            _forget(dead, snapshot.txn_id)
            self._view.move(snapshot)
            self._wrote(rows, 0)
        return True

    def drop(self, stored: Stored) -> None:
        """Delete segments that no map leads to."""
        for start in range(0, len(stored), _DELETED_TOGETHER):
            part = stored[start : start + _DELETED_TOGETHER]
            require_headers(self._view.snapshot, part)
            self._look_ahead()
            with self._changing() as change:
                change.delete(part)
                reach("rollback: segments deleted")
            with self._file.must_succeed():
                self._view.move(self._file.new_snapshot())


def _some_dead(rows: RowMap, snapshot: Snapshot) -> Dead:
    """Some segments that are to be deleted, by layout. One that is damaged stays, until the file is opened anew."""
    found: Dead = []
    room = _DELETED_TOGETHER
    for segments in rows.segments.values():
        slots = np.array(segments.dead[:room], np.int64)
        if len(slots):
            try:
                require_headers(snapshot, segments.stored(slots))
            except DamagedError:
                sound = [slot for slot in slots.tolist() if _can_be_deleted(segments, slot, snapshot)]
                segments.dead[:room], slots = sound, np.array(sound, np.int64)
            found.append((segments, slots))
            room -= len(slots)
    return [each for each in found if len(each[1])]


def _can_be_deleted(segments: Segments, slot: int, snapshot: Snapshot) -> bool:
    try:
        require_headers(snapshot, segments.stored(np.array([slot])))
    except DamagedError as error:
        _LOG.warning("a segment that nobody needs is damaged, and stays (%s)", error)
        return False
    return True


def _delete(change: Change, dead: Dead) -> None:
    for segments, slots in dead:
        change.delete(segments.stored(slots))


def _forget(dead: Dead, txn_id: int) -> None:
    for segments, slots in dead:
        del segments.dead[: len(slots)]
        segments.free(slots, txn_id)
