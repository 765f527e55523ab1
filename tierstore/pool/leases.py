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
        return self.admit_some(keys, read=True)

    def acquire_whole(self, keys: Int64s, order: Int64s | None = None) -> Lease | None:
        """Pin the rows of all ``keys``; None, and nothing is read, if there is no room for all.

        Args:
            keys: int64 [n], n > 0.
            order: int64 [n], the positions in the order in which the rows come into use; default: as they are.

        Raises:
            DamagedError: a row on SSD failed its check; no row stays pinned.
        """
        lease = self._admit(keys if order is None else keys[order], read=True, whole=True, order=order)
        return lease if lease.num_positions else None

    def _admit(
        self,
        keys: Int64s,
        *,
        read: bool,
        whole: bool = False,
        order: Int64s | None = None,
        fill: Callable[[Admission], None] | None = None,
    ) -> Lease:
        """A lease of what was admitted. It owns the pins before there are any."""
        admission = Admission(keys)
        lease = self._pins.lease(admission)
        try:
            with self._arena.fill_lock:
                self._filler.admit(admission, read=read, whole=whole)
                if fill is not None and admission.consumed:
                    fill(admission)
            lease.slots, lease.inverse = admission.slots, admission.inverse[: admission.consumed]
            if order is not None and admission.consumed:
                slots, inverse = np.empty_like(lease.slots), np.empty_like(lease.inverse)
                kernels.renumber(order, lease.inverse, lease.slots, inverse, slots)
                lease.slots, lease.inverse = slots, inverse
        except BaseException:
            lease.release()
            raise
        return lease

    def acquire_rows(self, inverse: Int32s, keys: Int64s) -> Lease | None:
        """Pin the rows of a whole batch, given as ``Distinct``; otherwise as ``acquire_whole``. Rows used last are
        admitted first: they are the likeliest to be still resident."""
        if len(keys) > self._arena.cache.capacity:
            return None
        lease = self._admit(keys[::-1].copy(), read=True, whole=True)
        if not lease.num_positions:
            return None
        lease.slots, lease.inverse = lease.slots[::-1].copy(), inverse
        return lease

    def in_place(self, slots: Int32s) -> Lease:
        """See ``Pins.in_place``."""
        return self._pins.in_place(slots)

    def admit_some(self, keys: Int64s, *, read: bool, fill: Callable[[Admission], None] | None = None) -> Lease:
        """Pin the rows of leading positions of ``keys``, at least one. ``read`` reads them; ``fill`` fills them, with
        ``fill_lock`` held."""
        arena = self._arena
        deadline = time.monotonic() + PIN_WAIT_SECONDS
        while True:
            lease = self._admit(keys, read=read, fill=fill)
            if lease.num_positions:
                return lease
            with arena.lock:
                # In short waits: a dropped lease cannot wake anyone.
                while not arena.changed.wait_for(self._pins.has_unpinned, timeout=PIN_POLL_SECONDS):
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
