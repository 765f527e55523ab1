"""Some rows of one layout in device memory, above the pool that holds them in host memory; and the tier over all pools
of a store.

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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, CacheCounters
from ..config import TableConfig
from ..errors import BudgetError, TableError
from ..kernels.arrays import Int32s, Int64s
from ..layout import QuantizedName, RowLayout
from ..optim.configs import RowWiseAdagradOfColumns
from ..pool.joined import Joined
from ..pool.leases import HELD_SHARE, PIN_POLL_SECONDS, PIN_WAIT_SECONDS
from ..pool.pool import Pool
from ..pool.stats import TierStats, of_counters
from ..system.signals import shielded
from ..system.sizes import format_size
from .base import Claim, DeviceLease, DeviceRows, Part, rows_of
from .cache import OVERFLOW_INDEX_BYTES, HbmCache, HbmSize, Overflow, PolicyName, group
from .full import FullRows
from .kernel_types import NUM_STATUSES, SUMMARY_ROWS, DeviceBatch, Groups, Plan, Status
from .streams import Sender, host_buffer, open_streams

_NO_SLOTS: Final = np.empty(0, np.int32)


class HbmPool(DeviceRows):
    row_dtype = torch.int64

    def __init__(self, below: Pool, size: HbmSize, sender: Sender, policy: PolicyName) -> None:
        super().__init__(below, size, sender)
        with torch.inference_mode(False), self.streams.side():
            self.cache = HbmCache(size.cached_rows, policy=policy, device=self.device)
            self.overflow = Overflow(size.overflow_rows, behind=size.cached_rows, sender=sender)
            summary = host_buffer(self.streams, SUMMARY_ROWS * NUM_STATUSES, torch.int32)
            self._summary = summary.view(SUMMARY_ROWS, NUM_STATUSES)
        self._index_bytes = self.cache.size_bytes + self.overflow.capacity * OVERFLOW_INDEX_BYTES
        self._seen: Int32s = self._summary.numpy()
        self._listed = host_buffer(self.streams, 0, torch.int64)
        self.rows_lock: Any = threading.RLock() if self.device.type == "cpu" else contextlib.nullcontext()
        self.released: deque[Claim] = deque()
        self.let_go = self.released.append
        self._claims: set[Claim] = set()
        self._held_lock = threading.RLock()
        self._held: set[Claim] = set()
        self._last_overflow = 0
        self._is_whole = True

    # Leases

    def has_room(self, joined: Joined) -> bool:
        """May wait for the device: rows are counted only where it depends on them."""
        if not len(joined):
            return True
        batch = self.batch_of(joined)
        return self._can_hold(len(batch)) or self._can_hold(int(self._groups_here(batch).num_unique))

    def _can_hold(self, num_rows: int) -> bool:
        """Of overflow slots a batch is taken to need as many as the last one."""
        with self._held_lock:
            rows = sum(claim.num_rows for claim in self._held)
            overflow = sum(len(claim.overflow) for claim in self._held)
            return (
                rows + num_rows <= self.capacity_rows * HELD_SHARE
                and overflow + self._last_overflow <= self.overflow.capacity - self._least_part
            )

    def hold(self, lease: DeviceLease) -> bool:
        with self._held_lock:
            self._last_overflow = len(lease.claim.overflow)
            if self._can_hold(lease.claim.num_rows):
                self._held.add(lease.claim)
                lease.held = True
            return lease.held

    def stage(self, joined: Joined) -> DeviceLease | None:
        batch = self.batch_of(joined)
        lease = self.acquire(self.groups(batch), len(batch)) if self.has_room(joined) else None
        if lease is not None and not self.hold(lease):
            lease.release()
            return None
        return lease

    def lease_of(self, batch: DeviceBatch) -> DeviceLease | None:
        return self.acquire(self.groups(batch), 0)

    def parts(self, batch: DeviceBatch, lease: DeviceLease | None, *, by_row: bool = False) -> Iterator[Part]:
        whole = self.groups(batch)
        if lease is not None:
            return iter((Part(0, len(batch), lease.claim.slots, None if by_row else whole.inverse, lease),))
        return self._in_parts(batch.rows, whole, by_row=by_row)

    def _in_parts(self, keys: Tensor, whole: Groups, *, by_row: bool) -> Iterator[Part]:
        count = size = len(keys)
        first, deadline = 0, time.monotonic() + PIN_WAIT_SECONDS
        while first < count:
            last = min(first + size, count)
            groups = whole
            if last - first < count:
                with self.streams.side():
                    groups = whole.part(first, last) if by_row else group(keys[first:last])
            lease = self.acquire(groups, 0 if by_row else last - first)
            if lease is not None:
                try:
                    yield Part(first, last, lease.claim.slots, None if by_row else groups.inverse, lease)
                finally:
                    if not lease.held:
                        lease.release()
                        self.retain(groups)
                if by_row and lease.claim.num_rows < last - first:
                    return
                first, deadline = last, time.monotonic() + PIN_WAIT_SECONDS
            elif last - first > self._least_part:
                self.split_batches += size == count
                size = max((last - first) // 2, self._least_part)
            elif time.monotonic() > deadline:
                raise BudgetError(
                    f"all rows of the HBM tier stayed pinned for {PIN_WAIT_SECONDS:.0f} s; "
                    "open the store with a larger hbm="
                )
            else:
                time.sleep(PIN_POLL_SECONDS)

    @property
    def _least_part(self) -> int:
        """Positions that fit the overflow slots which held leases leave, even if all of them are conflict misses."""
        return max(1, self.overflow.capacity // 2)

    @contextlib.contextmanager
    def in_use(self, claim: Claim, *, changes: bool) -> Iterator[None]:
        with self.rows_lock:
            self.require_open()
            self.streams.follow(claim.ready)
            claim.changed |= changes
            try:
                yield
            finally:
                claim.last_use = self.streams.mark()

    def acquire(self, groups: Groups, lookups: int) -> DeviceLease | None:
        """Pin the rows of these keys, which stand for so many lookups; None if there are too few overflow slots."""
        with self._changing():
            self.require_open()
            started = time.perf_counter()
            self._reclaim(wait=False)
            lease = self._admit(groups, lookups)
            if lease is None and self.released:
                self._reclaim(wait=True)
                lease = self._admit(groups, lookups)
            self.fill_seconds += time.perf_counter() - started
            return lease

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
        """Unpin what was released and is no longer used; with ``wait``, all that was released, for which the side
        stream waits. The caller is in ``_changing``."""
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
        super()._follow_users()

    def _unpin(self, claim: Claim) -> None:
        self.cache.release(claim.slots, changed=claim.changed)
        if len(claim.overflow):
            if claim.changed:
                self.overflow.mark_dirty(claim.overflow)
            self.overflow.unpin(claim.overflow)
        with self._held_lock:
            self._held.discard(claim)
        self._claims.discard(claim)

    # Bringing rows in; the caller is in ``_changing``

    def _admit(self, groups: Groups, lookups: int) -> DeviceLease | None:
        """Launch all that a batch needs whose rows are there, or enter over clean ones; then bring in what is missing.
        None, and nothing is pinned, if there are too few overflow slots."""
        lying = self.overflow.locate(groups.distinct)
        plan = self.cache.plan(groups.distinct, groups.num_unique, lying=lying)
        self._summary.copy_(plan.summary, non_blocking=True)
        is_there = self.streams.mark()
        self.cache.commit(plan)
        is_there.synchronize()
        seen: list[int] = np.add.reduce(self._seen).tolist()
        total = sum(seen)
        entered = self._enter(plan, seen) if seen[Status.HIT] < total else (plan.slots, _NO_SLOTS)
        if entered is None:
            return None
        lease = DeviceLease(self, entered[0], self.streams.mark())
        lease.claim.num_rows, lease.claim.overflow = total, entered[1]
        self._claims.add(lease.claim)
        hits = seen[Status.HIT] + seen[Status.TAKEN]
        evictions = seen[Status.CLEAN_VICTIM] + seen[Status.DIRTY_VICTIM]
        more = CacheCounters(lookups=lookups, hits=hits, misses=total - hits, evictions=evictions)
        self.counters = CacheCounters(*map(operator.add, self.counters, more))
        self.conflict_misses += seen[Status.CONFLICT]
        return lease

    def _enter(self, plan: Plan, seen: list[int]) -> tuple[Tensor, Int32s] | None:
        """Bring in the keys that are no hits, in order of status: those that lie in overflow slots stay there, others
        enter the cache, once its dirty victims are written down, and conflict misses enter overflow slots. The host
        waits once if there are no victims. (The plan's slots with those, the overflow slots), or None."""
        cache, overflow = self.cache, self.overflow
        places = torch.sort(plan.statuses, stable=True).indices[seen[Status.HIT] : sum(seen)]
        if len(self._listed) < 2 * len(places):
            self._listed = host_buffer(self.streams, 1 << (2 * len(places) - 1).bit_length(), torch.int64)
        listed = self._listed[: 2 * len(places)].view(2, -1)
        slots = cache.list_keys(plan, places, listed)
        keys, others = listed.numpy()
        first = sum(seen[Status.TAKEN : Status.DIRTY_VICTIM])
        victims = slice(first, first + seen[Status.DIRTY_VICTIM])
        if seen[Status.DIRTY_VICTIM]:
            self._write_down(others[victims], slots[victims])
            cache.clean(slots[victims])
        else:
            self.streams.mark().synchronize()
        own = (others[: seen[Status.TAKEN]] - cache.capacity).astype(np.int32)
        overflow.pin(own)
        entering = slice(len(own), sum(seen[Status.TAKEN : Status.CONFLICT]))
        extra = _NO_SLOTS
        if any(seen[Status.DIRTY_VICTIM : Status.NO_KEY]):
            admission = overflow.enter(keys[entering.stop :], self._write_down_overflow)
            if admission is None:
                overflow.unpin(own)
                return None
            cache.commit(plan, forced=True)
            extra = admission.slots
        self._staging.bring(keys[entering], slots[entering], self._below.take)
        cache.settle(plan.slots)
        lying = plan.slots
        if len(extra):
            behind = overflow.places(extra)
            self._staging.bring(keys[entering.stop :], behind, self._below.take)
            overflow.filled(extra)
            lying = lying.index_copy(0, places[entering.stop :], behind)
        overflow.use(overflow.keys_of(own))
        return lying, np.concatenate([extra, own])

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
            sent = self._of_keys(keys).rows
            slots, lying = self.cache.locate(sent), self.overflow.locate(sent)
            slots = slots if lying is None else torch.maximum(slots, lying)
            is_here = slots >= 0
            self._staging.bring(keys[is_here.cpu().numpy()], slots[is_here], self._below.take)

    def _forget(self) -> None:
        with self.streams.side():
            self.cache.clear()
            self.overflow.forget()

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

    def check_integrity(self) -> None:
        with self._changing():
            self._reclaim(wait=True)
            self.cache.check_integrity()
            self.overflow.check_integrity()
            outside = self._of_keys(self.overflow.keys_of(self.overflow.resident_slots()))
            both = int((self.cache.locate(outside.rows) >= 0).sum())
            loading = len(self.cache.slots_with(LOADING))
            pinned = self.cache.num_pinned, self.overflow.num_pinned
            stray = 0 if self._claims else sum(pinned)
            assert not both + loading + stray, (
                f"{both} rows in cache and overflow, {loading} loading; {pinned[0]} + {pinned[1]} slots pinned "
                f"by {len(self._claims)} leases"
            )


def add_hbm(
    pools: Iterable[Pool], sizes: Mapping[RowLayout, HbmSize], tables: Sequence[Any], *, device: torch.device,
    policy: str, readonly: bool, given: object,
) -> None:  # fmt: skip
    """Give each pool its part of device memory. BudgetError, which names the budget as ``given``: the device has less
    memory free."""
    sender = Sender(open_streams(device), device)
    own: PolicyName = "lfu" if policy.endswith("lfu") else "lru"
    try:
        for pool in pools:
            ranges = {table.index: table.rows for table in tables if table.layout == pool.layout}
            size = sizes[pool.layout]
            if size.overflow_rows:
                pool.tier = HbmPool(pool, size, sender, own)
            else:
                pool.tier = FullRows(pool, ranges, size, sender, readonly=readonly)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise BudgetError(
            f"hbm={given!r}: {device} has {format_size(free)} free of {format_size(total)}; give less"
        ) from error


def require_supported(config: TableConfig, *, readonly: bool) -> None:
    """TableError for a table that the device tier has no kernels for. ``readonly``: nothing will be trained."""
    if config.dtype in get_args(QuantizedName):
        raise TableError(
            f"table {config.name!r} has {config.dtype} rows, which are not supported with hbm; open the store "
            'with hbm=0 and device="cpu", or quantize to float16 or bfloat16'
        )
    if config.rounding != "nearest" and not readonly:
        raise TableError(
            f"table {config.name!r} has rounding={config.rounding!r}, which is not supported with hbm; open the store "
            'with hbm=0 and device="cpu", or with mode="r" for lookups alone, or make a table with rounding="nearest"'
        )
    if isinstance(config.optimizer, RowWiseAdagradOfColumns):
        raise TableError(
            f"table {config.name!r} is sharded by columns with row-wise Adagrad, which is not supported with hbm: "
            'shard it "row_wise", or open the store with hbm=0'
        )


def hbm_stats(pools: Iterable[Pool]) -> TierStats:
    hot = [rows_of(pool) for pool in pools if pool.tier.on_device]
    return of_counters([rows.counters for rows in hot])._replace(
        capacity_rows=sum(rows.capacity_rows for rows in hot),
        bytes=sum(rows.size_bytes for rows in hot),
        seconds=sum(rows.fill_seconds for rows in hot),
        split_batches=sum(rows.split_batches for rows in hot),
        conflict_misses=sum(rows.conflict_misses for rows in hot),
    )
