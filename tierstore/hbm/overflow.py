"""Overflow slots: for rows all of whose set is in use. Any row may take any slot; the host keeps which one does."""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..cache import Admission, AdmitStatus, DdrCache
from ..cache.ddr import size_bytes_of
from ..kernels.arrays import Int32s, Int64s

OVERFLOW_INDEX_BYTES: Final = 3 * 8
"""Device memory for each slot: its key, once as it is and once sorted, and the slot of the sorted one."""


def overflow_bytes(rows: int) -> int:
    """Host memory that ``rows`` overflow slots take."""
    return size_bytes_of(rows, weight_words=0, state_words=0, policy="lru")


_NOBODY: Final = -1
"""No key of a row is negative."""


class Overflow:
    """Bookkeeping of slots ``[0, capacity)``, least recently used first to go. Not thread-safe.

    Slots are numpy int32 [n], distinct within a call.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._rows = DdrCache(capacity, weight_words=0, state_words=0, policy="lru")
        self._keys = torch.full((capacity,), _NOBODY, dtype=torch.int64, device=device)
        self._ordered: tuple[Tensor, Tensor] | None = None
        """``_keys`` sorted, and the slot of each; None after a change."""

    @property
    def capacity(self) -> int:
        return self._rows.capacity

    @property
    def size_bytes(self) -> int:
        return self._rows.size_bytes

    def find(self, keys: Tensor) -> Tensor | None:
        """int32 [n], on the keys' device: each key's slot or -1, the slots pinned. None if no key can have one."""
        if not self._rows.num_resident:
            return None
        if self._ordered is None:
            self._ordered = torch.sort(self._keys)
        ordered, order = self._ordered
        place = torch.searchsorted(ordered, keys).clamp(max=self.capacity - 1)
        found = torch.where(ordered[place] == keys, order[place], -1).to(torch.int32)
        self._rows.pin(present(found))
        return found

    def admit(self, keys: Int64s, make_room: Callable[[Int32s], None]) -> Admission | None:
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
                leaving = self._rows.victims(self.capacity, self.capacity)
                make_room(leaving)
                self._rows.clean(leaving)
        except BaseException:
            self._drop(admission)
            raise
        if status is AdmitStatus.ALL_PINNED:
            self._drop(admission)
            return None
        self._note(admission)
        return admission

    def _note(self, admission: Admission) -> None:
        """Tell the device whose slots these are now."""
        slots = torch.from_numpy(admission.slots).to(self._keys.device)
        self._keys[slots] = torch.from_numpy(admission.keys).to(self._keys.device)
        self._ordered = None

    def filled(self, admission: Admission) -> None:
        """The rows of admitted keys are in place."""
        self._rows.filled(admission.missing_slots)

    def abandon(self, admission: Admission) -> None:
        """Undo ``admit``."""
        self._drop(admission)

    def _drop(self, admission: Admission) -> None:
        """Undo an admission that may be half done; rows that left for it are gone, so its slots are nobody's."""
        slots, keys = admission.slots, admission.keys[: admission.num_unique]
        self._rows.abandon(admission)
        gone = slots[self._rows.find(keys) < 0]
        self._keys[torch.from_numpy(gone).to(self._keys.device)] = _NOBODY
        self._ordered = None

    def touch(self, slots: Int32s) -> None:
        """Count one access of each slot."""
        self._rows.touch(slots)

    def unpin(self, slots: Int32s, *, changed: bool = False) -> None:
        """Undo one pin of each slot; its row is newer than the one below if it changed."""
        if changed:
            self._rows.mark_dirty(slots)
        self._rows.unpin(slots)

    def dirty_slots(self) -> Int32s:
        """Slots of newer rows."""
        return self._rows.dirty_slots()

    def clean(self, slots: Int32s) -> None:
        """The rows of these slots were written down."""
        self._rows.clean(slots)

    def keys_of(self, slots: Int32s) -> Int64s:
        """int64 [n]: whose slots they are."""
        return self._rows.keys_of(slots)

    def forget(self) -> None:
        """Forget every row; none is pinned or newer."""
        self._rows.evict(self._rows.resident_slots())
        self._keys.fill_(_NOBODY)
        self._ordered = None

    def check_integrity(self) -> None:
        """AssertionError unless the books are whole and nothing is loading."""
        self._rows.check_integrity()
        assert not self._rows.is_loading(self._rows.resident_slots()), "an overflow slot is loading with nobody at it"
        keys = self._keys.cpu().numpy()
        slots = self.resident_slots
        known = int((keys != _NOBODY).sum())
        assert known == len(slots), f"{known} slots taken on the device, {len(slots)} in the books"
        assert np.array_equal(keys[slots], self.keys_of(slots)), "the device's keys are not those of the books"

    @property
    def num_pinned(self) -> int:
        return self._rows.num_pinned

    @property
    def resident_slots(self) -> Int32s:
        """int32 [n]: slots that have a row."""
        return self._rows.resident_slots()


def present(found: Tensor) -> Int32s:
    """Numpy: those that are slots."""
    slots = found.cpu().numpy()
    return slots[slots >= 0]
