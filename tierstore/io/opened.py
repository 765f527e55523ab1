"""The row file, open: locked, mapped and checked, and what its readers are shown."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ..errors import ClosedError, DamagedError, StoreLockedError, StoreNotFoundError, TierstoreError
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..system.files import directory_locked, sync_directory, write_all
from ..system.killpoints import reach
from ..system.oserrors import RESTORE, translate_os_error
from ..system.processes import disown_in_forks
from .anchor import Anchor, is_sound, load_anchor, read_metas, renew_anchor, require_sound
from .btree import Meta, parse_meta
from .files import are_successive, check_rows_file, create_rows_file, require_own_files, require_plain_files, rows_path
from .indexes import stored_segments
from .mapped import FileMap
from .pins import Pins
from .records import (
    MAX_VERSION,
    CommitRecord,
    Head,
    check_store,
    chosen_version,
    first_records,
    read_head,
    read_payload,
    read_record,
)
from .row_map import RowMap
from .snapshot import Snapshot, Tree
from .tail import RowPlaces, Tail

_PAUSE_SECONDS: Final = 0.1


class View:
    """What readers are shown: one snapshot and a map of its rows, each kept for as long as somebody uses it.

    Attributes:
        lock: guards both, where they change together, and the leases.
        rows: the map; None until one is made.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._leased: dict[object, tuple[Snapshot, RowMap | None]] = {}  # by lease
        self._old: list[Snapshot] = []  # no longer shown, but leased
        self.snapshot = snapshot
        self.rows: RowMap | None = None

    @contextmanager
    def lease(self, check: Callable[[], None], *, with_rows: bool = True) -> Iterator[tuple[Snapshot, RowMap | None]]:
        """Snapshot and map, or no map, kept until the end of the block; ``check`` may refuse, under the lock."""
        lease = object()
        try:
            with self.lock:
                check()
                self._leased[lease] = leased = self.snapshot, self.rows if with_rows else None
            yield leased
        finally:
            with self._idle:
                if lease in self._leased:
                    del self._leased[lease]  # no call, before which memory may be short
                self._close_unused()
                if not self._leased:
                    self._idle.notify_all()

    def _close_unused(self) -> None:
        """End the snapshots whose last lease ended, with those that a call was to end that was cut short."""
        leased = [snapshot for snapshot, _ in self._leased.values()]
        for snapshot in [each for each in self._old if each not in leased]:
            self._old.remove(snapshot)
            snapshot.close()

    def move(self, snapshot: Snapshot, rows: RowMap | Tail | None = None) -> None:
        """Make a snapshot current, and a map with it if one is given; its predecessor ends with its last lease.

        The tail of the log enters the map that it goes on from, or a copy of it while somebody reads through that.
        """
        with self.lock:
            self._old.append(self.snapshot)
            self.snapshot = snapshot
            if isinstance(rows, Tail):
                is_read = any(each is rows.base for _, each in self._leased.values())
                self.rows = rows.base.copied() if is_read else rows.base
                self.rows.advance(rows)
            elif rows is not None:
                self.rows = rows
            self._close_unused()

    def oldest(self) -> int:
        """Number of the oldest transaction whose tree is leased or current."""
        with self.lock:
            return min([self.snapshot.txn_id, *(snapshot.txn_id for snapshot, _ in self._leased.values())])

    def close(self) -> None:
        """End the snapshot, which nobody uses any more."""
        self.snapshot.close()

    def drain(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` under the lock, then wait for the leases to end."""
        with self._idle:
            stop()
            while self._leased:
                self._idle.wait(_PAUSE_SECONDS)  # a lease that was cut short as it ended does not notify


def _create(path: Path, store_id: bytes) -> None:
    """Create the row file unless it is there."""
    if not path.exists():
        with directory_locked(path.parent):
            if not path.exists():
                create_rows_file(path, first_records(store_id), store_id)


def _open(path: Path, *, writable: bool) -> Pins:
    try:
        return Pins(path, writable=writable)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFoundError(f"{path}: no such file. {RESTORE}") from None
    except OSError as error:
        raise translate_os_error(error, path) from error


class OpenFile:
    """The row file of a directory. Arguments and errors as for ``LmdbColdTier``.

    Attributes:
        lock: held by a thread that writes, or changes what readers are shown.
        map: the file as memory; another when it outgrows that.
        view: what readers are shown.
        head: which versions there are.
        record: of the version that is shown.
        logged: the record of the log, as it was found.
        has_loose: for a writer: there may be segments of versions that never become current; the map leaves them out.
        is_behind: for a writer: from the beginning of a transaction until the map and the view follow it. If a call is
            cut short in between, the next use of the writer asks the file what became of it (``Writer.catch_up``).
        has_failed: what the device holds is not known.
        tables: layout and number of rows, by index.
    """

    def __init__(self, directory: Path, store_id: bytes, *, readonly: bool, version: int | None, create: bool) -> None:
        self.path: Final = rows_path(directory)
        self.store_id: Final = store_id
        self.readonly: Final = readonly
        self.lock: Final = threading.RLock()
        self.tables: dict[int, tuple[RowLayout, int]] = {}
        self.has_loose = True
        self.is_behind = self.has_failed = False
        self._state = "open"
        disown_in_forks(self)
        require_plain_files(directory)
        with ExitStack() as stack:
            if create and not readonly:
                _create(self.path, store_id)
            stack.callback((pins := _open(self.path, writable=not readonly)).close)
            if readonly:
                require_sound(self.path, store_id)
            else:
                pins.lock_for_writer()
                pins.require_in_place()
                require_own_files(directory)
                sync_directory(directory)  # a process that ended may have left names that the device does not hold
                recover(self.path, store_id, pins)
            self.page_bytes: Final = check_rows_file(self.path).page_bytes
            self.map = FileMap.of_rows(self.path, pins.size_bytes(), pins)
            stack.callback(self.map.close)
            self.view: Final = View(snapshot := self.new_snapshot())
            stack.callback(self.view.close)
            snapshot.check_free_pages()
            self.logged: Final = check_store(snapshot, store_id)
            self.head: Head = read_head(snapshot)
            self.record: CommitRecord = read_record(snapshot, chosen_version(self.path, self.head, version))
            self._parts = stack.pop_all()

    @property
    def snapshot(self) -> Snapshot:
        """The tree that readers are shown."""
        return self.view.snapshot

    @property
    def is_closed(self) -> bool:
        return self._state == "closed"

    def disown(self) -> None:
        """In a forked process, which has no map of the file: refuse further use."""
        self._state = "closed"

    def require_open(self) -> None:
        """ClosedError after ``close``; TierstoreError if it ``has_failed``."""
        if self._state == "closed":
            raise ClosedError(f"{self.path}: the store was closed")
        if self.has_failed:
            raise TierstoreError(f"{self.path}: an earlier error left the store unusable; close it and open it again.")

    # -- what readers are shown

    def follow(self, snapshot: Snapshot) -> None:
        """Show the newest tree, which the map goes with."""
        self.view.move(snapshot)
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

    @contextmanager
    def lease(self) -> Iterator[tuple[Snapshot, RowMap]]:
        """The current snapshot and map, kept until the end of the block."""
        self.require_open()
        while True:
            with self.view.lease(self.require_open) as (snapshot, rows):
                if rows is not None:
                    yield snapshot, rows
                    return
            self.make_map()  # may be dropped again before it is leased: by a rollback

    @contextmanager
    def lease_tree(self) -> Iterator[Snapshot]:
        """The current snapshot, kept until the end of the block."""
        with self.view.lease(self.require_open, with_rows=False) as (snapshot, _):
            yield snapshot

    def new_snapshot(self) -> Snapshot:
        """Of the newest tree; the caller's to close."""
        return Snapshot(self.path, self.map, self.page_bytes)

    def make_map(self) -> RowMap:
        """The map of the rows that are shown, made if there is none."""
        with self.lock:
            if (rows := self.view.rows) is None:
                self.require_open()
                rows = RowMap(self.tables)
                current, kept = (self.record.version, ()) if self.readonly else (self.head.current, self.head.kept)
                last = current if self.readonly or self.has_loose else MAX_VERSION
                rows.enter(self.snapshot, stored_segments(self.snapshot), last, kept)
                self.view.rows = rows
            return rows

    def layout_of(self, rows: RowPlaces, keys: Int64s) -> RowLayout:
        """Of the rows of some keys, by the first; ValueError if there is no such table, or not all tables are known."""
        layout = rows.layouts.get(int(keys[0]) >> KEY_ROW_BITS)
        if layout is None:
            raise ValueError(f"keys[0] is of table {int(keys[0]) >> KEY_ROW_BITS}, which was not added")
        if rows.unknown:
            raise ValueError(f"{self.path}: has rows of tables that were not added; add all tables before")
        return layout

    # -- closing

    def drain(self) -> None:
        """Refuse further use, and wait for the leases to end."""
        self.view.drain(self.disown)

    def close(self) -> None:
        """Release map and locks."""
        self._state = "closed"
        self._parts.close()
        self.view.rows = None  # references to the store, or to a table of it, do not keep the map


def recover(path: Path, store_id: bytes, pins: Pins) -> None:
    """Have the device hold the anchor, and put the anchored meta pages back: before an open for writing.

    Done only if the anchored tree is whole, and nobody reads another one: while a reader of the same boot has the file
    open, the tree that it sees stays. Whatever step it is cut short at, the next recovery does the same again.

    Args:
        pins: of the row file, open for writing; no tree is read through it.

    Raises:
        ChecksumError, FormatError: the anchor is damaged, or the row file older than it.
        DamagedError: the anchored tree is not whole; nothing was changed.
        StoreLockedError: others read a tree that a failed write has left.
        OSError: the device refused.
    """
    anchor = load_anchor(path, store_id)
    if anchor is None:
        return
    if read_metas(path, anchor.page_bytes) == anchor.metas:
        renew_anchor(path, anchor)
        return
    _require_whole(path, store_id, anchor, pins)
    renew_anchor(path, anchor)
    with pins.readers_kept_out() as is_alone:
        if is_alone:
            for number, meta in enumerate(anchor.metas):
                write_all(pins.descriptor, meta, number * anchor.page_bytes)
            reach("recovery: anchored meta pages put back")
            os.fdatasync(pins.descriptor)
        elif not is_sound(path, anchor):
            raise StoreLockedError(
                f"{path}: a write failed while the store was open for writing, and others read it; end them, then "
                "open it again."
            )


def _require_whole(path: Path, store_id: bytes, anchor: Anchor, pins: Pins) -> None:
    """DamagedError unless the anchored tree holds all that an open looks at: both trees, records and payload."""
    found = [meta for meta in map(parse_meta, anchor.metas) if isinstance(meta, Meta)]
    file_map = FileMap(path, path.stat().st_size, pins)
    try:
        sizes = [meta.page_bytes for meta in found]
        if sizes != [anchor.page_bytes] * 2 or not are_successive(*(meta.txn_id for meta in found)):
            raise DamagedError("its meta pages are none")
        tree = Tree(path, file_map, max(found, key=lambda meta: meta.txn_id))
        tree.check_free_pages()
        check_store(tree, store_id)
        read_payload(tree, read_record(tree, read_head(tree).current))
    except DamagedError as error:
        said = str(error).removesuffix(RESTORE).removeprefix(f"{path}: ").strip()
        look = ' mode="r" shows what can still be read.' if is_sound(path, anchor) else ""
        raise DamagedError(
            f"{path}: the last writer was cut short, and the state that it would go back to is damaged ({said}). "
            f"Nothing was changed.{look} {RESTORE}"
        ) from error
    finally:
        file_map.close()
