"""A pool: the rows of all tables of one layout, in one DDR cache over the cold tier. Here the two layers meet.

Locks, always taken in this order:

- ``fill_lock`` serialises bringing rows in; held over device reads and writes.
- ``writeback.gate`` serialises writing rows back; held over device writes.
- ``lock`` guards the cache's bookkeeping and the bytes of rows that may change; never held over a device read or write.
  ``rows_lock`` is the same lock, or none in a read-only store.

A call may be cut short between any two lines, by any exception: of a signal's handler, for want of memory. Then the
cache's contract keeps rows right, ``Pins`` releases what the call had pinned, and the write-back begins again.

Its parts: ``leases`` (rows, locks, pins, and what brings rows in), ``host`` (the tier in host memory: lookups and
updates of batches, rows in and out by key), and ``writeback``.
"""

import logging
from typing import Final

from ..cache.base import RowCache
from ..cache.full import FullCache
from ..io.base import ColdTier
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..system.signals import shielded
from .converting import RowSource
from .host import EvictingRows, HostTier, InPlaceRows
from .leases import PIN_WAIT_SECONDS, Arena, Leases, Pins
from .tier import Tier
from .writeback import WriteBack

_LOG: Final = logging.getLogger("tierstore")


class Pool:
    """See the module's docstring.

    Attributes:
        arena, pins, leases, host, writeback: see the module's docstring.
        cache: which rows are there.
        tier: the fastest one, which tables use: this one, or device memory above it, set before first use and kept when
            the pool is closed.
    """

    def __init__(
        self, layout: RowLayout, cache: RowCache, cold: ColdTier, workers: Workers, *, transaction_bytes: int,
        outbox_rows: int, epoch: int, readonly: bool, read: RowSource | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.cache = cache
        self.arena = Arena(layout, cache, workers, readonly=readonly)
        self.pins = Pins(self.arena)
        self.writeback = WriteBack(
            self.arena, self.pins, cold, transaction_bytes=transaction_bytes, outbox_rows=outbox_rows, epoch=epoch
        )
        self.leases = Leases(self.arena, self.pins, self.writeback.make_room, read or cold.read)
        parts = self.arena, self.pins, self.leases, self.writeback
        self.host: HostTier = InPlaceRows(cache, *parts) if isinstance(cache, FullCache) else EvictingRows(*parts)
        self.tier: Tier = self.host

    def refuse(self) -> None:
        """Refuse further use, here and in the tier above; waiters wake up."""
        self.tier.refuse()
        self.arena.refuse()

    @shielded
    def flush(self) -> None:
        """Write every dirty row to the cold tier. The rows stay cached, clean."""
        self.tier.flush()
        with self.arena.fill_lock:
            self.writeback.write_all()

    # State

    @property
    def in_use(self) -> bool:
        """Whether an in-flight batch or call uses or writes rows, here or in the tier above."""
        return self.pins.num_pinned > 0 or self.pins.num_held > 0 or self.tier.num_leased > 0

    def becomes_unused(self) -> bool:
        """Wait until no call uses rows, a minute at most; False if one does still, or a batch does."""
        pins = self.pins
        with self.arena.lock:
            self.arena.changed.wait_for(lambda: not pins.num_pinned or pins.num_held, timeout=PIN_WAIT_SECONDS)
            is_used = pins.num_pinned > 0 or pins.num_held > 0
        return not is_used and not self.tier.num_leased

    @property
    def size_bytes(self) -> int:
        """Bytes of the cache and of the buffers for write-back and for moving rows to the tier above."""
        size: int = self.cache.size_bytes + self.writeback.size_bytes + self.tier.host_bytes
        return size

    def close(self) -> None:
        self.arena.refuse()
        self.tier.close()

    @property
    def is_clean(self) -> bool:
        """Whether nothing is to be written, neither from here nor from the tier above."""
        return not self.cache.num_dirty and not self.tier.num_dirty
