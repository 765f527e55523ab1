"""Rows in and out of a pool by key: some for a caller, whole ones for a tier above."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import kernels
from ..cache import Admission
from ..kernels import quantized
from ..kernels.arrays import Bools, Floats, Int32s, Int64s, Weights, Words
from ..system.signals import shielded
from .arena import Arena
from .leases import Leases
from .writeback import WriteBack


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
        """Copy rows' optimizer state into ``out`` [n, state_dim]."""
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
        """Overwrite whole rows, state included, with newer ones from a tier above; nothing is read for it.

        Args: as for ``take``.

        Raises:
            DiskFullError and others of the cold tier: victims could not be written. Some of the given rows may be in;
            the tier above has values as new.
        """
        start = 0
        while start < len(keys):
            fill = partial(self._put_admitted, weights=weights[start:], state=state[start:])
            lease = self._leases.admit_some(keys[start:], read=False, fill=fill)
            start += lease.num_positions
            lease.release()

    def _put_admitted(self, admission: Admission, weights: Words, state: Words) -> None:
        """The caller holds ``fill_lock``."""
        cache, slots = self._arena.cache, admission.slots
        with self._arena.lock:
            is_missing = np.zeros(len(slots), np.bool_)
            is_missing[admission.missing[: admission.num_missing]] = True
            # Whole before anybody else can see them: waiting for the outbox lets others in.
            self._put_some(is_missing, slots, weights, state)
            cache.filled(slots[is_missing])
            self._writeback.begin_update(slots)
            self._put_some(~is_missing, slots, weights, state)

    def _put_some(self, chosen: Bools, slots: Int32s, weights: Words, state: Words) -> None:
        """Copy the chosen rows (bool [n]) into their slots."""
        places = np.flatnonzero(chosen)
        if len(places) == len(slots):
            self._put_all(slots, weights, state)
        elif len(places):
            self._put_all(slots[places], weights[places], state[places])

    def _put_all(self, slots: Int32s, weights: Words, state: Words) -> None:
        def work(begin: int, end: int) -> None:
            kernels.put_rows(begin, end, slots, self._arena.cache.weights, self._arena.cache.state, weights, state)

        self._arena.over_threads(work, len(slots))
