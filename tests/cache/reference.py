"""The slow and obviously right row cache, on mappings of Python's own: the oracle of the fast one.

It shares nothing with the fast cache but the contract. ``size_bytes`` are those of its rows.
"""

from collections import Counter
from typing import Final

import numpy as np

from tests.cache.reference_policies import CLASSES
from tierstore.cache.base import (
    CONSUMED,
    NUM_MISSING,
    NUM_UNIQUE,
    STAMP,
    Admission,
    AdmitStatus,
    CacheCounters,
    Listing,
    Pinned,
)
from tierstore.kernels.arrays import Int32s, Int64s, Words


def _aligned(capacity: int, words: int) -> Words:
    raw = np.empty(capacity * words + 8, np.uint64)
    skipped = -raw.ctypes.data % 64 // 8
    arena: Words = raw[skipped : skipped + capacity * words].reshape(capacity, words)
    return arena


class ReferenceCache:
    """A ``RowCache`` made of dictionaries, for arguments in range."""

    def __init__(self, capacity: int, *, weight_words: int, state_words: int, policy: str) -> None:
        self.policy: Final = policy
        self.weights = _aligned(capacity, weight_words)
        self.state = _aligned(capacity, state_words)
        self._rows = CLASSES[policy](capacity)
        self._keys: dict[int, int] = {}
        self._loading: set[int] = set()
        self._dirty: set[int] = set()
        self._frozen: set[int] = set()
        self._changed: set[int] = set()
        self._free = list(range(capacity))
        self._counted: Counter[str] = Counter()
        self._numbers: dict[int, int] = {}
        self._admitted: dict[int, tuple[int, int]] = {}
        self._stamp = 0

    @property
    def capacity(self) -> int:
        return int(self._rows.maxsize)

    @property
    def num_resident(self) -> int:
        return len(self._rows)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    @property
    def num_frozen(self) -> int:
        return len(self._frozen)

    @property
    def num_pinned(self) -> int:
        return len(self._rows.pins)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arenas; Python's objects are not counted."""
        return self.weights.nbytes + self.state.nbytes

    def counters(self) -> CacheCounters:
        return CacheCounters(**{name: self._counted[name] for name in CacheCounters._fields})

    def find(self, keys: Int64s) -> Int32s:
        return np.array([self._rows.slots[key] if key in self._rows else -1 for key in keys.tolist()], np.int32)

    def _key_of(self, slot: int) -> int:
        assert slot in self._keys, f"slot {slot} holds no row"
        return self._keys[slot]

    def is_loading(self, slots: Int32s) -> bool:
        return not self._loading.isdisjoint(slots.tolist())

    def use(self, keys: Int64s) -> Int32s | None:
        slots = self.find(keys)
        if slots.min(initial=0) < 0 or self.is_loading(slots):
            return None
        distinct = list(dict.fromkeys(keys.tolist()))
        self._rows.begin(len(keys))
        for key in distinct:
            self._rows[key]
        self._counted.update(lookups=len(keys), hits=len(distinct))
        self._rows.settle(distinct)
        return slots

    def admit(self, admission: Admission) -> AdmitStatus:
        if admission.progress[STAMP] < 0:
            self._stamp += 1
            admission.progress[STAMP] = self._stamp
            self._numbers = {}
        assert admission.progress[STAMP] == self._stamp, "another admission ran between the calls of one"
        num_before = admission.num_unique
        self._rows.begin(len(admission.keys) - admission.consumed)
        status = self._admit(admission)
        self._rows.settle([self._key_of(slot) for slot in admission.slots[num_before:].tolist()])
        return status

    def _admit(self, admission: Admission) -> AdmitStatus:
        order = admission.order.tolist() or range(len(admission.keys))
        for position in order[admission.consumed :]:
            key = int(admission.keys[position])
            if key not in self._numbers:
                status = self._resolve(admission, key, position)
                if status != AdmitStatus.COMPLETE:
                    return status
            admission.inverse[position] = self._numbers[key]
            admission.progress[CONSUMED] += 1
            self._counted.update(lookups=1)
        return AdmitStatus.COMPLETE

    def _resolve(self, admission: Admission, key: int, position: int) -> AdmitStatus:
        """The first occurrence of a key: touch its row, or reserve a slot; then pin it."""
        if key in self._rows:
            slot = self._rows[key]
            self._counted.update(misses=1) if slot in self._loading else self._counted.update(hits=1)
        else:
            status = self._make_room()
            if status != AdmitStatus.COMPLETE:
                return status
            slot = self._insert(key)
            self._loading.add(slot)
        if slot in self._loading:
            admission.missing[admission.num_missing] = position
            admission.progress[NUM_MISSING] += 1
        self._rows.pins[key] = self._rows.pins.get(key, 0) + 1
        self._numbers[key] = admission.num_unique
        self._admitted[slot] = self._stamp, admission.num_unique
        admission.unique_slots[admission.num_unique] = slot
        admission.progress[NUM_UNIQUE] += 1
        return AdmitStatus.COMPLETE

    def _make_room(self) -> AdmitStatus:
        if self._free:
            return AdmitStatus.COMPLETE
        victim = self._rows.first_unpinned()
        if victim is None:
            return AdmitStatus.ALL_PINNED
        if self._rows.slots[victim] in self._dirty | self._frozen:
            return AdmitStatus.DIRTY_VICTIM
        _, slot = self._rows.popitem()
        self._loading.discard(slot)
        del self._keys[slot]
        self._free.append(slot)
        self._counted.update(evictions=1)
        return AdmitStatus.COMPLETE

    def _insert(self, key: int) -> int:
        slot = self._free.pop()
        self._rows[key] = slot
        self._keys[slot] = key
        self._counted.update(misses=1)
        return slot

    def _drop(self, slot: int) -> None:
        del self._rows[self._keys.pop(slot)]
        self._loading.discard(slot)
        self._free.append(slot)

    def filled(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot in self._loading, f"slot {slot} is not loading"
            self._loading.remove(slot)

    def release(self, pinned: Pinned) -> None:
        self.unpin(pinned.slots)
        pinned.progress[:] = 0
        pinned.progress[STAMP] = -1

    def pin(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            key = self._key_of(slot)
            self._rows.pins[key] = self._rows.pins.get(key, 0) + 1

    def unpin(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            key = self._key_of(slot)
            assert key in self._rows.pins, f"slot {slot} is not pinned"
            self._rows.pins[key] -= 1
            if self._rows.pins[key] == 0:
                del self._rows.pins[key]
                if slot in self._loading:
                    self._drop(slot)

    def mark_dirty(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            self._key_of(slot)
            assert slot not in self._loading, f"slot {slot} is loading"
            self._frozen.discard(slot)
            self._dirty.add(slot)
            self._changed.add(slot)

    def take(self, slots: Int32s, pinned: Pinned, *, frozen: bool) -> None:
        members = self._frozen if frozen else self._dirty
        taken = np.array([slot for slot in slots.tolist() if slot in members], np.int32)
        self._changed.difference_update(taken.tolist())
        self.pin(taken)
        pinned.unique_slots[: len(taken)] = taken
        pinned.progress[NUM_UNIQUE] = len(taken)

    def settle(self, slots: Int32s) -> None:
        self._dirty.difference_update(set(slots.tolist()) - self._changed)

    def dirty_victims(self, count: int, gap: int) -> Int32s:
        leaving = [slot for slot in self.resident_slots().tolist() if self._key_of(slot) not in self._rows.pins]
        found: list[int] = []
        clean = 0
        for slot in leaving[:count]:
            if clean >= gap and len(found) >= gap / 8:
                break
            is_unclean = slot in self._dirty | self._frozen
            found += [slot] * is_unclean
            clean = 0 if is_unclean else clean + 1
        return np.array(found, np.int32)

    def by_admission(self, slots: Int32s) -> Int32s:
        return np.array(sorted(slots.tolist(), key=self._admitted.__getitem__), np.int32)

    def frozen_of(self, slots: Int32s) -> Int32s:
        return np.array([slot for slot in slots.tolist() if slot in self._frozen], np.int32)

    def thaw(self, slots: Int32s) -> None:
        self._frozen.difference_update(slots.tolist())

    def freeze(self) -> None:
        assert not self._frozen, f"{len(self._frozen)} slots are frozen already"
        self._dirty, self._frozen = self._frozen, self._dirty

    def unfreeze(self) -> None:
        self._dirty |= self._frozen
        self._frozen = set()

    def dirty_slots(self) -> Int32s:
        return np.array(sorted(self._dirty), np.int32)

    def frozen_slots(self) -> Int32s:
        return np.array(sorted(self._frozen), np.int32)

    def keys_of(self, slots: Int32s) -> Int64s:
        return np.array([self._key_of(slot) for slot in slots.tolist()], np.int64)

    def resident_slots(self) -> Int32s:
        return np.array([self._rows.slots[key] for key in self._rows.eviction_order()], np.int32)

    def list_more(self, listing: Listing, limit: int) -> bool:
        slots = self.resident_slots()
        listing.add(self.keys_of(slots), np.zeros(len(slots), np.int32), np.arange(len(slots)))
        return False

    def evict(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            key = self._key_of(slot)
            assert key not in self._rows.pins, f"slot {slot} is pinned"
            assert slot not in self._dirty | self._frozen, f"slot {slot} is dirty or frozen"
            self._drop(slot)
            self._counted.update(evictions=1)

    def check_integrity(self) -> None:
        assert {slot: key for key, slot in self._rows.slots.items()} == self._keys
        assert sorted([*self._free, *self._keys]) == list(range(self.capacity))
        assert sorted(self._rows.eviction_order()) == sorted(self._keys.values())
        assert self._loading | self._dirty | self._frozen <= self._keys.keys()
        assert not self._loading & (self._dirty | self._frozen) | self._dirty & self._frozen
        assert all(key in self._rows and pins > 0 for key, pins in self._rows.pins.items())
