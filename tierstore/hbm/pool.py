"""Rows of one layout in device memory, above the pool that holds them in host memory.

A row's newest value is in its slot here if it has one, else in the pool below. Most slots are the set-associative
cache's. A row all of whose set is in use (a *conflict miss*) takes an *overflow* slot, behind the cache's in the same
arenas: there any row may lie anywhere, and which one does is kept on the host, in a cache without rows.

Bringing rows in: the batch's distinct keys are looked up on the device, dirty rows that must leave are copied down,
the missing rows' keys go to the host, and the pool below fills page-locked buffers that are copied into the slots.
All of it on the side stream; forward waits, on its stream, for the mark of the lease.

A lease pins its slots. ``release`` only notes it, together with a mark of the stream that used the rows: the slots
are unpinned when rows are next brought in and the mark has passed. So nothing is evicted that a queued kernel needs,
and no thread waits for a kernel unless every slot is taken.

Locks: ``fill_lock`` serialises whoever brings rows in or writes them down, and is taken before those of the pool below.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache import Admission, AdmitStatus, DdrCache
from ..cache.ddr import size_bytes_of as ddr_size_bytes
from ..cache.hbm import HbmCache, HbmPolicyName
from ..cache.hbm_books import DIRTY, LOADING, Plan, Status
from ..errors import BudgetError, ClosedError, TableError
from ..pool import HELD_SHARE, PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Pool
from ..rows import RowLayout
from . import rows_twin
from .grouping import Grouping, group
from .lanes import Lane, Mark
from .staging import NUM_BUFFERS, Staging

__all__ = ["HbmLease", "HbmPool", "HbmSize", "Part", "host_bytes_of"]

_NO_SLOTS: Final = np.empty(0, np.int32)
_ENTERING: Final = (Status.FREE_SLOT, Status.CLEAN_VICTIM, Status.DIRTY_VICTIM)


class HbmSize(NamedTuple):
    """Rows of one pool's parts in device memory."""

    cached_rows: int
    overflow_rows: int
    staging_rows: int
    """Of each buffer."""


def host_bytes_of(layout: RowLayout, size: HbmSize) -> int:
    """Host memory that a pool of this size takes: staging, and what says which row has which overflow slot."""
    books = ddr_size_bytes(size.overflow_rows, weight_words=0, state_words=0, policy="lru")
    return NUM_BUFFERS * size.staging_rows * layout.row_bytes + books


class HbmLease:
    """The rows of a batch, pinned in their slots until ``release``.

    Attributes:
        slots: int32 [U], rows of the arenas, in order of the keys asked for.
    """

    __slots__ = ("_last_use", "_pool", "cached", "held", "num_overflow", "overflow", "ready", "slots")

    def __init__(self, pool: "HbmPool", slots: Tensor, cached: Tensor, overflow: Any, ready: Mark) -> None:
        self._pool: HbmPool | None = pool
        self.slots = slots
        self.cached = cached
        self.overflow = overflow
        self.ready = ready
        self.held = False
        self._last_use = ready

    def use(self) -> None:
        """The calling thread's current stream is about to use the rows."""
        if self._pool is not None:
            self._pool.lane.follow(self.ready)

    def used(self) -> None:
        """It was given work that uses them; more may follow."""
        if self._pool is not None:
            self._last_use = self._pool.lane.mark()

    def release(self, *keep: Any, changed: bool = False) -> None:
        """The work given to the current stream so far is the last that uses the rows; a second call does nothing.

        Args:
            keep: objects whose memory that work uses; they are kept until it is done.
            changed: it makes the rows newer than those below.
        """
        self.used()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.released.append(_Released(self, self._last_use, changed))
            pool.retain(*keep)

    def __del__(self) -> None:
        # In any thread, under any lock: it may neither wait nor ask which stream is current.
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.released.append(_Released(self, self._last_use, False))


class _Released(NamedTuple):
    lease: HbmLease
    mark: Mark
    changed: bool


class _Retained(NamedTuple):
    mark: Mark
    objects: tuple[Any, ...]


class Part(NamedTuple):
    """Positions ``[first, last)`` of a batch, whose rows are pinned."""

    first: int
    last: int
    grouping: Grouping
    lease: HbmLease


class HbmPool:
    """See the module's docstring.

    Attributes:
        weights: of the table's dtype, [slots, >= dim]; state: float32 [slots, >= state_dim]. The arenas.
        split_batches: batches whose rows did not fit at once.
        conflict_misses: rows that took an overflow slot.
        fill_seconds: time spent bringing rows in and writing them down.
    """

    def __init__(self, below: Pool, size: HbmSize, lane: Lane, device: torch.device, policy: HbmPolicyName) -> None:
        layout = below.layout
        self.lane = lane
        self.device = device
        self.layout = layout
        self.kernels = _kernels_for(device)
        self._below = below
        # Not inference tensors, whoever uses the rows first: they will be written to outside inference mode too.
        with torch.inference_mode(False), lane.side():
            self.cache = HbmCache(
                size.cached_rows,
                weight_words=layout.weight_words,
                state_words=layout.state_words,
                policy=policy,
                device=device,
                extra_rows=size.overflow_rows,
            )
            self._staging = Staging(layout, size.staging_rows, (self.cache.weights, self.cache.state), lane)
        self.overflow = DdrCache(size.overflow_rows, weight_words=0, state_words=0, policy="lru")
        self.weights = self.cache.weights.view(layout.torch_dtype)
        self.state = self.cache.state.view(torch.float32)
        self.fill_lock = threading.RLock()
        self.released: deque[_Released] = deque()
        self._retained: deque[_Retained] = deque()
        self.split_batches = self.conflict_misses = 0
        self.fill_seconds = 0.0
        self._held_lock = threading.Lock()
        self._held_rows = self._held_overflow = 0
        self._num_leased = 0
        self._closed = False

    # Leases

    def parts(self, keys: Tensor, grouping: Grouping | None = None) -> Iterator[Part]:
        """Leases that together cover ``keys`` (int64 [N], on the device) in order; one if the rows fit.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.

        Args:
            grouping: that of all keys, if it is known.

        Raises:
            BudgetError: every slot stayed pinned by others for a minute.
        """

        def acquire(first: int, last: int) -> Part | None:
            whole = grouping is not None and last - first == len(keys)
            own = grouping if whole else self.group(keys[first:last])
            assert own is not None
            lease = self.acquire(own, last - first)
            return None if lease is None else Part(first, last, own, lease)

        for part in self._in_parts(len(keys), acquire):
            try:
                yield part
            finally:
                if not part.lease.held:
                    part.lease.release(part.grouping)

    def unique_parts(self, grouping: Grouping) -> Iterator[Part]:
        """Leases of ranges of the distinct keys of a batch; the caller releases each before it asks for the next."""

        def acquire(first: int, last: int) -> Part | None:
            own = grouping._replace(keys=grouping.keys[first:last], sets=grouping.sets[first:last])
            lease = self.acquire(own, 0)
            return None if lease is None else Part(first, last, own, lease)

        yield from self._in_parts(grouping.groups.num_unique, acquire)

    def _in_parts(self, count: int, acquire: Callable[[int, int], Part | None]) -> Iterator[Part]:
        """``acquire`` of ranges that together cover ``[0, count)``: of everything, else of ever smaller ranges."""
        first, size = 0, count
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while first < count:
            last = min(first + size, count)
            part = acquire(first, last)
            if part is not None:
                first = last
                deadline = time.monotonic() + PIN_WAIT_SECONDS
                yield part
            elif last - first > self._least_part:
                self.split_batches += size == count
                size = max((last - first) // 2, self._least_part)
            else:
                self._wait_for_room(deadline)

    @property
    def _least_part(self) -> int:
        """Positions that fit the overflow slots which held leases leave, even if all of them are conflict misses."""
        return max(1, self.overflow.capacity // 2)

    def group(self, keys: Tensor) -> Grouping:
        """Group keys; see ``grouping``."""
        with self.lane.side():
            return group(keys, self.cache.num_sets)

    def hold(self, lease: HbmLease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        rows, overflow = len(lease.slots), len(lease.overflow)
        with self._held_lock:
            fits = (
                self._held_rows + rows <= (self.cache.capacity + self.overflow.capacity) * HELD_SHARE
                and self._held_overflow + overflow <= self.overflow.capacity - self._least_part
            )
            if fits:
                self._held_rows += rows
                self._held_overflow += overflow
                lease.held = True
        return fits

    def retain(self, *objects: Any) -> None:
        """Keep objects until the work given to the calling thread's current stream so far, which uses them, is done."""
        if objects:
            self._retained.append(_Retained(self.lane.mark(), objects))

    def acquire(self, grouping: Grouping, lookups: int) -> HbmLease | None:
        """Pin the rows of these keys, all of them; None if they need more overflow slots than there are.

        Args:
            lookups: positions that the keys stand for, for the statistics.
        """
        with self.fill_lock, self.lane.side():
            self.require_open()
            started = time.perf_counter()
            self._reclaim(wait=False)
            lease = self._admit(grouping, lookups)
            if lease is None and self.released:
                self._reclaim(wait=True)
                lease = self._admit(grouping, lookups)
            self.fill_seconds += time.perf_counter() - started
            return lease

    def _wait_for_room(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise BudgetError(
                f"all rows of the HBM tier stayed pinned for {PIN_WAIT_SECONDS:.0f} s; "
                "open the store with a larger hbm="
            )
        time.sleep(PIN_POLL_SECONDS)

    def _reclaim(self, *, wait: bool) -> None:
        """Unpin what was released and is no longer used; with ``wait``, all that was released.

        The caller holds ``fill_lock``; the side stream waits where ``wait`` says so, this thread does not.
        """
        for _ in range(len(self.released)):
            entry = self.released.popleft()
            if not (entry.mark.query() or wait):
                self.released.append(entry)
                continue
            self.lane.follow(entry.mark)
            self._unpin(entry.lease, changed=entry.changed)
        while self._retained and self._retained[0].mark.query():
            self._retained.popleft()

    def _unpin(self, lease: HbmLease, *, changed: bool) -> None:
        self.cache.release(lease.cached, changed=changed)
        if changed:
            self.overflow.mark_dirty(lease.overflow)
        self.overflow.unpin(lease.overflow)
        self._num_leased -= 1
        if lease.held:
            with self._held_lock:
                self._held_rows -= len(lease.slots)
                self._held_overflow -= len(lease.overflow)

    # Bringing rows in; the caller holds ``fill_lock`` and is on the side stream

    def _admit(self, grouping: Grouping, lookups: int) -> HbmLease | None:
        keys = grouping.keys
        members = torch.arange(len(keys), dtype=torch.int32, device=self.device)
        lying = self._find_overflow(keys)
        try:
            plan = self.cache.plan(keys, grouping.sets, members, None if lying is None else lying >= 0)
            statuses = plan.statuses.cpu().numpy()
            self._write_down_cached(plan.slots, np.flatnonzero(statuses == Status.DIRTY_VICTIM))
            conflicts = np.flatnonzero(statuses == Status.CONFLICT)
            admission = Admission(self._to_host(keys, conflicts))
            complete = self._admit_overflow(admission)
        except BaseException:
            self._unpin_overflow(lying)
            raise
        if not complete:
            self._unpin_overflow(lying)
            return None
        return self._load(grouping, lookups, plan, statuses, conflicts, admission, lying)

    def _find_overflow(self, keys: Tensor) -> Tensor | None:
        """int32 [U], which overflow slot a key has, or -1; pinned. None if there is none for sure."""
        slots = self.overflow.resident_slots()
        if not len(slots):
            return None
        held = torch.from_numpy(self.overflow.keys_of(slots)).to(self.device)
        ordered, order = torch.sort(held)
        place = torch.searchsorted(ordered, keys).clamp(max=len(held) - 1)
        found = torch.from_numpy(slots).to(self.device)[order[place]]
        lying = torch.where(ordered[place] == keys, found, -1)
        self.overflow.pin(_present(lying))
        return lying

    def _unpin_overflow(self, lying: Tensor | None) -> None:
        if lying is not None:
            self.overflow.unpin(_present(lying))

    def _admit_overflow(self, admission: Admission) -> bool:
        """Give conflict misses an overflow slot each; False, and nothing done, if there are too few."""
        if not len(admission.keys):
            return True
        try:
            while (status := self.overflow.admit(admission)) is AdmitStatus.DIRTY_VICTIM:
                self._write_down_overflow(self.overflow.victims(self._staging.rows))
        except BaseException:
            self.overflow.abandon(admission)
            raise
        if status is AdmitStatus.ALL_PINNED:
            self.overflow.abandon(admission)
            return False
        return True

    def _load(
        self, grouping: Grouping, lookups: int, plan: Plan, statuses: Any, conflicts: Any, admission: Admission,
        lying: Tensor | None,
    ) -> HbmLease:  # fmt: skip
        """Carry out the plan and copy the missing rows in."""
        keys, cache = grouping.keys, self.cache
        cache.commit(keys, plan, len(keys))
        cached = plan.slots if len(conflicts) == 0 and lying is None else plan.slots[plan.slots >= 0]
        slots, extra = plan.slots, _NO_SLOTS
        try:
            missing = np.flatnonzero(np.isin(statuses, _ENTERING))
            if len(missing):
                index = torch.from_numpy(missing).to(self.device)
                self._staging.bring(self._to_host(keys, missing), plan.slots[index], self._below.take)
                cache.settle(plan.slots[index])
            if len(conflicts):
                extra = admission.slots
                index = torch.from_numpy(conflicts).to(self.device)
                places = torch.from_numpy(extra + np.int32(cache.capacity)).to(self.device)
                slots = slots.index_copy(0, index, places)
                self._staging.bring(admission.keys, places, self._below.take)
                self.overflow.filled(admission.missing_slots)
        except BaseException:
            cache.drop_loading(cached)
            self.overflow.abandon(admission)
            self._unpin_overflow(lying)
            raise
        if lying is not None:
            slots = torch.where(lying >= 0, lying + cache.capacity, slots)
            own = _present(lying)
            self.overflow.touch(own)
            extra = np.concatenate([extra, own])
        self._count(lookups, statuses, len(conflicts))
        self._num_leased += 1
        return HbmLease(self, slots, cached, extra, self.lane.mark())

    def _count(self, lookups: int, statuses: Any, conflicts: int) -> None:
        hits = int(np.isin(statuses, (Status.HIT, Status.TAKEN)).sum())
        evictions = int(np.isin(statuses, (Status.CLEAN_VICTIM, Status.DIRTY_VICTIM)).sum())
        self.cache.count(lookups=lookups, hits=hits, misses=len(statuses) - hits, evictions=evictions)
        self.conflict_misses += conflicts

    def _to_host(self, values: Tensor, index: Any) -> Any:
        """Numpy, the chosen values."""
        if not len(index):
            return np.empty(0, np.int64)
        return values[torch.from_numpy(index).to(self.device)].cpu().numpy()

    # Writing rows down; the caller holds ``fill_lock`` and is on the side stream

    def _write_down_cached(self, slots: Tensor, chosen: Any) -> None:
        """Copy the rows of dirty slots down; they are then clean."""
        if len(chosen):
            taken = slots[torch.from_numpy(chosen).to(self.device)]
            self._staging.take(self.cache.keys_at(taken).cpu().numpy(), taken, self._below.put)
            self.cache.clear_flag(taken, DIRTY)

    def _write_down_overflow(self, slots: Any) -> None:
        places = torch.from_numpy(slots + np.int32(self.cache.capacity)).to(self.device)
        self._staging.take(self.overflow.keys_of(slots), places, self._below.put)
        self.overflow.clean(slots)

    def flush(self) -> None:
        """Copy every newer row to the pool below, as the work given to any stream so far leaves it. The rows stay."""
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            slots = self.cache.slots_with(DIRTY)
            self._write_down_cached(slots, np.arange(len(slots)))
            if self.overflow.num_dirty:
                self._write_down_overflow(self.overflow.victims(self.overflow.num_dirty))

    def forget(self) -> None:
        """Copy every newer row down and forget all rows: those below are about to change.

        Raises:
            TableError: rows are in use.
        """
        with self.fill_lock, self.lane.side():
            self.flush()
            if self._num_leased:
                raise TableError("rows are in use by a batch under way (prefetched, or its backward still to come)")
            self.cache.clear()
            self.overflow.evict(self.overflow.resident_slots())

    # Whole rows, for their owner

    def read(self, keys: Any) -> Tensor:
        """[n, dim] of the table's dtype: weights of the rows ``keys`` (numpy int64 [n], n > 0)."""
        sent = self.send(keys)
        out = torch.empty((len(keys), self.layout.dim), dtype=self.layout.torch_dtype, device=self.device)
        for part in self.parts(sent):
            part.lease.use()
            slots = part.lease.slots[part.grouping.inverse]
            out[part.first : part.last] = self.weights[slots][:, : self.layout.dim]
        return out

    def write(self, keys: Any, rows: Tensor) -> None:
        """Overwrite weights with ``rows`` [n, dim]; of equal keys the last wins; optimizer state is kept."""
        sent, rows = self.send(keys), rows.to(self.device)
        for part in self.parts(sent):
            part.lease.use()
            groups = part.grouping.groups
            last = part.first + groups.order[groups.starts[1:] - 1].long()
            self.weights[part.lease.slots, : self.layout.dim] = rows[last]
            part.lease.release(part.grouping, sent, changed=True)

    def send(self, array: Any) -> Tensor:
        """A numpy array on the device, for work on any stream."""
        with self.lane.side():
            return torch.from_numpy(array).to(self.device)

    # State

    @property
    def num_leased(self) -> int:
        """Leases that are in use."""
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            return self._num_leased

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory: arenas, index, staging."""
        return self.cache.size_bytes + self._staging.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory; ``host_bytes_of`` tells them ahead."""
        return self._staging.host_bytes + self.overflow.size_bytes

    def check_integrity(self) -> None:
        """AssertionError unless cache and overflow are whole, no row lies in both, and no slot is pinned without a
        lease, or loading with nobody at it."""
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            self.cache.check_integrity()
            self.overflow.check_integrity()
            slots = self.overflow.resident_slots()
            both = self.cache.find(self.overflow.keys_of(slots)) >= 0
            loading = len(self.cache.slots_with(LOADING)) + self.overflow.is_loading(slots)
            pinned = self.cache.num_pinned, self.overflow.num_pinned
            assert not (both.any() or loading or (any(pinned) and not self._num_leased)), (
                f"{both.sum()} rows in cache and overflow, {loading} loading; {pinned[0]} + {pinned[1]} slots pinned "
                f"by {self._num_leased} leases"
            )

    def close(self) -> None:
        """Refuse further use."""
        self._closed = True

    def require_open(self) -> None:
        """ClosedError after ``close``."""
        if self._closed:
            raise ClosedError("the store is closed")


def _kernels_for(device: torch.device) -> Any:
    """The module with the kernels over rows."""
    if device.type != "cuda":
        return rows_twin
    from . import rows_triton

    return rows_triton


def _present(lying: Tensor) -> Any:
    """Numpy: those that are slots."""
    slots = lying.cpu().numpy()
    return slots[slots >= 0]
