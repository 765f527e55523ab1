"""Rows in and out of a pool by key: whole ones for a tier above, some for tables, by the pool's fastest tier."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache import Admission
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Bools, Floats, Int32s, Int64s, Weights, Words
from ..layout import KEY_ROW_BITS
from ..system.signals import shielded
from .arena import Arena
from .leases import Leases, ResidentRows
from .writeback import WriteBack

if TYPE_CHECKING:
    from .one_table import OneTable

_Fill = Callable[[Int32s, Any], None]
"""Fills slots, given the places of their rows among the keys: int64 [n] or a slice."""


class Transfers:
    def __init__(self, arena: Arena, leases: Leases, writeback: WriteBack) -> None:
        self._arena = arena
        self._leases = leases
        self._writeback = writeback

    def are_in(self, keys: Int64s) -> bool:
        """Whether all these rows are in the cache, and can be looked up now."""
        with self._arena.lock:
            self._arena.require_open()
            return self._are_in(self._arena.cache.find(keys))

    def _are_in(self, slots: Int32s) -> bool:
        return int(slots.min(initial=0)) >= 0 and not self._arena.cache.is_loading(slots)

    def read_in_memory(self, keys: Int64s, out: Weights) -> bool:
        """``read`` if all these rows are in the cache; else False."""
        return self._use_in_memory(keys, partial(self._copy_out, out=out))

    def _use_in_memory(self, keys: Int64s, use: Callable[[Int32s], None]) -> bool:
        """Call ``use(slots)`` if all these rows are in the cache; else False. Nothing is admitted or pinned."""
        with self._arena.lock:  # no bookkeeping is half done between two lines: nothing to shield
            self._arena.require_open()
            slots = self._arena.cache.find(keys)
            if not self._are_in(slots):
                return False
            self._arena.cache.touch(slots)
            use(slots)
        return True

    @shielded
    def read_state(self, keys: Int64s, out: Floats) -> None:
        for start, lease in self._leases.parts(keys):
            with self._arena.lock:
                part = out[start : start + lease.num_positions]
                kernels.copy_rows_out(lease.position_slots, self._arena.state, out.shape[1], part)

    @shielded
    def read(self, keys: Int64s, out: Weights) -> None:
        """Copy rows into ``out`` [n, dim], bits unchanged, quantized ones as float32.

        Rows in cache are copied without waiting for any device.
        """
        if self.read_in_memory(keys, out):
            return
        for start, lease in self._leases.parts(keys):
            with self._arena.lock:
                self._copy_out(lease.position_slots, out[start : start + lease.num_positions])

    def _copy_out(self, slots: Int32s, out: Any) -> None:
        if self._arena.layout.is_quantized:
            quantized.unpack_rows(slots, self._arena.weights, self._arena.layout.dim, self._arena.dtype_code, out)
        else:
            kernels.copy_rows_out(slots, self._arena.weights, self._arena.layout.dim, out)

    @shielded
    def write(self, keys: Int64s, rows: Weights) -> None:
        """Overwrite weights with ``rows`` [n, dim]; of equal keys the last wins; optimizer state is kept."""
        arena = self._arena
        for start, lease in self._leases.parts(keys):
            part = rows[start : start + lease.num_positions]
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

        self._arena.over_threads(work, len(slots))

    def put(self, keys: Int64s, weights: Words, state: Words) -> None:
        """Overwrite whole rows, state included, with newer ones from a tier above; nothing is read for it. The cold
        tier's errors: victims could not be written. Some of the given rows may be in; the tier above has values as
        new."""
        self._overwrite(keys, lambda slots, places: self._put(slots, weights[places], state[places]))

    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        """``put`` of first values and state: those that rows ``ids`` of the table would have. Keys are of one table."""

        def fill(slots: Int32s, places: Any) -> None:
            self._leases.fill_first_values(int(keys[0]) >> KEY_ROW_BITS, ids[places], slots)

        self._overwrite(keys, fill)

    def _overwrite(self, keys: Int64s, fill: _Fill) -> None:
        start = 0
        while start < len(keys):
            lease = self._leases.admit_some(
                keys[start:], read=False, fill=partial(self._fill_admitted, fill=fill, start=start)
            )
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

    def _put(self, slots: Int32s, weights: Words, state: Words) -> None:
        def work(begin: int, end: int) -> None:
            kernels.put_rows(begin, end, slots, self._arena.cache.weights, self._arena.cache.state, weights, state)

        self._arena.over_threads(work, len(slots))


def _fill_some(chosen: Bools, slots: Int32s, fill: _Fill, start: int) -> None:
    places = np.flatnonzero(chosen)
    if len(places) == len(slots):
        fill(slots, slice(start, start + len(slots)))
    elif len(places):
        fill(slots[places], start + places)


def raw_weights(rows: Tensor) -> NDArray[Any]:
    """Numpy view of weights as kernels see them: float32, or uint16 for the dtypes of 16 bits."""
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


class Tier(Protocol):
    """The fastest tier of a pool: host memory (``HostTier``), or device memory above it (``hbm.base.DeviceRows``)."""

    on_device: bool
    lock: AbstractContextManager[Any]
    """Held while rows come into device memory or go down; taken before the locks of the pool."""

    @property
    @abstractmethod
    def num_leased(self) -> int:
        """Leases that use rows in device memory."""

    @property
    @abstractmethod
    def num_dirty(self) -> int:
        """Rows that are newer than those in host memory."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory that device memory takes."""

    def are_in_memory(self, keys: Int64s) -> bool:
        """Whether a lookup of ``keys`` (int64 [n]) reads nothing from SSD and copies nothing to a device."""

    @abstractmethod
    def read(self, keys: Int64s) -> Tensor:
        """Rows of ``keys`` (int64 [n], n > 0), [n, dim], on its device."""

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        """``read`` if ``are_in_memory``, else None."""

    @abstractmethod
    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights of ``keys`` (int64 [n]) with ``rows`` [n, dim] of the table's dtype."""

    @abstractmethod
    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        """As of ``Transfers``; no row of them is in use, but by batches that were prepared."""

    def one_table(self, table_index: int, num_rows: int) -> "OneTable | None":
        """A short way for small lookups of a table, if there is one."""

    @abstractmethod
    def flush(self) -> None:
        """Copy newer rows to host memory; errors as ``look``."""

    def look(self) -> None:
        """ValueError, once for each, for a batch that had a wrong id and was used. Waits until all are known."""

    def emptied(self) -> AbstractContextManager[Any]:
        """Within it, host memory has the newest value of every row, and device memory has no row."""

    def refuse(self) -> None:
        """Refuse further use, by ClosedError."""

    def close(self) -> None:
        """Refuse further use, and let nothing use the rows when it returns."""

    @abstractmethod
    def check_integrity(self) -> None:
        """AssertionError unless the counts agree with the rows."""


class HostTier:
    on_device = False
    num_leased = num_dirty = host_bytes = 0

    def __init__(self, arena: Arena, rows: ResidentRows, transfers: Transfers) -> None:
        self.lock: AbstractContextManager[Any] = contextlib.nullcontext()
        self.one_table = rows.one_table
        self.put_first_values = transfers.put_first_values
        self.are_in_memory = transfers.are_in
        self._arena = arena
        self._layout = arena.layout
        self._transfers = transfers

    def check_integrity(self) -> None:
        with self._arena.lock:
            self._arena.cache.check_integrity()

    def _empty(self, num_rows: int) -> Tensor:
        return torch.empty((num_rows, self._layout.dim), dtype=self._layout.torch_dtype, device="cpu")

    def read(self, keys: Int64s) -> Tensor:
        out = self._empty(len(keys))
        self._transfers.read(keys, raw_weights(out))
        return out

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        out = self._empty(len(keys))
        return out if self._transfers.read_in_memory(keys, raw_weights(out)) else None

    def write(self, keys: Int64s, rows: Tensor) -> None:
        self._transfers.write(keys, raw_weights(rows.cpu().contiguous()))

    def flush(self) -> None: ...

    def look(self) -> None: ...

    def emptied(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def refuse(self) -> None: ...

    def close(self) -> None: ...
