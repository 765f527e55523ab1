"""A pool: the rows of all tables of one layout, in one DDR cache over the cold tier. Here the two layers meet.

Locks, always taken in this order:

- ``fill_lock`` serialises whoever brings rows in; it is held over device reads and writes.
- ``writeback.gate`` serialises whoever writes rows back.
- ``lock`` guards the cache's bookkeeping and the bytes of rows that may change; never held over a device read or write.
  ``rows_lock`` is the same lock, or none in a read-only store.

A lease pins its rows. Pins are *transient* (released by the call that took them) or *held* (by a prefetched batch, or a
forward whose backward is to come). Held pins are at most three quarters of the slots, and no thread waits for a lease
while it keeps a transient one, so a caller that finds every slot pinned waits for others and is never stuck.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import kernels, quantized
from .cache import Admission, AdmitStatus, Announceable, CacheCounters, FullCache, RowCache
from .config import TableConfig
from .converting import RowSource
from .errors import BudgetError, ClosedError
from .floats import half_code
from .io import ColdTier
from .io.forks import disown_in_forks
from .lease import Lease, Use
from .rows import KEY_ROW_BITS, RowLayout
from .signals import shielded
from .threads import Workers
from .writeback import WriteBack

if TYPE_CHECKING:
    from .hbm.pool import HbmPool
    from .newer import Arrivals

__all__ = ["HELD_SHARE", "PIN_POLL_SECONDS", "PIN_WAIT_SECONDS", "Pool"]

_LOG: Final = logging.getLogger("tierstore")
HELD_SHARE: Final = 0.75
PIN_WAIT_SECONDS: Final = 60.0
PIN_POLL_SECONDS: Final = 0.1


class Pool:
    """See the module's docstring.

    Attributes:
        weights: float32, uint16 or uint8 [capacity, >= stored columns], the DDR arena as kernels read it.
        state: float32 [capacity, >= state_dim].
        split_batches: batches whose rows did not fit at once and were worked off in parts.
        fill_seconds: time spent bringing rows in and writing rows back.
        full: the cache, if every row has a slot of its own in it; then lookups may go by slots, with ``bring_in``.
        uses: batches that use rows of a full cache.
        hot: the tier above, in device memory, or None. It may hold newer rows.
        arrivals: if not None, told the keys of rows that are read in, under ``lock``.

    Args:
        read: brings rows in; default: as ``cold`` has them.
    """

    def __init__(
        self,
        layout: RowLayout,
        cache: RowCache,
        cold: ColdTier,
        workers: Workers,
        *,
        transaction_bytes: int,
        outbox_rows: int,
        epoch: int,
        readonly: bool,
        read: RowSource | None = None,
    ) -> None:
        self.layout = layout
        self.cache = cache
        self.full = cache if isinstance(cache, FullCache) else None
        self.workers = workers
        self.half = half_code(layout.dtype)
        self.weights: Any = cache.weights.view(layout.numpy_dtype)
        self.state: Any = cache.state.view(np.float32)
        self._make_locks(readonly=readonly)
        self._announceable = cache if isinstance(cache, Announceable) else None
        self.split_batches = 0
        self.fill_seconds = 0.0
        self.hot: HbmPool | None = None
        self.arrivals: Arrivals | None = None
        self._no_lookups = CacheCounters(lookups=0, hits=0, misses=0, evictions=0)
        self._read_rows: RowSource = read or cold.read
        self.writeback = WriteBack(
            layout,
            cache,
            cold,
            self.lock,
            transaction_bytes=transaction_bytes,
            outbox_rows=outbox_rows,
            epoch=epoch,
        )
        self._tables: dict[int, TableConfig] = {}
        self._held_slots = self._last_rows = 0
        self._said_lookahead = False
        self.uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self._dropped: deque[tuple[Any, bool]] = deque()
        self._closed = self._is_disowned = False
        disown_in_forks(self)

    def _make_locks(self, *, readonly: bool) -> None:
        self.fill_lock = threading.RLock()
        # Ctrl-C can come when a Condition, which is Python, has its lock and has not told; not so with the lock itself.
        self._plain_lock = threading.RLock()
        self.lock = threading.Condition(self._plain_lock)
        self.rows_lock: Any = contextlib.nullcontext() if readonly else self._plain_lock

    def disown(self) -> None:
        """In a forked process: refuse further use. Whoever held a lock when it was forked, one of these or that of
        numba's compiler, is not here to release it."""
        self._make_locks(readonly=False)
        self._closed = self._is_disowned = True

    def add_table(self, table_index: int, config: TableConfig) -> None:
        """Make the first values of a table's rows known."""
        self._tables[table_index] = config

    def can_announce(self, num_keys: int) -> bool:
        """See ``cache.Announceable``."""
        with self.lock:
            return self._announceable.can_announce(num_keys) if self._announceable else True

    @shielded
    def announce(self, keys: Any) -> int:
        """See ``cache.Announceable``."""
        with self.lock:
            self.require_open()
            number = self._announceable.announce(keys) if self._announceable else 0
            has_no_use = not number and self.full is None and self.can_announce(len(keys))
            if has_no_use and not self._said_lookahead:
                self._said_lookahead = True
                _LOG.warning('lookahead= changes nothing under this policy; open the store with policy="lookahead"')
            return number

    @shielded
    def retire(self, batch: int) -> None:
        """See ``cache.Announceable``."""
        with self.lock:
            if self._announceable and not self._closed:
                self._announceable.retire(batch)

    def acquire(self, keys: Any) -> Lease:
        """Pin the rows of as many leading positions of ``keys`` as there is room for, at least one.

        Args:
            keys: int64 [n], n > 0.

        Raises:
            BudgetError: every slot stayed pinned by others for a minute.
            DamagedError: a row on SSD failed its check; no row stays pinned.
        """
        return Lease(self, self._pinned(keys))

    def acquire_whole(self, keys: Any, order: Any = None) -> Lease | None:
        """Pin the rows of all ``keys``; None, and nothing is read, if there is no room for all.

        Args:
            keys: int64 [n], n > 0.
            order: int64 [n], the positions in the order in which the rows come into use; default: as they are.

        Raises:
            DamagedError: a row on SSD failed its check; no row stays pinned.
        """
        admission = Admission(keys if order is None else keys[order])
        with self.fill_lock:
            self._stage(admission, read=True, whole=True)
        if not admission.consumed:
            self._last_rows = self.cache.capacity
            return None
        if order is not None:
            numbers, admission.inverse = admission.inverse, np.empty_like(admission.inverse)
            slots, admission.unique_slots = admission.slots, np.empty_like(admission.slots)
            kernels.renumber(order, numbers, slots, admission.inverse, admission.unique_slots)
        return Lease(self, admission)

    def _pinned(self, keys: Any, rows: tuple[Any, Any] | None = None) -> Admission:
        """Admit leading positions of ``keys``, at least one; with ``rows``, put them there and unpin them."""
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            admission = Admission(keys)
            with self.fill_lock:
                self._stage(admission, read=rows is None)
                if rows is not None and admission.consumed:
                    self._put_admitted(admission, *rows)
            if admission.consumed:
                return admission
            with self.lock:
                # In short waits: a dropped lease cannot wake anyone.
                while not self.lock.wait_for(self._has_unpinned, timeout=PIN_POLL_SECONDS):
                    if time.monotonic() < deadline:
                        continue
                    raise BudgetError(
                        f"all {self.cache.capacity} rows of the DDR cache stayed pinned for {PIN_WAIT_SECONDS:.0f} s; "
                        "open the store with a larger ddr="
                    )

    def bring_in(self, slots: Any) -> None:
        """Have the rows of these slots (int32 [n], duplicates allowed) of a full cache in; they never leave it.

        Raises: as for ``acquire``.
        """
        cache = self.full
        assert cache is not None, "rows of a cache that evicts are leased"
        self.require_open()
        num_absent = 0 if cache.are_in(slots) else self._bring_absent(cache, slots)
        self.note_hits(len(slots) - num_absent)

    def note_hits(self, count: int) -> None:
        """Count lookups of rows of a full cache that were in."""
        assert self.full is not None, "of a cache that evicts, admissions are counted"
        with self._plain_lock:
            self.full.note_hits(count)

    def _bring_absent(self, cache: FullCache, slots: Any) -> int:
        absent = cache.absent(slots)
        if len(absent):
            self.acquire(cache.keys_at(absent)).release()
        return len(absent)

    def leases(self, keys: Any, order: Any = None) -> Iterator[tuple[int, Lease]]:
        """Leases that together cover ``keys`` in order: (first position, lease); one if the rows fit. ``order`` is as
        for ``acquire_whole``.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.
        """
        start = 0
        while start < len(keys):
            whole = None if start or order is None else self.acquire_whole(keys, order)
            lease = whole or self.acquire(keys[start:])
            consumed = lease.consumed
            if not start and consumed < len(keys):
                self.split_batches += 1
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed

    @property
    def has_room(self) -> bool:
        """Whether one more lease could be held, of as many rows as the last for which that was asked."""
        if self.hot is not None:
            return self.hot.has_room
        with self.lock:
            self._release_dropped()
            return self._can_hold(self._last_rows)

    def _can_hold(self, rows: int) -> bool:
        return self._held_slots + rows <= self.cache.capacity * HELD_SHARE

    def hold(self, lease: Lease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self.lock:
            self._release_dropped()
            self._last_rows = lease.num_unique
            if self._can_hold(lease.num_unique):
                self._held_slots += lease.num_unique
                lease.held = True
            return lease.held

    def release(self, slots: Any, held: bool) -> None:
        """Unpin; called by ``Lease.release``."""
        with self.lock:
            self._unpin(slots, held)
            self._release_dropped()
            self.lock.notify_all()

    def release_later(self, slots: Any, held: bool) -> None:
        """Have a lease that was dropped unpinned by whoever next takes the lock.

        The garbage collector may run this in any thread, under any lock; it must not wait for one.
        """
        self._dropped.append((slots, held))

    @property
    def num_pinned(self) -> int:
        """Slots that leases pin, or that are being written."""
        with self.lock:
            self._release_dropped()
            return self.cache.num_pinned

    def _release_dropped(self) -> None:
        while self._dropped:
            self._unpin(*self._dropped.popleft())

    def _unpin(self, slots: Any, held: bool) -> None:
        if self._is_disowned:
            return
        self.cache.unpin(slots)
        if held:
            self._held_slots -= len(slots)

    @shielded
    def read(self, keys: Any, out: Any) -> None:
        """Copy rows into ``out`` [n, dim], bits unchanged, quantized ones as float32.

        Rows in cache are copied without waiting for any device.
        """
        with self.lock:
            self.require_open()
            slots = self.cache.find(keys)
            if (slots >= 0).all() and not self.cache.is_loading(slots):
                self.cache.touch(slots)
                self._copy_out(np.arange(len(keys), dtype=np.int32), slots, out)
                return
        for start, lease in self.leases(keys):
            with self.lock:
                self._copy_out(lease.inverse, lease.slots, out[start : start + lease.consumed])

    def _copy_out(self, inverse: Any, slots: Any, out: Any) -> None:
        if self.layout.is_quantized:
            quantized.unpack_rows(inverse, slots, self.weights, self.layout.dim, self.half, out)
        else:
            kernels.copy_rows_out(inverse, slots, self.weights, self.layout.dim, out)

    @shielded
    def write(self, keys: Any, rows: Any) -> None:
        """Overwrite weights with ``rows`` [n, dim]; of equal keys the last wins; optimizer state is kept."""
        for start, lease in self.leases(keys):
            with self.lock:
                self.writeback.begin_update(lease.slots)
                kernels.copy_rows_in(
                    lease.inverse, lease.slots, rows[start : start + lease.consumed], self.weights, self.layout.dim
                )

    def take(self, keys: Any, weights: Any, state: Any) -> None:
        """Copy whole rows out, for a tier above.

        Args:
            keys: int64 [n], distinct.
            weights, state: uint64 [n, words], out.
        """
        for start, lease in self.leases(keys):
            part = slice(start, start + lease.consumed)
            with self.rows_lock:
                self._take(lease.slots, weights[part], state[part])

    def _take(self, slots: Any, weights: Any, state: Any) -> None:
        def work(begin: int, end: int) -> None:
            part = slice(begin, end)
            for arena, out in ((self.cache.weights, weights), (self.cache.state, state)):
                np.take(arena, slots[part], axis=0, out=out[part], mode="clip")

        self._over_threads(work, len(slots))

    def put(self, keys: Any, weights: Any, state: Any) -> None:
        """Overwrite whole rows, state included, with newer ones from a tier above; nothing is read for it.

        Args: as for ``take``.

        Raises:
            DiskFullError and others of the cold tier: rows that leave could not be written; some of these rows may be
            in, and what the tier above has is as new.
        """
        start = 0
        while start < len(keys):
            admission = self._pinned(keys[start:], rows=(weights[start:], state[start:]))
            start += admission.consumed

    def _put_admitted(self, admission: Admission, weights: Any, state: Any) -> None:
        """The caller holds ``fill_lock``."""
        cache, slots = self.cache, admission.slots
        with self.lock:
            is_missing = np.zeros(len(slots), np.bool_)
            is_missing[admission.missing[: admission.num_missing]] = True
            try:
                # Whole before anybody else can see them: waiting for the outbox lets others in.
                self._put_some(is_missing, slots, weights, state)
                cache.filled(slots[is_missing])
                self.writeback.begin_update(slots)
                self._put_some(~is_missing, slots, weights, state)
            finally:
                cache.unpin(slots)
                self.lock.notify_all()

    def _put_some(self, chosen: Any, slots: Any, weights: Any, state: Any) -> None:
        """Copy the chosen rows (bool [n]) into their slots."""
        places = np.flatnonzero(chosen)
        if len(places) == len(slots):
            self._put_all(slots, weights, state)
        elif len(places):
            self._put_all(slots[places], weights[places], state[places])

    def _put_all(self, slots: Any, weights: Any, state: Any) -> None:
        def work(begin: int, end: int) -> None:
            kernels.put_rows(begin, end, slots, self.cache.weights, self.cache.state, weights, state)

        self._over_threads(work, len(slots))

    def _over_threads(self, work: Callable[[int, int], Any], count: int) -> None:
        self.workers.run(work, self.workers.split(np.arange(count + 1)))

    @shielded
    def flush(self) -> None:
        """Write every dirty row to the cold tier. The rows stay cached, clean."""
        self.settle()
        with self.fill_lock:
            self.writeback.write_all()

    def exclusive(self) -> AbstractContextManager[Any]:
        """Within it, this tier has the newest value of every row, and the tier above, if there is one, has none."""
        return contextlib.nullcontext() if self.hot is None else self.hot.emptied()

    def settle(self) -> None:
        """Have the tier above, if there is one, copy its newer rows into this one."""
        if self.hot is not None:
            self.hot.flush()

    @property
    def in_use(self) -> bool:
        """Whether a batch, or some call just now, uses rows here or in the tier above, or writes them."""
        return self.num_pinned > 0 or self._has_batches or self._is_used_above

    @property
    def _has_batches(self) -> bool:
        """Whether rows here are used by batches under way: prefetched ones, or ones whose backward is to come."""
        return self._held_slots > 0 or len(self.uses) > 0

    @property
    def _is_used_above(self) -> bool:
        return self.hot is not None and self.hot.num_leased > 0

    def becomes_unused(self) -> bool:
        """Wait until no call uses rows, a minute at most; False if one does still, or a batch does."""
        with self.lock:
            self.lock.wait_for(lambda: not self.num_pinned or self._has_batches, timeout=PIN_WAIT_SECONDS)
            is_used = self.num_pinned > 0 or self._has_batches
        return not (is_used or self._is_used_above)

    @property
    def size_bytes(self) -> int:
        """Bytes of the cache and of what write-back, and moving rows to the tier above, keep beside it."""
        staging = 0 if self.hot is None else self.hot.host_bytes
        return self.cache.size_bytes + self.writeback.size_bytes + staging

    def refuse(self) -> None:
        """Refuse further use; waiters are told."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()

    def close(self) -> None:
        """Refuse further use."""
        self.refuse()
        hot, self.hot = self.hot, None  # each knows the other: memory is freed when the last one lets go, not later
        if hot is not None:
            hot.close()

    @property
    def is_clean(self) -> bool:
        """Whether nothing is to be written, neither from here nor from the tier above."""
        return not self.cache.num_dirty and (self.hot is None or not self.hot.cache.num_dirty)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        """ClosedError after ``close``."""
        if self._closed:
            raise ClosedError("the store is closed")

    def _has_unpinned(self) -> bool:
        self._release_dropped()
        return self._closed or self.cache.num_pinned < self.cache.capacity

    def _stage(self, admission: Admission, *, read: bool, whole: bool = False) -> None:
        """Admit what there is room for (with ``whole`` all or nothing) and, with ``read``, bring its rows in. The
        caller holds ``fill_lock``."""
        try:
            while True:
                with self.lock:
                    self.require_open()
                    self._release_dropped()
                    status = self.cache.admit(admission)
                    if whole and status is AdmitStatus.ALL_PINNED:
                        self._note_no_lookup(admission)
                        self._give_up(admission)
                        return
                if status is not AdmitStatus.DIRTY_VICTIM:
                    break
                started = time.perf_counter()
                self.writeback.make_room()
                self.fill_seconds += time.perf_counter() - started
            if read and admission.num_missing:
                self._load(admission.missing_slots)
        except BaseException:
            with self.lock:
                if not read:
                    self._note_no_lookup(admission)
                self._give_up(admission)
            raise
        if not read:
            self._note_no_lookup(admission)

    def _give_up(self, admission: Admission) -> None:
        self.cache.abandon(admission)
        self.lock.notify_all()

    def _note_no_lookup(self, admission: Admission) -> None:
        """What the cache counted for it is no lookup: rows came down from the tier above, or nothing came of it."""
        lookups, hits, misses, _ = self._no_lookups
        self._no_lookups = CacheCounters(
            lookups=lookups + admission.consumed,
            hits=hits + admission.num_unique - admission.num_missing,
            misses=misses + admission.num_missing,
            evictions=0,
        )

    def counters(self) -> CacheCounters:
        """What was looked up in the cache, and what was evicted from it for that or for rows that came down."""
        every, others = self.cache.counters(), self._no_lookups
        return CacheCounters(
            lookups=every.lookups - others.lookups,
            hits=every.hits - others.hits,
            misses=every.misses - others.misses,
            evictions=every.evictions,
        )

    def _load(self, slots: Any) -> None:
        """Read rows into their reserved slots; rows never written get their first value."""
        started = time.perf_counter()
        cache = self.cache
        keys = cache.keys_of(slots)
        present = np.empty(len(keys), np.bool_)
        self._read_rows(keys, slots, cache.weights, cache.state, present)
        if not present.all():
            self._fill_first_values(keys[~present], slots[~present])
        with self.lock:
            cache.filled(slots)
            if self.arrivals is not None:
                self.arrivals.add(keys)
        self.fill_seconds += time.perf_counter() - started

    def _fill_first_values(self, keys: Any, slots: Any) -> None:
        table_indices = keys >> KEY_ROW_BITS
        for table_index in np.unique(table_indices):
            config = self._tables[int(table_index)]
            chosen = table_indices == table_index
            fill = partial(quantized.fill_first_values, config.init) if self.layout.is_quantized else config.init.fill
            fill(keys[chosen], slots[chosen], self.weights, self.layout.dim, self.half)
            self.state[slots[chosen]] = 0
            self.state[slots[chosen], : self.layout.state_dim] = config.optimizer.initial_state
