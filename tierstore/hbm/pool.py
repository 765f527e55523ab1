"""Rows of one layout in device memory, above the pool that holds them in host memory.

A row's newest value is in its slot here if it has one, else in the pool below. Most slots are the set-associative
cache's. A row all of whose set is in use (a *conflict miss*) takes an *overflow* slot, behind the cache's in the same
arenas.

A lease pins its slots. ``release`` only notes it, with a mark of the stream that used the rows: the slots are unpinned
when rows are next fetched and the mark has passed. So nothing is evicted that a queued kernel needs, and no thread
waits for a model's kernels; a thread that brings rows in waits for the side stream's.

A call may be cut short anywhere, by any exception. Which slots are pinned follows from the leases that there are: the
next call that brings rows in or writes them down pins their slots again, and forgets what was loading.

Locks: ``lock`` serialises threads that bring rows in or write them down, and is taken before those of the pool below.
``rows_lock``, after it, keeps threads from reading a row while another changes it where no stream orders them: on the
CPU. It is held while rows are in use.
"""

import contextlib
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, CacheCounters
from ..errors import BudgetError
from ..kernels.arrays import Int32s, Int64s
from ..layout import RowLayout
from ..pool import HELD_SHARE, PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Pool
from ..system.signals import shielded
from .base import DeviceBatch, DeviceRows, Part
from .cache import Grouping, HbmCache, PolicyName, group_keys
from .cache_state import NUM_STATUSES, SUMMARY_ROWS, Plan, Status
from .overflow import OVERFLOW_INDEX_BYTES, Overflow, overflow_bytes
from .staging import Sender, Staging, staging_bytes
from .streams import Mark

_NO_SLOTS: Final = np.empty(0, np.int32)


class HbmSize(NamedTuple):
    cached_rows: int
    overflow_rows: int
    staging_rows: int
    """Of each buffer."""

    def host_bytes(self, layout: RowLayout) -> int:
        return staging_bytes(layout, self.staging_rows) + overflow_bytes(self.overflow_rows)


class _Misses(NamedTuple):
    """The keys of a batch that are no hits, by status, and of each status in order of their sets."""

    places: Tensor
    """int64 [n], on the device: their places in the plan."""
    slots: Tensor
    """int32 [n], on the device: their slots by the plan."""
    keys: Int64s
    own: Int32s
    """Overflow slots of the first of them, those with status TAKEN."""


class HbmLease:
    """The rows of a batch, pinned in their slots until ``release``; in place from ``ready`` on. ``grouping`` is of the
    keys asked for."""

    __slots__ = ("__weakref__", "_pool", "claim", "grouping", "held", "num_rows", "overflow", "ready", "slots")

    def __init__(
        self, pool: "HbmPool", grouping: Grouping, slots: Tensor, num_rows: int, overflow: Int32s, ready: Mark
    ) -> None:
        self._pool: HbmPool | None = pool
        self.grouping = grouping
        self.ready = ready
        self.held = False
        self.claim = HbmClaim(self, pool.released.append)
        self.slots = self.claim.slots = slots
        self.num_rows = num_rows
        self.overflow = self.claim.overflow = overflow
        self.claim.last_use = ready
        self.claim.changed = False

    @contextlib.contextmanager
    def in_use(self, *, changes: bool = False) -> Iterator[None]:
        assert self._pool is not None, "rows are used after their release"
        with self._pool.rows_lock:
            self._pool.streams.follow(self.ready)
            self.claim.changed |= changes
            try:
                yield
            finally:
                self.claim.last_use = self._pool.streams.mark()

    def release(self, *, changed: bool = False) -> None:
        self.claim.changed |= changed
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.released.append(self.claim)


class HbmClaim(weakref.ref[HbmLease]):
    """What a lease has, for when it is gone. Nothing of Python runs where one is dropped: the garbage collector may do
    that in any thread, under any lock, and no exception can come then.

    Attributes:
        slots: int32 [N]; the first ones are rows of the arenas, in order of the keys asked for, the others are -1.
        overflow: numpy int32 [n], which overflow slots are among them.
        last_use: when the work that uses the rows is done.
        changed: whether that work makes the rows newer than those below.
    """

    __slots__ = ("changed", "last_use", "overflow", "slots")
    slots: Tensor
    overflow: Int32s
    last_use: Mark
    changed: bool


class HbmPool(DeviceRows):
    dirty = None
    row_dtype = torch.int64

    def __init__(self, below: Pool, size: HbmSize, sender: Sender, policy: PolicyName) -> None:
        super().__init__(below, sender)
        streams, device = self.streams, self.device
        layout = self.layout
        # Not inference tensors, even if inference comes first: they will be written to outside inference mode too.
        with torch.inference_mode(False), streams.side():
            self.cache = HbmCache(
                size.cached_rows, weight_words=layout.weight_words, state_words=layout.state_words, policy=policy,
                device=device, extra_rows=size.overflow_rows,
            )  # fmt: skip
            self.overflow = Overflow(
                size.overflow_rows, behind=size.cached_rows, sender=sender, kernels=self.cache.kernels
            )
            self.weights = self.cache.weights.view(layout.torch_dtype)
            self.state = self.cache.state.view(torch.float32)
            arenas = self.cache.weights, self.cache.state
            self._staging = Staging(layout, size.staging_rows, arenas, streams, self.kernels)
            self._summary = self._host_buffer(SUMMARY_ROWS * NUM_STATUSES, torch.int32).view(SUMMARY_ROWS, -1)
            self._seen: Int32s = self._summary.numpy()
            self._listed = self._host_buffer(0, torch.int64)
        self.rows_lock: Any = threading.RLock() if device.type == "cpu" else contextlib.nullcontext()
        self.released: deque[HbmClaim] = deque()
        self._claims: set[HbmClaim] = set()
        self._held_lock = threading.RLock()
        self._held: dict[HbmClaim, tuple[int, int]] = {}
        self._last_overflow = 0
        self._is_whole = True

    # Batches

    def _grouped(self, batch: DeviceBatch) -> Grouping:
        if batch.grouping is None:
            with self.streams.side():
                self.streams.follow(batch.rows_ready)
                grouping, batch.grouped = group_keys(batch.rows), self.streams.mark()
                batch.grouping = grouping  # last: another thread may look
        made: Grouping = batch.grouping
        return made

    def batch_has_room(self, batch: DeviceBatch) -> bool:
        """Of overflow slots a batch is taken to need as many as the last one."""
        # The rows are counted only where it depends on them.
        return self._has_room(len(batch)) or self._has_room(int(self.groups(batch).num_unique))

    def _has_room(self, num_rows: int) -> bool:
        with self._held_lock:
            return self._can_hold(num_rows)

    def stage_batch(self, batch: DeviceBatch) -> HbmLease | None:
        lease = self.acquire(self._grouped(batch), len(batch)) if self.batch_has_room(batch) else None
        if lease is not None and not self.hold(lease):
            lease.release()
            return None
        return lease

    def parts(self, batch: DeviceBatch, lease: Any) -> Iterator[Part]:
        if lease is not None:
            return iter((Part(0, len(batch), lease.slots, lease.grouping.inverse, lease),))
        return self._parts(batch.rows, self._grouped(batch))

    def whole_batch(self, batch: DeviceBatch, lease: Any) -> HbmLease | None:
        found: HbmLease | None = self.acquire(self._grouped(batch), 0) if lease is None else lease
        return found

    def row_parts(self, batch: DeviceBatch, lease: Any) -> Iterator[Part]:
        if lease is not None:
            return iter((Part(0, len(batch), lease.slots, None, lease),))
        return self._row_parts(self._grouped(batch))

    def keys(self, batch: DeviceBatch) -> Tensor:
        groups = self.groups(batch)
        return self._grouped(batch).keys[: int(groups.num_unique)]

    def position_keys(self, batch: DeviceBatch) -> Int64s:
        self.streams.follow(batch.rows_ready)
        keys: Int64s = batch.rows.cpu().numpy()
        return keys

    # Leases

    def _parts(self, keys: Tensor, grouping: Grouping) -> Iterator[Part]:
        """``parts`` of keys, int64 [N], on the device."""

        def acquire(first: int, last: int) -> HbmLease | None:
            return self.acquire(grouping if last - first == len(keys) else self.group(keys[first:last]), last - first)

        for first, last, lease in self._in_parts(len(keys), acquire):
            try:
                yield Part(first, last, lease.slots, lease.grouping.inverse, lease)
            finally:
                if not lease.held:
                    lease.release()
                    self.retain(lease.grouping)

    def _row_parts(self, grouping: Grouping) -> Iterator[Part]:
        keys, num_unique = grouping.keys, grouping.groups.num_unique

        def acquire(first: int, last: int) -> HbmLease | None:
            own = grouping
            if last - first < len(keys):
                with self.streams.side():
                    count = (num_unique - first).clamp(0, last - first)
                own = grouping._replace(keys=keys[first:last], groups=grouping.groups._replace(num_unique=count))
            return self.acquire(own, 0)

        for first, last, lease in self._in_parts(len(keys), acquire):
            yield Part(first, last, lease.slots, None, lease)
            if lease.num_rows < last - first:
                return

    def _in_parts(
        self, count: int, acquire: Callable[[int, int], HbmLease | None]
    ) -> Iterator[tuple[int, int, HbmLease]]:
        """``acquire`` of ranges that together cover ``[0, count)``: of everything, else of ever smaller ranges."""
        first, size = 0, count
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while first < count:
            last = min(first + size, count)
            lease = acquire(first, last)
            if lease is not None:
                yield first, last, lease
                first = last
                deadline = time.monotonic() + PIN_WAIT_SECONDS
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
        with self.streams.side():
            return group_keys(keys)

    def hold(self, lease: Any) -> bool:
        with self._held_lock:
            self._last_overflow = len(lease.overflow)
            if self._can_hold(lease.num_rows):
                self._held[lease.claim] = lease.num_rows, self._last_overflow
                lease.held = True
            return bool(lease.held)

    def _can_hold(self, num_rows: int) -> bool:
        rows = sum(held_rows for held_rows, _ in self._held.values())
        overflow = sum(held_overflow for _, held_overflow in self._held.values())
        return (
            rows + num_rows <= self.capacity_rows * HELD_SHARE
            and overflow + self._last_overflow <= self.overflow.capacity - self._least_part
        )

    def acquire(self, grouping: Grouping, lookups: int) -> HbmLease | None:
        """Pin the rows of these keys, which stand for so many lookups; None if they need more overflow slots than there
        are."""
        with self._changing():
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

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """On the side stream, with ``lock``: what a call that was cut short within left half done is undone first."""
        with self.lock, self.streams.side():
            if not self._is_whole:
                claims = list(self._claims)
                self.cache.repin([claim.slots for claim in claims])
                self.overflow.repin([claim.overflow for claim in claims])
            self._is_whole = False
            yield
            self._is_whole = True

    def _reclaim(self, *, wait: bool) -> None:
        """Unpin what was released and is no longer used; with ``wait``, all that was released: the side stream waits
        then, this thread does not. The caller is in ``_changing``."""
        for _ in range(len(self.released)):
            claim = self.released[0]
            if claim in self._claims:
                if not (claim.last_use.query() or wait):
                    self.released.rotate(-1)
                    continue
                self.streams.follow(claim.last_use)
                self._unpin(claim)
            self.released.popleft()

    def _follow_users(self) -> None:
        self._reclaim(wait=True)
        for mark, _ in list(self._retained):
            self.streams.follow(mark)

    def _unpin(self, claim: HbmClaim) -> None:
        self.cache.release(claim.slots, changed=claim.changed)
        if len(claim.overflow):
            if claim.changed:
                self.overflow.mark_dirty(claim.overflow)
            self.overflow.unpin(claim.overflow)
        with self._held_lock:
            self._held.pop(claim, None)
        self._claims.discard(claim)

    # Bringing rows in; the caller is in ``_changing``

    def _admit(self, grouping: Grouping, lookups: int) -> HbmLease | None:
        """Launch all that a batch needs whose rows are there, or enter over clean ones; then bring in what is missing.
        None, and nothing is pinned, if there are too few overflow slots."""
        cache, overflow = self.cache, self.overflow
        lying = overflow.locate(grouping.keys)
        plan = cache.plan(grouping.keys, grouping.groups.num_unique, lying=lying)
        self._summary.copy_(plan.summary, non_blocking=True)
        is_there = self.streams.mark()
        cache.commit(plan)
        is_there.synchronize()
        seen: list[int] = np.add.reduce(self._seen).tolist()
        total = sum(seen)
        outside = _NO_SLOTS
        slots = plan.slots
        is_committed = not any(seen[Status.DIRTY_VICTIM : Status.NO_KEY])
        if seen[Status.HIT] < total:
            misses = self._misses(plan, seen)
            outside = own = misses.own
            overflow.pin(own)
            entering = slice(len(own), sum(seen[Status.TAKEN : Status.CONFLICT]))
            if not is_committed:
                admission = overflow.enter(misses.keys[entering.stop :], self._write_down_overflow)
                if admission is None:
                    overflow.unpin(own)
                    return None
                cache.commit(plan, forced=True)
                outside = np.concatenate([admission.slots, own])
            self._staging.bring(misses.keys[entering], misses.slots[entering], self._below.take)
            cache.settle(slots)
            if len(outside) > len(own):
                slots = self._bring_into_overflow(slots, misses, outside[: len(outside) - len(own)])
            overflow.touch(own)
        lease = HbmLease(self, grouping, slots, total, outside, self.streams.mark())
        self._claims.add(lease.claim)
        self._count(lookups, seen)
        return lease

    def _misses(self, plan: Plan, seen: list[int]) -> _Misses:
        """What is no hit; and the dirty victims are written down, and clean. The host waits once if there are none."""
        places = torch.sort(plan.statuses, stable=True).indices[seen[Status.HIT] : sum(seen)]
        if len(self._listed) < 2 * len(places):
            self._listed = self._host_buffer(1 << (2 * len(places) - 1).bit_length(), torch.int64)
        listed = self._listed[: 2 * len(places)].view(2, -1)
        slots = self.cache.list_keys(plan, places, listed)
        keys, others = listed.numpy()
        first = sum(seen[Status.TAKEN : Status.DIRTY_VICTIM])
        victims = slice(first, first + seen[Status.DIRTY_VICTIM])
        if seen[Status.DIRTY_VICTIM]:
            self._write_down(others[victims], slots[victims])
            self.cache.clean(slots[victims])
        else:
            self.streams.mark().synchronize()
        own = (others[: seen[Status.TAKEN]] - self.cache.capacity).astype(np.int32)
        return _Misses(places, slots, keys, own)

    def _bring_into_overflow(self, slots: Tensor, misses: _Misses, extra: Int32s) -> Tensor:
        """Bring the last misses into these overflow slots; the plan's slots, with those."""
        places = self.overflow.places(extra)
        self._staging.bring(misses.keys[-len(extra) :], places, self._below.take)
        self.overflow.filled(extra)
        return slots.index_copy(0, misses.places[-len(extra) :], places)

    def _count(self, lookups: int, seen: list[int]) -> None:
        hits = seen[Status.HIT] + seen[Status.TAKEN]
        evictions = seen[Status.CLEAN_VICTIM] + seen[Status.DIRTY_VICTIM]
        more = CacheCounters(lookups=lookups, hits=hits, misses=sum(seen) - hits, evictions=evictions)
        self.counters = CacheCounters(*map(operator.add, self.counters, more))
        self.conflict_misses += seen[Status.CONFLICT]

    def _host_buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # it is kept
            return torch.empty(length, dtype=dtype, device="cpu", pin_memory=self.streams.pin_memory)

    # Writing rows down; the caller holds ``lock`` and is on the side stream

    def _write_down_overflow(self, slots: Int32s) -> None:
        self._write_down(self.overflow.keys_of(slots), self.overflow.places(slots))

    def _write_down(self, keys: Int64s, slots: Tensor) -> None:
        with self.rows_lock:
            self._staging.take(keys, slots, self._below.put)

    @shielded
    def flush(self) -> None:
        """On a GPU, a row that another thread is about to change may be copied half changed; it then is newer again."""
        with self._changing():
            self._reclaim(wait=True)
            slots = self.cache.slots_with(DIRTY)
            self._write_down(self.cache.keys_at(slots).cpu().numpy(), slots)
            self.cache.clean(slots)
            dirty = self.overflow.dirty_slots()
            self._write_down_overflow(dirty)
            self.overflow.clean(dirty)

    def _renew(self, keys: Int64s) -> None:
        with self._changing():
            self._follow_users()
            sent = self._send_keys(keys)
            slots, lying = self.cache.locate(sent), self.overflow.locate(sent)
            slots = slots if lying is None else torch.maximum(slots, lying)
            is_here = slots >= 0
            self._staging.bring(keys[is_here.cpu().numpy()], slots[is_here], self._below.take)

    def _forget(self) -> None:
        with self.streams.side():
            self.cache.clear()
            self.overflow.forget()

    # Whole rows, for their owner

    @shielded
    def read(self, keys: Int64s) -> Tensor:
        sent = self._send_keys(keys)
        out = torch.empty((len(keys), self.layout.dim), dtype=self.layout.torch_dtype, device=self.device)
        for part in self._parts(sent, self.group(sent)):
            with part.lease.in_use():
                out[part.first : part.last] = self.weights[part.slots[part.inverse]][:, : self.layout.dim]
        return out

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        sent, rows = self._send_keys(keys), rows.to(self.device)
        for part in self._parts(sent, self.group(sent)):
            lease: Any = part.lease
            order, starts, _ = lease.grouping.groups
            try:
                with lease.in_use(changes=True):
                    last = part.first + order[starts[1 : lease.num_rows + 1] - 1]
                    self.weights[lease.slots[: lease.num_rows], : self.layout.dim] = rows[last]
            finally:
                lease.release()

    def _send_keys(self, keys: Int64s) -> Tensor:
        """On the device, for the side stream, and so before a lease taken later is used."""
        (sent,), _ = self._sender.copy(keys)
        return sent

    # State

    @property
    def num_leased(self) -> int:
        with self._changing():
            self._reclaim(wait=True)
            return len(self._claims)

    @property
    def num_dirty(self) -> int:
        with self._changing():
            self._reclaim(wait=True)
            return len(self.cache.slots_with(DIRTY)) + self.overflow.num_dirty

    @property
    def capacity_rows(self) -> int:
        return self.cache.capacity + self.overflow.capacity

    @property
    def size_bytes(self) -> int:
        return self.cache.size_bytes + self.overflow.capacity * OVERFLOW_INDEX_BYTES

    @property
    def host_bytes(self) -> int:
        return self._staging.host_bytes + self.overflow.size_bytes

    def check_integrity(self) -> None:
        """AssertionError unless cache and overflow are whole, no row lies in both, and no slot is pinned without a
        lease, or loading with nobody at it."""
        with self._changing():
            self._reclaim(wait=True)
            self.cache.check_integrity()
            self.overflow.check_integrity()
            outside = self._send_keys(self.overflow.keys_of(self.overflow.resident_slots()))
            both = int((self.cache.locate(outside) >= 0).sum())
            loading = len(self.cache.slots_with(LOADING))
            pinned = self.cache.num_pinned, self.overflow.num_pinned
            stray = 0 if self._claims else sum(pinned)
            assert not both + loading + stray, (
                f"{both} rows in cache and overflow, {loading} loading; {pinned[0]} + {pinned[1]} slots pinned "
                f"by {len(self._claims)} leases"
            )
