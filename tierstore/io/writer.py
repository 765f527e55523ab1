"""The one writer of a row file: rows appended, versions committed and gone back to, what nobody needs deleted.

After a transaction the map of rows and what readers are shown follow it; after an error, by ``Writer.catch_up``.
``commit`` makes a version current in one small transaction; what no kept version needs any more is deleted after it, a
little at a time.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import lmdb
import numpy as np

from ..errors import DamagedError, DiskFullError, TierstoreError
from ..layout import PAGE_HEADER_WORDS, RowLayout
from ..system.files import RESTORE
from ..system.killpoints import reach
from ..system.processes import disown_in_forks, keep_for_ever
from ..system.sizes import format_size
from . import records
from .files import open_environment, translate
from .log import DELETED_PAGES, Cleaner, Dead, require_headers, some_dead
from .meta import MAX_PAGES, bytes_checksum
from .places import Segments
from .reader_locks import OldestReader
from .reads import KeyedRows
from .records import CommitRecord, Head, LogRecord, item_key, read_head, read_log, read_record, stale_items
from .row_file import OpenFile, SuperblockWriter
from .row_map import RowMap
from .segments import NEWEST, OLDEST, STORED, Stored, build_segment, numbers_hash

_LOG: Final = logging.getLogger("tierstore")
_SPARE_BYTES: Final = 64 << 20  # for a transaction's records and pages of the trees
_LISTED_PART: Final = 256  # LMDB's list of free pages takes at most this part of the file
_CHUNKS_TOGETHER: Final = 16  # of a payload, in a transaction
_CLEANED_PAGES: Final = 128  # a transaction that only cleans chooses victims as if so many had been appended before
_TREE_PAGES: Final = 8  # of both of LMDB's trees, from leaf to root, that a small transaction copies
_DROPPED_TOGETHER: Final = 512
_LIFE: Final = 1 << 32
"""Each process that writes begins at the next multiple: no number that one gave away and lost is given again."""
_PAUSE_SECONDS: Final = 5e-5  # a lock released and taken again at once is given to nobody else
_LEAST_HELD_BYTES: Final = 64 << 20  # less is not worth a warning
_GROWTH: Final = 1.05  # of the file, before what one reader keeps is counted again: that takes as long as it has stayed


class Writer:
    """Writes to a row file that is open for it; first it deletes what an earlier process left behind. ``slack``: see
    ``LmdbColdTier``. ``add_counts``: adds to totals of ``ColdCounters``. ``held_bytes``: what the oldest reader kept
    from being reused, when that was counted last."""

    def __init__(self, file: OpenFile, slack: float, add_counts: Callable[..., None]) -> None:
        self._file = file
        disown_in_forks(self)
        with ExitStack() as stack:
            self._mapped_bytes = file.map.length_bytes
            self._environment = open_environment(file.path, self._mapped_bytes)
            stack.callback(self._environment.close)
            file.map.locks.require_in_place()
            self._oldest = OldestReader(self._environment, file.path, file.map.locks)
            stack.callback(self._oldest.close)
            self._superblocks = SuperblockWriter(file, self.sync)
            stack.callback(self._superblocks.close)
            self._superblocks.set()
            self.held_bytes = self._logged_bytes = 0
            self._counted = -1, 0  # the oldest tree read, and bytes of the file, when it was counted last
            self._cleaner = Cleaner(slack)
            self._add_counts = add_counts
            self._record = file.logged
            self._appended = 0  # pages, since ``_prune`` was called
            self._is_numbered = False  # whether this process has numbers of segments of its own
            self._parts = stack.pop_all()

    def disown(self) -> None:
        """In a forked process: let go. LMDB's table of readers is shared memory: closing a transaction here would free
        the parent's pages for reuse."""
        if hasattr(self, "_parts"):
            keep_for_ever(self._parts)
            self._parts = ExitStack()

    def close(self) -> None:
        """Set a last anchor if one is due, and end LMDB's part."""
        if not self._file.map.locks.is_held():  # nor need LMDB's descriptors be ours any more
            self._superblocks.stop()
            self.disown()
        self._parts.close()

    def sync(self) -> None:
        self._file.map.file_bytes()  # is it ours to sync, and the anchor after it ours to set?
        try:
            self._environment.sync(True)
        except lmdb.Error as error:
            self._file.has_failed = True
            raise translate(error, self._file.path) from error

    @contextlib.contextmanager
    def _transaction(self, size_bytes: int = 0) -> "Iterator[lmdb.Transaction[bytes]]":
        """A write transaction that leaves alone what others read. ``size_bytes``: what it may put, records and pages of
        the tree apart."""
        file = self._file
        self.catch_up()
        file.map.guard.require_whole()
        now = file.map.locks.size_bytes()
        needed = now + now // _LISTED_PART + 2 * size_bytes + _SPARE_BYTES
        file.map = file.map.reaching(min(needed, MAX_PAGES * file.page_bytes))
        try:
            if file.map.length_bytes != self._mapped_bytes:
                self._map_again(file.map.length_bytes)
            file.is_behind = True
            self._oldest.update()
            with self._environment.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise translate(error, file.path) from error

    def _map_again(self, length_bytes: int) -> None:
        try:
            self._environment.set_mapsize(length_bytes)
            self._oldest.begin_again()
        except (lmdb.Error, TierstoreError):  # LMDB gives its map up before it makes another
            self._file.has_failed = True
            raise
        self._mapped_bytes = length_bytes

    def catch_up(self) -> None:
        """After a call that was cut short: show what the file has. Versions are shown once they are durable."""
        file = self._file
        if not file.is_behind:
            return
        with file.lock, ExitStack() as stack:
            if not file.is_behind or file.is_closed or file.has_failed:
                return
            stack.callback((snapshot := file.new_snapshot()).close)
            head = read_head(snapshot)
            record = read_record(snapshot, head.current)
            found = read_log(snapshot)  # numbers that were given to segments are not given again in any case
            self._record = found._replace(next_number=max(found.next_number, self._record.next_number))
            if head != file.head:
                self._superblocks.set()
            if snapshot.txn_id != file.snapshot.txn_id:
                file.rows = None
            stack.pop_all()
            file.head, file.record = head, record
            file.follow(snapshot)

    # -- the log

    @contextlib.contextmanager
    def _changing(self, dead: Dead, size_bytes: int = 0) -> "Iterator[lmdb.Transaction[bytes]]":
        """A transaction that deletes these segments, after ``require_headers``, and changes the log. LMDB's way to what
        is appended is read before: a page that LMDB cannot read ends the process."""
        self._file.snapshot.seek(np.zeros(1, np.uint64), np.array([self._record.next_number], np.uint64))
        with self._transaction(size_bytes) as txn:
            for segments, slots in dead:
                self._delete(txn, segments.stored(slots))
            yield txn
            txn.put(item_key(records.LOG_ITEM), records.pack_words(*self._record))

    def _put(self, txn: "lmdb.Transaction[bytes]", segments: Segments, new: KeyedRows) -> Stored:
        """Put rows, in their order, as segments; where these are the tree tells once they are committed."""
        layout, geo, first = segments.layout, segments.geo, self._record.next_number
        per_segment, weights, state = geo.rows_per_segment, new.weights.reshape(-1), new.state.reshape(-1)
        most = layout.segment_pages(min(per_segment, len(new.keys)), is_mixed=True)
        image = np.empty(most * geo.page_words, np.uint64)
        parts: list[tuple[int, ...]] = []
        for start in range(0, len(new.keys), per_segment):
            part = slice(start, start + per_segment)
            epochs = new.epochs[part] if len(new.epochs) > 1 else new.epochs
            if len(epochs) > 1 and (epochs == epochs[0]).all():
                epochs = epochs[:1]
            keys, number = new.keys[part], first + len(parts)
            pages = layout.segment_pages(len(keys), is_mixed=len(epochs) > 1)
            value = image[: pages * geo.page_words - PAGE_HEADER_WORDS]
            build_segment(geo, number, epochs, keys, new.slots[part], weights, state, value)
            txn.put(records.segment_key(number), value.data, dupdata=False)
            parts.append((number, 0, pages, len(keys), int(value[NEWEST]), int(value[OLDEST]), int(keys[0])))
        stored = np.array(parts, STORED)
        self._count(stored, 1)
        return stored

    def _delete(self, txn: "lmdb.Transaction[bytes]", stored: Stored) -> None:
        for number in stored["number"].tolist():
            if not txn.delete(records.segment_key(number)):
                raise DamagedError(f"{self._file.path}: its tree has lost segment {number}. {RESTORE}")
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        record = self._record
        self._record = LogRecord(
            next_number=max(record.next_number, int(stored["number"].max(initial=np.uint64(0))) + 1),
            num_segments=record.num_segments + sign * len(stored),
            hash=(record.hash + sign * int(numbers_hash(stored))) % 2**64,
        )

    def append(self, layout: RowLayout, new: KeyedRows | None) -> None:
        """Append rows of one layout and one epoch, or none, and clean a little. The caller holds the file's lock."""
        rows, kept = self.rows(), self._file.head.kept
        self._take_numbers()
        segments, before = rows.segments[layout], self._file.snapshot
        moved = self._cleaner.collect(before, rows, segments, kept)
        dead = some_dead(rows, before)
        segments.reuse(self._file.oldest_shown())
        parts = [(segments, each, each is moved) for each in (moved, new) if each is not None]
        rows.make_room(layout, [len(each.keys) for _, each, _ in parts])
        pages = self._change(rows, dead, parts)
        appended = pages[-1] if new is not None else 0
        self._appended += appended
        self._add_counts(bytes_written=appended * before.page_bytes)
        if moved is not None:
            bytes_moved = pages[0] * before.page_bytes
            self._add_counts(rows_moved=len(moved.keys), pages_moved=moved.pages, bytes_moved=bytes_moved)
        if new is not None:
            self._cleaner.plan(self._file.snapshot, segments, kept, appended)

    def _change(self, rows: RowMap, dead: Dead, parts: Sequence[tuple[Segments, KeyedRows, bool]] = ()) -> list[int]:
        """Delete dead segments and append rows in one transaction; returns the pages of each part. The flag: cleaning
        has moved the rows. Those come first: a row may be newer in what is new."""
        file, put = self._file, []
        most = sum(segments.layout.pages_for(len(new.keys), is_mixed=True) for segments, new, _ in parts)
        with self._changing(dead, most * file.page_bytes) as txn:
            for segments, new, is_moved in parts:
                put.append(self._put(txn, segments, new))
                if is_moved:
                    reach("cleaning: rows put")
            reach("write-back: segments put" if parts else "prune: segments deleted")
        reach("write-back: transaction committed" if parts else "prune: transaction committed")
        pages = [int(each["pages"].sum()) for each in put]
        freed = sum(int(each.arrays.pages[slots].sum()) + len(slots) for each, slots in dead)  # and leaves of the tree
        with file.following() as snapshot:
            for each, slots in dead:
                each.spare(slots, slots[:0])
                each.free(slots, snapshot.txn_id)
            for stored, (segments, new, is_moved) in zip(put, parts, strict=True):
                stored["first_page"] = snapshot.seek(np.zeros(len(stored), np.uint64), stored["number"].copy())["page"]
                if not stored["first_page"].all():
                    raise DamagedError(f"{file.path}: a segment that was just written is not in its tree. {RESTORE}")
                rows.publish(segments, stored, new.keys, file.head.current, snapshot.txn_id, is_moved=is_moved)
                if is_moved:
                    reach("cleaning: rows published")
        if parts:
            reach("write-back: segments published")
        live = sum(each.pages for each in rows.segments.values())
        written = max(sum(pages), freed) + _TREE_PAGES
        self._superblocks.wrote(written * file.page_bytes, live * file.page_bytes)
        return pages

    def _clean(self) -> bool:
        """Clean a little; False if there is nothing to clean."""
        file = self._file
        with file.lock:
            file.require_open()
            for segments in self.rows().segments.values():
                if self._cleaner.plan(file.snapshot, segments, file.head.kept, _CLEANED_PAGES):
                    self.append(segments.layout, None)
                    return True
        return False

    def _take_numbers(self) -> None:
        """Begin where no process before has numbered segments, and see that none after will."""
        if self._is_numbered:
            return
        self._file.snapshot.file_map.locks.require_in_place()  # a superblock is to be set next to it
        record = self._record._replace(next_number=(self._record.next_number // _LIFE + 1) * _LIFE)
        with self._transaction(0) as txn:
            txn.put(item_key(records.LOG_ITEM), records.pack_words(*record))
            txn.put(item_key(records.STORE_ITEM), records.pack_store(self._file.store_id))  # was it an older release's?
        self._record = record
        reach("log: numbers taken")
        self._file.follow()
        self._superblocks.set()
        self._is_numbered = True

    def delete_dead(self) -> bool:
        """Delete some of the segments whose rows nobody needs; False if there are none."""
        file = self._file
        with file.lock:
            file.require_open()
            rows = self.rows()
            if dead := some_dead(rows, file.snapshot):
                self._change(rows, dead)
            return bool(dead)

    def _drop(self, stored: Stored) -> None:
        for start in range(0, len(stored), _DROPPED_TOGETHER):
            part = stored[start : start + _DROPPED_TOGETHER]
            require_headers(self._file.snapshot, part)
            with self._changing([]) as txn:
                self._delete(txn, part)
                reach("rollback: segments deleted")
            self._file.follow()

    # -- versions

    def commit(self, payload: bytes, version: int, keep: int, dropped: Collection[int]) -> None:
        file = self._file
        with file.lock:
            file.require_open()
            file.map.locks.require_in_place()
            self.rows()
            if not file.head.last < version <= records.MAX_VERSION or keep < 1:
                words = f"above {file.head.last} and at most {records.MAX_VERSION}, and keep={keep} at least 1"
                raise ValueError(f"version={version} must be {words}")
            before = (kept for kept in file.head.kept if kept not in dropped)
            head = Head(last=version, kept=(*before, version)[-keep:])
            record = CommitRecord(version, len(payload), bytes_checksum(payload))
        with self._making_current(version):
            self._put_payload(record, payload)
            with file.lock:
                read_head(file.snapshot)  # so LMDB's way to the records: a page that it cannot read ends the process
                with self._transaction() as txn:
                    txn.put(item_key(records.version_item(version)), records.pack_words(*record))
                    txn.put(item_key(records.HEAD_ITEM), records.pack_head(head))
                    reach("commit: record put")
                reach("commit: transaction committed")
                file.follow()
            try:
                self._anchor()
            except BaseException as error:
                error.add_note(f"version {version} was written: it, or the one before it, is what opens next")
                raise
            with file.lock:
                file.head, file.record = head, record
            reach("commit: durable")
            self._prune()

    @contextlib.contextmanager
    def _making_current(self, version: int) -> Iterator[None]:
        """An error that comes once the version is durable is logged."""
        try:
            yield
        except BaseException as error:
            self._file.is_behind = True
            if not isinstance(error, Exception):
                raise
            with contextlib.suppress(TierstoreError):  # which may come again; the first one says more
                self.catch_up()
            if self._file.head.current != version:
                raise
            _LOG.warning("version %d is durable; what was to follow failed, and is left to later: %r", version, error)

    def _put_payload(self, record: CommitRecord, payload: bytes) -> None:
        """Put a version's payload, some at a time, as LMDB keeps what a transaction puts in memory."""
        view, step = memoryview(payload), records.PAYLOAD_CHUNK_BYTES
        try:
            for first in range(0, record.num_payload_chunks, _CHUNKS_TOGETHER):
                with self._file.lock:
                    self._file.require_open()
                    read_head(self._file.snapshot)
                    with self._transaction(_CHUNKS_TOGETHER * step) as txn:
                        for chunk in range(first, min(first + _CHUNKS_TOGETHER, record.num_payload_chunks)):
                            key = item_key(records.version_item(record.version, chunk))
                            txn.put(key, view[chunk * step : (chunk + 1) * step])
                    self._file.follow()
                reach("commit: payload put")
        except DiskFullError:
            with self._file.lock, contextlib.suppress(TierstoreError):
                self._delete_items()  # room for a smaller one
            raise

    def _prune(self) -> None:
        """Delete what no kept version needs, and clean, a little at a time. On a full disk later commits do it."""
        file = self._file
        with file.lock:
            rows = self.rows()
            for segments in rows.segments.values():
                segments.release(file.head.kept, file.head.last)
            # For what was appended since the last call and what is dead: while others write there is always more.
            dead = sum(segments.dead_pages for segments in rows.segments.values())
            turns, self._appended = 2 + self._appended // _CLEANED_PAGES + dead // DELETED_PAGES, 0
        try:
            for work in (self.delete_dead, self._clean, self.delete_dead):
                for _ in range(turns):
                    if not work():
                        break
                    time.sleep(_PAUSE_SECONDS)
            with file.lock:
                self._delete_items()
        except DiskFullError as error:
            _LOG.warning("the commit stands; there was no room to clean up after it (%s)", error)
        self._anchor()  # only behind an anchor can the pages be used again
        self._count_held(sum(segments.pages for segments in rows.segments.values()) * file.page_bytes)
        reach("prune: done")

    def _count_held(self, live_bytes: int) -> None:
        """Count what the oldest reader elsewhere keeps from being reused. Log a warning whenever it is more than
        ``live_bytes``, those of the segments, and has doubled since the last one."""
        with self._file.lease_tree() as snapshot:
            locks, size_bytes = snapshot.file_map.locks, snapshot.file_map.file_bytes()
            oldest = locks.oldest_elsewhere(snapshot.txn_id)
            if oldest is None:
                self.held_bytes = 0
            elif oldest != self._counted[0] or size_bytes > self._counted[1] * _GROWTH:
                self._counted = oldest, size_bytes
                self.held_bytes = snapshot.freed_since(oldest)
            if self.held_bytes <= max(live_bytes, _LEAST_HELD_BYTES):
                self._logged_bytes = 0
            elif oldest is not None and self.held_bytes >= 2 * self._logged_bytes:
                self._logged_bytes = self.held_bytes
                _LOG.warning(
                    "%s: %s still shows an old version, and keeps %s from being reused, so the file grows with each "
                    "commit; have it call Store.refresh() now and then, or close it",
                    snapshot.path, locks.describe_holders(oldest), format_size(self.held_bytes),
                )  # fmt: skip

    def _anchor(self) -> None:
        """Set an anchor while other threads go on writing."""
        with self._file.lock:
            anchored = self._superblocks.start()
        anchored.exception()  # waits
        with self._file.lock:
            self._superblocks.settle()
        anchored.result()  # another thread may have settled it

    def _delete_items(self) -> None:
        if items := stale_items(self._file.snapshot, self._file.head):
            with self._transaction() as txn:
                for item in items:
                    txn.delete(item_key(item))
            self._file.follow()

    def rollback(self, version: int) -> None:
        file = self._file
        with file.lock:
            file.require_open()
            self.catch_up()
            if version not in file.head.kept:
                raise ValueError(f"version={version} is not kept: there are {list(file.head.kept)}")
            file.rows, file.has_loose = None, True  # if a step fails, what was not committed is dropped even so
            record = read_record(file.snapshot, version)
            head = Head(last=file.head.last, kept=tuple(kept for kept in file.head.kept if kept <= version))
            with self._making_current(version):
                with self._transaction() as txn:
                    txn.put(item_key(records.HEAD_ITEM), records.pack_head(head))
                    reach("rollback: head put")
                reach("rollback: transaction committed")
                file.follow()
                self._superblocks.set()
                file.head, file.record = head, record
                reach("rollback: durable")
                self.rows()

    def rows(self) -> RowMap:
        """The map. Segments of versions that are not current, which a process that ended, or a rollback, left behind,
        are deleted first: a version to come would show them."""
        file = self._file
        self.catch_up()
        rows = file.make_map()
        if file.has_loose:
            self._drop(rows.later)
            self._delete_items()
            file.has_loose = False
        return rows
