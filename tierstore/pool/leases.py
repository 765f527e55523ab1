"""Leases of rows by key, whole batches or parts of them, and the lookups that use them; rows are brought in first.

To bring rows in is to reserve slots, write next victims back, and read rows or compute their first values.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..cache import Admission, AdmitStatus, CacheCounters, DdrCache
from ..config import TableConfig
from ..errors import BudgetError
from ..kernels import slots as kernels
from ..kernels.arrays import Int32s, Int64s
from ..layout import KEY_ROW_BITS
from .arena import Arena, pool_part
from .bags import NO_INTS, Bags, Batch, Distinct, FromIds, IdsOfBags, Numbering, Pooling, Update
from .converting import RowSource
from .one_table import InCache, OneTable, has_one_call
from .pins import PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Lease, Pins
from .writeback import WriteBack


class Leases:
    """Makes leases of an arena's rows, which it has brought in first, by ``read_rows``. ``split_batches``: those whose
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

    def acquire(self, keys: Int64s) -> Lease:
        """Pin the rows of leading positions of ``keys``, int64 [n], n > 0: as many as there is room for, at least one.
        BudgetError: every slot stayed pinned by others for a minute. DamagedError: a row on SSD failed its check;
        none stays pinned."""
        return self.admit_some(keys, read=True)

    def acquire_whole(self, batch: Batch) -> Lease | None:
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
        if lease is None:
            return None
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
            consumed = admission.consumed
            lease.slots, lease.inverse = admission.slots, admission.inverse[:consumed]
        except BaseException:
            lease.release()
            raise
        return lease

    def _bring_in(self, admission: Admission, *, read: bool, whole: bool) -> None:
        """Admit as many rows as there is room for (with ``whole`` all or nothing). With ``read``, read them too. What
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
            self._fill_first_values(keys[~present], slots[~present])
        with self._arena.lock:
            cache.filled(slots)
        self.seconds += time.perf_counter() - started

    def _fill_first_values(self, keys: Int64s, slots: Int32s) -> None:
        alike = self._alike[keys >> KEY_ROW_BITS]
        for table_index in np.unique(alike).tolist():
            chosen = alike == table_index
            self.fill_first_values(table_index, keys[chosen], slots[chosen])

    def fill_first_values(self, table_index: int, ids: Int64s, slots: Int32s) -> None:
        """First values and state of rows of a table, by ``ids``, int64 [n]: keys, unless ids are dynamic."""
        arena, layout, config = self._arena, self._arena.layout, self._tables[table_index]

        def work(begin: int, end: int) -> None:
            config.init.fill(ids[begin:end], slots[begin:end], arena.weights, layout.dim, arena.dtype_code)
            kernels.fill_state(slots[begin:end], arena.state, layout.state_dim, config.optimizer.initial_state)

        arena.over_threads(work, len(ids))

    def admit_some(self, keys: Int64s, *, read: bool, fill: Callable[[Admission], None] | None = None) -> Lease:
        """Pin the rows of leading positions of ``keys``, at least one. ``read`` reads them; ``fill`` fills them, with
        ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            lease = self._admit(keys, read=read, fill=fill)
            if len(lease.slots):
                return lease
            with arena.lock:
                # In short waits: a dropped lease cannot wake anyone.
                while not arena.changed.wait_for(self._pins.has_unpinned, timeout=PIN_POLL_SECONDS):
                    if time.monotonic() < deadline:
                        continue
                    raise BudgetError(
                        f"all {arena.cache.capacity} rows of the DDR cache stayed pinned for {PIN_WAIT_SECONDS:.0f} s; "
                        "open the store with a larger ddr="
                    )

    def parts(self, keys: Int64s, batch: Batch | None = None) -> Iterator[tuple[int, Lease]]:
        """Leases that together cover ``keys`` in order: (first position, lease); one if the rows fit. ``batch``: whose
        rows they are, to be admitted in its order if all fit.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.
        """
        start = 0
        while start < len(keys):
            whole = None if start or batch is None or not batch.by_sample else self.acquire_whole(batch)
            lease = whole or self.admit_some(keys[start:], read=True)
            consumed = lease.num_positions
            if not start and consumed < len(keys):
                self.split_batches += 1
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed


class ResidentRows(ABC):
    """Brings in, looks up and updates the rows of a batch. A lease that is given is of the whole batch, or None. Slots
    are of ``numbering``, which batches have here; without one they have keys. Methods raise ClosedError if the pool
    was closed, and DamagedError if a row on SSD failed its check."""

    numbering: Numbering | None = None
    takes_ids = False

    def __init__(self, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        self._arena = arena
        self._pins = pins
        self._leases = leases
        self._writeback = writeback

    @property
    def are_all_in(self) -> bool:
        """Whether every row is in, to stay."""
        return False

    @abstractmethod
    def has_room(self, batch: Batch) -> bool:
        """Whether the rows could be held, beside those that are."""

    @abstractmethod
    def stage(self, batch: Batch) -> Lease | None:
        """Bring the rows in and hold them; None, and nothing is read, if there is no room."""

    @abstractmethod
    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        """(first position, lease): parts of the batch, in order. A lease is over when the next is asked for."""

    def look_up_ids(self, ids: IdsOfBags, bags: Bags, pooling: Pooling, *, keep: bool) -> FromIds:
        """Check ids and pool every bag, in one pass, if it ``takes_ids``; ``keep`` asks for slots."""
        raise NotImplementedError("rows are found by key")

    def held(self, slots: Int32s) -> Lease:
        """A held lease of rows that ``look_up_ids`` gave the slots of."""
        raise NotImplementedError("slots are pinned by key")

    @abstractmethod
    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        """Pool every bag. Returns the lease; with ``keep``, one that is held, if there is room."""

    @abstractmethod
    def whole(self, batch: Batch) -> Lease | None:
        """A lease of all rows of the batch, for ``update``; None if they do not fit, or there are none."""

    @abstractmethod
    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        """Merge each row's gradients in their fixed order, mark it dirty, update it. Without a lease, if a later part
        of a split batch cannot be brought in, the rows of earlier parts are updated."""

    @abstractmethod
    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """A short way for small lookups of a table, if there is one."""


class EvictingRows(ResidentRows):
    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        is_ours = isinstance(self._arena.cache, DdrCache) and has_one_call(self._arena)
        return InCache(self._arena, self._leases, table_index, num_rows) if is_ours else None

    def has_room(self, batch: Batch) -> bool:
        return self._pins.has_room(len(batch.distinct.keys))

    def stage(self, batch: Batch) -> Lease | None:
        lease = self._leases.acquire_whole(batch) if len(batch) and self.has_room(batch) else None
        if lease is None or self._pins.hold(lease):
            return lease
        lease.release()
        return None

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        return self._leases.parts(batch.rows, batch) if lease is None else iter([(0, lease)])

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        count = len(batch.rows)
        if not count:
            pool_part(self._arena, self._arena.workers, batch.bags, pooling, 0, NO_INTS)
        parts = self._leases.parts(batch.rows, batch) if lease is None else ((0, lease),)
        for first, part in parts:
            with self._arena.rows_lock:
                pool_part(self._arena, self._arena.workers, batch.bags, pooling, first, part.position_slots)
            if keep and not part.held and part.num_positions == count and self._pins.hold(part):
                lease = part
        return lease

    def whole(self, batch: Batch) -> Lease | None:
        # Rows used last first: they are the likeliest to be still resident.
        return self._leases.acquire_rows(batch.distinct, slice(None, None, -1)) if len(batch) else None

    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        if lease is None:
            inverse, keys = batch.distinct
        else:
            assert lease.inverse is not None, "slots of this cache are not the positions' own"
            inverse, keys = lease.inverse, np.empty(len(lease.slots), np.int64)
            if update.seeds is not None:
                keys[inverse] = batch.rows
        groups = update.groups
        groups.by_number(inverse, len(keys))
        for first, slots in self._row_parts(keys, lease):
            with self._arena.lock:
                self._writeback.begin_update(slots)
                row_keys = None if update.seeds is None else keys[first:]
                groups.update(self._arena, first, slots, update.codes, update.hyper, update.gradient,
                              seeds=update.seeds, keys=row_keys)  # fmt: skip

    def _row_parts(self, keys: Int64s, lease: Lease | None) -> Iterator[tuple[int, Int32s]]:
        """(first number, int32 slot of each from there on): parts of the rows, pinned. Rows used last come first: they
        are the likeliest to be still resident."""
        if lease is not None:
            yield 0, lease.slots
            return
        for passed, part in self._leases.parts(keys[::-1].copy()):
            yield len(keys) - passed - len(part.slots), part.slots[::-1].copy()
