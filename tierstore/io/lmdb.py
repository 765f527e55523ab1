"""The cold tier on LMDB: a log of segments as values, transactions by py-lmdb, reads by address.

Rows are appended, many at a time, and never rewritten where they lie. ``segments.py`` says what a segment is,
``row_map.py`` how a row is found and what versions have to do with it, ``cleaning.py`` how room is won back. An epoch
is the number of the version that rows were written for. ``commit`` makes a version current in one small transaction;
what no kept version needs any more is deleted after it, a little at a time. An open for writing drops segments of
epochs that no commit made current; one for reading ignores them. docs/format.md describes the file.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, DiskFullError, ReadOnlyError, StoreNotFoundError, TierstoreError
from ..rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout
from ..system.durable import sync_directory
from ..system.forks import disown_in_forks, keep_for_ever
from ..system.killpoints import reach
from .anchor import AnchorKeeper, require_sound
from .appending import NewRows, put_version
from .arguments import check_arrays, check_widths, require_distinct
from .base import ColdCounters, VerifyReport
from .cleaning import DEFAULT_SLACK, Cleaner
from .counting import Counting
from .files import (
    RESTORE,
    check_rows_file,
    create_rows_file,
    map_bytes,
    open_environment,
    require_plain_files,
    rows_path,
    translate,
)
from .floor import Floor
from .gather import GatherStatus, gather_error
from .indexes import read_indexes, require_logged, stored_segments
from .log import Log, Written
from .mapped import FileMap
from .newer import Lookout, NewerVersion
from .reads import RowReader
from .records import HEAD_ITEM, MAX_VERSION, CommitRecord, Head, first_records, item_key, pack_head
from .recovery import recover
from .row_map import RowMap, new_places
from .snapshot import Snapshot
from .stored_records import check_store, chosen_version, read_head, read_payload, read_record, stale_items
from .verify import verify_segments
from .view import View
from .writer_lock import WriterLock

__all__ = ["LmdbColdTier"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_LOG: Final = logging.getLogger("tierstore")
_PAUSE_SECONDS: Final = 5e-5
"""Between two transactions of a long run of them: a lock released and taken again at once is given to nobody else."""


class LmdbColdTier:
    """``ColdTier`` in the file ``rows.lmdb`` of a store's directory. See the module's docstring.

    One process may have the directory open for writing, and any number for reading. LMDB holds every segment of a
    transaction in memory until it ends: bound the rows of a ``write``.

    Args:
        path: the store's directory; must exist.
        store_id: 16 bytes that all files of the store carry.
        readonly: never write anything; see the newest commit, and later ones after ``refresh``.
        version: with ``readonly``, the kept version to see; default: the newest.
        slack: pages that segments may take for one that their rows need, before segments are cleaned; above 1.
        verify_reads: for benchmarks only: False skips the checksums of rows read.
        create: whether an open for writing may create the file. A store that has committed rows passes False.

    Raises:
        StoreNotFoundError: there is no file, and it may not be created.
        StoreLockedError: a writer has it open.
        FormatError: not such a file, another version, or another store's.
        TruncatedError, DamagedError: see the message.
    """

    def __init__(
        self,
        path: Path,
        *,
        store_id: bytes,
        readonly: bool,
        version: int | None = None,
        slack: float = DEFAULT_SLACK,
        verify_reads: bool = True,
        create: bool = True,
    ) -> None:
        if len(store_id) != 16:
            raise ValueError(f"store_id must be 16 bytes, not {len(store_id)}")
        if not slack > 1:
            raise ValueError(f"slack must be above 1, not {slack}")
        self.path: Final = rows_path(path)
        self.page_bytes = 0
        self.readonly: Final = readonly
        self._wanted = version
        self._verify_reads = verify_reads
        self._slack = slack
        self._writer = threading.RLock()  # one writer, and whoever changes what the view shows
        self._state = "open"
        self._counting = Counting()
        self._tables: dict[int, tuple[RowLayout, int]] = {}
        self._lock: WriterLock | None = None
        self._floor: Floor | None = None
        self._environment: lmdb.Environment | None = None
        self._map: FileMap | None = None
        self._shown: View | None = None
        self.lookout = Lookout()
        self._anchors: AnchorKeeper | None = None
        self._log: Log | None = None
        disown_in_forks(self)
        try:
            self._open(path, store_id, create)
        except BaseException:
            self._release()
            raise

    # -- opening and closing

    def _open(self, directory: Path, store_id: bytes, create: bool) -> None:
        require_plain_files(directory)
        if not self.readonly:
            self._lock = WriterLock(directory)
            sync_directory(directory)  # a process that ended may have left names that the device does not hold
        if not self.path.exists():
            if self.readonly or not create:
                raise StoreNotFoundError(f"{self.path}: no such file. {RESTORE}")
            create_rows_file(self.path, first_records(store_id), store_id)
        if self.readonly:
            require_sound(self.path, store_id)
        else:
            recover(self.path, store_id)
        self.page_bytes = check_rows_file(self.path).page_bytes
        self._map = FileMap(self.path, map_bytes(directory))
        if not self.readonly:
            self._environment = open_environment(self.path, self._map.length_bytes)
            self._floor = Floor(self._environment, self.path, self._map.pins)
        self._reader = RowReader(self._map.rows, verify=self._verify_reads)
        self._shown = View(snapshot := self._new_snapshot())
        snapshot.check_free_pages()
        log = require_logged(snapshot, check_store(snapshot, store_id))
        self._head = read_head(snapshot)
        self._record = read_record(snapshot, chosen_version(self.path, self._head, self._wanted))
        if not self.readonly:
            self._anchors = AnchorKeeper(self.path, store_id, self.page_bytes, sync=self._sync, pin=self._new_snapshot)
            self._anchors.set()
            self._log = Log(
                log,
                Cleaner(self._slack, RowReader(self._map.rows, verify=True)),
                self._view,
                self._anchors,
                transaction=self._transaction,
                new_snapshot=self._new_snapshot,
                must_succeed=self._must_succeed,
            )
            self._drop_loose()

    def _sync(self) -> None:
        self._file_map.file_bytes()  # is it ours to sync, and the anchor after it ours to set?
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise translate(error, self.path) from error

    @property
    def _env(self) -> "lmdb.Environment":
        assert self._environment is not None
        return self._environment

    @property
    def _keeper(self) -> AnchorKeeper:
        assert self._anchors is not None
        return self._anchors

    @property
    def _appender(self) -> Log:
        assert self._log is not None
        return self._log

    @property
    def _file_map(self) -> FileMap:
        assert self._map is not None
        return self._map

    @property
    def _view(self) -> View:
        assert self._shown is not None
        return self._shown

    @property
    def _snapshot(self) -> Snapshot:
        return self._view.snapshot

    def close(self) -> None:
        """Wait for reads in progress, then release files and maps. Again is fine."""
        with self._writer:
            if self._state == "closed":
                return
            self._view.drain(self._stop)
            self._release()

    def _stop(self) -> None:
        self._state = "closed"

    def disown(self) -> None:
        """In a forked process: forget the store without ending the parent's transactions. LMDB's table of readers is
        shared memory: closing one here would free the parent's pages for reuse."""
        keep_for_ever(self._environment, self._shown, self._anchors, self._floor, self.lookout)
        self._environment = self._shown = self._anchors = self._floor = self._log = None
        self.lookout = Lookout()
        self._state = "closed"

    def _release(self) -> None:
        """Release whatever there is, each part also if another's release fails."""
        if self._map is not None and not self._map.pins.is_held():  # nor need LMDB's descriptors be ours any more
            if self._anchors is not None:
                self._anchors.stop()
            self.disown()
        try:
            with ExitStack() as stack:
                stack.callback(self.lookout.close)
                if self._lock is not None:
                    stack.callback(self._lock.release)
                for part in (self._map, self._environment, self._floor, self._shown, self._anchors):
                    if part is not None:
                        stack.callback(part.close)
        finally:
            self._map = self._environment = self._floor = self._shown = self._anchors = self._lock = self._log = None

    def _check_open(self) -> None:
        if self._state == "closed":
            raise ClosedError(f"{self.path}: the store was closed")
        if self._state == "failed":
            raise TierstoreError(f"{self.path}: an earlier error left the store unusable; close it and open it again.")

    def _check_writable(self) -> None:
        self._check_open()
        if self.readonly:
            raise ReadOnlyError(f'{self.path}: the store was opened with mode="r"; open it with mode="w" to write.')

    # -- snapshots

    @contextmanager
    def lease(self) -> Iterator[tuple[Snapshot, RowMap]]:
        """The current snapshot and map, kept until the end of the block."""
        self._check_open()
        while True:
            with self._view.lease(self._check_open) as (snapshot, rows):
                if rows is not None:
                    yield snapshot, rows
                    return
            self._make_map()  # may be dropped again before it is leased: by a rollback

    @contextmanager
    def lease_tree(self) -> Iterator[Snapshot]:
        """The current snapshot, kept until the end of the block."""
        with self._view.lease(self._check_open) as (snapshot, _):
            yield snapshot

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self.path, self._file_map, self.page_bytes)

    def _make_map(self) -> RowMap:
        with self._writer:
            if (rows := self._view.rows) is None:
                self._check_open()
                rows, snapshot = RowMap(self._tables), self._snapshot
                indexes = read_indexes(snapshot, stored_segments(snapshot))
                if self.readonly:
                    rows.enter(snapshot, indexes, self._record.version, ())
                else:
                    rows.enter(snapshot, indexes, MAX_VERSION, self._head.kept)
                self._view.show(rows)
            return rows

    def find_newer(self) -> NewerVersion | None:
        """Make ready what a read-only tier can move to, for ``read_newer`` and ``show_newer``; None if there is
        nothing newer, or the tier was opened at one version.

        Between two calls the pages of the tier's snapshot are kept from being reused: the writer's file grows.

        Raises:
            StoreReplacedError: the file is not at its path any more. DamagedError: the newer one is damaged.
        """
        with self._writer:
            self._check_open()
            if not self.readonly or self._wanted is not None:
                return None
            self._file_map.require_in_place()
            rows = self._make_map()  # what the newer one is compared with
            return self.lookout.look(self._new_snapshot(), rows, self._record, self._view)

    def show_newer(self) -> None:
        """Move to what ``find_newer`` found. Reads in progress finish where they are."""
        with self._writer:
            found = self.lookout.take()
            self._head, self._record = found.head, found.record
            self._view.show(found.rows, found.snapshot)

    # -- tables

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        """See ``ColdTier.add_table``. Nothing is read or written until all tables that have rows are added.

        Raises:
            ValueError: a table added before, or numbers out of range, or another page size than ``page_bytes``.
            BudgetError: the system refuses memory for the map of the rows.
        """
        if not 0 <= table_index < MAX_TABLES:
            raise ValueError(f"table_index must be in [0, {MAX_TABLES}), not {table_index}")
        if not 0 < num_rows <= MAX_ROWS:
            raise ValueError(f"num_rows must be in (0, {MAX_ROWS}], not {num_rows}")
        if layout.page_bytes != self.page_bytes:
            raise ValueError(f"layout.page_bytes is {layout.page_bytes}, the file's pages have {self.page_bytes} bytes")
        with self._writer:
            self._check_open()
            if table_index in self._tables:
                raise ValueError(f"table {table_index} was added before")
            if (rows := self._view.rows) is not None:
                self._view.show(None if rows.unknown else rows.with_table(table_index, layout, num_rows))
            else:  # the first reader makes the map, but what the system refuses is told now
                new_places(sum(other for _, other in self._tables.values()) + num_rows)
            self._tables[table_index] = layout, num_rows

    def drop_tables(self, first: int) -> None:
        """Forget the tables from index ``first`` on, which a read-only tier shows no version of."""
        with self._writer:
            self._tables = {index: shape for index, shape in self._tables.items() if index < first}
            self._view.show(None)

    def _layout_of(self, rows: RowMap, keys: Int64s) -> RowLayout:
        layout = rows.layouts.get(int(keys[0]) >> KEY_ROW_BITS)
        if layout is None:
            raise ValueError(f"keys[0] is of table {int(keys[0]) >> KEY_ROW_BITS}, which was not added")
        if rows.unknown:
            raise ValueError(f"{self.path}: has rows of tables that were not added; add all tables before")
        return layout

    # -- reading

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """See ``ColdTier.read``; ValueError for keys of no row or of several layouts, and slots out of range."""
        with self.lease() as (snapshot, rows):
            self._read_from(snapshot, rows, keys, slots, weights, state, present)

    def read_newer(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """``read``, of what ``find_newer`` found."""
        newer = self.lookout.required()
        self._read_from(newer.snapshot, newer.rows, keys, slots, weights, state, present)

    def _read_from(
        self, snapshot: Snapshot, rows: RowMap, keys: Int64s, slots: Int32s, weights: Words, state: Words,
        present: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        check_arrays(keys, slots, weights, state)
        if present.dtype != np.bool_ or present.shape != keys.shape or not present.flags.c_contiguous:
            raise ValueError("present must be a contiguous bool array as long as keys")
        if not len(keys):
            return
        started = time.perf_counter()
        layout = self._layout_of(rows, keys)
        check_widths(layout, weights, state)
        positions = rows.positions(layout, keys)
        result = self._reader.gather(
            snapshot, rows.segments[layout], rows.places, positions, keys, slots, weights, state, present
        )
        if result[0] != GatherStatus.DONE:
            raise gather_error(self.path, result, keys)
        absent, seconds = len(keys) - int(np.count_nonzero(present)), time.perf_counter() - started
        self._counting.add(rows_read=len(keys), rows_absent=absent, pages_read=int(result[2]), read_seconds=seconds)

    # -- writing

    def _transaction(self) -> "AbstractContextManager[lmdb.Transaction[bytes]]":
        """A write transaction, committed at the end of the block, with LMDB's errors translated."""
        assert self._floor is not None
        self._file_map.guard.require_whole()
        return self._floor.transaction()

    @contextmanager
    def _must_succeed(self) -> Iterator[None]:
        """After an LMDB commit our view must follow; if it cannot, the tier stops."""
        try:
            yield
        except BaseException:
            self._state = "failed"
            raise

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        """See ``ColdTier.write``; ValueError as for ``read``, for a key given twice, and for an epoch committed before.

        Raises:
            DiskFullError: nothing of this call was stored; reads go on.
        """
        check_arrays(keys, slots, weights, state)
        with self._writer:
            self._check_writable()
            if not len(keys):
                return
            started = time.perf_counter()
            rows = self._make_map()
            layout = self._layout_of(rows, keys)
            check_widths(layout, weights, state)
            require_distinct(keys)
            rows.positions(layout, keys)
            if not self._head.last < epoch <= MAX_VERSION:
                raise ValueError(f"epoch={epoch} must be above {self._head.last}, the last version")
            new = NewRows(keys, slots, weights, state, np.array([epoch], np.uint64))
            written = self._appender.append(rows, rows.segments[layout], new, self._head.kept)
            self._count(written, rows_written=len(keys), write_seconds=time.perf_counter() - started)

    def _count(self, written: Written, **more: float) -> None:
        self._counting.add(
            bytes_written=written.pages * self.page_bytes,
            rows_moved=written.rows_moved,
            pages_moved=written.pages_read,
            bytes_moved=written.pages_moved * self.page_bytes,
            **more,
        )

    # -- versions

    def commit(self, payload: bytes, version: int, *, keep: int = 1) -> None:
        """See ``ColdTier.commit``. Writes of other threads go on while the device is waited for.

        Raises:
            DiskFullError, StoreReplacedError (the file is not at its path any more): nothing was committed; what was
                written is still there, and commit may be tried again.
        """
        with self._writer:
            self._check_writable()
            self._file_map.require_in_place()
            if version <= self._head.last or keep < 1:
                raise ValueError(f"version={version} must be above {self._head.last}, and keep={keep} at least 1")
            head = Head(last=version, kept=(*self._head.kept, version)[-keep:])
            read_head(self._snapshot)  # and so LMDB's way to the records: see write()
            with self._transaction() as txn:
                record = put_version(txn, version, payload)
                txn.put(item_key(HEAD_ITEM), pack_head(head))
                reach("commit: record put")
            reach("commit: transaction committed")
        with self._must_succeed():
            self._anchor()
            self._adopt(head, record)
        reach("commit: durable")
        self._prune()

    def _adopt(self, head: Head, record: CommitRecord) -> None:
        """Show a version that became current."""
        with self._writer:
            self._head, self._record = head, record
            self._view.move(self._new_snapshot())

    def _prune(self) -> None:
        """Delete what the kept versions do not need, and clean what that leaves too empty, a little at a time. A full
        disk leaves that to later commits."""
        with self._writer:
            rows = self._make_map()
            for segments in rows.segments.values():
                segments.release(self._head.kept, self._head.last)
            turns = self._appender.take_turns(rows)
        try:
            for work in (self._delete_dead, self._clean, self._delete_dead):
                for _ in range(turns):
                    if not work():
                        break
                    time.sleep(_PAUSE_SECONDS)
            with self._writer:
                self._delete_items()
        except DiskFullError as error:
            _LOG.warning("the commit stands; there was no room to clean up after it (%s)", error)
        with self._writer:
            self._view.move(self._new_snapshot())
        self._anchor()  # only behind an anchor can the pages be used again
        reach("prune: done")

    def _clean(self) -> bool:
        with self._writer:
            self._check_writable()
            written = self._appender.clean(self._make_map(), self._head.kept)
            if written is not None:
                self._count(written)
            return written is not None

    def _delete_dead(self) -> bool:
        with self._writer:
            self._check_writable()
            return self._appender.delete_dead(self._make_map())

    def _anchor(self) -> None:
        """Set an anchor while other threads go on writing."""
        with self._must_succeed():
            with self._writer:
                anchored = self._keeper.start()
            anchored.result()
            with self._writer:
                self._keeper.settle()

    def _delete_items(self) -> bool:
        """Delete the records and payloads of versions that are not kept; whether there were any."""
        if items := stale_items(self._snapshot, self._head):
            with self._transaction() as txn:
                for item in items:
                    txn.delete(item_key(item))
        return bool(items)

    def rollback(self, version: int) -> None:
        """See ``ColdTier.rollback``."""
        with self._writer:
            self._check_writable()
            if version not in self._head.kept:
                raise ValueError(f"version={version} is not kept: there are {list(self._head.kept)}")
            record = read_record(self._snapshot, version)
            head = Head(last=self._head.last, kept=tuple(kept for kept in self._head.kept if kept <= version))
            with self._transaction() as txn:
                txn.put(item_key(HEAD_ITEM), pack_head(head))
                reach("rollback: head put")
            reach("rollback: transaction committed")
            with self._must_succeed():
                self._keeper.set()
                self._adopt(head, record)
                reach("rollback: durable")
                self._view.show(None)
                self._drop_loose()

    def _drop_loose(self) -> None:
        """Delete segments of versions that are not current: what a process that ended, or a rollback, left behind."""
        indexes = read_indexes(self._snapshot, stored_segments(self._snapshot))
        self._appender.drop(indexes.stored.chosen(indexes.oldest > self._head.current))
        if self._delete_items():
            self._view.move(self._new_snapshot())

    @property
    def version(self) -> int:
        return self._record.version

    @property
    def last_version(self) -> int:
        return self._head.last

    @property
    def versions(self) -> tuple[int, ...]:
        return self._head.kept

    @property
    def payload(self) -> bytes:
        """See ``ColdTier.payload``; read anew at each use. DamagedError if it does not match its checksum."""
        with self._writer:
            self._check_open()
            return read_payload(self._snapshot, self._record)

    # -- checking and counting

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """See ``ColdTier.verify``. Also checked: the tree, the list of free pages, and the payload of each version.

        Of segments of tables that were not added, only the index is checked.
        """
        with self.lease() as (snapshot, rows):
            return verify_segments(snapshot, rows, progress)

    def counters(self) -> ColdCounters:
        return self._counting.totals

    @property
    def map_bytes(self) -> int:
        """See ``ColdTier.map_bytes``; of address space: memory is taken where rows exist."""
        rows = self._view.rows
        return 0 if rows is None else rows.size_bytes
