"""Leases of rows by key, whole batches or parts of them; rows are fetched first: slots are reserved, next victims
written back, and rows read or their first values computed."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..cache.base import Admission, AdmitStatus, CacheCounters
from ..config import TableConfig
from ..errors import BudgetError
from ..kernels import slots as kernels
from ..kernels.arrays import Int32s, Int64s
from ..layout import KEY_ROW_BITS
from .arena import Arena
from .bags import Batch, Distinct
from .converting import RowSource
from .pins import PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Lease, Pins
from .writeback import WriteBack


class Leases:
    """Makes leases of an arena's rows, which it has fetched first, by ``read_rows``. ``split_batches``: those whose
    rows did not fit at once and were processed in parts; ``seconds``: spent bringing rows in and writing rows back."""

    def __init__(self, arena: Arena, pins: Pins, writeback: WriteBack, read_rows: RowSource) -> None:
        self.split_batches = 0
        self.seconds = 0.0
        self._arena = arena
        self._pins = pins
        self._writeback = writeback
        self._read_rows = read_rows
        self._tables: dict[int, TableConfig] = {}
        self._alike: Int64s = np.empty(0, np.int64)  # of each table, the first one with the same first values
        self._no_lookups = CacheCounters(lookups=0, hits=0, misses=0, evictions=0)
        self._repeats = 0  # positions whose row others of their batch had admitted

    def add_table(self, table_index: int, config: TableConfig) -> None:
        self._tables[table_index] = config
        firsts, alike = dict[str, int](), np.zeros(max(self._tables) + 1, np.int64)
        for index, each in self._tables.items():  # 0.0 and -0.0 are equal, and not alike
            rule = repr((each.init, each.init.place, each.optimizer.initial_state))
            alike[index] = firsts.setdefault(rule, index)
        self._alike = alike

    def acquire(self, keys: Int64s, *, read: bool = True, fill: Callable[[Admission], None] | None = None) -> Lease:
        """Pin the rows of leading positions of ``keys``, int64 [n], n > 0: as many as there is room for, at least one.
        BudgetError: every slot stayed pinned by others for a minute. DamagedError: a row on SSD failed its check;
        none stays pinned. ``read``: whether to read them; ``fill`` fills them, with ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            lease = self._admit(keys, read=read, fill=fill)
            if len(lease.slots):
                return lease
            with arena.lock:
                # In short waits: a dropped lease cannot wake anyone.
                while not arena.changed.wait_for(self._pins.has_unpinned, timeout=PIN_POLL_SECONDS):
                    if time.monotonic() >= deadline:
                        raise BudgetError(
                            f"all {arena.cache.capacity} rows of the DDR cache stayed pinned for "
                            f"{PIN_WAIT_SECONDS:.0f} s; open the store with a larger ddr="
                        )

    def acquire_batch(self, batch: Batch) -> Lease | None:
        """``acquire_rows`` of all rows of a batch, to look them up in order of use."""
        lease = self.acquire_rows(batch.distinct, batch.order)
        if lease is not None:
            with self._arena.lock:
                self._repeats += len(batch) - len(lease.slots)
        return lease

    def acquire_rows(self, rows: Distinct, order: Any) -> Lease | None:
        """Pin rows; None, and nothing is read, if there is no room for all. ``order``: what their keys are indexed by
        to be admitted in order. DamagedError as of ``acquire``."""
        if len(rows.keys) > self._arena.cache.capacity:
            return None
        lease = self.acquire_all(np.ascontiguousarray(rows.keys[order]))
        if lease is not None:
            slots = np.empty_like(lease.slots)
            slots[order] = lease.slots
            lease.slots, lease.inverse = slots, rows.inverse
        return lease

    def acquire_all(self, keys: Int64s) -> Lease | None:
        """``acquire`` of all positions; None, and nothing is read, if there is no room for their rows. Others may have
        been evicted by then."""
        lease = self._admit(keys, read=True, whole=True)
        return lease if len(lease.slots) else None

    def _admit(
        self, keys: Int64s, *, read: bool, whole: bool = False, fill: Callable[[Admission], None] | None = None
    ) -> Lease:
        """A lease of what was admitted. It owns the pins before there are any."""
        admission = Admission(keys)
        lease = self._pins.lease(admission)
        try:
            with self._arena.fill_lock:
                self._bring_in(admission, read=read, whole=whole)
                if fill is not None and admission.consumed:
                    fill(admission)
            lease.slots, lease.inverse = admission.slots, admission.inverse[: admission.consumed]
        except BaseException:
            lease.release()
            raise
        return lease

    def _bring_in(self, admission: Admission, *, read: bool, whole: bool) -> None:
        """Admit as many rows as there is room for (with ``whole`` all or nothing), and with ``read`` read them. What
        was pinned when it failed is the caller's to release. The caller holds ``fill_lock``."""
        arena = self._arena
        try:
            while True:
                with arena.lock:
                    arena.require_open()
                    self._pins.release_dropped()
                    status = arena.cache.admit(admission)
                    if whole and status is AdmitStatus.ALL_PINNED:
                        self._note_no_lookup(admission)
                        arena.cache.release(admission)
                        arena.changed.notify_all()
                        return
                if status is not AdmitStatus.DIRTY_VICTIM:
                    break
                started = time.perf_counter()
                self._writeback.make_room()
                self.seconds += time.perf_counter() - started
            if read and admission.num_missing:
                self._load(admission.missing_slots)
        finally:
            if not read:
                self._note_no_lookup(admission)

    def _note_no_lookup(self, admission: Admission) -> None:
        """Take an admission out of the lookup counts: its rows came from the tier above, or it was undone."""
        lookups, hits, misses, _ = self._no_lookups
        self._no_lookups = CacheCounters(
            lookups=lookups + admission.consumed,
            hits=hits + admission.num_unique - admission.num_missing,
            misses=misses + admission.num_missing,
            evictions=0,
        )

    def counters(self) -> CacheCounters:
        """Counts of lookups in the cache, and of evictions for lookups or for rows from the tier above."""
        every, others = self._arena.cache.counters(), self._no_lookups
        return CacheCounters(
            lookups=every.lookups - others.lookups + self._repeats,
            hits=every.hits - others.hits,
            misses=every.misses - others.misses,
            evictions=every.evictions,
        )

    def _load(self, slots: Int32s) -> None:
        """Read rows into their reserved slots; rows never written get their first value."""
        started = time.perf_counter()
        cache = self._arena.cache
        keys = cache.keys_of(slots)
        present = np.empty(len(keys), np.bool_)
        self._read_rows(keys, slots, cache.weights, cache.state, present)
        if not present.all():
            keys, unwritten = keys[~present], slots[~present]
            alike = self._alike[keys >> KEY_ROW_BITS]
            for table_index in np.unique(alike).tolist():
                chosen = alike == table_index
                self.fill_first_values(table_index, keys[chosen], unwritten[chosen])
        with self._arena.lock:
            cache.filled(slots)
        self.seconds += time.perf_counter() - started

    def fill_first_values(self, table_index: int, ids: Int64s, slots: Int32s) -> None:
        """First values and state of rows of a table, by ``ids``, int64 [n]: keys, unless ids are dynamic."""
        arena, layout, config = self._arena, self._arena.layout, self._tables[table_index]

        def work(begin: int, end: int) -> None:
            config.init.fill(ids[begin:end], slots[begin:end], arena.weights, layout.dim, arena.dtype_code)
            kernels.fill_state(slots[begin:end], arena.state, layout.state_dim, config.optimizer.initial_state)

        arena.workers.divide(work, len(ids))

    def parts(self, keys: Int64s, batch: Batch | None = None) -> Iterator[tuple[int, Lease]]:
        """Leases that together cover ``keys`` in order: (first position, lease); one if the rows fit. ``batch``: whose
        rows they are, to be admitted in its order if all fit.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.
        """
        start = 0
        while start < len(keys):
            whole = None if start or batch is None or not batch.by_sample else self.acquire_batch(batch)
            lease = whole or self.acquire(keys[start:])
            consumed = lease.num_positions
            if not start and consumed < len(keys):
                self.split_batches += 1
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed
