"""The row file, open: locked, mapped and checked; what its readers are shown; the superblock that its writer sets."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ..errors import ClosedError, StoreNotFoundError, TierstoreError
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..system.files import RESTORE, directory_locked, sync_directory, translate_os_error
from ..system.killpoints import reach
from ..system.processes import disown_in_forks
from . import files, records
from .files import SUPERBLOCK_NAME
from .mapped import FileMap
from .meta import newest_meta
from .reader_locks import FileLocks
from .records import check_store, read_head
from .row_map import NewSegments, RowMap, RowPlaces
from .segments import stored_segments
from .snapshot import Snapshot, metas_in
from .superblock import SyncError, recover, require_sound, save_superblock

_PAUSE_SECONDS: Final = 0.1


class OpenFile:
    """The row file of a directory. Arguments and errors as for ``LmdbColdTier``. Readers are shown one snapshot and a
    map of its rows, each kept for as long as somebody uses it.

    Attributes:
        lock: held by a thread that writes, or changes what readers are shown.
        map: the file as memory; another when it outgrows that.
        snapshot, rows, record: the tree that readers are shown, the map, None until one is made, and the version's
            record.
        head, logged: which versions there are, and the record of the log, as it was found.
        has_loose: there may be segments of versions that never become current; the map leaves them out.
        is_behind: from the beginning of a transaction until the map and the snapshot follow it. If a call is cut short
            in between, the next use of the writer asks the file what became of it (``Writer.catch_up``).
        has_failed: what the device holds is not known.
    """

    def __init__(self, directory: Path, store_id: bytes, *, readonly: bool, version: int | None, create: bool) -> None:
        self.path: Final = files.rows_path(directory)
        self.store_id: Final = store_id
        self.readonly: Final = readonly
        self.lock: Final = threading.RLock()
        self.tables: dict[int, tuple[RowLayout, int]] = {}
        self.rows: RowMap | None = None
        self.has_loose = True
        self.is_behind = self.has_failed = self.is_closed = False
        self._shown = threading.RLock()  # snapshot and rows, where they change together, and the leases
        self._idle = threading.Condition(self._shown)
        self._leased: dict[object, tuple[Snapshot, RowMap | None]] = {}  # by lease
        self._old: list[Snapshot] = []  # no longer shown, but leased
        disown_in_forks(self)
        files.require_plain_files(directory)
        with ExitStack() as stack:
            if create and not readonly and not self.path.exists():
                with directory_locked(directory):
                    if not self.path.exists():
                        files.create_rows_file(self.path, records.first_records(store_id), store_id)
            try:
                locks = FileLocks(self.path, writable=not readonly)
            except (FileNotFoundError, NotADirectoryError):
                raise StoreNotFoundError(f"{self.path}: no such file. {RESTORE}") from None
            except OSError as error:
                raise translate_os_error(error, self.path) from error
            stack.callback(locks.close)
            if readonly:
                require_sound(self.path, store_id)
            else:
                locks.lock_for_writer()
                locks.require_in_place()
                files.require_own_files(directory)
                sync_directory(directory)  # a process that ended may have left names that the device does not hold
                recover(self.path, store_id, locks)
            self.page_bytes: Final = newest_meta(self.path).page_bytes
            self.map = FileMap.of_rows(self.path, locks.size_bytes(), locks)
            stack.callback(self.map.close)
            self.snapshot = self.new_snapshot()
            stack.callback(lambda: self.snapshot.close())  # the one of the end
            self.snapshot.check_free_pages()
            self.logged: Final = check_store(self.snapshot, store_id)
            self.head = read_head(self.snapshot)
            if version is not None and version not in self.head.kept:
                kept = ", ".join(map(str, self.head.kept)) or "none"
                raise StoreNotFoundError(f"{self.path}: version {version} is not kept; kept: {kept}.")
            self.record = records.read_record(self.snapshot, self.head.current if version is None else version)
            self._parts = stack.pop_all()

    def disown(self) -> None:
        """In a forked process, which has no map of the file: refuse further use."""
        self.is_closed = True

    def require_open(self) -> None:
        """ClosedError after ``close``; TierstoreError if it ``has_failed``."""
        if self.is_closed:
            raise ClosedError(f"{self.path}: the store was closed")
        if self.has_failed:
            raise TierstoreError(f"{self.path}: an earlier error left the store unusable; close it and open it again.")

    def new_snapshot(self) -> Snapshot:
        return Snapshot(self.path, self.map, self.page_bytes)

    @contextmanager
    def _lease(self, *, with_rows: bool) -> Iterator[tuple[Snapshot, RowMap | None]]:
        lease = object()
        try:
            with self._shown:
                if self.is_closed or self.has_failed:
                    self.require_open()
                self._leased[lease] = leased = self.snapshot, self.rows if with_rows else None
            yield leased
        finally:
            with self._idle:
                if lease in self._leased:
                    del self._leased[lease]  # no call, before which memory may be short
                if self._old:
                    self._close_unused()
                if not self._leased:
                    self._idle.notify_all()

    @contextmanager
    def lease(self) -> Iterator[tuple[Snapshot, RowMap]]:
        """The current snapshot and map, kept until the end of the block."""
        while True:
            with self._lease(with_rows=True) as (snapshot, rows):
                if rows is not None:
                    yield snapshot, rows
                    return
            self.make_map()  # may be dropped again before it is leased: by a rollback

    @contextmanager
    def lease_tree(self) -> Iterator[Snapshot]:
        """The current snapshot, kept until the end of the block."""
        with self._lease(with_rows=False) as (snapshot, _):
            yield snapshot

    def oldest_shown(self) -> int:
        """Number of the oldest transaction whose tree is leased or current."""
        with self._shown:
            return min([self.snapshot.txn_id, *(snapshot.txn_id for snapshot, _ in self._leased.values())])

    def _close_unused(self) -> None:
        """End the snapshots whose last lease ended, with those that a call was to end that was cut short."""
        leased = [snapshot for snapshot, _ in self._leased.values()]
        for snapshot in [each for each in self._old if each not in leased and each is not self.snapshot]:
            self._old.remove(snapshot)
            snapshot.close()

    def show(self, snapshot: Snapshot, rows: RowMap | NewSegments | None = None) -> None:
        """Make a snapshot current, and a map with it if one is given; its predecessor ends with its last lease. New
        segments enter the map that they go on from, or a copy of it while somebody reads through that."""
        with self._shown:
            self._old.append(self.snapshot)
            self.snapshot = snapshot
            if isinstance(rows, NewSegments):
                is_read = any(each is rows.base for _, each in self._leased.values())
                self.rows = rows.base.copied() if is_read else rows.base
                self.rows.advance(rows)
            elif rows is not None:
                self.rows = rows
            self._close_unused()

    def follow(self, snapshot: Snapshot | None = None) -> None:
        """Show the newest tree, which the map goes with."""
        self.show(snapshot or self.new_snapshot())
        self.is_behind = False

    @contextmanager
    def following(self) -> Iterator[Snapshot]:
        """A snapshot of the newest tree, to be shown at the end of the block."""
        snapshot = self.new_snapshot()
        try:
            yield snapshot
        except BaseException:
            snapshot.close()
            raise
        self.follow(snapshot)

    def make_map(self) -> RowMap:
        """The map of the rows that are shown, made if there is none."""
        with self.lock:
            if (rows := self.rows) is None:
                self.require_open()
                rows = RowMap(self.tables)
                current, kept = (self.record.version, ()) if self.readonly else (self.head.current, self.head.kept)
                last = current if self.readonly or self.has_loose else records.MAX_VERSION
                rows.enter(self.snapshot, stored_segments(self.snapshot), last, kept)
                self.rows = rows
            return rows

    def layout_of(self, rows: RowPlaces, keys: Int64s) -> RowLayout:
        """Of the rows of some keys, by the first; ValueError if there is no such table, or not all tables are known."""
        layout = rows.layouts.get(int(keys[0]) >> KEY_ROW_BITS)
        if layout is None:
            raise ValueError(f"keys[0] is of table {int(keys[0]) >> KEY_ROW_BITS}, which was not added")
        if rows.unknown:
            raise ValueError(f"{self.path}: has rows of tables that were not added; add all tables before")
        return layout

    def drain(self) -> None:
        with self._idle:
            self.disown()
            while self._leased:
                self._idle.wait(_PAUSE_SECONDS)  # a lease that was cut short as it ended does not notify

    def close(self) -> None:
        self.is_closed = True
        self._parts.close()
        self.rows = None  # references to the store, or to a table of it, do not keep the map


GROWTH_BYTES: Final = 16 * 2**20  # written between two superblocks of the background
_GROWTH_PART: Final = 32  # or this part of the segments if that is more
_MOST_GROWTHS: Final = 4  # at most so many times as much: more pages wait to be free, and LMDB writes their list


class SuperblockWriter:
    """Sets superblocks for the one writer of a row file, which calls it between its transactions. The file grows by
    what is written between two. ``sync``: make all transactions so far durable; may be called during a later one."""

    def __init__(self, file: OpenFile, sync: Callable[[], None]) -> None:
        self._file = file
        self._sync = sync
        self._executor = ThreadPoolExecutor(1, "tierstore-superblock")
        self._anchored: tuple[Snapshot, tuple[bytes, ...]] | None = None
        self._pending: tuple[Snapshot, tuple[bytes, ...], Future[None]] | None = None
        self._written_bytes = 0  # since the last pin
        self._between_bytes = 0  # written between the two pins, while there are two

    def set(self) -> None:
        """Vouch for the tree as it is, and return when that stands. TierstoreError: the row file was moved, or the
        device refused; the superblock before stands."""
        self.start()
        self.settle()

    def start(self) -> Future[None]:
        """Begin to vouch for the tree as it is, in the background; ``settle`` ends it. TierstoreError: the superblock
        before this one failed."""
        self.settle()
        pinned = self._file.new_snapshot()
        try:
            metas = metas_in(self._file.map, self._file.page_bytes)
            try:
                future = self._executor.submit(self._make, metas)
            except RuntimeError:  # the interpreter ends, and nothing begins in a thread any more
                self._make(metas)
                (future := Future[None]()).set_result(None)
        except BaseException:
            pinned.close()
            raise
        self._between_bytes, self._written_bytes = self._written_bytes, 0
        self._pending = pinned, metas, future
        return future

    def _make(self, metas: tuple[bytes, ...]) -> None:
        file = self._file
        self._sync()
        reach("anchor: tree synced")
        file.map.locks.require_in_place()
        try:
            save_superblock(file.path, file.store_id, file.page_bytes, metas)
        except OSError as error:
            if isinstance(error, SyncError):
                file.has_failed = True
            translated = translate_os_error(error, file.path.with_name(SUPERBLOCK_NAME))
            if type(translated) is TierstoreError:
                translated = TierstoreError(
                    f"{translated} The last commit is intact: close the store and open it again."
                )
            raise translated from error

    def wrote(self, size_bytes: int, live_bytes: int) -> None:
        """Set a superblock in the background if enough was written; wait for the last one if that falls too far behind.
        ``size_bytes``: what the last transaction wrote, or took out of use if that is more. ``live_bytes``: of segments
        in the tree. TierstoreError: the last superblock failed."""
        self._written_bytes += size_bytes
        limit = min(max(GROWTH_BYTES, live_bytes // _GROWTH_PART), _MOST_GROWTHS * GROWTH_BYTES)
        behind = self._pending is not None and not self._pending[2].done()
        if self._written_bytes >= limit and not (behind and self._between_bytes + self._written_bytes < 3 * limit):
            self.start()

    def settle(self) -> None:
        """Wait for the superblock in flight, if there is one; from then on its tree is the one that is pinned.
        TierstoreError: it failed."""
        if self._pending is None:
            return
        pinned, metas, future = self._pending
        error, self._pending = future.exception(), None
        if error is not None:
            pinned.close()
            raise error
        before, self._anchored = self._anchored, (pinned, metas)
        if before is not None:
            before[0].close()

    def close(self) -> None:
        """Set a last superblock if the tree has changed since, so that readers find it sound after the machine has
        stopped; then unpin. One that fails now is of no matter: the one before stands."""
        with contextlib.suppress(TierstoreError, OSError):
            self.settle()
            if not self._file.has_failed and (
                self._anchored is None or metas_in(self._file.map, self._file.page_bytes) != self._anchored[1]
            ):
                self.set()
        self.stop()
        if self._anchored is not None:
            self._anchored[0].close()
            self._anchored = None

    def stop(self) -> None:
        """Wait for the superblock in flight and set no other one; all stays pinned."""
        self._executor.shutdown()
