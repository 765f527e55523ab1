"""The feed of changes: what changed in a store, commit by commit, for consumers whose cursors it keeps.

A cursor is the commit up to which a consumer acknowledged all changes. The log has later ones, but not which id a row
had before: a consumer has a file of the ids that it was told for each table with dynamic ids, 16 bytes a row. In which
order file and cursor are written is in docs/architecture.md, "How changes reach other systems".
"""

import contextlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ..config import TableConfig
from ..errors import ClosedError, DamagedError
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
# What feeds hold until they are closed. The garbage collector would end it in any thread, beside ``close``.
_KEPT: Final[set[contextlib.ExitStack]] = set()


class ChangedBatch(NamedTuple):
    """Some rows of a table as they are now, or ids that have no row any more."""

    table: str
    ids: Int64s  # [n]; no id comes twice in a change
    values: Tensor | None  # [n, embedding_dim], of the table's dtype, float32 where quantized; None: tombstones


class Cursor(NamedTuple):
    """``acked``: the commit up to which all is acknowledged; version 0: the receiver may have anything. ``told``: that
    one, or a later one, of which it may have some rows. ``tables``: those at ``acked``, as [place, name] in order.
    ``displaced``: by place of a table with dynamic ids, those that the receiver may have and that are not in the file.
    """

    acked: Ancestor = Ancestor(0, "")
    told: Ancestor = Ancestor(0, "")
    tables: Sequence[list[Any]] = ()
    displaced: Mapping[int, Int64s] = {}

    def since(self, commit_id: Callable[[int], str]) -> int:
        """The version after which changes come; 0: a full copy does."""
        return self.acked.version if all(commit_id(each[0]) == each[1] != "" for each in self[:2]) else 0

    def save(self, folder: Path) -> "Cursor":
        displaced = {place: ids.tobytes().hex() for place, ids in self.displaced.items()}
        text = json.dumps([self.acked, self.told, self.tables, displaced])
        files.write_text(folder / "cursor.json", f"{_checksum(folder, text)}\n{text}", force=True)
        return self

    @classmethod
    def load(cls, folder: Path) -> "Cursor":
        """The saved cursor. A new one if there is none, if it is a copy's, or damaged, which the log says."""
        path = folder / "cursor.json"
        with contextlib.suppress(FileNotFoundError), files.open_plain_file(path) as file:
            checksum, _, text = file.read().decode(errors="replace").partition("\n")
            if checksum == _checksum(folder, text):
                acked, told, tables, displaced = json.loads(text)
                ids = {int(place): np.frombuffer(bytes.fromhex(each), np.int64) for place, each in displaced.items()}
                return cls(Ancestor(*acked), Ancestor(*told), tables, ids)
            _LOG.warning("%s is damaged, or of a copied store; the consumer gets a full copy", path)
        return cls()


def _checksum(folder: Path, text: str) -> str:
    """Of a cursor. It depends on when the folder's lock was made, which is never written: a copy of a store has copies
    of its cursors, and other receivers."""
    return f"{zlib.crc32(text.encode(), (folder / 'lock').stat().st_ctime_ns % 2**32):08x}"


class _ToldIdsError(DamagedError):
    """The file of told ids is missing, or has a damaged entry."""


class _ToldIds:
    """A file of the ids that a consumer was told, by row. An entry, uint64 [2], is an id and a checksum, which is 0 of
    a row without an id."""

    def __init__(self, path: Path, num_rows: int, *, is_new: bool) -> None:
        self._path = path
        if not (is_new or path.exists()):
            raise _ToldIdsError(f"{path} is missing; the consumer gets a full copy")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with files.output_errors(path), open(os.open(path, flags, 0o666), "r+b") as file:
            # A write to the map of what has no place on the device would end the process.
            os.posix_fallocate(file.fileno(), 0, 16 * num_rows)
            self._map = np.memmap(file, np.uint64, "r+", shape=(num_rows, 2))

    def of(self, rows: Int64s) -> Words:
        """Entries, [n, 2]. _ToldIdsError: one is damaged; the file is deleted, for a full copy to follow."""
        entries = np.asarray(self._map)[rows]
        if not np.array_equal(entries, _entries(rows, entries[:, 0], entries[:, 1])):
            self._path.unlink()
            raise _ToldIdsError(f"{self._path} does not match its checksums; the consumer gets a full copy next")
        return entries

    def put(self, parts: Iterable[tuple[Int64s, Words]]) -> None:
        for rows, entries in parts:
            is_other = (np.asarray(self._map)[rows] != entries).any(axis=1)
            self._map[rows[is_other]] = entries[is_other]
        self._map.flush()


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
        since: that version; 0 with ``is_full``. version: the newest one. commit_id: of that, as ``Store.commit_id``.
        event_time: of the commit, ``extra["event_time"]``, seconds since 1970; None if it has none.
        is_full: all rows: the receiver must have nothing else afterwards. docs/online.md says when that comes.
        tables: of now. places: [place, name] of each, in order.
        dropped: names of tables whose rows the receiver must drop, before it takes those of ``rows``.
    """

    since: int
    version: int
    commit_id: str
    event_time: float | None
    is_full: bool
    tables: tuple[TableConfig, ...]
    places: Sequence[list[Any]]
    dropped: tuple[str, ...]
    _feed: "ChangeFeed" = field(repr=False)
    _end: Cursor = field(repr=False)  # once it is acknowledged

    def rows(self) -> Iterator[ChangedBatch]:
        """Batches of up to 8 MiB, table by table, tombstones of a table first; may be called twice. Rows never written
        have first values, and are not among them. DamagedError: a row is."""
        batches = self._feed._batches()
        return iter(lambda: self._feed._use(self, lambda: next(batches, None)), None)

    def ack(self) -> None:
        """The receiver has it all: move the cursor, durably. May be called twice. DiskFullError, ReadOnlyError,
        TierstoreError: the cursor stays."""
        self._feed.cursor = self._feed._use(self, lambda: self._end.save(self._feed._folder))
        reach("feed: acknowledged")


class ChangeFeed(ClosedWhenDropped, contextlib.AbstractContextManager["ChangeFeed"]):
    """The changes of a store for one consumer; made by ``Store.changes``. A context manager that closes it.
    ``store_id``: as the manifest has it; a copy's is the same. ``cursor``: what is saved for the consumer.

    One thread at a time may use it; another may close it. Memory, besides the store's: 8 bytes for each row that
    changed, some 100 if it has a dynamic id, and 32 MiB; where the store is open for writing, a map of the
    rows, too. Until it is iterated again the writer reuses no page of what it showed last, and the row file grows.
    """

    _is_closed = True  # until all of it is there

    def __init__(self, reader: Any, cold: Any, folder: Path, since: int | None, *, is_own: bool) -> None:
        """``reader``: a store opened for reading, ``is_own``: for this alone. ``cold``: its cold tier."""
        self._reader, self._cold, self._folder = reader, cold, folder
        self.store_id = reader._catalog.manifest.store_id
        self._process_id, self._lock = os.getpid(), threading.RLock()  # held while what ``close`` ends is in use
        self._leases = contextlib.ExitStack()
        self._current: Change | None = None
        self._parts: list[tuple[Table, Changes, Int64s]] = []  # of that one: tables, where their rows are, tombstones
        self._id_files: dict[int, _ToldIds] = {}
        with contextlib.ExitStack() as held, files.output_errors(folder):
            held.callback(reader.close if is_own else lambda: None)
            held.callback(self._leases.close)
            files.make_directory(folder)
            held.enter_context(locked(folder))
            found = Cursor.load(folder)
            self.cursor = found if since in (None, found.acked.version) else Cursor()
            self._held = held.pop_all()
        self._is_closed = False
        _KEPT.add(self._held)

    def close(self) -> None:
        """Release files, and the consumer's name; waits for another thread's use. May be called twice."""
        if not self._is_closed and self._process_id == os.getpid():  # in a fork, all is the parent's
            with self._lock:
                self._is_closed = True
                _KEPT.discard(self._held)
                self._held.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Change]:
        """Give changes until none is newer, or one was not acknowledged; iterate again for what is committed later.
        Errors as of ``Store.refresh``, ``Change.rows`` and ``Change.ack``."""
        while (change := self._use(self._current, self._look)) is not None:
            yield change
            if self.cursor.told != self.cursor.acked:
                return

    def _look(self) -> Change | None:
        self._current = None
        self._leases.close()
        with self._reader._follower.lock:  # no other thread shows a newer version meanwhile
            self._reader.refresh()
            version, tables = self._reader.shown.version, list(self._reader.tables.values())
            cursor = self.cursor if self.cursor.since(self._reader.commit_id) else Cursor()
            dynamic = [table for table in tables if table.ids is not None]
            newest = Ancestor(version.number, version.lineage.commit_id)
            places: list[list[Any]] = sorted([table.index, table.name] for table in tables)
            now = Cursor(newest, newest, places, {table.index: _NONE for table in dynamic})
            if not version.number or cursor[:3] == now[:3]:
                return None
            new, every = (self._leases.enter_context(self._cold.changes(each)) for each in (cursor.acked.version, 0))
        try:
            gone = self._tell(cursor, now, dynamic, new)
        except _ToldIdsError as error:
            _LOG.warning("%s", error)
            self.cursor = Cursor()
            return self._look()
        self._parts = [
            (table, new if [table.index, table.name] in cursor.tables else every, gone.get(table.index, _NONE))
            for table in tables
        ]
        dropped = sorted(each[1] for each in cursor.tables if each not in places)
        self._current = Change(
            cursor.acked.version, *newest, event_time_of(version.extra), not cursor.acked.version,
            tuple(table.config for table in tables), places, tuple(dropped), self, now,
        )  # fmt: skip
        return self._current

    def _batches(self) -> Iterator[ChangedBatch]:
        """Of the current change."""
        for table, changes, tombstones in self._parts:
            if len(tombstones):
                yield ChangedBatch(table.name, tombstones, None)
            for ids, weights in changes.rows(table.index):
                if table.ids is not None:
                    entries = self._id_files[table.index].of(ids)
                    ids, weights = _ids_of(entries), weights[entries[:, 1] != 0]
                if len(ids):
                    yield ChangedBatch(table.name, ids, values_of(weights, table.layout))

    def _tell(self, cursor: Cursor, now: Cursor, tables: list[Table], changes: Changes) -> dict[int, Int64s]:
        """Note what is given out next, before it is; returns the tombstones of tables, by place."""
        if others := [path for path in self._folder.glob("*.ids") if int(path.stem) not in cursor.displaced]:
            cursor.save(self._folder)  # which knows none of them
            for path in others:
                path.unlink()
        displaced, tombstones = dict[int, Int64s](), dict[int, Int64s]()
        for table in tables:
            place, is_new = table.index, table.index not in cursor.displaced
            told = self._id_files[place] = _ToldIds(self._folder / f"{place}.ids", table.config.num_rows, is_new=is_new)
            gone, here = [cursor.displaced.get(place, _NONE)], [_NONE]
            for rows, entries in () if is_new else _changed_ids(changes, table):
                before = told.of(rows)
                gone.append(_ids_of(before[(before != entries).any(axis=1)]))
                here.append(_ids_of(entries))
            left, _ = np.unique(np.concatenate(gone), return_index=True)  # by sorting; it would hash, which is slow
            displaced[place], tombstones[place] = left, left[~np.isin(left, np.concatenate(here), assume_unique=True)]
        # Where tables changed, the receiver is between the two until it acknowledges.
        acked = cursor.acked if cursor.tables == now.tables else Cursor().acked
        self.cursor = cursor._replace(acked=acked, told=now.acked, displaced=displaced).save(self._folder)
        reach("feed: change noted")
        for table in tables:
            self._id_files[table.index].put(_changed_ids(changes, table))
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
    """Delete the cursor, durably. TierstoreError: it is locked."""
    with files.output_errors(folder), locked(folder):
        for path in (folder / "cursor.json", *folder.glob("*.ids")):
            path.unlink()
            files.sync_directory(folder)


def locked(folder: Path) -> contextlib.AbstractContextManager[int]:
    """A consumer's name, taken."""
    refusal = "{} is locked: the changes for this consumer are being taken, here or by another process; close that feed"
    return files.output_locked(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, refusal)
