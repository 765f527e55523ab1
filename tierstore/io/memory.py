"""The cold tier as a dict: obviously right, slow, and gone when the process ends."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from ..errors import ClosedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..layout import KEY_ROW_BITS, MAX_ROWS, RowLayout
from .base import ColdCounters, Counting, VerifyReport, check_arrays, check_table, check_widths, require_distinct


class MemoryColdTier:
    """``ColdTier`` in memory: the tests' oracle, and what is below a store opened with ``cold="memory"``.

    One lock around everything; a row is one ``bytes`` object for each epoch that a kept version, or none yet, shows.
    """

    page_bytes = 4096

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tables: dict[int, tuple[RowLayout, int]] = {}
        self._rows: dict[int, dict[int, bytes]] = {}
        self._payloads: dict[int, bytes] = {}
        self._last_version = 0
        self._closed = False
        self._counting = Counting()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        check_table(table_index, layout, num_rows, self.page_bytes)
        with self._lock:
            self._check_open()
            if table_index in self._tables:
                raise ValueError(f"table {table_index} was added before")
            self._tables[table_index] = layout, num_rows

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        for index, (layout, num_rows) in shapes.items():
            check_table(index, layout, num_rows, self.page_bytes)
        with self._lock:
            self._check_open()
            self._tables = dict(shapes)
            gone = {index for index, (_, num_rows) in shapes.items() if not num_rows}
            self._rows = {key: rows for key, rows in self._rows.items() if key >> KEY_ROW_BITS not in gone}

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        with self._lock:
            self._check_open()
            rows = sorted(key % MAX_ROWS for key in self._rows if key >> KEY_ROW_BITS == table_index)
        yield np.array(rows, np.int64)

    def _layout_of(self, keys: Int64s) -> RowLayout:
        layouts = set()
        for key in keys.tolist():
            table, row = key >> KEY_ROW_BITS, key % MAX_ROWS
            layout, num_rows = self._tables.get(table, (None, 0))
            if layout is None or row >= num_rows:
                raise ValueError(f"keys has {key}, row {row} of table {table}: not a row of a table that was added")
            layouts.add(layout)
        if len(layouts) != 1:
            raise ValueError("keys are of tables of several layouts")
        return layouts.pop()

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        started = time.perf_counter()
        check_arrays(keys, slots, weights, state, present)
        with self._lock:
            self._check_open()
            if not len(keys):
                return
            layout = self._layout_of(keys)
            check_widths(layout, weights, state)
            for i, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
                epochs = self._rows.get(key)
                present[i] = epochs is not None
                if epochs:
                    words = np.frombuffer(epochs[max(epochs)], np.uint64)
                    weights[slot] = words[: layout.weight_words]
                    state[slot] = words[layout.weight_words :]
        absent, seconds = int((~present).sum()), time.perf_counter() - started
        self._counting.add(rows_read=len(keys), rows_absent=absent, read_seconds=seconds)

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        started = time.perf_counter()
        check_arrays(keys, slots, weights, state)
        with self._lock:
            self._check_open()
            if not len(keys):
                return
            layout = self._layout_of(keys)
            check_widths(layout, weights, state)
            require_distinct(keys)
            if epoch <= self._last_version:
                raise ValueError(f"epoch={epoch} must be above {self._last_version}, the last version")
            for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
                self._rows.setdefault(key, {})[epoch] = weights[slot].tobytes() + state[slot].tobytes()
        size_bytes, seconds = len(keys) * layout.row_bytes, time.perf_counter() - started
        self._counting.add(rows_written=len(keys), bytes_written=size_bytes, write_seconds=seconds)

    def commit(self, payload: bytes, version: int, *, keep: int = 1, dropped: Collection[int] = ()) -> None:
        """See ``ColdTier.commit``; durable until the process ends."""
        with self._lock:
            self._check_open()
            if version <= self._last_version or keep < 1:
                raise ValueError(f"version={version} must be above {self._last_version}, and keep={keep} at least 1")
            self._last_version = version
            self._payloads[version] = bytes(payload)
            kept_versions = [kept for kept in self.versions if kept not in dropped][-keep:]
            self._payloads = {kept: self._payloads[kept] for kept in kept_versions}
            for key, epochs in self._rows.items():
                shown = {max((each for each in epochs if each <= kept), default=0) for kept in self._payloads}
                self._rows[key] = {each: row for each, row in epochs.items() if each in shown or each > version}

    def rollback(self, version: int) -> None:
        with self._lock:
            self._check_open()
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
    def last_version(self) -> int:
        return self._last_version

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._payloads)

    @property
    def payload(self) -> bytes:
        return self._payloads.get(self.version, b"")

    def find_newer(self) -> None:
        """Nobody else commits here."""

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """See ``ColdTier.verify``; there is nothing to find. Each row counts as a segment."""
        with self._lock:
            self._check_open()
            count = len(self._rows)
            tables = len({key >> KEY_ROW_BITS for key in self._rows})
            size_bytes = sum(len(row) for epochs in self._rows.values() for row in epochs.values())
        if progress is not None:
            progress(count, count)
        return VerifyReport(tables=tables, segments=count, rows=count, bytes=size_bytes)

    def counters(self) -> ColdCounters:
        return self._counting.totals

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def map_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._rows.clear()
