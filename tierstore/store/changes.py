"""The feed of changes: what changed in a store, commit by commit, for consumers whose cursors it keeps.

A cursor is the commit up to which a consumer acknowledged all changes. Later ones are read from the log, as far back as
the lineage of the newest commit goes, so nothing is kept for a consumer that lags: no version, and no copy of rows.

The log does not tell which id a row had before. So a consumer has a file of the ids that it was told for each table
with dynamic ids, 16 bytes a row. A process may end at any time, so before a change is given out, this is durable, in
this order: the cursor, with the commit that is told and the ids that leave the file; then the file. So each id that
the receiver may have is in one of them, and if it has no row, it is a tombstone until the change is acknowledged.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ..config import TableConfig
from ..errors import ClosedError, DamagedError, TierstoreError
from ..io.reads import Changes
from ..kernels.arrays import Int64s, Words
from ..kernels.hashing import GOLDEN
from ..pool.converting import values_of
from ..system import files
from ..system.checks import excerpt
from ..system.killpoints import reach
from ..system.signals import ClosedWhenDropped
from .stored_ids import TableOfIds
from .table import Table
from .version import Ancestor, event_time_of

__all__ = ["Change", "ChangeFeed", "ChangedBatch"]

FOLDER: Final = "consumers"  # in the store's
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LOG: Final = logging.getLogger("tierstore")
_NONE: Final[Int64s] = np.empty(0, np.int64)
_HALF: Final = np.uint64(32)
_T = TypeVar("_T")


class ChangedBatch(NamedTuple):
    """Some rows of a table as they are now, or ids that have no row any more."""

    table: str
    ids: Int64s  # [n]; no id comes twice in a change
    values: Tensor | None  # [n, embedding_dim], of the table's dtype, float32 where quantized; None: tombstones


class Cursor(NamedTuple):
    """``acked``: the commit up to which all is acknowledged; None: the receiver may have anything. ``told``: a later
    one, of which it may have some rows. ``tables``: those at ``acked``, by place and name. ``displaced``: by place of a
    table with dynamic ids, those that the receiver may have and that are not in the file. ``born``: when the folder was
    made; a copy of a store has copies of its cursors, and other receivers."""

    born: int = 0
    acked: Ancestor | None = None
    told: Ancestor | None = None
    tables: frozenset[tuple[int, str]] = frozenset()
    displaced: Mapping[int, Int64s] = MappingProxyType({})

    @property
    def version(self) -> int:
        return self.acked.version if self.acked else 0

    @property
    def places(self) -> list[list[Any]]:
        """Place and name of each table, as JSON has them."""
        return [list(each) for each in sorted(self.tables)]

    def needs_full(self, commit_id: Callable[[int], str]) -> bool:
        known = (self.acked, self.told or self.acked)
        return not all(each and commit_id(each.version) == each.commit_id != "" for each in known)

    def save(self, folder: Path) -> "Cursor":
        displaced = {place: ids.tobytes().hex() for place, ids in self.displaced.items()}
        text = json.dumps([self.born, self.acked, self.told, self.places, displaced])
        files.write_text(folder / "cursor.json", f"{zlib.crc32(text.encode()):08x}\n{text}", force=True)
        return self

    @classmethod
    def load(cls, folder: Path) -> "Cursor":
        """The saved cursor. A new one if there is none, if it is a copy's, or damaged, which the log says."""
        new, path = cls(), folder / "cursor.json"
        with contextlib.suppress(FileNotFoundError):
            new = cls((folder / "lock").stat().st_ctime_ns)
            with files.open_plain_file(path) as file:
                digest, _, text = file.read().decode(errors="replace").partition("\n")
            if digest != f"{zlib.crc32(text.encode()):08x}":
                _LOG.warning("%s does not match its checksum; the consumer gets a full copy", path)
            elif (values := json.loads(text))[0] == new.born:
                acked, told = (values[at] and Ancestor(*values[at]) for at in (1, 2))
                displaced = {
                    int(place): np.frombuffer(bytes.fromhex(ids), np.int64) for place, ids in values[4].items()
                }
                return cls(new.born, acked, told, frozenset(map(tuple, values[3])), displaced)
        return new


class _ToldIdsError(DamagedError):
    """The file of told ids is missing, or has a damaged entry."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is missing, or does not match its checksum; the consumer gets a full copy next")


class _ToldIds:
    """A file of the ids that a consumer was told, by row. An entry, uint64 [2], is an id and a checksum, which is 0 of
    a row without an id."""

    def __init__(self, path: Path, num_rows: int, *, is_new: bool) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if is_new else 0)
        try:
            with files.output_errors(path), open(os.open(path, flags, 0o666), "r+b") as file:
                # A write to the map of what has no place on the device would end the process.
                os.posix_fallocate(file.fileno(), 0, 16 * num_rows)
                self._map = np.memmap(file, np.uint64, "r+", shape=(num_rows, 2))
        except FileNotFoundError:
            raise _ToldIdsError(path) from None

    def of(self, rows: Int64s) -> Words:
        """Entries, [n, 2]. _ToldIdsError."""
        entries = np.asarray(self._map)[rows]
        if not np.array_equal(entries, _entries(rows, entries[:, 0], entries[:, 1])):
            raise _ToldIdsError(self._path)
        return entries

    def put(self, parts: Iterable[tuple[Int64s, Words]], *, is_new: bool) -> None:
        if is_new:
            self._map[:] = 0
        for rows, entries in parts:
            is_other = (np.asarray(self._map)[rows] != entries).any(axis=1)
            self._map[rows[is_other]] = entries[is_other]
        self._map.flush()
        files.sync_directory(self._path.parent)


def _entries(rows: Int64s, ids: Words, has_id: Words) -> Words:
    sums = (ids ^ rows.view(np.uint64) << _HALF) * GOLDEN | np.uint64(1)
    entries: Words = np.stack([ids, sums], axis=1) * (has_id != 0)[:, None]
    return entries


def _ids_of(entries: Words) -> Int64s:
    ids: Int64s = entries[entries[:, 1] != 0, 0].view(np.int64)
    return ids


def _changed_ids(changes: Changes, table: Table) -> Iterator[tuple[Int64s, Words]]:
    """Rows whose id or score changed, and their entries as they are now."""
    for chunk in changes.rows(table.index + 1):
        own, rows = TableOfIds(table.config).own_rows(chunk.rows)
        words = chunk.weights[own]
        yield rows, _entries(rows, words[:, 0], words[:, 1] >> _HALF)


@dataclass(frozen=True, eq=False)
class Change:
    """All that changed after the commit that a consumer acknowledged last, up to the newest one. ClosedError once the
    feed is iterated further, or closed, and in a forked process.

    Attributes:
        since: that version; 0 with ``is_full``. version: the newest one.
        event_time: of the commit, ``extra["event_time"]``, seconds since 1970; None if it has none.
        is_full: all rows: the receiver must have nothing else afterwards. The consumer is new, or its cursor is none of
            the last 256 commits that this one was made from, as after a rollback.
        tables: of now. dropped: names of tables whose rows the receiver must drop, before it takes those of ``rows``.
    """

    since: int
    version: int
    event_time: float | None
    is_full: bool
    tables: tuple[TableConfig, ...]
    dropped: tuple[str, ...]
    _feed: "ChangeFeed" = field(repr=False)
    _end: Cursor = field(repr=False)  # once it is acknowledged

    @property
    def commit_id(self) -> str:
        """The identity of the commit, as of ``Store.commit_id``."""
        return self._end.acked.commit_id if self._end.acked else ""

    @property
    def places(self) -> list[list[Any]]:
        """Place and name of each of ``tables``."""
        return self._end.places

    def rows(self) -> Iterator[ChangedBatch]:
        """Batches of up to 8 MiB, table by table, tombstones of a table first; may be called twice. Rows never written
        have first values, and are not among them. DamagedError: a row is."""
        batches = self._feed._batches()
        while (batch := self._feed._use(self, lambda: next(batches, None))) is not None:
            yield batch

    def ack(self) -> None:
        """The receiver has it all: move the cursor, durably. May be called twice. DiskFullError, ReadOnlyError,
        TierstoreError: the cursor stays."""
        self._feed._cursor = self._feed._use(self, lambda: self._end.save(self._feed._folder))
        reach("feed: acknowledged")


class ChangeFeed(ClosedWhenDropped, contextlib.AbstractContextManager["ChangeFeed"]):
    """The changes of a store for one consumer; made by ``Store.changes``. A context manager that closes it.

    One thread at a time may use it; another may close it. Memory, besides the store's: 8 bytes for each row that
    changed, some 100 if it has a dynamic id, and 32 MiB; where the store is open for writing, a map of the
    rows, too. Until it is iterated again the writer reuses no page of what it showed last, and the row file grows.
    """

    _is_closed = True  # until all of it is there

    def __init__(self, reader: Any, cold: Any, folder: Path, since: int | None, *, is_own: bool) -> None:
        """``reader``: a store opened for reading, ``is_own``: for this alone. ``cold``: its cold tier."""
        self._reader, self._cold, self._folder = reader, cold, folder
        self._process_id, self._lock = os.getpid(), threading.RLock()  # held while what ``close`` ends is in use
        self._leases = contextlib.ExitStack()
        self._current: Change | None = None
        self._parts: list[tuple[Table, Changes, Int64s]] = []  # of that one: tables, where their rows are, tombstones
        self._id_files: dict[int, _ToldIds] = {}
        with contextlib.ExitStack() as held, files.output_errors(folder):
            held.callback(reader.close if is_own else lambda: None)
            held.callback(self._leases.close)
            files.make_directory(folder)
            self._new = Cursor(os.fstat(held.enter_context(locked(folder))).st_ctime_ns)
            found = Cursor.load(folder)
            self._cursor = found if since in (None, found.version) else self._new
            self._held = held.pop_all()
        self._is_closed = False

    def close(self) -> None:
        """Release files, and the consumer's name; waits for another thread's use. May be called twice."""
        if not self._is_closed and self._process_id == os.getpid():  # in a fork, all is the parent's
            with self._lock:
                self._is_closed = True
                self._held.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Change]:
        """Give changes until none is newer, or one was not acknowledged; iterate again for what is committed later.
        Errors as of ``Store.refresh``, ``Change.rows`` and ``Change.ack``."""
        while (change := self._use(self._current, self._look)) is not None:
            yield change
            if self._cursor.told is not None:
                return

    def _look(self) -> Change | None:
        self._current = None
        self._leases.close()
        with self._reader._follower.lock:  # no other thread shows a newer version meanwhile
            self._reader.refresh()
            version, tables = self._reader.shown.version, list(self._reader.tables.values())
            cursor = self._new if self._cursor.needs_full(self._reader.commit_id) else self._cursor
            dynamic = [table for table in tables if table.ids is not None]
            now = Cursor(
                self._new.born, Ancestor(version.number, version.lineage.commit_id), None,
                frozenset((table.index, table.name) for table in tables), {table.index: _NONE for table in dynamic},
            )  # fmt: skip
            if not version.number or (cursor.told, cursor.acked, cursor.tables) == (None, now.acked, now.tables):
                return None
            new, every = (self._leases.enter_context(self._cold.changes(each)) for each in (cursor.version, 0))
        try:
            gone = self._tell(cursor, now, dynamic, new)
        except _ToldIdsError as error:
            _LOG.warning("%s", error)
            cursor, new = self._new, every
            gone = self._tell(cursor, now, dynamic, new)
        self._parts = [
            (table, new if (table.index, table.name) in cursor.tables else every, gone.get(table.index, _NONE))
            for table in tables
        ]
        dropped, configs = {name for _, name in cursor.tables - now.tables}, (table.config for table in tables)
        self._current = Change(
            cursor.version, version.number, event_time_of(version.extra), cursor.acked is None, tuple(configs),
            tuple(sorted(dropped)), self, now,
        )  # fmt: skip
        return self._current

    def _batches(self) -> Iterator[ChangedBatch]:
        """Of the current change."""
        for table, changes, tombstones in self._parts:
            if len(tombstones):
                yield ChangedBatch(table.name, tombstones, None)
            for ids, weights in changes.rows(table.index):
                if table.ids is not None:
                    try:
                        entries = self._id_files[table.index].of(ids)
                    except _ToldIdsError:
                        self._cursor = self._new.save(self._folder)
                        raise
                    ids, weights = _ids_of(entries), weights[entries[:, 1] != 0]
                if len(ids):
                    yield ChangedBatch(table.name, ids, values_of(weights, table.layout))

    def _tell(self, cursor: Cursor, now: Cursor, tables: list[Table], changes: Changes) -> dict[int, Int64s]:
        """Note what is given out next, before it is; returns the tombstones of tables, by place."""
        displaced, tombstones = {**now.displaced}, dict[int, Int64s]()
        for table in tables:
            place, known = table.index, cursor.displaced.get(table.index)
            self._id_files[place] = _ToldIds(self._folder / f"{place}.ids", table.config.num_rows, is_new=known is None)
            gone, here = [_NONE if known is None else known], [_NONE]
            for rows, entries in () if known is None else _changed_ids(changes, table):
                before = self._id_files[place].of(rows)
                gone.append(_ids_of(before[(before != entries).any(axis=1)]))
                here.append(_ids_of(entries))
            left, _ = np.unique(np.concatenate(gone), return_index=True)  # by sorting; it would hash, which is slow
            displaced[place], tombstones[place] = left, left[~np.isin(left, np.concatenate(here), assume_unique=True)]
        # Where tables changed, the receiver is between the two until it acknowledges.
        acked = cursor.acked if cursor.tables == now.tables else None
        self._cursor = cursor._replace(acked=acked, told=now.acked, displaced=displaced).save(self._folder)
        reach("feed: change noted")
        for table in tables:
            self._id_files[table.index].put(_changed_ids(changes, table), is_new=table.index not in cursor.displaced)
        reach("feed: ids noted")
        return tombstones

    def _use(self, change: Change | None, call: Callable[[], _T]) -> _T:
        """Meanwhile nothing that the change needs is released. ClosedError: it was."""
        if self._process_id != os.getpid():
            raise ClosedError(f"{self._folder}: the feed is the parent process's; open the store in this one")
        with self._lock:
            if self._is_closed or change is not self._current:
                raise ClosedError(f"{self._folder}: the feed was closed, or gave a later change; take them one by one")
            return call()


def folder_of(directory: Path, consumer: str) -> Path:
    """ValueError: no name of a consumer."""
    if not isinstance(consumer, str) or _NAME.fullmatch(consumer) is None:
        raise ValueError(f"consumer={excerpt(consumer)} must be 1 to 100 of a-z, A-Z, 0-9, and, but first, of . _ -")
    return directory / FOLDER / consumer


def forget(folder: Path) -> None:
    """Delete it, durably. TierstoreError: it is locked."""
    gone = folder.with_name(f".gone-{folder.name}")  # no consumer's name
    with files.output_errors(folder), locked(folder):
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        files.sync_directory(folder.parent)
        shutil.rmtree(gone)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A consumer's name, taken. The file is never written, so its time is that of the folder's making; a copy has
    another."""
    refusal = "{} is locked: the changes for this consumer are being taken, here or by another process; close that feed"
    with files.output_locked(path := folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, refusal) as descriptor:
        if not (path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))):
            raise TierstoreError(f"{folder} was deleted meanwhile, by another process; try again")
        yield descriptor
