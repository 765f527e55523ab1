"""The rows of one cache as kernels read and pool them, the locks over them, and leases: rows of a batch that are
fetched and stay in their slots, by pins, until they are released.

Pins are *transient* (released by the call that took them) or *held* (by a prefetched batch, or a forward whose backward
is to come). Held pins are at most three quarters of the slots, and no thread waits for a lease while it keeps a
transient one. So a caller that finds every slot pinned waits for others and never deadlocks.
"""

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..cache.base import NUM_UNIQUE, Admission, AdmitStatus, CacheCounters, Pinned, RowCache
from ..config import TableConfig
from ..errors import BudgetError, ClosedError
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s, Weights
from ..kernels.floats import FLOAT32, code_of_dtype
from ..kernels.threads import Workers
from ..layout import KEY_ROW_BITS, RowLayout
from ..system.processes import disown_in_forks
from .converting import RowSource
from .joined import NO_INTS, Bags

HELD_SHARE: Final = 0.75
PIN_WAIT_SECONDS: Final = 60.0
PIN_POLL_SECONDS: Final = 0.1

_NOTHING: Final = Pinned(0)


@dataclass(eq=False)
class RowArrays:
    """Rows as kernels read and update them: float32, uint16 or uint8 [capacity, >= stored columns], and state, float32
    [capacity, >= state_dim]."""

    layout: RowLayout
    dtype_code: int
    weights: Weights
    state: Floats

    @classmethod
    def plain(cls, weights: Floats) -> "RowArrays":
        """float32 [n, dim] without state."""
        return RowArrays(RowLayout(dim=weights.shape[1]), FLOAT32, weights, np.zeros((len(weights), 0), np.float32))

    def pool(
        self, workers: Workers, bags: Bags, mode: int, out: Floats, arg_max: Int32s, first: int, slots: Int32s
    ) -> None:
        """Pool the positions from ``first`` on, whose slots are given, into ``out``, float32 [batch, columns], and of
        maxima the positions into ``arg_max``, int32 [bags, dim]. The caller holds the lock over the rows, if any."""
        pool_rows: Any = quantized.pool_rows if self.layout.is_quantized else kernels.pool_rows

        def work(begin: int, end: int) -> None:
            pool_rows(
                begin, end, first, first + len(slots), bags.starts, slots, bags.scale, mode, self.weights,
                self.layout.dim, self.dtype_code, bags.columns, bags.batch, out, arg_max,
            )  # fmt: skip

        workers.share(work, bags.starts)

    def dot(self, bags: Bags, grad_out: Floats, first: int, slots: Int32s, grad_scale: Floats) -> None:
        """Add the gradients of the weights of the positions from ``first`` on, given ``grad_out``, float32 [batch,
        columns], to ``grad_scale``, float32 [N]; see ``pool``."""
        dot_rows: Any = quantized.dot_rows if self.layout.is_quantized else kernels.dot_rows
        dot_rows(
            0, len(bags.starts) - 1, first, first + len(slots), bags.starts, slots, self.weights, self.layout.dim,
            self.dtype_code, bags.columns, bags.batch, grad_out, grad_scale,
        )  # fmt: skip


class Arena(RowArrays):
    """A cache's rows. ``changed`` is the condition of ``lock``: slots were released, the outbox has room, or the pool
    was closed. ``is_disowned``: this is a forked process, which may not use the rows."""

    def __init__(self, layout: RowLayout, cache: RowCache, workers: Workers, *, readonly: bool) -> None:
        super().__init__(
            layout, code_of_dtype(layout.dtype), cache.weights.view(layout.numpy_dtype), cache.state.view(np.float32)
        )
        self.cache = cache
        self.workers = workers
        self.is_closed = self.is_disowned = False
        self._make_locks(readonly=readonly)
        disown_in_forks(self)

    def _make_locks(self, *, readonly: bool) -> None:
        self.fill_lock = threading.RLock()
        # An exception can come when a Condition, which is Python, has its lock and woke nobody; not so with the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.rows_lock: Any = contextlib.nullcontext() if readonly else self.lock

    def disown(self) -> None:
        """Refuse further use in a forked process. A thread that held one of these locks, or the lock of numba's
        compiler, at the fork does not exist here to release it."""
        self._make_locks(readonly=False)
        self.is_closed = self.is_disowned = True

    def refuse(self) -> None:
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()

    def require_open(self) -> None:
        """ClosedError after ``refuse``."""
        if self.is_closed:
            raise ClosedError("the store is closed")


class Lease:
    """The rows of a batch's leading positions, kept in their ``slots``, int32 [n]. ``inverse``, int32 [positions]: each
    one's place in ``slots``; None if slot i is position i's. ``held``: it outlives the call that took it."""

    __slots__ = ("__weakref__", "claim", "held", "inverse", "num_positions", "pins", "slots")

    def __init__(self, pins: "Pins", slots: Int32s) -> None:
        self.pins: Pins | None = pins  # None once it is released
        self.claim: weakref.ref[Lease] | None = None
        self.slots = slots
        self.inverse: Int32s | None = None
        self.num_positions = len(slots)
        self.held = False

    @property
    def position_slots(self) -> Int32s:
        """int32 [num_positions]: the slot of each position."""
        return self.slots if self.inverse is None else self.slots.take(self.inverse)

    def release(self) -> None:
        """Let the rows go; a second call does nothing."""
        pins, self.pins = self.pins, None
        if pins is not None and self.claim is not None:
            pins.release(self.claim)
            self.claim = None


class _Claim(weakref.ref[Lease]):
    """A key for what a lease has, also once the lease is gone."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Pins:
    """What leases pin. A lease that is dropped leaves its weak reference in a queue, and its slots are unpinned by the
    next call: nothing of Python runs where it is dropped, as no exception can come then, and the garbage collector
    may drop it in any thread, under any lock."""

    def __init__(self, arena: Arena) -> None:
        self.dropped: deque[weakref.ref[Lease]] = deque()
        self._arena = arena
        self._most_held = arena.cache.capacity * HELD_SHARE
        self._pinned: dict[weakref.ref[Lease], Pinned] = {}
        self._held: dict[weakref.ref[Lease], int] = {}

    def lease(self, pinned: Pinned = _NOTHING, slots: Int32s = NO_INTS) -> Lease:
        """A lease of what will be pinned in ``pinned``, without slots yet; however it ends, they are unpinned. Of rows
        that never leave their ``slots``, int32 [n], one a position, nothing is pinned."""
        lease = Lease(self, slots)
        claim = _Claim(lease, self.dropped.append)
        self._pinned[claim] = pinned
        lease.claim = claim
        return lease

    def has_unpinned(self) -> bool:
        """Whether a slot may be had, or waiting for one is over. The caller holds the lock."""
        self.release_dropped()
        return self._arena.is_closed or self._arena.cache.num_pinned < self._arena.cache.capacity

    def has_room(self, num_slots: int) -> bool:
        """Whether one more lease, of so many slots, could be held."""
        with self._arena.lock:
            if self.dropped:
                self.release_dropped()
            return sum(self._held.values()) + num_slots <= self._most_held

    def hold(self, lease: Lease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self._arena.lock:
            claim = lease.claim
            assert claim is not None, "a lease that was released"
            if self.dropped:
                self.release_dropped()
            num_slots = 0 if self._pinned[claim] is _NOTHING else len(lease.slots)
            lease.held = sum(self._held.values()) + num_slots <= self._most_held
            if lease.held:
                self._held[claim] = num_slots
            return lease.held

    def release(self, claim: weakref.ref[Lease]) -> None:
        with self._arena.lock:
            pinned = self._pinned.get(claim, _NOTHING)
            if pinned.progress.item(NUM_UNIQUE) and not self._arena.is_disowned:
                self._arena.cache.release(pinned)
            self._held.pop(claim, None)
            self._pinned.pop(claim, None)
            self._arena.changed.notify_all()

    def release_dropped(self) -> None:
        """Unpin what leases had that were dropped. The caller holds the lock."""
        while self.dropped:
            self.release(self.dropped[0])
            self.dropped.popleft()

    @property
    def num_pinned(self) -> int:
        """Slots that leases pin, or that are being written."""
        with self._arena.lock:
            self.release_dropped()
            return self._arena.cache.num_pinned

    @property
    def num_held(self) -> int:
        """Leases held: of batches that were prefetched, or whose backward is to come."""
        with self._arena.lock:
            self.release_dropped()
            return len(self._held)


class Leases:
    """Makes leases of an arena's rows. It fetches them first: slots are reserved, next victims written back by
    ``make_room``, and rows read by ``read_rows`` or their first values computed. ``split_batches``: those whose rows
    did not fit at once; ``seconds``: spent bringing rows in and writing rows back."""

    def __init__(self, arena: Arena, pins: Pins, make_room: Callable[[], None], read_rows: RowSource) -> None:
        self.split_batches = 0
        self.last_was_split = False
        self.seconds = 0.0
        self._arena = arena
        self._pins = pins
        self._make_room = make_room
        self._read_rows = read_rows
        self._tables: dict[int, TableConfig] = {}
        self._alike: Int64s = np.empty(0, np.int64)  # of each table, the first one with the same first values
        self._no_lookups = np.zeros(4, np.int64)  # ``CacheCounters`` of what is none

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

    def leading(self, keys: Int64s, *, fill: Callable[[Admission], None] | None = None) -> Lease:
        """Pin the rows of leading positions of ``keys``, int64 [n], n > 0: as many as there is room for, at least one.
        Errors as of ``whole``; BudgetError: every slot stayed pinned by others for a minute. With ``fill`` nothing is
        read: it fills the rows of the admission, with ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            lease = self._admit(keys, NO_INTS, fill=fill)
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
            if not start:
                self.last_was_split = consumed < len(keys)
                self.split_batches += self.last_was_split
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed

    def _admit(
        self, keys: Int64s, order: Int32s, *, whole: bool = False, fill: Callable[[Admission], None] | None = None
    ) -> Lease:
        """A lease of what was admitted: as many rows as there is room for, with ``whole`` all or nothing. It owns the
        pins before there are any."""
        arena, admission = self._arena, Admission(keys, order)
        lease = self._pins.lease(admission)
        try:
            with arena.fill_lock:
                try:
                    while True:
                        with arena.lock:
                            if arena.is_closed:
                                arena.require_open()
                            if self._pins.dropped:
                                self._pins.release_dropped()
                            status = arena.cache.admit(admission)
                            if whole and status is AdmitStatus.ALL_PINNED:
                                self._note_no_lookup(admission)
                                arena.cache.release(admission)
                                arena.changed.notify_all()
                        if status is not AdmitStatus.DIRTY_VICTIM:
                            break
                        started = time.perf_counter()
                        self._make_room()
                        self.seconds += time.perf_counter() - started
                    consumed, num_unique, num_missing, _ = admission.progress.tolist()
                    slots = admission.unique_slots[:num_unique]
                    if fill is None and num_missing:
                        missing = admission.missing[:num_missing]
                        self._load(keys[missing], slots[admission.inverse[missing]])
                finally:
                    if fill is not None:
                        self._note_no_lookup(admission)
                if fill is not None and consumed:
                    fill(admission)
            lease.slots, lease.inverse, lease.num_positions = slots, admission.inverse[:consumed], consumed
        except BaseException:
            lease.release()
            raise
        return lease

    def _note_no_lookup(self, admission: Admission) -> None:
        """Take an admission out of the lookup counts: its rows came from the tier above, or it was undone."""
        num_missing = admission.num_missing
        self._no_lookups += (admission.consumed, admission.num_unique - num_missing, num_missing, 0)

    def counters(self) -> CacheCounters:
        """Counts of lookups in the cache, and of evictions for lookups or for rows from the tier above."""
        return CacheCounters(*(np.array(self._arena.cache.counters()) - self._no_lookups).tolist())

    def _load(self, keys: Int64s, slots: Int32s) -> None:
        """Read rows into their reserved slots; rows never written get their first value."""
        started = time.perf_counter()
        cache = self._arena.cache
        present = np.empty(len(keys), np.bool_)
        self._read_rows(keys, slots, cache.weights, cache.state, present)
        if np.count_nonzero(present) < len(keys):
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
            if layout.state_dim:
                kernels.fill_state(slots[begin:end], arena.state, layout.state_dim, config.optimizer.initial_state)

        arena.workers.divide(work, len(ids))
