"""A feed takes what each commit of a store changed to a sink; the contract of sinks."""

import abc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import ClosedError, StoreReplacedError, TierstoreError
from ..store import Store
from ..store.changes import Change, ChangedBatch, ChangeFeed
from ..system.sizes import format_count

_LOOK_SECONDS, _SAY_SECONDS = 0.2, 10.0


class Position(NamedTuple):
    """A commit whose rows a sink holds, and the tables that were asked for; none: all. ``shown``: ``Change.places``, as
    a change of these is part of no commit. ``store_id``: of the store; None of what an older release wrote."""

    version: int
    commit_id: str
    tables: list[str]
    shown: Sequence[list[Any]] | None = None
    store_id: str | None = None


class Sink(abc.ABC):
    """What a feed fills; ``--to package.module:Class`` makes one of yours, without arguments. ``name``: for errors."""

    name = "the sink"

    @abc.abstractmethod
    def position(self) -> Position | None:
        """Of the last whole change. None of a new sink, and, or version 0, if one with ``is_full`` was not taken to its
        end."""

    @abc.abstractmethod
    def apply(self, change: Change, batches: Iterator[ChangedBatch], position: Position) -> None:
        """Take a change, then the position; durable on return. If it fails, or is killed, the next change makes up for
        what was taken of this one.

        Args:
            change: rows of tables in ``dropped``, asked for or not, are deleted first; of all tables if it ``is_full``.
            batches: of the tables that were asked for, as ``Change.rows`` has them.
        """

    def close(self) -> None:  # noqa: B027 - a sink may hold nothing
        """Release what is held."""


class Feed:
    """One store and one sink. The store's ``close`` ends it. ``num_rows``: that the sink took so far, deleted ones too.
    ``version``: that it holds; 0 before. ``event_time``: of the last commit that it took; NaN if it is not known.

    Args:
        consumer: the name of the store's cursor.
        tables: names of those to take; default: all. TableError: no such table.
        say: told in a line what was done, and, after each 10 s of a change, how far that is.
    """

    def __init__(
        self, store: Store, sink: Sink, *, consumer: str, tables: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.num_rows, self.version, self.event_time = 0, 0, math.nan
        self._store, self._sink, self._consumer, self._say = store, sink, consumer, say
        self._tables = sorted({store[name].name for name in tables})
        self._changes: ChangeFeed | None = None
        self._position: Position | None = None

    def step(self) -> int:
        """Have the sink hold the newest commit; how many changes that took. Errors: the sink's, ``Store.changes``'.
        ValueError: it holds rows of another store."""
        count = 0
        for change in (changes := self._open()):
            begun, before = time.monotonic(), self.num_rows
            position = Position(change.version, change.commit_id, self._tables, change.places, changes.store_id)
            self._sink.apply(change, self._counted(change), position)
            change.ack()
            self._position, self.version, count = position, change.version, count + 1
            self.event_time = math.nan if change.event_time is None else change.event_time
            rows = f"{'all rows, ' if change.is_full else ''}{format_count(self.num_rows - before, 'row')}"
            self._say(f"version {change.version}: {rows} in {time.monotonic() - begun:.1f} s")
        return count

    def follow(self) -> None:
        """``step`` until Ctrl-C. After an error it is tried again, ever more rarely, up to each 10 s; but for
        StoreReplacedError and ClosedError."""
        said, seconds = "", _LOOK_SECONDS
        while True:
            try:
                self.step()
                said, seconds = "", _LOOK_SECONDS
            except (ClosedError, StoreReplacedError):
                raise
            except (TierstoreError, OSError) as error:
                if said != (said := str(error)):
                    self._say(f"waiting, then again: {said}")
                seconds = min(2 * seconds, _SAY_SECONDS)
            time.sleep(seconds)

    def _open(self) -> ChangeFeed:
        """The changes since what the sink holds."""
        if (position := self._sink.position()) != self._position or self._changes is None:
            self._changes = None
            self._store.refresh()
            changes = self._store.changes(self._consumer)
            if position is None or not self._goes_on(position, changes):
                changes = self._store.changes(self._consumer, since=0)
            self._changes, self._position, self.version = changes, position, position.version if position else 0
        return self._changes

    def _goes_on(self, position: Position, changes: ChangeFeed) -> bool:
        """Whether the sink has all that the cursor says; it may have a change that was not acknowledged. ValueError."""
        if position.store_id not in (None, changes.store_id):
            way = "give this one another --to or --prefix"
            raise ValueError(f"{self._sink.name} holds rows of another store, {position.store_id}: {way}")
        found = self._store.commit_id(position.version), self._tables, changes.cursor.tables
        if position[1:4] != found:
            self._say("the sink has half a copy, another commit, other tables, dtype or ttl: it gets all rows")
        return position[1:4] == found and position.version >= changes.cursor.acked.version

    def _counted(self, change: Change) -> Iterator[ChangedBatch]:
        before, due = self.num_rows, time.monotonic() + _SAY_SECONDS
        for batch in change.rows():
            if not self._tables or batch.table in self._tables:
                yield batch
                self.num_rows += len(batch.ids)
            if time.monotonic() > due:
                self._say(f"version {change.version}: {format_count(self.num_rows - before, 'row')} so far")
                due += _SAY_SECONDS
