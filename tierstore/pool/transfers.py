"""Rows in and out of a pool by key: whole ones for a tier above, some for tables, by the pool's fastest tier."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.base import Admission
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Bools, Floats, Int32s, Int64s, Words
from ..layout import KEY_ROW_BITS
from ..system.signals import shielded
from .arena import Arena
from .leases import Leases
from .one_table import OneTable
from .rows import ResidentRows
from .writeback import WriteBack

_Fill = Callable[[Int32s, Any], None]
"""Fills slots, given the places of their rows among the keys: int64 [n] or a slice."""


class Tier(ABC):
    """The fastest tier of a pool: host memory (``Transfers``), or device memory above it (``hbm.base.DeviceRows``)."""

    on_device: bool = False
    lock: AbstractContextManager[Any]
    """Held while rows come into device memory or go down; taken before the locks of the pool."""

    @property
    def num_leased(self) -> int:
        """Leases that use rows in device memory."""
        return 0

    @property
    def num_dirty(self) -> int:
        """Rows that are newer than those in host memory."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that device memory takes."""
        return 0

    @abstractmethod
    def are_in_memory(self, keys: Int64s) -> bool:
        """Whether a lookup of ``keys`` (int64 [n]) reads nothing from SSD and copies nothing to a device."""

    @abstractmethod
    def read(self, keys: Int64s) -> Tensor:
        """Rows of ``keys`` (int64 [n], n > 0), [n, dim], on its device: bits unchanged, quantized ones as float32."""

    @abstractmethod
    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        """``read`` if ``are_in_memory``, else None."""

    @abstractmethod
    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights of ``keys`` (int64 [n]) with ``rows`` [n, dim] of the table's dtype; of equal keys the last
        wins; optimizer state is kept."""

    @abstractmethod
    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        """Overwrite whole rows with first values and state: those that rows ``ids`` of the table would have. Keys are
        of one table; no row of them is in use, but by batches that were prepared."""

    @abstractmethod
    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """A short way for small lookups of a table, if there is one."""

    def flush(self) -> None:  # noqa: B027 - host memory has nothing to do for these
        """Copy newer rows to host memory; errors as ``look``."""

    def look(self) -> None:  # noqa: B027
        """ValueError, once for each, for a batch that had a wrong id and was used. Waits until all are known."""

    def emptied(self) -> AbstractContextManager[Any]:
        """Within it, host memory has the newest value of every row, and device memory has no row."""
        return contextlib.nullcontext()

    def refuse(self) -> None:  # noqa: B027
        """Refuse further use, by ClosedError."""

    def close(self) -> None:  # noqa: B027
        """Refuse further use, and let nothing use the rows when it returns."""

    @abstractmethod
    def check_integrity(self) -> None:
        """AssertionError unless the counts agree with the rows."""


class Transfers(Tier):
    """Of host memory."""

    def __init__(self, arena: Arena, rows: ResidentRows, leases: Leases, writeback: WriteBack) -> None:
        self.lock = contextlib.nullcontext()
        self._arena = arena
        self._rows = rows
        self._leases = leases
        self._writeback = writeback

    def check_integrity(self) -> None:
        with self._arena.lock:
            self._arena.cache.check_integrity()

    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        return self._rows.one_table(table_index, num_rows)

    def are_in_memory(self, keys: Int64s) -> bool:
        return self._use_in_memory(keys, None)

    def _use_in_memory(self, keys: Int64s, use: Callable[[Int32s], None] | None) -> bool:
        """Whether all these rows are in the cache; then calls ``use(slots)``. Nothing is admitted or pinned."""
        with self._arena.lock:  # no bookkeeping is half done between two lines: nothing to shield
            self._arena.require_open()
            slots = self._arena.cache.find(keys)
            is_in = int(slots.min(initial=0)) >= 0 and not self._arena.cache.is_loading(slots)
            if is_in and use is not None:
                self._arena.cache.touch(slots)
                use(slots)
        return is_in

    def _empty(self, num_rows: int) -> Tensor:
        layout = self._arena.layout
        return torch.empty((num_rows, layout.dim), dtype=layout.torch_dtype, device="cpu")

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        out = self._empty(len(keys))
        return out if self._use_in_memory(keys, partial(self._copy_out, out=raw_weights(out))) else None

    @shielded
    def read(self, keys: Int64s) -> Tensor:
        """Rows in cache are copied without waiting for any device."""
        rows = self._empty(len(keys))
        out = raw_weights(rows)
        if not self._use_in_memory(keys, partial(self._copy_out, out=out)):
            for start, lease in self._leases.parts(keys):
                with self._arena.lock:
                    self._copy_out(lease.position_slots, out[start : start + lease.num_positions])
        return rows

    def _copy_out(self, slots: Int32s, out: Any) -> None:
        if self._arena.layout.is_quantized:
            quantized.unpack_rows(slots, self._arena.weights, self._arena.layout.dim, self._arena.dtype_code, out)
        else:
            kernels.copy_rows_out(slots, self._arena.weights, self._arena.layout.dim, out)

    @shielded
    def read_state(self, keys: Int64s, out: Floats) -> None:
        for start, lease in self._leases.parts(keys):
            with self._arena.lock:
                part = out[start : start + lease.num_positions]
                kernels.copy_rows_out(lease.position_slots, self._arena.state, out.shape[1], part)

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        arena, weights = self._arena, raw_weights(rows.cpu().contiguous())
        for start, lease in self._leases.parts(keys):
            part = weights[start : start + lease.num_positions]
            with arena.lock:
                self._writeback.begin_update(lease.slots)
                kernels.copy_rows_in(lease.position_slots, part, arena.weights, arena.layout.dim)

    def take(self, keys: Int64s, weights: Words, state: Words) -> None:
        """Copy whole rows out, for a tier above.

        Args:
            keys: int64 [n], distinct.
            weights, state: uint64 [n, words], out.
        """
        if self._use_in_memory(keys, partial(self._take, weights=weights, state=state)):
            return
        for start, lease in self._leases.parts(keys):
            part = slice(start, start + lease.num_positions)
            with self._arena.rows_lock:
                self._take(lease.slots, weights[part], state[part])

    def _take(self, slots: Int32s, weights: Words, state: Words) -> None:
        def work(begin: int, end: int) -> None:
            part = slice(begin, end)
            for arena, out in ((self._arena.cache.weights, weights), (self._arena.cache.state, state)):
                np.take(arena, slots[part], axis=0, out=out[part], mode="clip")

        self._arena.workers.divide(work, len(slots))

    def put(self, keys: Int64s, weights: Words, state: Words) -> None:
        """Overwrite whole rows, state included, with newer ones from a tier above; nothing is read for it. The cold
        tier's errors: victims could not be written. Some of the given rows may be in; the tier above has values as
        new."""
        cache, workers = self._arena.cache, self._arena.workers

        def fill(slots: Int32s, places: Any) -> None:
            rows = cache.weights, cache.state, weights[places], state[places]
            workers.divide(lambda begin, end: kernels.put_rows(begin, end, slots, *rows), len(slots))

        self._overwrite(keys, fill)

    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        def fill(slots: Int32s, places: Any) -> None:
            self._leases.fill_first_values(int(keys[0]) >> KEY_ROW_BITS, ids[places], slots)

        self._overwrite(keys, fill)

    def _overwrite(self, keys: Int64s, fill: _Fill) -> None:
        start = 0
        while start < len(keys):
            fill_admitted = partial(self._fill_admitted, fill=fill, start=start)
            lease = self._leases.acquire(keys[start:], read=False, fill=fill_admitted)
            start += lease.num_positions
            lease.release()

    def _fill_admitted(self, admission: Admission, fill: _Fill, start: int) -> None:
        """The caller holds ``fill_lock``."""
        cache, slots = self._arena.cache, admission.slots
        with self._arena.lock:
            is_missing = np.zeros(len(slots), np.bool_)
            is_missing[admission.missing[: admission.num_missing]] = True
            # Whole before anybody else can see them: waiting for the outbox lets others in.
            _fill_some(is_missing, slots, fill, start)
            cache.filled(slots[is_missing])
            self._writeback.begin_update(slots)
            _fill_some(~is_missing, slots, fill, start)


def _fill_some(chosen: Bools, slots: Int32s, fill: _Fill, start: int) -> None:
    places = np.flatnonzero(chosen)
    if len(places) == len(slots):
        fill(slots, slice(start, start + len(slots)))
    elif len(places):
        fill(slots[places], start + places)


def raw_weights(rows: Tensor) -> NDArray[Any]:
    """Numpy view of weights as kernels see them: float32, or uint16 for the dtypes of 16 bits."""
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()
