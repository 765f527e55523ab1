"""Leases: rows of a batch that stay in their slots until they are released; and the pins that keep them there.

Pins are *transient* (released by the call that took them) or *held* (by a prefetched batch, or a forward whose backward
is to come). Held pins are at most three quarters of the slots, and no thread waits for a lease while it keeps a
transient one. So a caller that finds every slot pinned waits for others and never deadlocks.
"""

import weakref
from collections import deque
from typing import Final

from ..cache.base import Pinned
from ..kernels.arrays import Int32s
from .arena import Arena
from .bags import NO_INTS

HELD_SHARE: Final = 0.75
PIN_WAIT_SECONDS: Final = 60.0
PIN_POLL_SECONDS: Final = 0.1

_NOTHING: Final = Pinned(0)


class Lease:
    """The rows of a batch's leading positions, kept in their ``slots``, int32 [n]. ``inverse``, int32 [positions]: each
    one's place in ``slots``; None if slot i is position i's. ``held``: it outlives the call that took it."""

    __slots__ = ("__weakref__", "claim", "held", "inverse", "keeper", "pinned", "slots")

    def __init__(self, keeper: "Pins", pinned: Pinned, slots: Int32s) -> None:
        self.keeper: Pins | None = keeper  # None once it is released
        self.claim: _Claim | None = None
        self.pinned = pinned
        self.slots = slots
        self.inverse: Int32s | None = None
        self.held = False

    @property
    def num_positions(self) -> int:
        return len(self.slots if self.inverse is None else self.inverse)

    @property
    def position_slots(self) -> Int32s:
        """int32 [num_positions]: the slot of each position."""
        return self.slots if self.inverse is None else self.slots[self.inverse]

    def release(self) -> None:
        """Let the rows go; a second call does nothing."""
        keeper, self.keeper = self.keeper, None
        if keeper is not None and self.claim is not None:
            keeper.release(self.claim)
            self.claim = None


class _Claim(weakref.ref[Lease]):
    """What a lease has, for when it is gone. Nothing of Python runs where it is dropped: no exception can come then,
    and the garbage collector may drop it in any thread, under any lock."""

    __slots__ = ("pinned",)
    pinned: Pinned


class Pins:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._claims: set[_Claim] = set()
        self._held: dict[_Claim, int] = {}
        self._dropped: deque[_Claim] = deque()

    def lease(self, pinned: Pinned) -> Lease:
        """A lease of what will be pinned in ``pinned``, without slots yet; however it ends, they are unpinned."""
        lease = Lease(self, pinned, NO_INTS)
        self._claim(lease)
        return lease

    def in_place(self, slots: Int32s) -> Lease:
        """A lease of rows that never leave their slots (int32 [n], one a position): nothing is pinned."""
        return Lease(self, _NOTHING, slots)

    def _claim(self, lease: Lease) -> _Claim:
        claim = _Claim(lease, self._dropped.append)
        claim.pinned = lease.pinned
        lease.claim = claim
        self._claims.add(claim)
        return claim

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
        return sum(self._held.values()) + num_slots <= self._arena.cache.capacity * HELD_SHARE

    def hold(self, lease: Lease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""
        with self._arena.lock:
            self.release_dropped()
            num_slots = lease.pinned.num_unique
            if self._can_hold(num_slots):
                self._held[lease.claim or self._claim(lease)] = num_slots
                lease.held = True
            return lease.held

    def release(self, claim: _Claim) -> None:
        """Unpin; called by ``Lease.release``."""
        with self._arena.lock:
            self._release(claim)
            self.release_dropped()
            self._arena.changed.notify_all()

    def release_dropped(self) -> None:
        """Unpin what leases had that were dropped. The caller holds the lock."""
        while self._dropped:
            self._release(self._dropped[0])
            self._dropped.popleft()

    def _release(self, claim: _Claim) -> None:
        if claim.pinned.num_unique and not self._arena.is_disowned:
            self._arena.cache.release(claim.pinned)
        self._held.pop(claim, None)
        self._claims.discard(claim)

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
            return len(self._held)
