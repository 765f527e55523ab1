"""The contract of a cold tier: rows below memory, written in transactions, read in batches, committed atomically."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import ClosedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..layout import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout


class ColdCounters(NamedTuple):
    """Running totals since the tier was opened."""

    rows_read: int = 0  # asked for, absent ones included
    rows_absent: int = 0  # of those: never written
    pages_read: int = 0  # that rows lay on, each counted once per ``read``; they may have come from the page cache
    pages_direct: int = 0  # of those: read past the page cache
    read_seconds: float = 0.0
    rows_written: int = 0
    bytes_written: int = 0  # of the pages that rows were appended in
    write_seconds: float = 0.0  # cleaning included
    rows_moved: int = 0  # by cleaning: live rows of segments that were to be deleted
    pages_moved: int = 0  # that they were read from
    bytes_moved: int = 0  # of the pages that they were appended in


class VerifyReport(NamedTuple):  # what was found sound
    tables: int  # that have rows
    segments: int  # that were checked: also of earlier versions, and with rows that nobody needs
    rows: int  # that a read finds, each counted once
    bytes: int  # of the segments


class NewerVersion(Protocol):
    """A commit that a tier open for reading does not show yet. Valid until the tier looks for a newer one again."""

    @property
    def version(self) -> int: ...

    @property
    def payload(self) -> bytes: ...

    @property
    def changed(self) -> Int64s:
        """int64 [n], ascending: keys of the rows that may be others than the tier shows; no other row is."""

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        """``ColdTier.read``, of this version."""

    def show(self) -> None:
        """Have the tier show it, in time that goes with ``changed``. Reads in progress finish where they are."""

    def close(self) -> None:
        """Give it up, unless it was shown. Again is fine."""


class ColdTier(Protocol):
    """Rows are addressed by key (``layout.KEY_ROW_BITS``). Thread-safe: any number of readers, one writer."""

    @property
    def page_bytes(self) -> int: ...

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        """Know tables of these layouts and numbers of rows, by index, in place of those before; nothing is written. A
        table keeps its layout. One of 0 rows was dropped: what is stored of it is deleted.

        Raises, nothing changed:
            ValueError: numbers out of range, or a layout for another page size.
            BudgetError: the system refuses memory for the map of their rows.
        """

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        """Which rows of a table ``read`` finds, int64, ascending, in parts; those written meanwhile may be missing."""

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        """Copy row ``keys[i]`` into ``weights[slots[i]]`` and ``state[slots[i]]`` and set ``present[i]``.

        All keys' tables share one layout. A row never written leaves its slot as it is and ``present[i]`` False.
        Every row is verified against its checksum. Reads see every ``write`` that returned before.

        Raises:
            ValueError: keys of no row or of several layouts, slots out of range, or arrays of other widths.
            ChecksumError: names file, table and row; the slots' contents are then undefined.
        """

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        """Store ``weights[slots[i]]``, ``state[slots[i]]`` as row ``keys[i]`` (keys distinct, one layout), all or
        nothing and in this order. Visible to ``read`` on return; part of no version until ``commit``.

        Args:
            epoch: the first version that the rows are to be part of, above ``last_version``. A row written for an
                earlier epoch than before is that of the versions up to the later one, and not what ``read`` sees.

        Raises:
            ValueError: as for ``read``, and for a key given twice or an epoch committed before.
            DiskFullError: nothing of this call was stored; reads go on.
        """

    def commit(self, payload: bytes, version: int, *, keep: int = 1, dropped: Collection[int] = ()) -> None:
        """Make what was written for epochs up to ``version``, above ``last_version``, and ``payload``, the current
        version, atomically and durably. Others may go on writing for later epochs meanwhile. ``keep``: how many of the
        last versions stay, this one included. ``dropped``: versions before it that go at once, and do not count."""

    def rollback(self, version: int) -> None:
        """Make a kept version the current one; later versions, and what belongs to none, are dropped."""

    @property
    def version(self) -> int:
        """Number of the current version; 0 before the first commit."""

    @property
    def last_version(self) -> int:
        """The highest number that a version ever had."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the kept versions, ascending."""

    @property
    def payload(self) -> bytes:
        """What the current version was committed with; b"" before the first commit."""

    def find_newer(self) -> NewerVersion | None:
        """What a tier open for reading can move to, if anything; what an earlier call gave is closed."""

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every row that is stored, also for earlier versions and for none yet; rows of tables that were
        not added are not counted. ``progress(done_bytes, total_bytes)``. DamagedError: names the file, the place and
        the way out."""

    def counters(self) -> ColdCounters: ...

    @property
    def held_bytes(self) -> int:
        """What the oldest reader keeps from being reused, as of the last commit; 0 unless open for writing."""

    @property
    def map_bytes(self) -> int:
        """Bytes of the map from rows to places."""

    def close(self) -> None:
        """Release files and maps; what was written since the last commit is dropped at the next open."""


class Counting:  # by many threads
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._totals: dict[str, Any] = ColdCounters()._asdict()

    @property
    def totals(self) -> ColdCounters:
        return ColdCounters(**self._totals)

    def add(self, **added: float) -> None:
        with self._lock:
            totals = self._totals.copy()
            for name, value in added.items():
                totals[name] += value
            self._totals = totals  # at once: a signal handler may raise between two


# ValueErrors of arguments that no tier takes: out of range, or not of the table's layout.


def check_tables(shapes: Mapping[int, tuple[RowLayout, int]], page_bytes: int) -> None:
    for index, (layout, num_rows) in shapes.items():
        if not 0 <= index < MAX_TABLES:
            raise ValueError(f"a table's index must be in [0, {MAX_TABLES}), not {index}")
        if not 0 <= num_rows <= MAX_ROWS:
            raise ValueError(f"num_rows must be in [0, {MAX_ROWS}], not {num_rows}")
        if layout.page_bytes != page_bytes:
            raise ValueError(f"layout.page_bytes is {layout.page_bytes}, the tier's pages have {page_bytes} bytes")


def check_arenas(layout: RowLayout, slots: Int32s, weights: Words, state: Words) -> None:
    if weights.shape[1] != layout.weight_words or state.shape[1] != layout.state_words:
        raise ValueError(
            f"weights and state have {weights.shape[1]} and {state.shape[1]} words a row, the table's layout has "
            f"{layout.weight_words} and {layout.state_words}"
        )
    # A negative one is more than any as uint32; the method max() is Python, and takes longer than this of few slots.
    if np.maximum.reduce(slots.view(np.uint32)) >= min(len(weights), len(state)):
        raise ValueError(f"slots must be in [0, {min(len(weights), len(state))})")
    assert weights.flags.c_contiguous and state.flags.c_contiguous, "kernels take them flat"  # noqa: PT018


def require_distinct(keys: Int64s) -> None:
    if (keys[1:] > keys[:-1]).all():
        return
    ordered = np.sort(keys)
    if (twice := ordered[1:] == ordered[:-1]).any():
        key = int(ordered[int(np.argmax(twice))])
        raise ValueError(f"keys has row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} twice")


class MemoryColdTier:
    """The twin: ``ColdTier`` in memory, the tests' oracle, and below stores opened with ``cold="memory"``. A row is one
    ``bytes`` object for each epoch that a kept version, or none yet, shows."""

    page_bytes = 4096
    held_bytes = map_bytes = 0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tables: dict[int, tuple[RowLayout, int]] = {}
        self._rows: dict[int, dict[int, bytes]] = {}
        self._payloads: dict[int, bytes] = {}
        self.last_version = 0
        self._closed = False
        self._counting = Counting()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError("the store was closed")
            yield

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        check_tables(shapes, self.page_bytes)
        with self._open():
            self._tables = dict(shapes)
            gone = {index for index, (_, num_rows) in shapes.items() if not num_rows}
            self._rows = {key: rows for key, rows in self._rows.items() if key >> KEY_ROW_BITS not in gone}

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        with self._open():
            rows = sorted(key % MAX_ROWS for key in self._rows if key >> KEY_ROW_BITS == table_index)
        yield np.array(rows, np.int64)

    def _check(self, keys: Int64s, slots: Int32s, weights: Words, state: Words) -> RowLayout:
        """Their layout, in whose slots they go."""
        for key in keys.tolist():
            table, row = key >> KEY_ROW_BITS, key % MAX_ROWS
            if row >= self._tables.get(table, (None, 0))[1]:
                raise ValueError(f"keys has {key}, row {row} of table {table}: not a row of a table that was added")
        layout, *others = {self._tables[table][0] for table in (keys >> KEY_ROW_BITS).tolist()}
        if others:
            raise ValueError("keys are of tables of several layouts")
        check_arenas(layout, slots, weights, state)
        return layout

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        started = time.perf_counter()
        with self._open():
            if not len(keys):
                return
            layout = self._check(keys, slots, weights, state)
            for i, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
                epochs = self._rows.get(key)
                present[i] = epochs is not None
                if epochs:
                    words = np.frombuffer(epochs[max(epochs)], np.uint64)
                    weights[slot] = words[: layout.weight_words]
                    state[slot] = words[layout.weight_words :]
        seconds = time.perf_counter() - started
        self._counting.add(rows_read=len(keys), rows_absent=int((~present).sum()), read_seconds=seconds)

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        started = time.perf_counter()
        with self._open():
            if not len(keys):
                return
            layout = self._check(keys, slots, weights, state)
            require_distinct(keys)
            if epoch <= self.last_version:
                raise ValueError(f"epoch={epoch} must be above {self.last_version}, the last version")
            for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
                self._rows.setdefault(key, {})[epoch] = weights[slot].tobytes() + state[slot].tobytes()
        size_bytes, seconds = len(keys) * layout.row_bytes, time.perf_counter() - started
        self._counting.add(rows_written=len(keys), bytes_written=size_bytes, write_seconds=seconds)

    def commit(self, payload: bytes, version: int, *, keep: int = 1, dropped: Collection[int] = ()) -> None:
        with self._open():
            if version <= self.last_version or keep < 1:
                raise ValueError(f"version={version} must be above {self.last_version}, and keep={keep} at least 1")
            self.last_version = version
            self._payloads[version] = bytes(payload)
            kept_versions = [kept for kept in self.versions if kept not in dropped][-keep:]
            self._payloads = {kept: self._payloads[kept] for kept in kept_versions}
            for key, epochs in self._rows.items():
                shown = {max((each for each in epochs if each <= kept), default=0) for kept in self._payloads}
                self._rows[key] = {each: row for each, row in epochs.items() if each in shown or each > version}

    def rollback(self, version: int) -> None:
        with self._open():
            if version not in self._payloads:
                raise ValueError(f"version={version} is not kept: there are {list(self.versions)}")
            self._payloads = {kept: payload for kept, payload in self._payloads.items() if kept <= version}
            for key, epochs in self._rows.items():
                self._rows[key] = {each: row for each, row in epochs.items() if each <= version}
            self._rows = {key: epochs for key, epochs in self._rows.items() if epochs}

    @property
    def version(self) -> int:
        return max(self._payloads, default=0)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._payloads)

    @property
    def payload(self) -> bytes:
        return self._payloads.get(self.version, b"")

    def find_newer(self) -> None: ...  # nobody else commits here

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """There is nothing to find. Each row counts as a segment."""
        with self._open():
            count = len(self._rows)
            tables = len({key >> KEY_ROW_BITS for key in self._rows})
            size_bytes = sum(len(row) for epochs in self._rows.values() for row in epochs.values())
        if progress is not None:
            progress(count, count)
        return VerifyReport(tables=tables, segments=count, rows=count, bytes=size_bytes)

    def counters(self) -> ColdCounters:
        return self._counting.totals

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._rows.clear()
