"""The cold tier on LMDB: a log of segments as values, transactions by py-lmdb, reads by address.

Rows are appended, many at a time. An epoch is the number of the version that rows were written for. A writer drops
segments of epochs that no commit made current before it writes; lookups ignore them.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ReadOnlyError, StoreReplacedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..layout import RowLayout
from ..system.files import sync_directory, translate_os_error
from .base import ColdCounters, Counting, VerifyReport, check_arenas, check_tables, require_distinct
from .log import DEFAULT_SLACK
from .meta import META_KEY
from .places import new_places
from .reads import Changes, KeyedRows, RowReader
from .records import MAX_VERSION, CommitRecord, Head, read_head, read_payload, read_record, require_logged
from .row_file import OpenFile
from .row_map import NewSegments, RowMap, RowPlaces
from .segments import stored_segments
from .snapshot import Snapshot
from .verify import verify_segments
from .writer import Writer


@dataclass(eq=False)
class NewerCommit:
    """See ``base.NewerVersion``; made by ``LmdbColdTier.find_newer``."""

    tier: "LmdbColdTier"
    snapshot: Snapshot
    head: Head
    record: CommitRecord
    rows: RowPlaces
    changed: Int64s

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def payload(self) -> bytes:
        return read_payload(self.snapshot, self.record)

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        self.tier._read_from(self.snapshot, self.rows, keys, slots, weights, state, present)

    def show(self) -> None:
        file = self.tier._file
        with file.lock:
            assert self.tier._found is self, "it was shown or given up"
            self.tier._found = None
            file.head, file.record = self.head, self.record
            file.show(self.snapshot, self.rows)
            self.rows = RowMap({})  # references to this do not keep the map

    def close(self) -> None:
        if self.tier._found is self:
            self.tier._found = None
            self.snapshot.close()
            self.rows = RowMap({})


class LmdbColdTier:
    """``ColdTier`` in the file ``rows.lmdb`` of a store's directory, whose docstrings hold here too.

    One process may have the directory open for writing, and any number for reading. LMDB holds every segment of a
    transaction in memory until it ends: bound the rows of a ``write``. Nothing is read or written until all tables that
    have rows are added. ``reader`` reads and verifies rows.

    Args:
        path: the store's directory; must exist.
        store_id: 16 bytes that all files of the store carry.
        readonly: never write anything; see the newest commit, and later ones that ``find_newer`` finds.
        version: with ``readonly``, the kept version to see; default: the newest.
        follow: with ``readonly``, whether ``find_newer`` looks.
        slack: pages that segments may take for one that their rows need, before segments are cleaned; above 1.
        create: whether an open for writing may create the file.

    Raises:
        StoreNotFoundError: there is no file, and it may not be created. StoreLockedError: a writer has it open.
        FormatError: not such a file, another version, or another store's. TruncatedError, DamagedError: see the
            message.
    """

    def __init__(
        self, path: Path, *, store_id: bytes, readonly: bool, version: int | None = None,
        slack: float = DEFAULT_SLACK, create: bool = True, follow: bool = True,
    ) -> None:  # fmt: skip
        self._counting = Counting()
        with ExitStack() as stack:
            self._file = OpenFile(path, store_id, readonly=readonly, version=version, create=create)
            stack.callback(self._file.close)
            self.path, self.page_bytes = self._file.path, self._file.page_bytes
            self.lease, self.lease_tree = self._file.lease, self._file.lease_tree
            self.reader = RowReader(verify=True)
            self._follows = readonly and follow
            self._found: NewerCommit | None = None  # what find_newer found last, until it is shown or given up
            self._same_until = -1  # transaction of the newest tree in which find_newer found nothing
            self._writer = None if readonly else Writer(self._file, slack, self._counting.add)
            stack.pop_all()

    def close(self) -> None:
        """Wait for reads in progress, then release files and maps. Again is fine."""
        with self._file.lock, ExitStack() as stack:  # each, also if the release of one before it fails; the last first
            if self._file.is_closed:
                return
            self._file.drain()
            stack.callback(self._file.close)
            for part in (self._writer, self._found):
                if part is not None:
                    stack.callback(part.close)

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        check_tables(shapes, self.page_bytes)
        file = self._file
        with file.lock:
            file.require_open()
            if file.rows is not None and not file.rows.unknown and file.tables.items() <= shapes.items():
                file.rows = file.rows.with_tables(shapes)
            else:  # the first reader makes the map, but what the system refuses is an error now
                new_places(sum(num_rows for _, num_rows in shapes.values()))
                file.rows = None
            file.tables = dict(shapes)

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        first = 0
        while True:
            with self.lease() as (_, rows):  # not while the caller uses a part
                part = next(filter(len, rows.stored_rows(table_index, first=first)), None)
            if part is None:
                return
            yield part
            first = int(part[-1]) + 1

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        with self._file.lease() as (snapshot, rows):
            self._read_from(snapshot, rows, keys, slots, weights, state, present)

    def _read_from(
        self, snapshot: Snapshot, rows: RowPlaces, keys: Int64s, slots: Int32s, weights: Words, state: Words,
        present: Bools,
    ) -> None:  # fmt: skip
        if not len(keys):
            return
        started = time.perf_counter()
        layout = self._file.layout_of(rows, keys)
        check_arenas(layout, slots, weights, state)
        result = self.reader.gather(snapshot, rows, layout, keys, slots, weights, state, present)
        self._counting.add(
            rows_read=len(keys), rows_absent=len(keys) - int(np.count_nonzero(present)), pages_read=int(result[2]),
            pages_direct=int(result[4]), read_seconds=time.perf_counter() - started,
        )  # fmt: skip

    @contextmanager
    def changes(self, since: int) -> Iterator[Changes]:
        """What changed since a version that the current one was made from; 0: all rows that were ever written."""
        with self.lease() as (snapshot, rows):
            yield Changes(snapshot, rows, since)

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        file = self._file
        with file.lock:
            writer = self._require_writer()
            if not len(keys):
                return
            started = time.perf_counter()
            rows = writer.rows()
            layout = file.layout_of(rows, keys)
            check_arenas(layout, slots, weights, state)
            require_distinct(keys)
            rows.positions(layout, keys)
            if not file.head.last < epoch <= MAX_VERSION:
                raise ValueError(f"epoch={epoch} must be above {file.head.last}, the last version, up to {MAX_VERSION}")
            writer.append(layout, KeyedRows(keys, slots, weights, state, np.array([epoch], np.uint64)))
            self._counting.add(rows_written=len(keys), write_seconds=time.perf_counter() - started)

    def _require_writer(self) -> Writer:
        self._file.require_open()
        if self._writer is None:
            raise ReadOnlyError(f'{self.path}: the store was opened with mode="r"; open it with mode="w" to write.')
        return self._writer

    def commit(self, payload: bytes, version: int, *, keep: int = 1, dropped: Collection[int] = ()) -> None:
        """Writes of other threads go on meanwhile. DiskFullError, StoreReplacedError (the file is not at its path any
        more): nothing was committed, nothing is lost, and commit may be tried again."""
        self._require_writer().commit(payload, version, keep, dropped)

    def rollback(self, version: int) -> None:
        self._require_writer().rollback(version)

    def require_in_place(self) -> None:
        """StoreReplacedError if the store's path names other files by now."""
        self._file.map.locks.require_in_place()

    def sync_names(self) -> None:
        """Have the device hold the directory's names. TierstoreError: it refuses, and the tier is of no more use."""
        try:
            sync_directory(self.path.parent)
        except OSError as error:
            self._file.has_failed = True
            raise translate_os_error(error, self.path.parent) from error

    @property
    def version(self) -> int:
        if self._writer is not None:
            self._writer.catch_up()
        return self._file.record.version

    @property
    def last_version(self) -> int:
        return self._file.head.last

    @property
    def versions(self) -> tuple[int, ...]:
        return self._file.head.kept

    @property
    def payload(self) -> bytes:
        """Read again at each use. DamagedError if it does not match its checksum."""
        with self._file.lock:
            self._file.require_open()
            return read_payload(self._file.snapshot, self._file.record)

    def find_newer(self) -> NewerCommit | None:
        """Between two calls the pages of the shown snapshot are kept from being reused: the writer's file grows.
        StoreReplacedError: the file is not at its path any more, or others were copied over it. DamagedError."""
        file = self._file
        file.require_open()
        if not self._follows:
            return None
        with file.lock:
            file.require_open()
            file.map.locks.require_in_place()
            before = file.make_map()  # what the newer one is compared with
            snapshot = file.new_snapshot()
            if self._found is not None:
                self._found.close()
            txn_id = snapshot.txn_id
            if txn_id == self._same_until:
                snapshot.close()
                return None
            try:
                self._found = self._look(snapshot, before)
            except BaseException:
                snapshot.close()
                raise
            self._same_until = txn_id if self._found is None else self._same_until
            return self._found

    def _look(self, snapshot: Snapshot, before: RowMap) -> NewerCommit | None:
        """The newest version in a snapshot, by the indexes of new segments; after a rollback by all. None if it is the
        one that is shown: then this snapshot is shown, in which rows that cleaning moved lie elsewhere."""
        shown = self._file.record
        snapshot.walk(META_KEY)  # damage on the way to the records is found first
        head = read_head(snapshot)
        record = read_record(snapshot, head.current)
        stored = stored_segments(snapshot)
        is_same = head.current == shown.version  # then rows are what they were, if elsewhere, and enter the map at once
        if is_same and record != shown:  # its payload, whose checksum it has, tells commits apart
            raise StoreReplacedError(
                f"{snapshot.path}: its version {head.current} is another commit than when the store was opened; "
                "other files were copied over it: open the store again"
            )
        require_logged(snapshot, stored)
        segments = before.segments if is_same else {layout: each.copied() for layout, each in before.segments.items()}
        oldest = self._file.oldest_shown()
        new = NewSegments.read(
            before, segments, snapshot, stored, shown=shown.version, last=record.version, oldest=oldest
        )
        if is_same and new is not None:
            before.advance(new)
            self._file.show(snapshot)
            return None
        if new is not None:
            return NewerCommit(self, snapshot, head, record, new, new.changed)
        rows = RowMap(before.shapes)
        rows.enter(snapshot, stored, record.version, ())
        return NewerCommit(self, snapshot, head, record, rows, rows.differing(before))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Of segments of tables that were not added, only the index is checked."""
        with self._file.lease() as (snapshot, rows):
            return verify_segments(snapshot, rows, progress)

    def counters(self) -> ColdCounters:
        return self._counting.totals

    @property
    def held_bytes(self) -> int:
        return 0 if self._writer is None else self._writer.held_bytes

    @property
    def map_bytes(self) -> int:
        """Of address space: memory is taken where rows exist."""
        rows = self._file.rows
        return 0 if rows is None else rows.size_bytes
