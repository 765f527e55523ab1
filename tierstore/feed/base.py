"""A feed takes what each commit of a store changed to a sink; the contract of sinks.

A sink keeps with its rows which commit they are of. If that is earlier than what the sink acknowledged, as in a Redis
that began again with an older snapshot, or is none that the store's commits were made from, it gets all rows.
"""

import abc
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

from ..errors import ClosedError, StoreReplacedError, TierstoreError
from ..store import Store
from ..store.changes import Change, ChangedBatch, ChangeFeed, Cursor, folder_of
from ..system.sizes import format_count

_LOOK_SECONDS: Final = 0.2
Progress = AbstractContextManager[Callable[[int, int], None]]


class Position(NamedTuple):
    """A commit whose rows a sink holds, and the tables that were asked for; none: all. ``shown``: place and name of
    each table that the store had, as a change of these is part of no commit."""

    version: int
    commit_id: str
    tables: list[str]
    shown: list[list[Any]] | None = None


class Sink(abc.ABC):
    """What a feed fills; ``--to package.module:Class`` makes one of yours, without arguments."""

    @abc.abstractmethod
    def position(self) -> Position | None:
        """Of the last whole change; None of a new sink, and if one with ``is_full`` was not taken to its end."""

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
    """One store and one sink.

    Args:
        consumer: the name of the store's cursor.
        tables: names of those to take; default: all. TableError: no such table.
        say: told in a line what was done.
        progress: opens, for a change, what is called with its rows so far, and those that the tables may have.

    Attributes:
        num_rows: that the sink took so far, deleted ones included.
        version: that the sink holds; 0 before. event_time: of the last commit that it took; NaN if it is not known.
    """

    def __init__(
        self, store: Store, sink: Sink, *, consumer: str, tables: Sequence[str] = (),
        say: Callable[[str], None] = print, progress: Callable[[], Progress] = lambda: nullcontext(lambda *_: None),
    ) -> None:  # fmt: skip
        self.num_rows, self.version, self.event_time = 0, 0, math.nan
        self._store, self._sink, self._consumer, self._say, self._progress = store, sink, consumer, say, progress
        self._tables = sorted({store[name].name for name in tables})
        self._changes: ChangeFeed | None = None
        self._position: Position | None = None

    def step(self) -> int:
        """Have the sink hold the newest commit; how many changes that took. Errors: the sink's, ``Store.changes``'."""
        count = 0
        for change in self._open():
            begun, before = time.monotonic(), self.num_rows
            position = Position(change.version, change.commit_id, self._tables, change.places)
            with self._progress() as show:
                self._sink.apply(change, self._counted(change, show), position)
            change.ack()
            count += 1
            self._position, self.version = position, change.version
            self.event_time = math.nan if change.event_time is None else change.event_time
            rows = f"{'all rows, ' if change.is_full else ''}{format_count(self.num_rows - before, 'row')}"
            self._say(f"version {change.version}: {rows} in {time.monotonic() - begun:.1f} s")
        return count

    def follow(self) -> None:
        """``step`` until Ctrl-C. After an error it is tried again, but for StoreReplacedError and ClosedError."""
        said = ""
        while True:
            try:
                self.step()
                said = ""
            except (ClosedError, StoreReplacedError):
                raise
            except (TierstoreError, OSError) as error:
                if said != (said := str(error)):
                    self._say(f"waiting, then again: {said}")
            time.sleep(_LOOK_SECONDS)

    def _open(self) -> ChangeFeed:
        """The changes since what the sink holds."""
        if (position := self._sink.position()) != self._position or self._changes is None:
            self.close()
            self._store.refresh()
            self._changes = self._store.changes(self._consumer, since=self._since(position))
            self._position, self.version = position, position.version if position else 0
        return self._changes

    def _since(self, position: Position | None) -> int:
        if position is None:
            return 0
        cursor = Cursor.load(folder_of(self._store.directory, self._consumer))
        commit_id = self._store.commit_id(position.version)
        if position[1:] != (commit_id, self._tables, cursor.places):
            self._say(f"the sink's version {position.version} is of another commit, or other tables: it gets all rows")
            return 0
        # The sink may have a change that was not acknowledged.
        return min(position.version, cursor.version)

    def _counted(self, change: Change, show: Callable[[int, int], None]) -> Iterator[ChangedBatch]:
        rows = {each.name: each.num_embeddings for each in change.tables if each.name in (self._tables or [each.name])}
        before = self.num_rows
        for batch in change.rows():
            if batch.table in rows:
                yield batch
                self.num_rows += len(batch.ids)
                show(self.num_rows - before, sum(rows.values()))

    def close(self) -> None:
        """Let others take the consumer's changes. May be called twice."""
        if self._changes is not None:
            self._changes.close()
        self._changes = None


def needed(module: str, what: str) -> Any:
    """A package of the extra ``feed``; ImportError if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        name = module.partition(".")[0]
        raise ImportError(f'{what} takes {name}: pip install {name}, or "tierstore[feed]"') from None
