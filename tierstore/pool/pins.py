"""Leases: rows of a batch that stay in their slots until they are released; and the pins that keep them there.

Pins are *transient* (released by the call that took them) or *held* (by a prefetched batch, or a forward whose backward
is to come). Held pins are at most three quarters of the slots, and no thread waits for a lease while it keeps a
transient one. So a caller that finds every slot pinned waits for others and never deadlocks.
"""

from collections import deque
from typing import Final

from ..kernels.arrays import Int32s
from .arena import Arena

HELD_SHARE: Final = 0.75
PIN_WAIT_SECONDS: Final = 60.0
PIN_POLL_SECONDS: Final = 0.1


class Lease:
    """The rows of a batch's leading positions, kept in their slots.

    Args:
        keeper: who made it.
        slots: int32 [n], of the rows.
        inverse: int32 [positions]: each position's place in ``slots``; None if slot i is position i's.
        pinned: int32, the slots that ``release`` unpins.

    Attributes:
        held: it outlives the call that took it; set by ``Pins.hold``.
    """

    __slots__ = ("_keeper", "held", "inverse", "pinned", "slots")

    def __init__(self, keeper: "Pins", slots: Int32s, inverse: Int32s | None, pinned: Int32s) -> None:
        self._keeper: Pins | None = keeper
        self.slots = slots
        self.inverse = inverse
        self.pinned = pinned
        self.held = False

    @property
    def num_positions(self) -> int:
        """Positions whose rows it has."""
        return len(self.slots if self.inverse is None else self.inverse)

    @property
    def position_slots(self) -> Int32s:
        """int32 [num_positions]: the slot of each position."""
        return self.slots if self.inverse is None else self.slots[self.inverse]

    def is_of(self, keeper: "Pins") -> bool:
        """Whether it was made by this keeper, and not released."""
        return self._keeper is keeper

    def release(self) -> None:
        """Let the rows go; a second call does nothing."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.release(self.pinned, held=self.held)

    def __del__(self) -> None:
        keeper, self._keeper = self._keeper, None  # once, should somebody whom the collector found too release it
        if keeper is not None:
            keeper.release_later(self.pinned, held=self.held)


class Pins:
    """See the module's docstring."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held_slots = self._num_held = 0
        self._dropped: deque[tuple[Int32s, bool]] = deque()

    def has_unpinned(self) -> bool:
        """Whether a slot may be had, or waiting for one is over. The caller holds the lock."""
        self.release_dropped()
        return self._arena.is_closed or self._arena.cache.num_pinned < self._arena.cache.capacity

    def has_room(self, num_slots: int) -> bool:
        """Whether one more lease, of so many slots, could be held."""
        with self._arena.lock:
            self.release_dropped()
            return self._can_hold(num_slots)

    def _can_hold(self, num_slots: int) -> bool:
        return self._held_slots + num_slots <= self._arena.cache.capacity * HELD_SHARE

    def hold(self, lease: Lease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self._arena.lock:
            self.release_dropped()
            if self._can_hold(len(lease.pinned)):
                self._held_slots += len(lease.pinned)
                self._num_held += 1
                lease.held = True
            return lease.held

    def release(self, pinned: Int32s, *, held: bool) -> None:
        """Unpin; called by ``Lease.release``."""
        with self._arena.lock:
            self._release(pinned, held)
            self.release_dropped()
            self._arena.lock.notify_all()

    def release_later(self, pinned: Int32s, *, held: bool) -> None:
        """Queue a dropped lease; the next thread that takes the lock releases it.

        The garbage collector may run this in any thread, under any lock; it must not wait for one.
        """
        self._dropped.append((pinned, held))

    def release_dropped(self) -> None:
        """Unpin what leases had that were dropped. The caller holds the lock."""
        while self._dropped:
            self._release(*self._dropped.popleft())

    def _release(self, pinned: Int32s, held: bool) -> None:
        if self._arena.is_disowned:
            return
        if len(pinned):
            self._arena.cache.unpin(pinned)
        if held:
            self._held_slots -= len(pinned)
            self._num_held -= 1

    @property
    def num_pinned(self) -> int:
        """Slots that leases pin, or that are being written."""
        with self._arena.lock:
            self.release_dropped()
            return self._arena.cache.num_pinned

    @property
    def num_held(self) -> int:
        """Leases held: of batches that were prefetched, or whose backward is to come."""
        with self._arena.lock:
            self.release_dropped()
            return self._num_held
