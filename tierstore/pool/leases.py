"""Leases of rows by key, whole batches or parts of them."""

import time
from collections.abc import Callable, Iterator

import numpy as np

from .. import kernels
from ..cache import Admission
from ..errors import BudgetError
from ..kernels.arrays import Int32s, Int64s
from .arena import Arena
from .filling import Filler
from .pins import PIN_POLL_SECONDS, PIN_WAIT_SECONDS, Lease, Pins


class Leases:
    """Makes leases of an arena's rows, which it has brought in first.

    Attributes:
        split_batches: batches whose rows did not fit at once and were processed in parts.
    """

    def __init__(self, arena: Arena, pins: Pins, filler: Filler) -> None:
        self.split_batches = 0
        self._arena = arena
        self._pins = pins
        self._filler = filler

    def acquire(self, keys: Int64s) -> Lease:
        """Pin the rows of the leading positions of ``keys``: as many as there is room for, at least one.

        Args:
            keys: int64 [n], n > 0.

        Raises:
            BudgetError: every slot stayed pinned by others for a minute.
            DamagedError: a row on SSD failed its check; no row stays pinned.
        """
        return self._of(self.admit_some(keys, read=True))

    def acquire_whole(self, keys: Int64s, order: Int64s | None = None) -> Lease | None:
        """Pin the rows of all ``keys``; None, and nothing is read, if there is no room for all.

        Args:
            keys: int64 [n], n > 0.
            order: int64 [n], the positions in the order in which the rows come into use; default: as they are.

        Raises:
            DamagedError: a row on SSD failed its check; no row stays pinned.
        """
        admission = Admission(keys if order is None else keys[order])
        with self._arena.fill_lock:
            self._filler.admit(admission, read=True, whole=True)
        if not admission.consumed:
            return None
        if order is not None:
            numbers, admission.inverse = admission.inverse, np.empty_like(admission.inverse)
            slots, admission.unique_slots = admission.slots, np.empty_like(admission.slots)
            kernels.renumber(order, numbers, slots, admission.inverse, admission.unique_slots)
        return self._of(admission)

    def acquire_rows(self, inverse: Int32s, keys: Int64s) -> Lease | None:
        """Pin the rows of a whole batch, given as ``Distinct``; otherwise as ``acquire_whole``. Rows used last are
        admitted first: they are the likeliest to be still resident."""
        if len(keys) > self._arena.cache.capacity:
            return None
        admission = Admission(keys[::-1].copy())
        with self._arena.fill_lock:
            self._filler.admit(admission, read=True, whole=True)
        if not admission.consumed:
            return None
        return Lease(self._pins, admission.slots[::-1].copy(), inverse, pinned=admission.slots)

    def _of(self, admission: Admission) -> Lease:
        return Lease(self._pins, admission.slots, admission.inverse[: admission.consumed], pinned=admission.slots)

    def in_place(self, slots: Int32s) -> Lease:
        """A lease of rows that never leave their slots (int32 [n], one a position): nothing is pinned."""
        return Lease(self._pins, slots, None, pinned=slots[:0])

    def admit_some(self, keys: Int64s, *, read: bool, fill: Callable[[Admission], None] | None = None) -> Admission:
        """Admit leading positions of ``keys``, at least one. ``read`` reads their rows; ``fill`` fills them, with
        ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            admission = Admission(keys)
            with arena.fill_lock:
                self._filler.admit(admission, read=read)
                if fill is not None and admission.consumed:
                    fill(admission)
            if admission.consumed:
                return admission
            with arena.lock:
                # In short waits: a dropped lease cannot wake anyone.
                while not arena.lock.wait_for(self._pins.has_unpinned, timeout=PIN_POLL_SECONDS):
                    if time.monotonic() < deadline:
                        continue
                    raise BudgetError(
                        f"all {arena.cache.capacity} rows of the DDR cache stayed pinned for {PIN_WAIT_SECONDS:.0f} s; "
                        "open the store with a larger ddr="
                    )

    def parts(self, keys: Int64s, order: Int64s | None = None) -> Iterator[tuple[int, Lease]]:
        """Leases that together cover ``keys`` in order: (first position, lease); one if the rows fit. ``order`` is as
        for ``acquire_whole``.

        Each is released when the next is asked for, unless the caller held it: then it is the caller's to release.
        """
        start = 0
        while start < len(keys):
            whole = None if start or order is None else self.acquire_whole(keys, order)
            lease = whole or self.acquire(keys[start:])
            consumed = lease.num_positions
            if not start and consumed < len(keys):
                self.split_batches += 1
            try:
                yield start, lease
            finally:
                if not lease.held:
                    lease.release()
            start += consumed
