"""Leases of rows by key, whole batches or parts of them; rows are fetched first: slots are reserved, next victims
written back, and rows read or their first values computed."""

import time
from collections.abc import Callable, Iterator

import numpy as np

from ..cache.base import Admission, AdmitStatus, CacheCounters
from ..config import TableConfig
from ..errors import BudgetError
from ..kernels import slots as kernels
from ..kernels.arrays import Int32s, Int64s
from ..layout import KEY_ROW_BITS
from .arena import PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Arena, Lease, Pins
from .converting import RowSource
from .joined import NO_INTS
from .writeback import WriteBack

Fill = Callable[[Admission], None]
"""Fills the rows of an admission."""


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

    def add_table(self, table_index: int, config: TableConfig) -> None:
        self._tables[table_index] = config
        firsts, alike = dict[str, int](), np.zeros(max(self._tables) + 1, np.int64)
        for index, each in self._tables.items():  # 0.0 and -0.0 are equal, and not alike
            rule = repr((each.init, each.init.place, each.optimizer.initial_state))
            alike[index] = firsts.setdefault(rule, index)
        self._alike = alike

    def whole(self, keys: Int64s, order: Int32s = NO_INTS) -> Lease | None:
        """Pin the rows of all positions of ``keys``, int64 [n], admitted by ``order`` (of ``Admission``). None, and
        nothing is read, if there is no room for all; others may have been evicted by then. DamagedError: a row on SSD
        failed its check; none stays pinned."""
        lease = self._admit(keys, order, whole=True)
        return lease if len(lease.slots) else None

    def leading(self, keys: Int64s, *, read: bool = True, fill: Fill | None = None) -> Lease:
        """Pin the rows of leading positions of ``keys``, int64 [n], n > 0: as many as there is room for, at least one.
        Errors as of ``whole``; BudgetError: every slot stayed pinned by others for a minute. ``read``: whether to read
        them; ``fill`` fills them, with ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            lease = self._admit(keys, NO_INTS, read=read, fill=fill)
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

    def parts(self, keys: Int64s, order: Int32s = NO_INTS) -> Iterator[tuple[int, Lease]]:
        """Leases that together cover ``keys`` in order: (first position, lease); one if the rows fit, admitted by
        ``order`` then.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.
        """
        start = 0
        while start < len(keys):
            lease = None if start or not len(order) else self._admit(keys, order, whole=True)
            if lease is None or not len(lease.slots):
                lease = self.leading(keys[start:])
            consumed = lease.num_positions
            self.split_batches += not start and consumed < len(keys)
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed

    def _admit(
        self, keys: Int64s, order: Int32s, *, read: bool = True, whole: bool = False, fill: Fill | None = None
    ) -> Lease:
        """A lease of what was admitted: as many rows as there is room for, with ``whole`` all or nothing. It owns the
        pins before there are any."""
        admission = Admission(keys, order)
        lease = self._pins.lease(admission)
        try:
            with self._arena.fill_lock:
                try:
                    while self._admit_until(admission, whole=whole) is AdmitStatus.DIRTY_VICTIM:
                        started = time.perf_counter()
                        self._writeback.make_room()
                        self.seconds += time.perf_counter() - started
                    consumed, num_unique, num_missing, _ = admission.progress.tolist()
                    slots = admission.unique_slots[:num_unique]
                    if read and num_missing:
                        self._load(keys[admission.missing[:num_missing]], admission.missing_slots)
                finally:
                    if not read:
                        self._note_no_lookup(admission)
                if fill is not None and consumed:
                    fill(admission)
            lease.slots, lease.inverse, lease.num_positions = slots, admission.inverse[:consumed], consumed
        except BaseException:
            lease.release()
            raise
        return lease

    def _admit_until(self, admission: Admission, *, whole: bool) -> AdmitStatus:
        arena = self._arena
        with arena.lock:
            if arena.is_closed:
                arena.require_open()
            self._pins.release_dropped()
            status = arena.cache.admit(admission)
            if whole and status is AdmitStatus.ALL_PINNED:
                self._note_no_lookup(admission)
                arena.cache.release(admission)
                arena.changed.notify_all()
        return status

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
            lookups=every.lookups - others.lookups,
            hits=every.hits - others.hits,
            misses=every.misses - others.misses,
            evictions=every.evictions,
        )

    def _load(self, keys: Int64s, slots: Int32s) -> None:
        """Read rows into their reserved slots; rows never written get their first value."""
        started = time.perf_counter()
        cache = self._arena.cache
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
        initial_state = config.optimizer.initial_state

        def work(begin: int, end: int) -> None:
            config.init.fill(ids[begin:end], slots[begin:end], arena.weights, layout.dim, arena.dtype_code)
            kernels.fill_state(slots[begin:end], arena.state, layout.state_dim, initial_state)

        arena.workers.divide(work, len(ids))
