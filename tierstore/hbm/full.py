"""Every row of one layout in device memory: row r of a table is in slot ``first + r``, as ``cache.FullCache`` has it.

There is no index, no plan and no pin, and the host waits for nothing once the rows are in: they come in together, at
first use. Dirty rows are marked by the kernel that updates them, and go down when somebody flushes.

``lock`` is held while work on the rows is given to the device, and by ``flush`` until it is done. So a row's mark and
its value change together for a thread that copies rows down. Nobody holds a lock of the pool below while asking for it.
"""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.base import CacheCounters
from ..cache.full import RowNumbering
from ..kernels.arrays import Int64s
from ..layout import RowLayout
from ..pool import Pool
from ..system.signals import shielded
from .base import DeviceBatch, DeviceRows, Part
from .batch import Groups
from .cache import group_slots
from .staging import Sender, Staging, staging_bytes
from .streams import Mark

DIRTY_BYTES: Final = 1
"""Of each row."""
_BUFFERS_AT_ONCE: Final = 64
"""Rows are moved by so many staging buffers at a time: so many keys and slots are in memory at once."""


class FullSize(NamedTuple):
    """Rows of one pool in device memory, and of each staging buffer."""

    cached_rows: int
    staging_rows: int

    def host_bytes(self, layout: RowLayout) -> int:
        return staging_bytes(layout, self.staging_rows)


class _Grouping(NamedTuple):
    slots: Tensor
    """int32 [N]: those of the distinct rows."""
    groups: Groups


class FullLease:
    """A batch between its first use and its last, counted while it is held; its rows stay where they are anyway."""

    __slots__ = ("__weakref__", "_batch", "_rows", "held")

    def __init__(self, rows: "FullRows", batch: DeviceBatch) -> None:
        self._rows: FullRows | None = rows
        self._batch = batch
        self.held = False

    def in_use(self, *, changes: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002 - the kernel marks it
        assert self._rows is not None, "rows are used after their release"
        return self._rows.in_use(self._batch.ready)

    def release(self, *, changed: bool = False) -> None:  # noqa: ARG002 - the kernel marked what changed
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.let_go(self)


class FullRows(DeviceRows):
    """See the module's docstring. ``tables``: the range of each one's rows, by its index."""

    row_dtype = torch.int32

    def __init__(
        self, below: Pool, tables: Mapping[int, range], size: FullSize, sender: Sender, *, readonly: bool
    ) -> None:
        super().__init__(below, sender)
        layout = self.layout
        self.numbering: RowNumbering = RowNumbering(tables)
        self._is_trained = not readonly
        # Not inference tensors, even if inference comes first: they will be written to outside inference mode too.
        with torch.inference_mode(False), self.streams.side():
            words = [
                torch.empty((size.cached_rows, width), dtype=torch.int64, device=self.device)
                for width in (layout.weight_words, layout.state_words)
            ]
            self.weights, self.state = words[0].view(layout.torch_dtype), words[1].view(torch.float32)
            self._marks = torch.zeros(size.cached_rows, dtype=torch.uint8, device=self.device)
            self._staging = Staging(layout, size.staging_rows, (words[0], words[1]), self.streams, self.kernels)
        self.dirty = self._marks
        self._held: set[weakref.ref[FullLease]] = set()
        self._uses: deque[Mark] = deque()
        self._loaded: Mark | None = None

    # Batches

    def batch_has_room(self, batch: DeviceBatch) -> bool:  # noqa: ARG002 - each row has its slot
        return True

    def stage_batch(self, batch: DeviceBatch) -> FullLease:
        """A batch that may be trained is grouped ahead, on the side stream."""
        with self.lock:
            self.require_open()
            self._load()
        if self._is_trained:
            with self.streams.side():
                self._grouped(batch)
        lease = FullLease(self, batch)
        self.hold(lease)
        return lease

    def parts(self, batch: DeviceBatch, lease: Any) -> Iterator[Part]:
        self._note_hits(len(batch))
        return iter((Part(0, len(batch), batch.rows, None, lease or FullLease(self, batch)),))

    def _note_hits(self, count: int) -> None:
        with self.lock:
            lookups, hits, *others = self.counters
            self.counters = CacheCounters(lookups + count, hits + count, *others)

    def whole_batch(self, batch: DeviceBatch, lease: Any) -> FullLease:
        found: FullLease = lease or FullLease(self, batch)
        return found

    def row_parts(self, batch: DeviceBatch, lease: Any) -> Iterator[Part]:
        slots = self._grouped(batch).slots
        return iter((Part(0, len(slots), slots, None, lease or FullLease(self, batch)),))

    def _grouped(self, batch: DeviceBatch) -> _Grouping:
        """Group on the calling thread's current stream, if that was not done."""
        if batch.grouping is None:
            self.streams.follow(batch.rows_ready)
            slots, groups = group_slots(batch.rows)
            if batch.check is not None:  # a wrong batch has no rows that an update could change
                groups = groups._replace(num_unique=groups.num_unique * batch.check.is_right)
            batch.grouped = self.streams.mark()
            batch.grouping = _Grouping(slots, groups)  # last: another thread may look
        made: _Grouping = batch.grouping
        return made

    def keys(self, batch: DeviceBatch) -> Tensor:
        groups = self.groups(batch)
        slots = self._grouped(batch).slots[: int(groups.num_unique)].cpu().numpy()
        return torch.from_numpy(self.numbering.keys_at(slots)).to(self.device)

    def position_keys(self, batch: DeviceBatch) -> Int64s:
        self.streams.follow(batch.rows_ready)
        return self.numbering.keys_at(batch.rows.cpu().numpy())

    def hold(self, lease: Any) -> bool:
        self._held.add(weakref.ref(lease, self._held.discard))  # nothing of Python runs where one is dropped
        lease.held = True
        return True

    def let_go(self, lease: FullLease) -> None:
        self._held.discard(weakref.ref(lease))

    @contextlib.contextmanager
    def in_use(self, *marks: Mark) -> Iterator[None]:
        """What the calling thread's current stream is given within uses the rows, after these marks."""
        with self.lock:
            self.require_open()
            for mark in (*marks, self._load()):
                self.streams.follow(mark)
            try:
                yield
            finally:
                while self._uses and self._uses[0].query():
                    self._uses.popleft()
                self._uses.append(self.streams.mark())

    def _follow_users(self) -> None:
        for mark in list(self._uses):
            self.streams.follow(mark)

    # Rows from and to the pool below

    def _load(self) -> Mark:
        """Bring every row in, unless they are; when they are. The caller holds ``lock``."""
        if self._loaded is None:
            started = time.perf_counter()
            with self.streams.side():
                self._loaded = self._bring_all()
            self.fill_seconds += time.perf_counter() - started
        return self._loaded

    @property
    def _ranges(self) -> Iterator[tuple[int, int]]:
        step = self._staging.rows * _BUFFERS_AT_ONCE
        return ((first, min(first + step, self.capacity_rows)) for first in range(0, self.capacity_rows, step))

    def _bring_all(self) -> Mark:
        self._follow_users()
        for first, last in self._ranges:
            slots = torch.arange(first, last, dtype=torch.int32, device=self.device)
            self._staging.bring(self.numbering.keys_at(np.arange(first, last, dtype=np.int32)), slots, self._below.take)
        return self.streams.mark()

    @shielded
    def flush(self) -> None:
        """A thread about to use rows waits for it."""
        self.look()
        with self.lock, self.streams.side():
            self._follow_users()
            started = time.perf_counter()
            for first, last in self._ranges:
                self._flush_some(first, last)
            self.streams.mark().synchronize()  # no mark of a later update is cleared
            self.fill_seconds += time.perf_counter() - started

    def _flush_some(self, first: int, last: int) -> None:
        slots = torch.nonzero(self._marks[first:last]).flatten() + first
        if len(slots):
            places = slots.to(torch.int32)
            self._staging.take(self.numbering.keys_at(places.cpu().numpy()), places, self._below.put)
            self._marks[slots] = 0

    def _renew(self, keys: Int64s) -> None:
        if self._loaded is not None:
            slots, _ = self._send_slots(keys)
            self._follow_users()
            self._staging.bring(keys, slots, self._below.take)
            self._loaded = self.streams.mark()

    def _forget(self) -> None:
        """The next use brings all rows in again."""
        self._loaded = None

    # Whole rows, for their owner

    @shielded
    def read(self, keys: Int64s) -> Tensor:
        slots, sent = self._send_slots(keys)
        self._note_hits(len(keys))
        with self.in_use(sent):
            found = torch.index_select(self.weights, 0, slots)
        self.retain(slots)
        return found[:, : self.layout.dim].contiguous()

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        distinct, place = np.unique(keys[::-1], return_index=True)
        last = torch.from_numpy(len(keys) - 1 - place)
        slots, sent = self._send_slots(distinct)
        with self.in_use(sent):
            chosen = rows[last.to(rows.device)].to(self.device)
            self._marks[slots.long()] = 1  # first, as the next line may fail half done
            self.weights[slots.long(), : self.layout.dim] = chosen
        self.retain(slots)

    def _send_slots(self, keys: Int64s) -> tuple[Tensor, Mark]:
        (slots,), sent = self._sender.copy(self.numbering.slots_of(keys).astype(np.int32))
        return slots, sent

    # State

    @property
    def num_leased(self) -> int:
        return len(self._held)

    @property
    def num_dirty(self) -> int:
        with self.streams.side():
            self._follow_users()
            return int(torch.count_nonzero(self._marks))

    @property
    def capacity_rows(self) -> int:
        return len(self._marks)

    @property
    def size_bytes(self) -> int:
        return self.weights.nbytes + self.state.nbytes + self._marks.nbytes

    @property
    def host_bytes(self) -> int:
        return self._staging.host_bytes

    def check_integrity(self) -> None:
        """AssertionError if a row is dirty that is not in."""
        with self.lock:
            assert self._loaded is not None or not self.num_dirty, "rows are dirty before they were loaded"
