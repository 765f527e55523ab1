"""The warm tier when every row has its own slot: no index, no eviction.

Row r of a table is in slot ``first + r``, with a ``first`` for each table, of which there may be a range of rows only.
Besides, a row takes 9 bytes (``FULL_OVERHEAD_BYTES``): flags, pins, and its number in the current admission or backward
pass. Memory is taken from the system as slots are first used.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from ..kernels.arrays import Bytes, Int32s, Int64s
from ..kernels.hash_table import ABSENT
from ..kernels.jit import prefetch_item
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import KEY_ROW_BITS, ROW_MASK
from .base import (
    CONSUMED,
    DIRTY,
    FLAGS,
    LOADING,
    NOTHING_WRONG,
    NUM_MISSING,
    NUM_UNIQUE,
    RESIDENT,
    UNCLEAN,
    Admission,
    AdmitStatus,
    CacheCounters,
    RowCache,
    checked,
    indexes,
    is_resident,
    pin_slot,
)
from .cache_state import NUM_TALLIES, Tally, arena_bytes, place_in

TABLE_BYTES: Final = 5 * 8  # host memory for each table of a store
FULL_OVERHEAD_BYTES: Final = 1 + 4 + 4
HITS_IN_PLACE: Final = NUM_TALLIES
"""The place behind the tallies that other caches have: hits that compiled lookups count by atomic instructions."""
_IN_OR_NOT: Final = RESIDENT | LOADING
_AHEAD: Final = 32  # Slots: flags are fetched from memory so long before they are looked at
_FILLED: Final = int(Tally.FILLED)
_NO_FLAGS: Final = np.empty(0, np.uint8)


def full_size_bytes(num_rows: int, *, weight_words: int, state_words: int) -> int:
    """Bytes a ``FullCache`` of so many rows allocates, less ``TABLE_BYTES`` for each table of the store."""
    rows = arena_bytes(num_rows, weight_words) + arena_bytes(num_rows, state_words)
    return rows + num_rows * FULL_OVERHEAD_BYTES


class RowNumbering:
    """Which slot each row of some tables has, from 0 on without gaps. ``tables``: the range of the rows of each table,
    by table index."""

    def __init__(self, tables: Mapping[int, range]) -> None:
        self._tables: Int64s = np.array(sorted(tables), np.int64)
        rows = [tables[int(index)] for index in self._tables]
        sizes = np.array([len(each) for each in rows], np.int64)
        self._firsts: Int64s = np.cumsum(sizes) - sizes
        # By table index: the slot that row 0 has or would have, and the range of rows.
        self._first_of, self._low_of, self._high_of = np.zeros((3, int(self._tables[-1]) + 1), np.int64)
        self._low_of[self._tables] = [each.start for each in rows]
        self._high_of[self._tables] = [each.stop for each in rows]
        self._first_of[self._tables] = self._firsts - self._low_of[self._tables]

    @property
    def size_bytes(self) -> int:
        arrays = (self._tables, self._firsts, self._first_of, self._low_of, self._high_of)
        return sum(array.nbytes for array in arrays)

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0; negative if the range begins behind it."""
        slots: Int64s = self._first_of[table_indices]
        return slots

    def keys_at(self, slots: Int32s) -> Int64s:
        """int64 [n]: the keys of the rows whose slots these are."""
        tables = self._tables[np.searchsorted(self._firsts, slots, side="right") - 1]
        keys: Int64s = (tables << KEY_ROW_BITS) | (slots - self._first_of[tables])
        return keys

    def slots_of(self, keys: Int64s) -> Int32s:
        """int32 [n], of keys of the tables; AssertionError for others."""
        slots = self.find(keys, _NO_FLAGS)
        assert slots.min(initial=0) >= 0, "a key that is no row of the tables"
        return slots

    def find(self, keys: Int64s, flags: Bytes) -> Int32s:
        """int32 [n]: the slots, or ABSENT of a key that is no row of the tables, or whose slot's ``flags`` are 0."""
        slots: Int32s = np.empty(len(keys), np.int32)
        _find(checked(keys, "int64"), self._first_of, self._low_of, self._high_of, flags, slots)
        return slots


class FullCache(RowCache):
    """A row cache with room for every row of some tables.

    Args:
        tables: the range of the rows of each table, by table index.
        weight_words: 64-bit words of weights a row.
        state_words: 64-bit words of optimizer state a row.

    Attributes:
        numbering: which slot each row has.
        number: int32 [capacity], scratch of kernels that number rows, all 0 between them.

    Raises:
        ValueError: no rows, or more than slots can be numbered.
    """

    def __init__(self, tables: Mapping[int, range], *, weight_words: int, state_words: int) -> None:
        capacity = sum(len(rows) for rows in tables.values())
        self.require_capacity(capacity)
        self.numbering = RowNumbering(tables)
        flags, pins = np.zeros(capacity, np.uint8), np.zeros(capacity, np.int32)
        tallies = np.zeros(HITS_IN_PLACE + 1, np.int64)
        super().__init__(flags, pins, tallies, weight_words=weight_words, state_words=state_words)
        self.tallies[Tally.USED_SLOTS] = capacity
        self.number: Int32s = np.zeros(capacity, np.int32)
        self._hits_in_place = 0

    @property
    def size_bytes(self) -> int:
        words = {"weight_words": self.weights.shape[1], "state_words": self.state.shape[1]}
        return full_size_bytes(self.capacity, **words) + self.numbering.size_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every row is in."""
        return self.tallies.item(_FILLED) == len(self.flags)

    @property
    def num_dirty(self) -> int:
        """Counted: a kernel that updates rows marks them in ``flags``, which all its threads do at once."""
        return int(_count(self.flags, DIRTY))

    def are_in(self, slots: Int32s) -> bool:
        """Whether the rows of all these slots are in."""
        return self.is_complete or bool(_are_in(slots, self.flags))

    def absent(self, slots: Int32s) -> Int32s:
        """Those of ``slots`` whose row is not in, each once."""
        missing: Int32s = slots[(self.flags[indexes(slots)] & _IN_OR_NOT) != RESIDENT]
        return np.unique(missing)

    def counters(self) -> CacheCounters:
        counted, more = super().counters(), self._hits_in_place + self.tallies.item(HITS_IN_PLACE)
        return counted._replace(lookups=counted.lookups + more, hits=counted.hits + more)

    def note_hits(self, count: int) -> None:
        """Count lookups of rows that are in, made without an admission."""
        self._hits_in_place += count  # a number of Python's: to change one of numpy's takes as long as a small lookup

    def find(self, keys: Int64s) -> Int32s:
        return self.numbering.find(keys, self.flags)

    def use(self, keys: Int64s) -> Int32s | None:
        slots = self.find(keys)
        if slots.min(initial=0) < 0 or not self.are_in(slots):
            return None
        _count_hits(slots, self.number, self.tallies)
        return slots

    def admit(self, admission: Admission) -> AdmitStatus:
        assert not admission.consumed, "an admission takes one call"
        _admit_slots(
            self.numbering.slots_of(admission.keys), admission.order, self.flags, self.pins, self.number,
            admission.inverse, admission.unique_slots, admission.missing, admission.progress, self.tallies,
        )  # fmt: skip
        return AdmitStatus.COMPLETE

    def dirty_victims(self, count: int, gap: int) -> Int32s:  # noqa: ARG002 - none leaves
        return np.empty(0, np.int32)

    def _keys_in(self, slots: Int32s) -> Int64s:
        return self.numbering.keys_at(slots)

    def resident_slots(self) -> Int32s:
        """int32 [num_resident], in order of their numbers: nothing is ever evicted for another row."""
        return self._flagged(RESIDENT, self.num_resident)

    def _drop_rows(self, slots: Int32s, evictions: int) -> int:
        return int(_drop_slots(slots, evictions, self.flags, self.pins, self.tallies))

    def check_integrity(self) -> None:
        counted = {name: int(np.count_nonzero(self.flags & flag)) for name, flag in FLAGS.items()}
        counted["pinned"] = int(np.count_nonzero(self.pins))
        loading = self.num_resident - self.tallies.item(_FILLED)
        kept = {"resident": self.num_resident, "loading": loading, "frozen": self.num_frozen, "pinned": self.num_pinned}
        assert {name: counted[name] for name in kept} == kept, f"flags and pins say {counted}, counts say {kept}"
        assert (self.pins >= 0).all(), "a slot is pinned less than 0 times"
        assert not self.number.any(), "a batch left numbers of its rows"
        assert not (self.flags & ~np.uint8(sum(FLAGS.values()))).any(), "unknown flags"
        free = (self.flags & RESIDENT) == 0
        assert not self.flags[free].any(), "a slot without a row is loading, dirty or frozen"
        assert not self.pins[free].any(), "a slot without a row is pinned"
        newer = self.flags[(self.flags & LOADING) != 0] & np.uint8(UNCLEAN)
        assert not newer.any(), "a loading slot is dirty or frozen"


@kernel
def _find(
    keys: Int64s, first_of: Int64s, low_of: Int64s, high_of: Int64s, flags: Bytes, slots: Int32s
) -> None:  # fmt: skip
    for i in range(keys.size):
        table, row = keys[i] >> KEY_ROW_BITS, keys[i] & ROW_MASK
        slots[i] = ABSENT
        if 0 <= table < high_of.size and low_of[table] <= row < high_of[table]:
            slot = first_of[table] + row
            if not flags.size or flags[slot] != 0:
                slots[i] = slot


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
def _count_hits(slots: Int32s, number: Int32s, tallies: Int64s) -> None:
    """Count lookups, and distinct slots as hits."""
    for i in range(slots.size):
        if i + _AHEAD < slots.size:
            prefetch_item(number, np.int64(slots[i + _AHEAD]))
        tallies[Tally.HITS] += number[slots[i]] == 0
        number[slots[i]] = 1
    for slot in slots:
        number[slot] = 0
    tallies[Tally.LOOKUPS] += slots.size


@kernel
def _count(flags: Bytes, flag: int) -> int:
    """How many slots have a flag."""
    count = 0
    for slot in range(flags.size):
        count += flags[slot] & flag != 0
    return count


@kernel
def _drop_slots(slots: Int32s, evictions: int, flags: Bytes, pins: Int32s, tallies: Int64s) -> int:
    """Drop rows, each counted as so many evictions; stops at one that is not resident, clean and unpinned."""
    for i in range(slots.size):
        slot = np.int64(slots[i])
        if not is_resident(flags, slot) or flags[slot] & UNCLEAN or pins[slot] > 0:
            return i
        tallies[Tally.FILLED] -= flags[slot] & LOADING == 0
        tallies[Tally.RESIDENT] -= 1
        tallies[Tally.EVICTIONS] += evictions
        flags[slot] = 0
    return NOTHING_WRONG


@kernel
def _admit_slots(
    slots: Int32s, order: Int32s, flags: Bytes, pins: Int32s, number: Int32s, inverse: Int32s, unique_slots: Int32s,
    missing: Int32s, progress: Int64s, tallies: Int64s,
) -> None:  # fmt: skip
    """``RowCache.admit`` of an admission not begun."""
    num_unique, num_missing, reserved = np.int64(0), np.int64(0), np.int64(0)
    for i in range(slots.size):
        position = place_in(order, i)
        slot = slots[position]
        if number[slot] == 0:
            unique_slots[num_unique] = slot
            num_unique += 1
            number[slot] = num_unique
            pin_slot(pins, tallies, slot)
            if flags[slot] == 0:
                flags[slot] = RESIDENT | LOADING
                reserved += 1
            if flags[slot] & LOADING:
                missing[num_missing] = position
                num_missing += 1
        inverse[position] = number[slot] - 1
    for slot in unique_slots[:num_unique]:
        number[slot] = 0
    progress[CONSUMED], progress[NUM_UNIQUE], progress[NUM_MISSING] = slots.size, num_unique, num_missing
    tallies[Tally.RESIDENT] += reserved
    tallies[Tally.LOOKUPS] += slots.size
    tallies[Tally.MISSES] += num_missing
    tallies[Tally.HITS] += num_unique - num_missing
