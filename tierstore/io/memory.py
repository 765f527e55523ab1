"""The cold tier as a dict: obviously right, slow, and gone when the process ends."""

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError
from ..rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout
from .base import ColdCounters, VerifyReport

__all__ = ["MemoryColdTier"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]


class MemoryColdTier:
    """``ColdTier`` in memory: the tests' oracle, and a store's cold tier where nothing need outlive the process.

    One lock around everything; a row is one ``bytes`` object for each epoch.
    """

    page_bytes = 4096

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layouts: dict[int, tuple[RowLayout, int]] = {}
        self._rows: dict[int, dict[int, bytes]] = {}
        self._payloads: dict[int, bytes] = {}
        self._last_version = 0
        self._closed = False
        self._counters = ColdCounters(0, 0, 0, 0.0, 0, 0, 0.0)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        """See ``ColdTier.add_table``."""
        if not 0 <= table_index < MAX_TABLES:
            raise ValueError(f"table_index must be in [0, {MAX_TABLES}), not {table_index}")
        if not 0 < num_rows <= MAX_ROWS:
            raise ValueError(f"num_rows must be in (0, {MAX_ROWS}], not {num_rows}")
        with self._lock:
            self._check_open()
            if table_index in self._layouts:
                raise ValueError(f"table {table_index} was added before")
            self._layouts[table_index] = (layout, num_rows)

    def _check_keys(self, keys: Int64s, weights: Words, state: Words) -> RowLayout:
        layouts = set()
        for key in keys.tolist():
            table, row = key >> KEY_ROW_BITS, key % MAX_ROWS
            layout, num_rows = self._layouts.get(table, (None, 0))
            if layout is None or row >= num_rows:
                raise ValueError(f"keys has {key}, row {row} of table {table}: not a row of a table that was added")
            layouts.add(layout)
        if len(layouts) != 1:
            raise ValueError("keys are of tables of several layouts")
        layout = layouts.pop()
        if (weights.shape[1], state.shape[1]) != (layout.weight_words, layout.state_words):
            raise ValueError("weights and state have other widths than the table's layout")
        return layout

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: NDArray[np.bool_]) -> None:
        """See ``ColdTier.read``."""
        started = time.perf_counter()
        with self._lock:
            self._check_open()
            if not len(keys):
                return
            layout = self._check_keys(keys, weights, state)
            for i, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
                epochs = self._rows.get(key)
                present[i] = epochs is not None
                if epochs:
                    words = np.frombuffer(epochs[max(epochs)], np.uint64)
                    weights[slot] = words[: layout.weight_words]
                    state[slot] = words[layout.weight_words :]
            c = self._counters
            self._counters = c._replace(
                rows_read=c.rows_read + len(keys),
                rows_absent=c.rows_absent + int((~present).sum()),
                read_seconds=c.read_seconds + time.perf_counter() - started,
            )

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        """See ``ColdTier.write``."""
        started = time.perf_counter()
        with self._lock:
            self._check_open()
            if not len(keys):
                return
            layout = self._check_keys(keys, weights, state)
            if len(set(keys.tolist())) != len(keys):
                raise ValueError("keys has a row twice")
            if epoch <= self._last_version:
                raise ValueError(f"epoch={epoch} must be above {self._last_version}, the last version")
            for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
                self._rows.setdefault(key, {})[epoch] = weights[slot].tobytes() + state[slot].tobytes()
            c = self._counters
            self._counters = c._replace(
                rows_written=c.rows_written + len(keys),
                bytes_written=c.bytes_written + len(keys) * layout.row_bytes,
                write_seconds=c.write_seconds + time.perf_counter() - started,
            )

    def commit(self, payload: bytes, version: int, *, keep: int = 1) -> None:
        """See ``ColdTier.commit``; durable until the process ends."""
        with self._lock:
            self._check_open()
            if version <= self._last_version or keep < 1:
                raise ValueError(f"version={version} must be above {self._last_version}, and keep={keep} at least 1")
            self._last_version = version
            self._payloads[version] = bytes(payload)
            self._payloads = {kept: self._payloads[kept] for kept in self.versions[-keep:]}

    def rollback(self, version: int) -> None:
        """See ``ColdTier.rollback``."""
        with self._lock:
            self._check_open()
            if version not in self._payloads:
                raise ValueError(f"version={version} is not kept: there are {list(self.versions)}")
            self._payloads = {kept: payload for kept, payload in self._payloads.items() if kept <= version}
            for key, epochs in list(self._rows.items()):
                self._rows[key] = {epoch: row for epoch, row in epochs.items() if epoch <= version}
                if not self._rows[key]:
                    del self._rows[key]

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

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """See ``ColdTier.verify``; there is nothing to find. Each row counts as a segment."""
        with self._lock:
            self._check_open()
            count = len(self._rows)
            if progress is not None:
                progress(count, count)
            tables = len({key >> KEY_ROW_BITS for key in self._rows})
            size_bytes = sum(len(row) for epochs in self._rows.values() for row in epochs.values())
            return VerifyReport(tables=tables, segments=count, rows=count, bytes=size_bytes)

    def counters(self) -> ColdCounters:
        return self._counters

    @property
    def map_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._rows.clear()
