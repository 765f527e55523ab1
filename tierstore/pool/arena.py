"""The rows of one cache as kernels read and pool them, the locks over them, and leases: rows of a batch that stay in
their slots until they are released, by pins.

Pins are *transient* (released by the call that took them) or *held* (by a prefetched batch, or a forward whose backward
is to come). Held pins are at most three quarters of the slots, and no thread waits for a lease while it keeps a
transient one. So a caller that finds every slot pinned waits for others and never deadlocks.
"""

import contextlib
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..cache.base import NUM_UNIQUE, Pinned, RowCache
from ..errors import ClosedError
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Weights
from ..kernels.floats import FLOAT32, code_of_dtype
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..system.processes import disown_in_forks
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
        return self.slots if self.inverse is None else self.slots[self.inverse]

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
        self._arena = arena
        self._most_held = arena.cache.capacity * HELD_SHARE
        self._pinned: dict[weakref.ref[Lease], Pinned] = {}
        self._held: dict[weakref.ref[Lease], int] = {}
        self._dropped: deque[weakref.ref[Lease]] = deque()

    def lease(self, pinned: Pinned, slots: Int32s = NO_INTS) -> Lease:
        """A lease of what will be pinned in ``pinned``, without slots yet; however it ends, they are unpinned."""
        lease = Lease(self, slots)
        claim = _Claim(lease, self._dropped.append)
        self._pinned[claim] = pinned
        lease.claim = claim
        return lease

    def in_place(self, slots: Int32s) -> Lease:
        """A lease of rows that never leave their slots (int32 [n], one a position): nothing is pinned."""
        return self.lease(_NOTHING, slots)

    def has_unpinned(self) -> bool:
        """Whether a slot may be had, or waiting for one is over. The caller holds the lock."""
        self.release_dropped()
        return self._arena.is_closed or self._arena.cache.num_pinned < self._arena.cache.capacity

    def has_room(self, num_slots: int) -> bool:
        """Whether one more lease, of so many slots, could be held."""
        with self._arena.lock:
            if self._dropped:
                self.release_dropped()
            return sum(self._held.values()) + num_slots <= self._most_held

    def hold(self, lease: Lease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self._arena.lock:
            claim = lease.claim
            assert claim is not None, "a lease that was released"
            if self._dropped:
                self.release_dropped()
            num_slots = 0 if self._pinned[claim] is _NOTHING else len(lease.slots)
            lease.held = sum(self._held.values()) + num_slots <= self._most_held
            if lease.held:
                self._held[claim] = num_slots
            return lease.held

    def release(self, claim: weakref.ref[Lease]) -> None:
        """Unpin; called by ``Lease.release``."""
        with self._arena.lock:
            self._release(claim)
            if self._dropped:
                self.release_dropped()
            self._arena.changed.notify_all()

    def release_dropped(self) -> None:
        """Unpin what leases had that were dropped. The caller holds the lock."""
        while self._dropped:
            self._release(self._dropped[0])
            self._dropped.popleft()

    def _release(self, claim: weakref.ref[Lease]) -> None:
        pinned = self._pinned.get(claim, _NOTHING)
        if pinned.progress.item(NUM_UNIQUE) and not self._arena.is_disowned:
            self._arena.cache.release(pinned)
        self._held.pop(claim, None)
        self._pinned.pop(claim, None)

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


def pool_part(
    rows: RowArrays, workers: Workers, bags: Bags, mode: int, out: Floats, arg_max: Int32s, first: int, slots: Int32s
) -> None:
    """Pool the positions from ``first`` on, whose slots are given, into ``out``, float32 [batch, columns], and of
    maxima the positions into ``arg_max``, int32 [bags, dim]. The caller holds the lock over the rows, if any."""
    pool_rows: Any = quantized.pool_rows if rows.layout.is_quantized else kernels.pool_rows

    def work(begin: int, end: int) -> None:
        pool_rows(
            begin, end, first, first + len(slots), bags.starts, slots, bags.scale, mode, rows.weights, rows.layout.dim,
            rows.dtype_code, bags.columns, bags.batch, out, arg_max,
        )  # fmt: skip

    workers.share(work, bags.starts)


def dot_part(rows: RowArrays, bags: Bags, grad_out: Floats, first: int, slots: Int32s, grad_scale: Floats) -> None:
    """Gradients of the weights of the positions from ``first`` on, given ``grad_out``, float32 [batch, columns], added
    to ``grad_scale``, float32 [N]; see ``pool_part``."""
    dot_rows: Any = quantized.dot_rows if rows.layout.is_quantized else kernels.dot_rows
    dot_rows(
        0, len(bags.starts) - 1, first, first + len(slots), bags.starts, slots, rows.weights, rows.layout.dim,
        rows.dtype_code, bags.columns, bags.batch, grad_out, grad_scale,
    )  # fmt: skip
