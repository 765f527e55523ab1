"""Every row of one layout in device memory: row r of a table is in slot ``first + r``, as ``cache.FullCache`` has it.

There is no index, no plan and no pin, and the host waits for nothing once the rows are in: they come in together, at
first use. Dirty rows are marked by the kernel that updates them, and go down when somebody flushes.

``lock`` is held while work on the rows is given to the device, and by ``flush`` until it is done. So a row's mark and
its value change together for a thread that copies rows down. Nobody holds a lock of the pool below while asking for it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..cache.base import CacheCounters
from ..cache.full import RowNumbering
from ..kernels.arrays import Int64s
from ..pool.joined import Joined
from ..pool.pool import Pool
from ..system.signals import shielded
from .base import Claim, DeviceLease, DeviceRows, Part
from .cache import HbmSize
from .kernel_types import DeviceBatch
from .streams import Mark, Sender

DIRTY_BYTES: Final = 1  # of each row
_BUFFERS_AT_ONCE: Final = 64  # staging buffers by which rows are moved at a time: their keys and slots are in memory


class FullRows(DeviceRows):
    """``tables``: the range of each one's rows, by its index."""

    row_dtype = torch.int32
    numbering: RowNumbering
    dirty: Tensor

    def __init__(
        self, below: Pool, tables: Mapping[int, range], size: HbmSize, sender: Sender, *, readonly: bool
    ) -> None:
        super().__init__(below, size, sender)
        self.numbering = RowNumbering(tables)
        self._is_trained = not readonly
        with torch.inference_mode(False), self.streams.side():
            self.dirty = torch.zeros(size.cached_rows, dtype=torch.uint8, device=self.device)
        self._index_bytes = self.dirty.nbytes
        self._held: set[Claim] = set()
        self.let_go = self._held.discard
        self._loaded: Mark | None = None

    # Leases: the rows stay where they are anyway; those held are counted

    def has_room(self, joined: Joined) -> bool:  # noqa: ARG002 - each row has its slot
        return True

    def stage(self, joined: Joined) -> DeviceLease:
        """A batch that may be trained is grouped ahead, on the side stream."""
        batch = self.batch_of(joined)
        with self.lock:
            self.require_open()
            self._load()
        if self._is_trained:
            with self.streams.side():
                self.groups(batch)
        lease = self.lease_of(batch)
        self.hold(lease)
        return lease

    def lease_of(self, batch: DeviceBatch) -> DeviceLease:
        return DeviceLease(self, batch.rows, batch.ready)

    def parts(self, batch: DeviceBatch, lease: DeviceLease | None, *, by_row: bool = False) -> Iterator[Part]:
        count, slots = len(batch), self.groups(batch).distinct if by_row else batch.rows
        if not by_row:
            with self.lock:
                lookups, hits, *others = self.counters
                self.counters = CacheCounters(lookups + count, hits + count, *others)
        return iter((Part(0, count, slots, None, lease or self.lease_of(batch)),))

    def hold(self, lease: DeviceLease) -> bool:
        self._held.add(lease.claim)
        lease.held = True
        return True

    @contextlib.contextmanager
    def in_use(self, claim: Claim, *, changes: bool) -> Iterator[None]:  # noqa: ARG002 - the kernel marks it
        with self.lock:
            self.require_open()
            self.streams.follow(claim.ready)
            self.streams.follow(self._load())
            try:
                yield
            finally:
                self.retain()

    # Rows from and to the pool below

    @property
    def _ranges(self) -> Iterator[tuple[int, int]]:
        step = self._staging.rows * _BUFFERS_AT_ONCE
        return ((first, min(first + step, self.capacity_rows)) for first in range(0, self.capacity_rows, step))

    def _load(self) -> Mark:
        """Bring every row in, unless they are; when they are. The caller holds ``lock``."""
        if self._loaded is None:
            started = time.perf_counter()
            with self.streams.side():
                self._follow_users()
                for first, last in self._ranges:
                    slots = torch.arange(first, last, dtype=torch.int32, device=self.device)
                    keys = self.numbering.keys_at(np.arange(first, last, dtype=np.int32))
                    self._staging.bring(keys, slots, self._below.take)
                self._loaded = self.streams.mark()
            self.fill_seconds += time.perf_counter() - started
        return self._loaded

    @shielded
    def flush(self) -> None:
        """A thread about to use rows waits for it."""
        self.look()
        with self.lock, self.streams.side():
            self._follow_users()
            started = time.perf_counter()
            for first, last in self._ranges:
                slots = torch.nonzero(self.dirty[first:last]).flatten() + first
                if len(slots):
                    places = slots.to(torch.int32)
                    self._staging.take(self.numbering.keys_at(places.cpu().numpy()), places, self._below.put)
                    self.dirty[slots] = 0
            self.streams.mark().synchronize()  # no mark of a later update is cleared
            self.fill_seconds += time.perf_counter() - started

    def _renew(self, keys: Int64s) -> None:
        if self._loaded is not None:
            self._follow_users()
            self._staging.bring(keys, self._of_keys(keys).rows, self._below.take)
            self._loaded = self.streams.mark()

    def _forget(self) -> None:
        self._loaded = None  # the next use brings all rows in again

    @property
    def num_leased(self) -> int:
        return len(self._held)

    @property
    def num_dirty(self) -> int:
        with self.streams.side():
            self._follow_users()
            return int(torch.count_nonzero(self.dirty))

    def check_integrity(self) -> None:
        with self.lock:
            assert self._loaded is not None or not self.num_dirty, "rows are dirty before they were loaded"
