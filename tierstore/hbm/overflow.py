"""Overflow slots: for rows all of whose set is in use. Any row may take any slot; the host keeps which one does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import Admission, AdmitStatus, DdrCache
from ..cache.ddr import size_bytes_of

__all__ = ["Overflow", "overflow_bytes"]


def overflow_bytes(rows: int) -> int:
    """Host memory that ``rows`` overflow slots take."""
    return size_bytes_of(rows, weight_words=0, state_words=0, policy="lru") + rows * np.dtype(np.int32).itemsize


class Overflow:
    """Bookkeeping of slots ``[0, capacity)``, least recently used first to go. Not thread-safe.

    Slots are numpy int32 [n], distinct within a call.
    """

    def __init__(self, capacity: int) -> None:
        self._rows = DdrCache(capacity, weight_words=0, state_words=0, policy="lru")
        self._pins = np.zeros(capacity, np.int32)

    @property
    def capacity(self) -> int:
        return self._rows.capacity

    @property
    def size_bytes(self) -> int:
        return self._rows.size_bytes + self._pins.nbytes

    def find(self, keys: Tensor) -> Tensor | None:
        """int32 [n], on the keys' device: each key's slot or -1, the slots pinned. None if no key can have one."""
        slots = self._rows.resident_slots()
        if not len(slots):
            return None
        ordered, order = torch.sort(torch.from_numpy(self._rows.keys_of(slots)).to(keys.device))
        place = torch.searchsorted(ordered, keys).clamp(max=len(slots) - 1)
        found = torch.where(ordered[place] == keys, torch.from_numpy(slots).to(keys.device)[order[place]], -1)
        self._pin(present(found), 1)
        return found

    def admit(self, keys: Any, make_room: Callable[[Any], None]) -> Admission | None:
        """Give each of the keys (numpy int64 [n], distinct, none with a slot) one, pinned and loading.

        Args:
            make_room: called with dirty slots that nobody uses, to write their rows down.

        Returns:
            None, and nothing changed but what was written down, if there are too few.
        """
        admission = Admission(keys)
        if not len(keys):
            return admission
        try:
            while (status := self._rows.admit(admission)) is AdmitStatus.DIRTY_VICTIM:
                dirty = self.dirty_slots()
                idle = dirty[self._pins[dirty] == 0]
                make_room(idle)
                self._rows.clean(idle)
        except BaseException:
            self._rows.abandon(admission)
            raise
        if status is AdmitStatus.ALL_PINNED:
            self._rows.abandon(admission)
            return None
        self._pins[admission.slots] += 1
        return admission

    def filled(self, admission: Admission) -> None:
        """The rows of admitted keys are in place."""
        self._rows.filled(admission.missing_slots)

    def abandon(self, admission: Admission) -> None:
        """Undo ``admit``."""
        self._pins[admission.slots] -= 1
        self._rows.abandon(admission)

    def touch(self, slots: Any) -> None:
        """Count one access of each slot."""
        self._rows.touch(slots)

    def unpin(self, slots: Any, *, changed: bool = False) -> None:
        """Undo one pin of each slot; its row is newer than the one below if it changed."""
        if changed:
            self._rows.mark_dirty(slots)
        self._pin(slots, -1)

    def _pin(self, slots: Any, count: int) -> None:
        self._pins[slots] += count
        (self._rows.pin if count > 0 else self._rows.unpin)(slots)

    def dirty_slots(self) -> Any:
        """Slots of newer rows, next to go first."""
        return self._rows.victims(self._rows.num_dirty)

    def clean(self, slots: Any) -> None:
        """The rows of these slots were written down."""
        self._rows.clean(slots)

    def keys_of(self, slots: Any) -> Any:
        """int64 [n]: whose slots they are."""
        return self._rows.keys_of(slots)

    def forget(self) -> None:
        """Forget every row; none is pinned or newer."""
        self._rows.evict(self._rows.resident_slots())

    def check_integrity(self) -> None:
        """AssertionError unless the books are whole, nothing is loading, and pins agree."""
        self._rows.check_integrity()
        assert not self._rows.is_loading(self._rows.resident_slots()), "an overflow slot is loading with nobody at it"
        pinned = int((self._pins != 0).sum())
        assert pinned == self._rows.num_pinned, f"{pinned} slots pinned, {self._rows.num_pinned} in the books"

    @property
    def num_pinned(self) -> int:
        return self._rows.num_pinned

    @property
    def resident_slots(self) -> Any:
        """int32 [n]: slots that have a row."""
        return self._rows.resident_slots()


def present(found: Tensor) -> Any:
    """Numpy: those that are slots."""
    slots = found.cpu().numpy()
    return slots[slots >= 0]
