"""The cold tier on LMDB: blocks of rows as values, transactions by py-lmdb, reads by address.

Keys are (block key, epoch). An epoch is the number of the version that a block was written for. A version shows each
block at its newest epoch up to its own number, so the blocks of the kept versions stay beside their successors, and
``commit`` makes a version current in one small transaction. What no kept version shows any more is deleted after it, a
little at a time. An open for writing drops blocks of epochs that no commit made current; one for reading ignores them.
docs/format.md describes the file, directory.py the rules by which readers and the writer share it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
from numpy.typing import NDArray

from ..durable import sync_directory
from ..errors import ClosedError, ReadOnlyError, StoreNotFoundError, TierstoreError
from ..killpoints import reach
from ..rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout
from .anchor import AnchorKeeper, require_sound
from .base import ColdCounters, VerifyReport
from .btree import Entries
from .census import (
    check_census,
    check_store,
    chosen_version,
    num_places,
    read_head,
    read_payload,
    read_placement,
    read_record,
)
from .checksum import bytes_checksum
from .counting import Counting
from .directory import Directory
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
from .forks import disown_in_forks, keep_for_ever
from .gather import GatherStatus, Geometry, gather_error, geometry
from .mapped import FileMap
from .newer import Lookout, NewerVersion
from .reads import RowReader
from .records import HEAD_ITEM, MAX_VERSION, CommitRecord, Head, first_records, item_key, pack_head
from .recovery import recover
from .snapshot import Snapshot
from .verify import verify_blocks
from .versions import garbage, next_totals, selected, stale_items, superseded
from .view import View, fill_directory
from .writer_lock import WriterLock
from .writes import BlockRows, Staging, check_arrays, check_widths, delete_blocks, put_version

__all__ = ["LmdbColdTier"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_DELETED_TOGETHER: Final = 512
_PAUSE_SECONDS: Final = 5e-5
"""Between two transactions of a long run of them: a lock released and taken again at once is given to nobody else."""


class LmdbColdTier:
    """``ColdTier`` in the file ``rows.lmdb`` of a store's directory. See the module's docstring.

    One process may have the directory open for writing, and any number for reading. A write stages
    ``staging_bytes`` of blocks at a time; LMDB itself holds every block of the transaction in memory until it
    ends, so one ``write`` takes about ``pages_per_block * page_bytes`` for each distinct block: bound its rows.

    Args:
        path: the store's directory; must exist.
        store_id: 16 bytes that all files of the store carry.
        readonly: never write anything; see the newest commit, and later ones after ``refresh``.
        version: with ``readonly``, the kept version to see; default: the newest.
        staging_bytes: memory in which ``write`` builds blocks, at least one block.
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
        staging_bytes: int,
        verify_reads: bool = True,
        create: bool = True,
    ) -> None:
        if len(store_id) != 16:
            raise ValueError(f"store_id must be 16 bytes, not {len(store_id)}")
        if staging_bytes <= 0:
            raise ValueError(f"staging_bytes must be positive, not {staging_bytes}")
        self.path: Final = rows_path(path)
        self.page_bytes = 0
        self.readonly: Final = readonly
        self._wanted = version
        self._verify_reads = verify_reads
        self._unlisted = 0  # versions up to it were committed before: the directory has no marks of them
        self._staging = Staging(staging_bytes)
        self._writer = threading.RLock()  # one writer, and whoever changes what the view shows
        self._state = "open"
        self._counting = Counting()
        self._geometries: dict[RowLayout, Geometry] = {}
        self._lock: WriterLock | None = None
        self._floor: Floor | None = None
        self._environment: lmdb.Environment | None = None
        self._map: FileMap | None = None
        self._shown: View | None = None
        self.lookout = Lookout()
        self._anchors: AnchorKeeper | None = None
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
        self._rows = RowReader(self._map.rows, verify=self._verify_reads)
        self._shown = View(snapshot := self._new_snapshot(), is_complete=False)
        snapshot.check_free_pages()
        self.placement = self._staging.placement = read_placement(snapshot, check_store(snapshot, store_id))
        self._head = read_head(snapshot)
        self._record = read_record(snapshot, chosen_version(self.path, self._head, self._wanted))
        check_census(snapshot, self._record)
        self._unlisted = self._head.last
        self._view.is_complete = not self._record.tables
        if not self.readonly:
            self._anchors = AnchorKeeper(self.path, store_id, self.page_bytes, sync=self._sync, pin=self._new_snapshot)
            self._anchors.set()
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

    @property
    def _directory(self) -> Directory:
        return self._view.directory

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
        self._environment = self._shown = self._anchors = self._floor = None
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
                stack.callback(self._staging.release)
                stack.callback(self.lookout.close)
                if self._lock is not None:
                    stack.callback(self._lock.release)
                for part in (self._map, self._environment, self._floor, self._shown, self._anchors):
                    if part is not None:
                        stack.callback(part.close)
        finally:
            self._map = self._environment = self._floor = self._shown = self._anchors = self._lock = None

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
    def lease(self, *, is_complete: bool = True) -> Iterator[tuple[Snapshot, Directory]]:
        """The current snapshot and directory, which may lack blocks if so wished, kept until the end of the block."""
        self._check_open()
        if is_complete and not self._view.is_complete:
            self._build_directory()
        with self._view.lease(self._check_open) as leased:
            yield leased

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self.path, self._file_map, self.page_bytes)

    @property
    def _epoch_limit(self) -> int:
        """Blocks of later epochs are none of ours."""
        return self._record.version if self.readonly else MAX_VERSION

    def _build_directory(self) -> None:
        with self._writer:
            if not self._view.is_complete:
                self._check_open()
                directory = self._directory.emptied()
                fill_directory(directory, self._snapshot, self._epoch_limit)
                self._view.show(directory)

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
            self._build_directory()  # what the newer one is compared with
            return self.lookout.look(self._new_snapshot(), self._directory, self._record, self._view.move)

    def show_newer(self) -> None:
        """Move to what ``find_newer`` found. Reads in progress finish where they are."""
        with self._writer:
            snapshot, self._head, self._record, directory, *_ = self.lookout.take()
            self._view.show(directory, snapshot)

    # -- tables

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        """See ``ColdTier.add_table``.

        Raises:
            ValueError: a table added before, or numbers out of range, or another page size than ``page_bytes``.
        """
        if not 0 <= table_index < MAX_TABLES:
            raise ValueError(f"table_index must be in [0, {MAX_TABLES}), not {table_index}")
        if not 0 < num_rows <= MAX_ROWS:
            raise ValueError(f"num_rows must be in (0, {MAX_ROWS}], not {num_rows}")
        if layout.page_bytes != self.page_bytes:
            raise ValueError(f"layout.page_bytes is {layout.page_bytes}, the file's pages have {self.page_bytes} bytes")
        with self._writer:
            self._check_open()
            if table_index in self._directory.layouts:
                raise ValueError(f"table {table_index} was added before")
            stored_rows = num_places(self.path, self.placement, table_index, layout, num_rows)
            directory = self._directory.with_table(table_index, layout, stored_rows)
            if self._view.is_complete and not self._snapshot.is_empty:
                fill_directory(directory, self._snapshot, self._epoch_limit, table_index)
            with self._view.lock:
                self._geometries[layout] = geometry(layout, directory.layout_id(layout))
                self._view.directory = directory

    def drop_tables(self, first: int) -> None:
        """Forget the tables from index ``first`` on, which a read-only tier shows no version of."""
        self._view.drop_tables(first)

    def place(self, keys: Int64s) -> Int64s:
        """See ``ColdTier.place``."""
        return keys if self.placement is None else self.placement.places(keys)

    def rows_at(self, places: Int64s) -> Int64s:
        """See ``ColdTier.rows_at``."""
        return places if self.placement is None else self.placement.rows_at(places)

    def _geometry_of(self, directory: Directory, keys: Int64s) -> tuple[RowLayout, Geometry]:
        layout = directory.layouts.get(int(keys[0]) >> KEY_ROW_BITS)
        if layout is None:
            raise ValueError(f"keys[0] is of table {int(keys[0]) >> KEY_ROW_BITS}, which was not added")
        return layout, self._geometries[layout]

    # -- reading

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """See ``ColdTier.read``; ValueError for keys of no row or of several layouts, and slots out of range."""
        with self.lease() as (snapshot, directory):
            self._read_from(snapshot, directory, keys, slots, weights, state, present)

    def read_newer(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """``read``, of what ``find_newer`` found."""
        newer = self.lookout.required()
        self._read_from(newer.snapshot, newer.directory, keys, slots, weights, state, present)

    def _read_from(
        self, snapshot: Snapshot, directory: Directory, keys: Int64s, slots: Int32s, weights: Words, state: Words,
        present: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        check_arrays(keys, slots, weights, state)
        if present.dtype != np.bool_ or present.shape != keys.shape or not present.flags.c_contiguous:
            raise ValueError("present must be a contiguous bool array as long as keys")
        if not len(keys):
            return
        started = time.perf_counter()
        layout, geo = self._geometry_of(directory, keys)
        check_widths(layout, weights, state)
        places = self.place(keys)
        result = self._rows.gather(snapshot, directory, geo, places, slots, weights, state, present)
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
            ChecksumError: a stored block that would keep some of its rows is damaged.
        """
        check_arrays(keys, slots, weights, state)
        with self._writer:
            self._check_writable()
            if not len(keys):
                return
            self._build_directory()
            started = time.perf_counter()
            snapshot, directory = self._snapshot, self._directory
            layout, geo = self._geometry_of(directory, keys)
            check_widths(layout, weights, state)
            rows = BlockRows(directory, geo, places := self.place(keys), keys)
            positions = directory.positions(block_keys := rows.block_keys)
            if not self._head.last < epoch <= MAX_VERSION:
                raise ValueError(f"epoch={epoch} must be above {self._head.last}, the last version")
            old_pages = directory.pages[positions].astype(np.int64)
            epochs = np.full(len(block_keys), epoch, np.uint64)
            if self._rows.is_cold:  # read LMDB's way to them first: a page that LMDB cannot read ends the process
                snapshot.seek(block_keys, epochs)
            with self._transaction() as txn:
                self._staging.put(txn, snapshot, layout, geo, epoch, rows, old_pages, (places, slots, weights, state))
                reach("write-back: blocks put")
            reach("write-back: transaction committed")
            with self._must_succeed():
                snapshot = self._new_snapshot()
                entries = snapshot.seek(block_keys, epochs)
                assert np.array_equal(entries.block_keys, block_keys), "a block just written is not in the tree"
                assert np.array_equal(entries.epochs, epochs), "a block just written is not in the tree"
                directory.publish(positions, entries.pages, epoch)
                self._view.move(snapshot)
                reach("write-back: blocks published")
            bytes_written = len(block_keys) * layout.pages_per_block * self.page_bytes
            with self._must_succeed():  # a device that failed to sync once may have dropped what it was to keep
                self._keeper.wrote(max(bytes_written, snapshot.freed_bytes), snapshot.num_entries * self.page_bytes)
            self._counting.add(rows_written=len(keys), blocks_written=len(block_keys), bytes_written=bytes_written)
            self._counting.add(write_seconds=time.perf_counter() - started)

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
                record = CommitRecord(
                    version=version,
                    payload_bytes=len(payload),
                    payload_checksum=bytes_checksum(payload),
                    tables=next_totals(self._snapshot, self._directory, self._record, version),
                )
                put_version(txn, record, payload)
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
        """Delete what the kept versions do not show, a little at a time."""
        oldest = self._head.oldest
        with self.lease() as (snapshot, directory):
            if oldest > self._unlisted:
                written = directory.written_blocks(0, oldest)
                self._delete(snapshot, (superseded(snapshot, block_keys, oldest) for block_keys in written))
            else:
                self._delete(snapshot, garbage(snapshot, MAX_VERSION, oldest))
        with self._writer:
            self._delete_items()
            directory.forget_written(oldest)
            self._view.move(self._new_snapshot())
        self._anchor()  # only behind an anchor can the pages be used again
        reach("prune: done")

    def _anchor(self) -> None:
        """Set an anchor while other threads go on writing."""
        with self._must_succeed():
            with self._writer:
                anchored = self._keeper.start()
            anchored.result()
            with self._writer:
                self._keeper.settle()

    def _delete(self, snapshot: Snapshot, chunks: Iterable[Entries]) -> bool:
        """Delete blocks in small transactions, between which other writes get their turn; whether there were any."""
        found = False
        for entries in chunks:
            for start in range(0, len(entries.pages), _DELETED_TOGETHER):
                with self._writer:
                    self._check_writable()
                    with self._transaction() as txn:
                        delete_blocks(txn, snapshot, selected(entries, slice(start, start + _DELETED_TOGETHER)))
                        reach("prune: blocks deleted")
                reach("prune: transaction committed")
                found = True
                time.sleep(_PAUSE_SECONDS)
        return found

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
                self._drop_loose()
                directory = self._directory.emptied()
                fill_directory(directory, self._snapshot, MAX_VERSION)
                self._view.show(directory)
                self._unlisted = head.last

    def _drop_loose(self) -> None:
        """Delete what no kept version shows, found by a walk of everything: what a process that ended left behind."""
        snapshot = self._snapshot
        found = self._delete(snapshot, garbage(snapshot, self._head.current, self._head.oldest))
        if self._delete_items() or found:
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
        """See ``ColdTier.verify``. Blocks of a version and their uncommitted successors are both checked and counted.

        Blocks of tables that were not added cannot be checked beyond their presence, and are not counted.
        """
        with ExitStack() as stack:
            with self._writer:
                record, limit = self._record, self._epoch_limit
                snapshot, directory = stack.enter_context(self.lease())
            check_census(snapshot, record)
            return verify_blocks(snapshot, directory, self._geometries, limit, progress, self.placement)

    def counters(self) -> ColdCounters:
        return self._counting.totals

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    @property
    def directory_bytes(self) -> int:
        return self._directory.size_bytes + (0 if self.placement is None else self.placement.size_bytes)
