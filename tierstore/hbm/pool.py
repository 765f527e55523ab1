"""Rows of one layout in device memory, above the pool that holds them in host memory.

A row's newest value is in its slot here if it has one, else in the pool below. Most slots are the set-associative
cache's. A row all of whose set is in use (a *conflict miss*) takes an *overflow* slot, behind the cache's in the same
arenas: there any row may lie anywhere, and which one does is kept on the host, in a cache without rows. So does, by
policy "lfu", a row that is asked for less often than the one it would drive out, while there is room.

Bringing rows in: the batch's distinct keys are looked up on the device, dirty rows that must leave are copied down,
the missing rows' keys go to the host, and the pool below fills page-locked buffers that are copied into the slots.
All of it on the side stream; forward waits, on its stream, for the mark of the lease.

A lease pins its slots. ``release`` only notes it, together with a mark of the stream that used the rows: the slots
are unpinned when rows are next brought in and the mark has passed. So nothing is evicted that a queued kernel needs,
and no thread waits for a model's kernels; whoever brings rows in waits for the side stream's.

Locks: ``fill_lock`` serialises whoever brings rows in or writes them down, and is taken before those of the pool below.
``rows_lock``, after it, keeps threads from reading a row while another changes it where no stream orders them: on the
CPU. It is held over work on rows in place.
"""

import contextlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache import Admission, CacheCounters
from ..cache.flags import DIRTY, LOADING
from ..cache.hbm import HbmCache, PolicyName
from ..cache.hbm_books import Plan, Status, mixed, sets_of
from ..cache.hbm_sketch import FrequencySketch
from ..errors import BudgetError, ClosedError, TableError
from ..kernels.arrays import Int32s, Int64s
from ..pool import HELD_SHARE, PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Pool
from ..rows import RowLayout
from ..system.signals import shielded
from . import rows_twin
from .grouping import Grouping, group_keys
from .lanes import Lane, Mark
from .lease import HbmLease, Part
from .overflow import OVERFLOW_INDEX_BYTES, Overflow, overflow_bytes, present
from .staging import Staging, staging_bytes

_NO_SLOTS: Final = np.empty(0, np.int32)
_TRANSIENT_SECONDS: Final = 1.0
"""No read or write of rows takes longer."""
_ALIGNMENT_BYTES: Final = 16
_ENTERING: Final = (Status.FREE_SLOT, Status.CLEAN_VICTIM, Status.DIRTY_VICTIM)


class HbmSize(NamedTuple):
    """Rows of one pool's parts in device memory."""

    cached_rows: int
    overflow_rows: int
    staging_rows: int
    """Of each buffer."""


def host_bytes_of(layout: RowLayout, size: HbmSize) -> int:
    """Host memory that a pool of this size takes: staging, and what says which row has which overflow slot."""
    return staging_bytes(layout, size.staging_rows) + overflow_bytes(size.overflow_rows)


class _Planned(NamedTuple):
    """How the rows of a batch are to be admitted."""

    plan: Plan
    statuses: NDArray[np.int8]
    """Numpy int8 [U]."""
    outside: Int64s
    """Numpy int64 [n]: which of the keys take an overflow slot."""
    admission: Admission
    """Of those."""


class HbmPool:
    """See the module's docstring.

    Attributes:
        weights: of the table's dtype, [slots, >= dim]; state: float32 [slots, >= state_dim]. The arenas.
        counters: of the cache, in the terms of a ``RowCache``.
        split_batches: batches whose rows did not fit at once.
        conflict_misses: rows that took an overflow slot.
        fill_seconds: time spent bringing rows in and writing them down.
    """

    def __init__(self, below: Pool, size: HbmSize, lane: Lane, device: torch.device, policy: PolicyName) -> None:
        layout = below.layout
        self.lane = lane
        self.device = device
        self.layout = layout
        self.kernels = _kernels_for(device)
        self._below = below.transfers
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
            self.overflow = Overflow(size.overflow_rows, device)
            self._sketch = FrequencySketch(size.cached_rows, device) if policy == "lfu" else None
            self.weights = self.cache.weights.view(layout.torch_dtype)
            self.state = self.cache.state.view(torch.float32)
            self._staging = Staging(layout, size.staging_rows, (self.cache.weights, self.cache.state), lane)
        self.fill_lock = threading.RLock()
        self.rows_lock: Any = threading.RLock() if device.type == "cpu" else contextlib.nullcontext()
        self.released: deque[HbmLease] = deque()
        self._retained: deque[tuple[Mark, tuple[Any, ...]]] = deque()
        self.counters = CacheCounters(0, 0, 0, 0)
        self.split_batches = self.conflict_misses = 0
        self.fill_seconds = 0.0
        self._held_lock = threading.Lock()
        self._held_rows = self._held_overflow = 0
        self._last_rows = self._last_overflow = 0
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
                    part.lease.release()
                    self.retain(part.grouping)

    def unique_parts(self, grouping: Grouping) -> Iterator[Part]:
        """Leases of ranges of the distinct keys of a batch; the caller releases each before it asks for the next."""

        def acquire(first: int, last: int) -> Part | None:
            own = grouping._replace(keys=grouping.keys[first:last])
            lease = self.acquire(own, 0)
            return None if lease is None else Part(first, last, own, lease)

        yield from self._in_parts(len(grouping.keys), acquire)

    def _in_parts(self, count: int, acquire: Callable[[int, int], Part | None]) -> Iterator[Part]:
        """``acquire`` of ranges that together cover ``[0, count)``: of everything, else of ever smaller ranges."""
        first, size = 0, count
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while first < count:
            last = min(first + size, count)
            part = acquire(first, last)
            if part is not None:
                first = last
                yield part
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
        """Group keys; see ``grouping``."""
        with self.lane.side():
            made = group_keys(keys)
            return made._replace(keys=made.keys[: int(made.groups.num_unique)])

    def hold(self, lease: HbmLease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self._held_lock:
            self._last_rows, self._last_overflow = len(lease.slots), len(lease.overflow)
            if self._can_hold_one_more:
                self._held_rows += self._last_rows
                self._held_overflow += self._last_overflow
                lease.held = True
            return lease.held

    @property
    def has_room(self) -> bool:
        """See ``Pool.has_room``."""
        with self._held_lock:
            return self._can_hold_one_more

    @property
    def _can_hold_one_more(self) -> bool:
        return (
            self._held_rows + self._last_rows <= (self.cache.capacity + self.overflow.capacity) * HELD_SHARE
            and self._held_overflow + self._last_overflow <= self.overflow.capacity - self._least_part
        )

    def retain(self, *objects: Any) -> None:
        """Keep objects until the work given to the calling thread's current stream so far, which uses them, is done."""
        if objects:
            self._retained.append((self.lane.mark(), objects))

    def acquire(self, grouping: Grouping, lookups: int) -> HbmLease | None:
        """Pin the rows of these keys, all of them; None if they need more overflow slots than there are.

        Args:
            lookups: positions that the keys stand for, for the statistics.
        """
        with self.fill_lock, self.lane.side():
            self.require_open()
            started = time.perf_counter()
            self._reclaim(wait=False)
            sketch = self._sketch
            counters = None if sketch is None else sketch.places(grouping.keys)
            counts = None if sketch is None or counters is None else sketch.estimate(counters)
            lease = self._admit(grouping, lookups, counts)
            if lease is None and self.released:
                self._reclaim(wait=True)
                lease = self._admit(grouping, lookups, counts)
            if lease is not None and lookups and sketch is not None and counters is not None:
                sketch.count(counters)
                if sketch.age():
                    self.cache.age()
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
            lease = self.released.popleft()
            if not (lease.last_use.query() or wait):
                self.released.append(lease)
                continue
            try:
                self.lane.follow(lease.last_use)
                self._unpin(lease)
            except BaseException:
                # It still is to be done: what changed must go down some day.
                self.released.appendleft(lease)
                raise
        while self._retained and self._retained[0][0].query():
            self._retained.popleft()

    def _unpin(self, lease: HbmLease) -> None:
        # First what may fail, for want of memory on the device; it then did nothing.
        self.cache.release(lease.cached, changed=lease.changed)
        if lease.changed:
            self.overflow.mark_dirty(lease.overflow)
        self.overflow.unpin(lease.overflow)
        self._num_leased -= 1
        if lease.held:
            with self._held_lock:
                self._held_rows -= len(lease.slots)
                self._held_overflow -= len(lease.overflow)

    # Bringing rows in; the caller holds ``fill_lock`` and is on the side stream

    def _admit(self, grouping: Grouping, lookups: int, counts: Tensor | None) -> HbmLease | None:
        lying = self.overflow.locate(grouping.keys)
        with contextlib.ExitStack() as undo:
            own = _NO_SLOTS if lying is None else present(lying)
            undo.callback(self.overflow.unpin, own)
            planned = self._plan(grouping, lying, counts)
            if planned is None and counts is not None:
                planned = self._plan(grouping, lying, None)
            if planned is None:
                return None
            undo.callback(self.overflow.drop, planned.admission)
            lease = self._load(grouping, planned, lying, own, undo)
            undo.pop_all()
        self._num_leased += 1
        self.overflow.touch(own)
        self._count(lookups, planned.statuses)
        return lease

    def _plan(self, grouping: Grouping, lying: Tensor | None, counts: Tensor | None) -> "_Planned | None":
        """A plan whose victims are clean, and overflow slots for whoever gets no slot by it; None if there are too
        few."""
        keys = grouping.keys
        taken = None if lying is None else lying >= 0
        plan = self.cache.plan(keys, sets_of(mixed(keys), self.cache.num_sets), taken=taken, counts=counts)
        statuses = plan.statuses.cpu().numpy()
        self._write_down_cached(plan.slots, np.flatnonzero(statuses == Status.DIRTY_VICTIM))
        outside = np.flatnonzero(statuses >= Status.CONFLICT)
        admission = self.overflow.enter(self._to_host(keys, outside), self._write_down_overflow)
        return None if admission is None else _Planned(plan, statuses, outside, admission)

    def _load(
        self, grouping: Grouping, planned: "_Planned", lying: Tensor | None, own: Int32s, undo: contextlib.ExitStack
    ) -> HbmLease:
        """Carry out the plan and copy the missing rows in.

        Args:
            own: overflow slots that rows of the batch had before.
            undo: told how to undo what was done, should it fail.
        """
        keys, cache = grouping.keys, self.cache
        plan, statuses, outside, admission = planned
        slots, extra = plan.slots, admission.slots
        cached = slots if lying is None and not len(outside) else slots[slots >= 0]
        missing = np.flatnonzero(np.isin(statuses, _ENTERING))
        cache.commit(keys, plan)
        undo.callback(cache.drop_loading, cached)
        if len(missing):
            entered = slots[torch.from_numpy(missing).to(self.device)]
            self._staging.bring(self._to_host(keys, missing), entered, self._below.take)
            cache.settle(entered)
        if len(outside):
            places = torch.from_numpy(extra + np.int32(cache.capacity)).to(self.device)
            slots = slots.index_copy(0, torch.from_numpy(outside).to(self.device), places)
            self._staging.bring(admission.keys, places, self._below.take)
            self.overflow.filled(admission.missing_slots)
        if lying is not None:
            slots = torch.where(lying >= 0, lying + cache.capacity, slots)
        return HbmLease(self, slots, cached, np.concatenate([extra, own]), self.lane.mark())

    def _count(self, lookups: int, statuses: NDArray[np.int8]) -> None:
        hits = int(np.isin(statuses, (Status.HIT, Status.TAKEN)).sum())
        evictions = int(np.isin(statuses, (Status.CLEAN_VICTIM, Status.DIRTY_VICTIM)).sum())
        more = CacheCounters(lookups=lookups, hits=hits, misses=len(statuses) - hits, evictions=evictions)
        self.counters = CacheCounters(*map(operator.add, self.counters, more))
        self.conflict_misses += int((statuses == Status.CONFLICT).sum())

    def _to_host(self, values: Tensor, index: Int64s) -> Int64s:
        """Numpy, the chosen values."""
        if not len(index):
            return np.empty(0, np.int64)
        return values[torch.from_numpy(index).to(self.device)].cpu().numpy()

    # Writing rows down; the caller holds ``fill_lock`` and is on the side stream

    def _write_down_cached(self, slots: Tensor, chosen: Int64s) -> None:
        """Copy the rows of dirty slots down; they are then clean."""
        if len(chosen):
            taken = slots[torch.from_numpy(chosen).to(self.device)]
            self._write_down(self.cache.keys_at(taken).cpu().numpy(), taken)
            self.cache.clean(taken)

    def _write_down_overflow(self, slots: Int32s) -> None:
        """Copy the rows of these overflow slots down."""
        places = torch.from_numpy(slots + np.int32(self.cache.capacity)).to(self.device)
        self._write_down(self.overflow.keys_of(slots), places)

    def _write_down(self, keys: Int64s, slots: Tensor) -> None:
        with self.rows_lock:
            self._staging.take(keys, slots, self._below.put)

    @shielded
    def flush(self) -> None:
        """Copy every newer row to the pool below, as the work given to any stream so far leaves it. The rows stay.

        On a GPU, a row that another thread is about to change may be copied half changed; it then is newer again.
        """
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            slots = self.cache.slots_with(DIRTY)
            self._write_down_cached(slots, np.arange(len(slots)))
            dirty = self.overflow.dirty_slots()
            self._write_down_overflow(dirty)
            self.overflow.clean(dirty)

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Copy every newer row down, forget all rows, and bring none in until the end: those below will change.

        Raises:
            TableError: rows are in use, and still after a second.
        """
        with self.fill_lock:
            self._empty()
            yield

    @shielded
    def _empty(self) -> None:
        deadline = time.monotonic() + _TRANSIENT_SECONDS
        while self.num_leased and time.monotonic() < deadline:
            time.sleep(PIN_POLL_SECONDS / 10)
        if self.num_leased:
            raise TableError("rows are in use by a batch under way (prefetched, or before its backward or step)")
        self.flush()
        with self.lane.side():
            self.cache.clear()
            self.overflow.forget()

    # Whole rows, for their owner

    @shielded
    def read(self, keys: Int64s) -> Tensor:
        """[n, dim] of the table's dtype: weights of the rows ``keys`` (numpy int64 [n], n > 0)."""
        sent = self.send(keys)[0]
        out = torch.empty((len(keys), self.layout.dim), dtype=self.layout.torch_dtype, device=self.device)
        for part in self.parts(sent):
            with part.lease.in_use(), self.rows_lock:
                slots = part.lease.slots[part.grouping.inverse]
                out[part.first : part.last] = self.weights[slots][:, : self.layout.dim]
        return out

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights with ``rows`` [n, dim]; of equal keys the last wins; optimizer state is kept."""
        sent, rows = self.send(keys)[0], rows.to(self.device)
        for part in self.parts(sent):
            groups = part.grouping.groups
            try:
                with part.lease.in_use(), self.rows_lock:
                    last = part.first + groups.order[groups.starts[1 : len(part.grouping.keys) + 1] - 1]
                    self.weights[part.lease.slots, : self.layout.dim] = rows[last]
            finally:
                part.lease.release(changed=True)

    def send(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Numpy arrays on the device, by one copy on the side stream; whoever uses a lease taken later finds them."""
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays)])
        packed = torch.empty(int(starts[-1]), dtype=torch.uint8, device="cpu", pin_memory=self.lane.pin_memory)
        places = [slice(start, start + array.nbytes) for start, array in zip(starts.tolist(), arrays, strict=False)]
        for place, array in zip(places, arrays, strict=True):
            packed[place].numpy()[:] = array.view(np.uint8)
        with self.lane.side():
            sent = packed.to(self.device, non_blocking=True)
        return [sent[place].view(torch.from_numpy(array).dtype) for place, array in zip(places, arrays, strict=True)]

    # State

    @property
    def num_leased(self) -> int:
        """Leases that are in use."""
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            return self._num_leased

    @property
    def num_dirty(self) -> int:
        """Rows, of those in the cache, that are newer than below."""
        return len(self.cache.slots_with(DIRTY))

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory: arenas, index, policy, staging."""
        sketch = 0 if self._sketch is None else self._sketch.size_bytes
        overflow = self.overflow.capacity * OVERFLOW_INDEX_BYTES
        return self.cache.size_bytes + overflow + sketch + self._staging.device_bytes

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
            outside = self.send(self.overflow.keys_of(self.overflow.resident_slots()))[0]
            both = int((self.cache.locate(outside) >= 0).sum())
            loading = len(self.cache.slots_with(LOADING))
            pinned = self.cache.num_pinned, self.overflow.num_pinned
            stray = 0 if self._num_leased else sum(pinned)
            assert not both + loading + stray, (
                f"{both} rows in cache and overflow, {loading} loading; {pinned[0]} + {pinned[1]} slots pinned "
                f"by {self._num_leased} leases"
            )

    def close(self) -> None:
        """Refuse further use, and wait until no work that was given to the device uses the rows."""
        self._closed = True
        with self.fill_lock, self.lane.side():
            self._reclaim(wait=True)
            while self._retained:
                self.lane.follow(self._retained.popleft()[0])
            self.lane.mark().synchronize()

    def require_open(self) -> None:
        """ClosedError after ``close``."""
        if self._closed:
            raise ClosedError("the store is closed")


def _kernels_for(device: torch.device) -> ModuleType:
    """The module with the kernels over rows."""
    if device.type != "cuda":
        return rows_twin
    from . import rows_triton

    return rows_triton
