"""The warm tier when every row has its own slot: no index, no eviction.

Row r of a table is in slot ``first + r``, with a ``first`` for each table. Beside its rows the cache needs 9 bytes a
row (``FULL_OVERHEAD_BYTES``): flags, pins, and its number in the current admission or backward pass. Memory is taken
from the system as slots are first used.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from ..kernels.arrays import Bools, Bytes, Int32s, Int64s
from ..kernels.jit import prefetch_item
from ..kernels.jit import uncounted_kernel as kernel
from ..rows import KEY_ROW_BITS
from .base import Admission, AdmitStatus, CacheCounters, Listing
from .ddr import ALIGNMENT_BYTES, CAPACITY_MAX, aligned_arena, checked_keys, checked_slots
from .flags import DIRTY, FLAGS, FROZEN, LOADING, RESIDENT, UNCLEAN
from .index import ABSENT

FULL_OVERHEAD_BYTES: Final = 1 + 4 + 4
assert FROZEN == 2 * DIRTY, "freeze and unfreeze move the bit by one"
TABLE_BYTES: Final = 4 * 8
_PART_SLOTS: Final = 2**20
_IN_OR_NOT: Final = RESIDENT | LOADING
_AHEAD: Final = 32
"""Slots: flags are fetched from memory so long before they are looked at."""
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1


def full_size_bytes(num_rows: int, *, weight_words: int, state_words: int) -> int:
    """Bytes a ``FullCache`` of so many rows allocates, less ``TABLE_BYTES`` for each table of the store."""
    return num_rows * ((weight_words + state_words) * 8 + FULL_OVERHEAD_BYTES) + 2 * ALIGNMENT_BYTES


class FullCache:
    """A ``RowCache`` in host memory with room for every row of some tables.

    Args:
        tables: rows of each table, by table index.
        weight_words: 64-bit words of weights a row.
        state_words: 64-bit words of optimizer state a row.

    Attributes:
        flags: uint8 [capacity], bits as in ``admission``.
        number: int32 [capacity], scratch of kernels that number rows; of any content between them.

    Raises:
        ValueError: no rows, or more than slots can be numbered.
    """

    def __init__(self, tables: Mapping[int, int], *, weight_words: int, state_words: int) -> None:
        capacity = sum(tables.values())
        if not 1 <= capacity <= CAPACITY_MAX:
            raise ValueError(f"capacity={capacity} is not from 1 to {CAPACITY_MAX}")
        self.weights, weights_bytes = aligned_arena(capacity, weight_words)
        self.state, state_bytes = aligned_arena(capacity, state_words)
        self._arena_bytes = weights_bytes + state_bytes
        self.flags: Bytes = np.zeros(capacity, np.uint8)
        self.number: Int32s = np.zeros(capacity, np.int32)
        self._pins: Int32s = np.zeros(capacity, np.int32)
        self._tables: Int64s = np.array(sorted(tables), np.int64)
        sizes = np.array([tables[int(index)] for index in self._tables], np.int64)
        self._firsts: Int64s = np.cumsum(sizes) - sizes
        self._first_of: Int64s = np.full(int(self._tables[-1]) + 1, -1, np.int64)
        self._first_of[self._tables] = self._firsts
        self._rows_of: Int64s = np.zeros(len(self._first_of), np.int64)
        self._rows_of[self._tables] = sizes
        self._resident = self._loading = self._dirty = self._frozen = self._pinned = 0
        self._lookups = self._hits = self._misses = self._evictions = 0

    @property
    def capacity(self) -> int:
        return len(self.flags)

    @property
    def num_resident(self) -> int:
        return self._resident

    @property
    def num_dirty(self) -> int:
        return self._dirty

    @property
    def num_frozen(self) -> int:
        return self._frozen

    @property
    def num_pinned(self) -> int:
        return self._pinned

    @property
    def size_bytes(self) -> int:
        return self._arena_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Of ``size_bytes``, all but rows."""
        arrays = (self.flags, self.number, self._pins, self._tables, self._firsts, self._first_of, self._rows_of)
        return sum(array.nbytes for array in arrays)

    @property
    def is_complete(self) -> bool:
        """Whether every row is in."""
        return self._resident == self.capacity and not self._loading

    def first_slot(self, table_index: int) -> int:
        """The slot of a table's row 0."""
        return int(self._first_of[table_index])

    def keys_at(self, slots: Int32s) -> Int64s:
        """int64 [n]: the keys of the rows whose slots these are, resident or not."""
        tables = np.searchsorted(self._firsts, slots, side="right") - 1
        keys: Int64s = (self._tables[tables] << KEY_ROW_BITS) | (slots - self._firsts[tables])
        return keys

    def are_in(self, slots: Int32s) -> bool:
        """Whether the rows of all these slots are in."""
        return self.is_complete or bool(_are_in(slots, self.flags))

    def absent(self, slots: Int32s) -> Int32s:
        """Those of ``slots`` whose row is not in, each once."""
        missing: Int32s = slots[(self.flags[slots] & (RESIDENT | LOADING)) != RESIDENT]
        return np.unique(missing)

    def note_hits(self, count: int) -> None:
        """Count lookups of rows that are in, made without an admission."""
        self._lookups += count
        self._hits += count

    def note_dirty(self, count: int) -> None:
        """So many slots, clean before, were marked dirty in ``flags``."""
        self._dirty += count

    def counters(self) -> CacheCounters:
        return CacheCounters(self._lookups, self._hits, self._misses, self._evictions)

    def _slots_of(self, keys: Int64s) -> Int64s:
        """Of keys of the tables; AssertionError for others."""
        keys = checked_keys(keys)
        assert self._is_row(keys).all(), "a key that is no row of the cache's tables"
        slots: Int64s = self._first_of[keys >> KEY_ROW_BITS] + (keys & _ROW_MASK)
        return slots

    def _is_row(self, keys: Int64s) -> Bools:
        tables = keys >> KEY_ROW_BITS
        known: Bools = (tables >= 0) & (tables < len(self._rows_of))
        return known & ((keys & _ROW_MASK) < self._rows_of[np.where(known, tables, 0)])

    def find(self, keys: Int64s) -> Int32s:
        is_row = self._is_row(checked_keys(keys))
        slots = self._slots_of(keys if is_row.all() else np.where(is_row, keys, self.keys_at(np.zeros(1, np.int32))))
        found: Int32s = np.where(is_row & (self.flags[slots] != 0), slots, ABSENT).astype(np.int32)
        return found

    def is_loading(self, slots: Int32s) -> bool:
        return bool((self.flags[checked_slots(slots)] & LOADING).any())

    def touch(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(self._has(slots, RESIDENT), slots, "touch", "resident")
        self._lookups += len(slots)
        self._hits += int(_count_distinct(slots, self.number))

    def admit(self, admission: Admission) -> AdmitStatus:
        slots = self._slots_of(admission.keys[admission.consumed :]).astype(np.int32)
        tallies = np.array([admission.num_unique, admission.num_missing, 0], np.int64)
        _admit_slots(
            slots, self.flags, self._pins, self.number, admission.inverse, admission.unique_slots, admission.missing,
            tallies,
        )  # fmt: skip
        unique, missing, pinned = tallies.tolist()
        self._lookups += len(slots)
        self._misses += missing - admission.num_missing
        self._hits += unique - admission.num_unique - (missing - admission.num_missing)
        self._loading += missing - admission.num_missing  # first: others ask whether all rows are in, without a lock
        self._resident += missing - admission.num_missing
        self._pinned += pinned
        admission.consumed, admission.num_unique, admission.num_missing = len(admission.keys), unique, missing
        return AdmitStatus.COMPLETE

    def filled(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(self._has(slots, LOADING), slots, "fill", "loading")
        self.flags[slots] &= ~np.uint8(LOADING)
        self._loading -= len(slots)

    def abandon(self, admission: Admission) -> None:
        slots = admission.slots
        self._require(self._pins[slots] > 0, slots, "abandon", "pinned")
        self._unpin(slots)
        dropped = slots[(self._pins[slots] == 0) & ((self.flags[slots] & LOADING) != 0)]
        self.flags[dropped] = 0
        self._resident -= len(dropped)
        self._loading -= len(dropped)
        admission.consumed = admission.num_unique = admission.num_missing = 0
        admission.stamp = -1

    def pin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(self._has(slots, RESIDENT), slots, "pin", "resident")
        self._pinned += int(np.count_nonzero(self._pins[np.unique(slots)] == 0))
        np.add.at(self._pins, slots, 1)

    def unpin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        pins = self._pins[slots]
        allowed = (pins > 1) | ((pins == 1) & ~self._has(slots, LOADING))
        self._require(allowed, slots, "unpin", "pinned, and filled by its last unpin")
        self._unpin(slots)

    def _unpin(self, slots: Int32s) -> None:
        np.subtract.at(self._pins, slots, 1)
        self._pinned -= int(np.count_nonzero(self._pins[slots] == 0))

    def mark_dirty(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        flags = self.flags[slots]
        allowed = (flags & (RESIDENT | LOADING | FROZEN)) == RESIDENT
        self._require(allowed, slots, "mark dirty", "resident, not loading, not frozen")
        self._dirty += len(np.unique(slots[(flags & DIRTY) == 0]))
        self.flags[slots] |= np.uint8(DIRTY)

    def victims(self, count: int, gap: int) -> Int32s:  # noqa: ARG002 - none leaves
        return np.empty(0, np.int32)

    def can_announce(self, num_keys: int) -> bool:  # noqa: ARG002 - announcing takes no room
        return True

    def announce(self, keys: Int64s) -> int:  # noqa: ARG002 - every row stays in
        return 1

    def retire(self, batch: int) -> None:
        pass

    def by_admission(self, slots: Int32s) -> Int32s:
        return slots

    def clean(self, slots: Int32s) -> Int32s:
        cleaned = self._clear(slots, DIRTY)
        self._dirty -= len(cleaned)
        return cleaned

    def frozen_of(self, slots: Int32s) -> Int32s:
        slots = checked_slots(slots)
        return slots[self._has(slots, FROZEN)]

    def thaw(self, slots: Int32s) -> Int32s:
        thawed = self._clear(slots, FROZEN)
        self._frozen -= len(thawed)
        return thawed

    def _clear(self, slots: Int32s, flag: int) -> Int32s:
        """Take a flag from those slots that have it; returns them, in order."""
        slots = checked_slots(slots)
        cleared: Int32s = slots[self._has(slots, flag)]
        self.flags[cleared] &= ~np.uint8(flag)
        return cleared

    def freeze(self) -> None:
        assert not self._frozen, f"{self._frozen} slots are frozen already"
        for part in self._parts():
            part += part & np.uint8(DIRTY)
        self._frozen, self._dirty = self._dirty, 0

    def unfreeze(self) -> None:
        for part in self._parts():
            part -= (part & np.uint8(FROZEN)) >> 1
        self._dirty, self._frozen = self._dirty + self._frozen, 0

    def _parts(self) -> Iterator[Bytes]:
        """The flags, part by part: what is computed of a part is small."""
        return (self.flags[first : first + _PART_SLOTS] for first in range(0, self.capacity, _PART_SLOTS))

    def _flagged(self, flag: int) -> Int32s:
        """int32: slots that have one of the flags, in order of their numbers."""
        found = [np.flatnonzero(part & np.uint8(flag)) + i * _PART_SLOTS for i, part in enumerate(self._parts())]
        return np.concatenate(found).astype(np.int32)

    def dirty_slots(self) -> Int32s:
        return self._counted(DIRTY, self._dirty)

    def frozen_slots(self) -> Int32s:
        return self._counted(FROZEN, self._frozen)

    def _counted(self, flag: int, expected: int) -> Int32s:
        found = self._flagged(flag)
        assert len(found) == expected, f"{len(found)} slots with flag {flag}, {expected} expected"
        return found

    def keys_of(self, slots: Int32s) -> Int64s:
        slots = checked_slots(slots)
        self._require(self._has(slots, RESIDENT), slots, "give the key of", "resident")
        return self.keys_at(slots)

    def resident_slots(self) -> Int32s:
        """int32 [num_resident], in order of their numbers: nothing is ever evicted for another row."""
        return self._flagged(RESIDENT)

    def list_more(self, listing: Listing, limit: int) -> bool:
        """See Listable. Slots that are never another row's are listed in the order of their numbers."""
        first, stop = listing.next_slot, min(listing.next_slot + limit, self.capacity)
        found = np.flatnonzero(self.flags[first:stop] & np.uint8(RESIDENT)) + first
        listing.keys.append(self.keys_at(found.astype(np.int32)))
        listing.next_slot = stop
        return stop < self.capacity

    def evict(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        allowed = self._has(slots, RESIDENT) & ~self._has(slots, UNCLEAN) & (self._pins[slots] == 0)
        self._require(allowed, slots, "evict", "resident, clean and unpinned")
        self.flags[slots] = 0
        self._resident -= len(slots)
        self._evictions += len(slots)

    def access(self, keys: Int64s) -> Bools:
        unclean = self._dirty + self._frozen
        assert self._pinned == unclean == 0, f"replay with {self._pinned} pinned, {unclean} dirty"
        slots = self._slots_of(keys)
        is_hit: Bools = self.flags[slots] != 0
        _, firsts = np.unique(slots, return_index=True)
        missed = firsts[~is_hit[firsts]]
        is_hit[:] = True
        is_hit[missed] = False
        self.flags[slots[missed]] = RESIDENT
        self._resident += len(missed)
        self._lookups += len(keys)
        self._misses += len(missed)
        self._hits += len(keys) - len(missed)
        return is_hit

    def check_integrity(self) -> None:
        counted = {name: int(np.count_nonzero(self.flags & flag)) for name, flag in FLAGS.items()}
        kept = {"resident": self._resident, "loading": self._loading, "dirty": self._dirty, "frozen": self._frozen}
        assert counted == kept, f"flags say {counted}, counts say {kept}"
        pinned = int(np.count_nonzero(self._pins))
        assert pinned == self._pinned, f"{pinned} slots are pinned, the count says {self._pinned}"
        assert (self._pins >= 0).all(), "a slot is pinned less than 0 times"
        assert not (self.flags & ~np.uint8(sum(FLAGS.values()))).any(), "unknown flags"
        free = self.flags[(self.flags & RESIDENT) == 0]
        assert not free.any(), "a slot without a row is loading, dirty or frozen"
        idle = (self._pins == 0) & ((self.flags & LOADING) != 0)
        assert not idle.any(), "a loading slot is not pinned"

    def _has(self, slots: Int32s, flag: int) -> Bools:
        """bool [n]: which of the slots have one of the flags."""
        has: Bools = (self.flags[slots] & flag) != 0
        return has

    def _require(self, allowed: Bools, slots: Int32s, action: str, condition: str) -> None:
        if allowed.all():
            return
        slot = int(slots[int(allowed.argmin())])
        names = [name for name, flag in FLAGS.items() if self.flags[slot] & flag]
        raise AssertionError(
            f"cannot {action} slot {slot}: it must be {condition}; it is {', '.join(names) or 'free'}, "
            f"pinned {int(self._pins[slot])} times"
        )


@kernel
def _are_in(slots: Int32s, flags: Bytes) -> bool:
    """Whether each slot is resident and not loading."""
    for i in range(slots.size):
        if i + _AHEAD < slots.size:
            prefetch_item(flags, np.int64(slots[i + _AHEAD]))
        if (flags[slots[i]] & _IN_OR_NOT) != RESIDENT:
            return False
    return True


@kernel
def _count_distinct(slots: Int32s, number: Int32s) -> int:
    for i in range(slots.size):
        number[slots[i]] = i
    count = 0
    for i in range(slots.size):
        if i + _AHEAD < slots.size:
            prefetch_item(number, np.int64(slots[i + _AHEAD]))
        count += number[slots[i]] == i
    return count


@kernel
def _admit_slots(
    slots: Int32s, flags: Bytes, pins: Int32s, number: Int32s, inverse: Int32s, unique_slots: Int32s, missing: Int32s,
    tallies: Int64s,
) -> None:  # fmt: skip
    """``RowCache.admit`` of an admission not begun; ``tallies``: int64 [3], num_unique, num_missing, slots pinned."""
    num_unique, num_missing, pinned = tallies[0], tallies[1], tallies[2]
    for i in range(slots.size):
        slot = slots[i]
        known = number[slot]
        if known < 0 or known >= num_unique or unique_slots[known] != slot:
            known = np.int32(num_unique)
            number[slot] = known
            unique_slots[num_unique] = slot
            num_unique += 1
            pinned += 1 if pins[slot] == 0 else 0
            pins[slot] += 1
            if flags[slot] == 0:
                flags[slot] = RESIDENT | LOADING
                missing[num_missing] = known
                num_missing += 1
        inverse[i] = known
    tallies[0], tallies[1], tallies[2] = num_unique, num_missing, pinned
