"""Overflow slots: for rows all of whose set is in use. Any row may take any slot; the host keeps which one does."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..cache.base import LOADING, Admission, AdmitStatus
from ..cache.cache_state import Tally
from ..cache.ddr import DdrCache, size_bytes_of
from ..kernels.arrays import Int32s, Int64s
from .staging import Sender

OVERFLOW_INDEX_BYTES: Final = 3 * 8
"""Device memory for each slot: its key, once as it is and once sorted, and the slot of the sorted one."""


def overflow_bytes(rows: int) -> int:
    return size_bytes_of("lru", rows, weight_words=0, state_words=0)


_NOBODY: Final = -1
"""No key of a row is negative."""


class Overflow(DdrCache):
    """Which rows have overflow slots, least recently used first to go: a cache without rows, known to the device, whose
    slots are ``behind`` others in the arenas. Rows enter by ``enter`` and go by ``drop`` and ``forget``, which update
    the device. Nothing waits for it."""

    def __init__(self, capacity: int, *, behind: int, sender: Sender, kernels: ModuleType) -> None:
        super().__init__(capacity, weight_words=0, state_words=0, policy="lru")
        self.behind = behind
        self._sender = sender
        self._kernels = kernels
        self._keys = torch.full((capacity,), _NOBODY, dtype=torch.int64, device=sender.device)
        self._ordered: tuple[Tensor, Tensor] | None = None
        """``_keys`` sorted, and the slot of each; None after a change."""

    def locate(self, keys: Tensor) -> Tensor | None:
        """int32 [n], on the keys' device: each key's slot of the arenas or -1. None if no key can have one."""
        if not self.num_resident:
            return None
        if self._ordered is None:
            self._ordered = torch.sort(self._keys)
        ordered, order = self._ordered
        found: Tensor = self._kernels.find_sorted(ordered, order, keys, self.behind)
        return found

    def enter(self, keys: Int64s, make_room: Callable[[Int32s], None]) -> Admission | None:
        """Give each of the keys (numpy int64 [n], distinct, none with a slot) one, pinned and loading. None, and
        nothing changed but what ``make_room`` wrote down (it is given dirty slots that nobody uses), if there are
        too few."""
        admission = Admission(keys)
        if not len(keys):
            return admission
        while (status := self.admit(admission)) is AdmitStatus.DIRTY_VICTIM:
            leaving = self.dirty_victims(self.capacity, self.capacity)
            make_room(leaving)
            self.clean(leaving)
        if status is AdmitStatus.ALL_PINNED:
            self._give_up(admission)
            return None
        self._tell(admission.slots, admission.keys)
        return admission

    def _tell(self, slots: Int32s, keys: Int64s | int) -> None:
        (places, owners), _ = self._sender.copy(slots.astype(np.int64), np.full(len(slots), keys, np.int64))
        self._keys.index_copy_(0, places, owners)
        self._ordered = None

    def places(self, slots: Int32s) -> Tensor:
        """int32 [n], on the device: slots of the arenas."""
        (places,), _ = self._sender.copy(slots + np.int32(self.behind))
        return places

    def _give_up(self, admission: Admission) -> None:
        """Undo an admission; rows that left for it are gone, so its slots are nobody's."""
        slots, keys = admission.slots, admission.keys[: admission.num_unique]
        self.release(admission)
        self._tell(slots[self.find(keys) < 0], _NOBODY)

    def repin(self, leased: Sequence[Int32s]) -> None:
        """Have the slots of these leases pinned, each as often as it is in one, and no others; and forget what is
        loading. The device gets all again."""
        self.pins[:] = 0
        self.tallies[Tally.PINNED] = 0
        for slots in leased:
            self.pin(slots)
        resident = self.resident_slots()
        self.evict(resident[(self.flags[resident] & LOADING) != 0])
        self._keys.fill_(_NOBODY)
        resident = self.resident_slots()
        self._tell(resident, self.keys_of(resident))

    def forget(self) -> None:
        """Forget every row; none is pinned or newer."""
        slots = self.resident_slots()
        self.evict(slots)
        self._tell(slots, _NOBODY)

    def check_integrity(self) -> None:
        """AssertionError unless its counters are right and nothing is loading."""
        super().check_integrity()
        slots, keys = self.resident_slots(), self._keys.cpu().numpy()
        assert not self.is_loading(slots), "an overflow slot is loading with nobody at it"
        known = int((keys != _NOBODY).sum())
        assert known == len(slots), f"{known} slots taken on the device, {len(slots)} on the host"
        assert np.array_equal(keys[slots], self.keys_of(slots)), "the device's keys are not those of the host"
