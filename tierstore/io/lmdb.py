"""The cold tier on LMDB: blocks of rows as values, transactions by py-lmdb, reads by address.

Keys are (block key, epoch). An epoch is the version being built, so that until ``commit`` the blocks of the current
version stay beside their successors; ``commit`` makes the epoch current and deletes what it supersedes, in one
transaction. An open for writing drops blocks of an epoch that was never committed; an open for reading ignores them.
docs/format.md describes the file, directory.py the rules by which readers and the writer share it.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
from numpy.typing import NDArray

from ..errors import (
    ChecksumError,
    ClosedError,
    DamagedError,
    ReadOnlyError,
    StoreNotFoundError,
    TierstoreError,
    TruncatedError,
)
from ..rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout
from .anchor import AnchorKeeper, recover, require_sound
from .base import ColdCounters, VerifyReport
from .btree import META_KEY
from .census import check_census, check_store, check_tree_totals
from .checksum import bytes_checksum
from .directory import Directory, fill_pages
from .files import (
    RESTORE,
    check_rows_file,
    create_rows_file,
    lock_for_writing,
    map_bytes,
    open_environment,
    rows_path,
    translate,
)
from .gather import GatherStatus, Geometry, gather, gather_error, geometry, seen_words
from .mapped import FileMap
from .records import (
    COMMIT_ITEM,
    PAYLOAD_CHUNK_BYTES,
    STORE_ITEM,
    CommitRecord,
    item_key,
    pack_commit,
    pack_store,
    payload_item,
)
from .snapshot import Snapshot
from .verify import verify_blocks
from .writes import BlockRows, Staging, check_arrays, check_widths, delete_blocks, selected, supersede

__all__ = ["LmdbColdTier"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_ROW_MASK: Final = MAX_ROWS - 1


class LmdbColdTier:
    """``ColdTier`` in the file ``rows.lmdb`` of a store's directory. See the module's docstring.

    One process may have the directory open for writing, and any number for reading (each once). A write stages
    ``staging_bytes`` of blocks at a time; LMDB itself holds every block of the transaction in memory until it
    ends, so one ``write`` takes about ``pages_per_block * page_bytes`` for each distinct block: bound its rows.

    Args:
        path: the store's directory; must exist.
        store_id: 16 bytes that all files of the store carry.
        readonly: never write (but for LMDB's lock file); see the newest commit, and later ones after ``refresh``.
        staging_bytes: memory in which ``write`` builds blocks, at least one block.
        verify_reads: for benchmarks only: False skips the checksums of rows read.
        create: whether an open for writing may create the file. A store that has committed rows passes False.

    Raises:
        StoreNotFoundError: there is no file, and it may not be created.
        StoreLockedError: another writer has it, or this process has it open already.
        FormatError: not such a file, another version, or another store's.
        TruncatedError, DamagedError: see the message.
    """

    def __init__(
        self,
        path: Path,
        *,
        store_id: bytes,
        readonly: bool,
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
        self._verify_reads = verify_reads
        self._staging = Staging(staging_bytes)
        self._lock = threading.Lock()  # guards _snapshot, _directory, leases and counters
        self._idle = threading.Condition(self._lock)
        self._writer = threading.RLock()  # one writer, and whoever replaces the snapshot or the directory
        self._state = "open"
        self._leases = 0
        self._counters = ColdCounters(0, 0, 0, 0.0, 0, 0, 0, 0.0)
        self._directory = Directory()
        self._directory_built = False
        self._geometries: dict[RowLayout, Geometry] = {}
        self._cold = False
        self._lock_file = -1
        self._environment: lmdb.Environment | None = None
        self._map: FileMap | None = None
        self._current: Snapshot | None = None
        self._anchors: AnchorKeeper | None = None
        try:
            self._open(path, store_id, create)
        except BaseException:
            self._release()
            raise

    # -- opening and closing

    def _open(self, directory: Path, store_id: bytes, create: bool) -> None:
        if not self.readonly:
            self._lock_file = lock_for_writing(directory)
        if not self.path.exists():
            if self.readonly or not create:
                raise StoreNotFoundError(f"{self.path}: no such file. {RESTORE}")
            create_rows_file(self.path, {item_key(STORE_ITEM): pack_store(store_id)}, store_id)
        if self.readonly:
            require_sound(self.path, store_id)
        else:
            recover(self.path, store_id)
        self.page_bytes = check_rows_file(self.path).page_bytes
        self._environment = open_environment(self.path, map_bytes(directory), self.readonly)
        self._environment.reader_check()
        self._map = FileMap(self.path, self._environment.info()["map_size"])
        self._can_sample = self._map.tells_residency()
        self._current = Snapshot(self._environment, self.path, self._map)
        if not self.readonly:
            self._current.check_free_pages()
        check_store(self._current, store_id)
        self._record = check_census(self._current)
        self._directory_built = not self._record.tables
        if not self.readonly:
            self._anchors = AnchorKeeper(
                self.path, store_id, self.page_bytes, sync=self._sync, pin=self._new_snapshot
            )
            self._anchors.set()
            self._drop_uncommitted()

    def _sync(self) -> None:
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise translate(error, self.path) from error

    def _drop_uncommitted(self) -> None:
        """Delete what was written after the last commit."""
        snapshot, version = self._snapshot, self._record.version
        dropped = False
        with self._transaction() as txn:
            for entries, count in snapshot.walk():
                keys, epochs = entries.block_keys[:count], entries.epochs[:count]
                loose = (keys != META_KEY) & (epochs > np.uint64(version))
                if loose.any():
                    delete_blocks(txn, snapshot, selected(entries, np.flatnonzero(loose)))
                    dropped = True
        if dropped:
            self._replace_snapshot(self._new_snapshot())

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
    def _snapshot(self) -> Snapshot:
        assert self._current is not None
        return self._current

    def close(self) -> None:
        """Wait for reads in progress, then release files and maps. Again is fine."""
        with self._writer:
            with self._idle:
                if self._state == "closed":
                    return
                self._state = "closed"
                self._idle.wait_for(lambda: self._leases == 0)
            self._release()

    def disown(self) -> None:
        """In a forked process: forget the store without ending the transactions that the parent goes on using.

        LMDB's table of readers is shared memory: closing one here would free the parent's pages for reuse.
        """
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        inherited = self._environment, self._current, self._anchors
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))  # never finalised, not even when the interpreter ends
        self._environment = self._current = self._anchors = None
        self._state = "closed"

    def _release(self) -> None:
        if self._anchors is not None:
            self._anchors.close()
            self._anchors = None
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        self._staging.release()

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
    def _lease(self) -> Iterator[tuple[Snapshot, Directory]]:
        """The current snapshot and directory, kept until the end of the block."""
        if not self._directory_built:
            self._build_directory()
        with self._lock:
            self._check_open()
            snapshot, directory = self._snapshot, self._directory
            snapshot.leases += 1
            self._leases += 1
        try:
            yield snapshot, directory
        finally:
            with self._idle:
                snapshot.leases -= 1
                self._leases -= 1
                if snapshot.leases == 0 and snapshot is not self._current:
                    snapshot.close()
                if self._leases == 0:
                    self._idle.notify_all()

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self._env, self.path, self._file_map)

    def _replace_snapshot(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._exchange(snapshot)

    def _exchange(self, snapshot: Snapshot) -> None:
        """Make the snapshot current; its predecessor ends with its last lease. The caller holds ``_lock``."""
        old, self._current = self._snapshot, snapshot
        if old.leases == 0:
            old.close()

    @property
    def _epoch_limit(self) -> int:
        """Blocks of later epochs are none of ours."""
        return self._record.version + (0 if self.readonly else 1)

    def _build_directory(self) -> None:
        with self._writer:
            if not self._directory_built:
                self._check_open()
                directory = self._directory.emptied()
                self._fill(directory, self._snapshot, self._epoch_limit, None)
                with self._lock:
                    self._directory = directory
                self._directory_built = True

    def _fill(self, directory: Directory, snapshot: Snapshot, epoch_limit: int, table: int | None) -> None:
        """Enter the blocks of one table, or of all."""
        for entries, count in snapshot.walk(0 if table is None else table * MAX_ROWS):
            bad = fill_pages(entries, count, epoch_limit, directory.tables, directory.pages)
            if bad >= 0:
                block_key = int(entries.block_keys[bad])
                raise DamagedError(
                    f"{self.path}: block {block_key % MAX_ROWS} of table {block_key // MAX_ROWS} cannot be one of its "
                    f"blocks (wrong number or size: is the manifest another store's?). {RESTORE}"
                )
            if table is not None and int(entries.block_keys[count - 1]) // MAX_ROWS > table:
                break

    def refresh(self) -> int:
        """Move a read-only tier to the newest commit; returns its version. Reads in progress finish where they are.

        Costs next to nothing if nothing was written, else three walks of the index. A tier that never moves keeps the
        pages of its snapshot from being reused: the writer's file grows.
        """
        with self._writer:
            self._check_open()
            if not self.readonly or self._env.info()["last_txnid"] == self._snapshot.txn_id:
                return self._record.version
            snapshot = self._new_snapshot()
            try:
                for _ in snapshot.walk():
                    pass
                record = check_census(snapshot)
                if record.version == self._record.version:
                    snapshot.close()
                    return record.version
                directory = self._directory.emptied()
                self._fill(directory, snapshot, record.version, None)
            except BaseException:
                snapshot.close()
                raise
            with self._lock:
                self._directory, self._record = directory, record
                self._directory_built = True
                self._exchange(snapshot)
            return record.version

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
            directory = self._directory.with_table(table_index, layout, num_rows)
            if self._directory_built and not self._snapshot.is_empty:
                self._fill(directory, self._snapshot, self._epoch_limit, table_index)
            with self._lock:
                self._geometries[layout] = geometry(layout, directory.layout_id(layout))
                self._directory = directory

    def _geometry_of(self, directory: Directory, keys: Int64s) -> tuple[RowLayout, Geometry]:
        layout = directory.layouts.get(int(keys[0]) >> KEY_ROW_BITS)
        if layout is None:
            raise ValueError(f"keys[0] is of table {int(keys[0]) >> KEY_ROW_BITS}, which was not added")
        return layout, self._geometries[layout]

    # -- reading

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """See ``ColdTier.read``; ValueError for keys of no row or of several layouts, and slots out of range."""
        check_arrays(keys, slots, weights, state)
        if present.dtype != np.bool_ or present.shape != keys.shape or not present.flags.c_contiguous:
            raise ValueError("present must be a contiguous bool array as long as keys")
        if not len(keys):
            return
        started = time.perf_counter()
        with self._lease() as (snapshot, directory):
            layout, geo = self._geometry_of(directory, keys)
            check_widths(layout, weights, state)
            result = self._gather(snapshot, directory, geo, keys, slots, weights, state, present)
            if result[0] != GatherStatus.DONE:
                raise gather_error(self.path, result, keys)
        absent = len(keys) - int(np.count_nonzero(present))
        elapsed = time.perf_counter() - started
        with self._lock:
            c = self._counters
            self._counters = c._replace(
                rows_read=c.rows_read + len(keys),
                rows_absent=c.rows_absent + absent,
                pages_read=c.pages_read + int(result[2]),
                read_seconds=c.read_seconds + elapsed,
            )

    def _gather(
        self,
        snapshot: Snapshot,
        directory: Directory,
        geo: Geometry,
        keys: Int64s,
        slots: Int32s,
        weights: Words,
        state: Words,
        present: NDArray[np.bool_],
    ) -> Int64s:
        file_map = self._file_map
        offsets = np.empty(len(keys), np.int64)
        limit = snapshot.limit_pages()
        while True:
            result = np.zeros(4, np.int64)
            gather(
                geo,
                file_map.words,
                file_map.address,
                limit,
                directory.tables,
                directory.pages,
                keys,
                slots,
                weights.reshape(-1),
                state.reshape(-1),
                present,
                offsets,
                np.zeros(seen_words(geo, limit, len(keys)), np.uint32),
                np.empty(8, np.uint64),
                np.empty(2, np.int64),
                np.empty(1, np.uint8),
                self._verify_reads,
                self._cold,
                self._can_sample,
                result,
            )
            if result[0] != GatherStatus.OUT_OF_FILE:
                self._cold = bool(result[3])
                return result
            # An entry published while we read may lie in what the file grew by meanwhile.
            known, limit = limit, snapshot.limit_pages()
            if limit <= known:
                return result

    # -- writing

    @contextmanager
    def _transaction(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """A write transaction, committed at the end of the block, with LMDB's errors translated."""
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise translate(error, self.path) from error

    @contextmanager
    def _must_succeed(self) -> Iterator[None]:
        """After an LMDB commit our view must follow; if it cannot, the tier stops."""
        try:
            yield
        except BaseException:
            self._state = "failed"
            raise

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words) -> None:
        """See ``ColdTier.write``; ValueError as for ``read``, and for a key given twice.

        Raises:
            DiskFullError: nothing of this call was stored; reads go on.
            ChecksumError: a stored block that would keep some of its rows is damaged.
        """
        check_arrays(keys, slots, weights, state)
        with self._writer:
            self._check_writable()
            if not len(keys):
                return
            if not self._directory_built:
                self._build_directory()
            started = time.perf_counter()
            snapshot, directory = self._snapshot, self._directory
            layout, geo = self._geometry_of(directory, keys)
            check_widths(layout, weights, state)
            rows = BlockRows(directory, geo, keys)
            block_keys = rows.block_keys
            positions = directory.positions(block_keys)
            epoch = self._record.version + 1
            old_pages = directory.pages[positions].astype(np.int64)
            with self._transaction() as txn:
                self._staging.put(txn, snapshot, layout, geo, epoch, rows, old_pages, (keys, slots, weights, state))
            with self._must_succeed():
                snapshot = self._new_snapshot()
                epochs = np.full(len(block_keys), epoch, np.uint64)
                entries = snapshot.seek(block_keys, epochs)
                assert np.array_equal(entries.block_keys, block_keys), "a block just written is not in the tree"
                assert np.array_equal(entries.epochs, epochs), "a block just written is not in the tree"
                directory.publish(positions, entries.pages)
                self._replace_snapshot(snapshot)
            bytes_written = len(block_keys) * layout.pages_per_block * self.page_bytes
            self._keeper.wrote(bytes_written, snapshot.num_entries * self.page_bytes)
            elapsed = time.perf_counter() - started
            with self._lock:
                c = self._counters
                self._counters = c._replace(
                    rows_written=c.rows_written + len(keys),
                    blocks_written=c.blocks_written + len(block_keys),
                    bytes_written=c.bytes_written + bytes_written,
                    write_seconds=c.write_seconds + elapsed,
                )

    # -- committing

    def commit(self, payload: bytes) -> int:
        """See ``ColdTier.commit``.

        Raises:
            DiskFullError: nothing was committed; what was written is still there, and commit may be tried again.
        """
        with self._writer:
            self._check_writable()
            version = self._record.version + 1
            with self._transaction() as txn:
                totals = supersede(txn, self._snapshot, self._directory, self._record)
                record = CommitRecord(
                    version=version,
                    payload_bytes=len(payload),
                    payload_checksum=bytes_checksum(payload),
                    tables=totals,
                )
                view = memoryview(payload)
                for chunk in range(record.num_payload_chunks):
                    start = chunk * PAYLOAD_CHUNK_BYTES
                    txn.put(item_key(payload_item(chunk)), view[start : start + PAYLOAD_CHUNK_BYTES])
                for chunk in range(record.num_payload_chunks, self._record.num_payload_chunks):
                    txn.delete(item_key(payload_item(chunk)))
                txn.put(item_key(COMMIT_ITEM), pack_commit(record))
            with self._must_succeed():
                self._keeper.set()
                snapshot = self._new_snapshot()
                self._record = record
                self._directory.clear_written()
                self._replace_snapshot(snapshot)
            return version

    @property
    def version(self) -> int:
        return self._record.version

    @property
    def payload(self) -> bytes:
        """See ``ColdTier.payload``; read anew at each use. DamagedError if it does not match its checksum."""
        with self._writer:
            self._check_open()
            record = self._record
            chunks = [self._snapshot.get(item_key(payload_item(i))) for i in range(record.num_payload_chunks)]
            payload = b"".join(chunk for chunk in chunks if chunk is not None)
        if len(payload) != record.payload_bytes or (payload and bytes_checksum(payload) != record.payload_checksum):
            raise ChecksumError(f"{self.path}: the payload of version {record.version} is damaged. {RESTORE}")
        return payload

    # -- checking and counting

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """See ``ColdTier.verify``. Blocks of a version and their uncommitted successors are both checked and counted.

        Blocks of tables that were not added cannot be checked beyond their presence, and are not counted.
        """
        with ExitStack() as stack:
            with self._writer:
                self._check_open()
                record = self._record
                snapshot, directory = stack.enter_context(self._lease())
            check_tree_totals(snapshot, record)
            limit = record.version + (0 if self.readonly else 1)
            return verify_blocks(snapshot, directory, self._geometries, limit, progress)

    def counters(self) -> ColdCounters:
        return self._counters

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    @property
    def directory_bytes(self) -> int:
        return self._directory.size_bytes
