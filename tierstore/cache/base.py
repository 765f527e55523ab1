"""The contract of a row cache in host memory, and what its implementations share.

A cache says which rows of a set of tables are resident, in which slot, and which row is the next victim. It owns two
arenas, ``weights`` and ``state``, of ``capacity`` slots each, and the bookkeeping over them. The caller that admits a
row fills its slot, and serialises calls. Pinned slots may be read and written without its lock.

A slot is free, or resident. A resident slot may be *pinned* (in use; no policy may evict it), and is one of: *loading*
(reserved, its row not yet copied in), *dirty* (newer than the tier below), *frozen* (newer, and part of a version being
committed: copy it before it changes), or clean.

Any exception may cut a caller short between two calls. So each call does all of its work or none, and notes what it did
in memory of the caller's (``Pinned``). A slot that was left loading is a miss for the next admission. A row is clean
only once it was written.

Kernels over slots return ``NOTHING_WRONG``, or the position of the first slot that forbids the operation. Those before
it are done, so that a caller's bug leaves the counts balanced.
"""

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..kernels.simd import item
from .cache_state import Tally, new_arena

RESIDENT: Final = 1
LOADING: Final = 2
DIRTY: Final = 4
FROZEN: Final = 8
CHANGED: Final = 16
"""Bits of a slot's flags; a free slot has none. CHANGED: marked dirty since its row was last taken to be written."""
FLAGS: Final = {"resident": RESIDENT, "loading": LOADING, "dirty": DIRTY, "frozen": FROZEN, "changed": CHANGED}
UNCLEAN: Final = DIRTY | FROZEN

NOTHING_WRONG: Final = -1
CAPACITY_MAX: Final = 2**31 - 2  # slots are int32, and a list's root takes one number
NO_ORDER: Final = np.empty(0, np.int32)
_EIGHT: Final = 8  # flags of a byte each in a word
_ONES: Final = np.uint64(0x0101010101010101)


class AdmitStatus(IntEnum):
    """Why ``admit`` returned."""

    COMPLETE = 0
    """Every key has a pinned slot."""
    DIRTY_VICTIM = 1
    """The next victim is dirty or frozen: write some ``dirty_victims`` back, then call ``admit`` again."""
    ALL_PINNED = 2
    """Every slot is pinned: use what was admitted so far, unpin it, and admit the rest afterwards."""


class CacheCounters(NamedTuple):
    """Running totals since the cache was made; ``hits + misses`` counts unique rows of each ``admit`` or ``use``."""

    lookups: int
    """Keys given to ``admit`` or ``use`` or ``access``, duplicates counted."""
    hits: int
    misses: int
    evictions: int


CONSUMED: Final = 0
NUM_UNIQUE: Final = 1
NUM_MISSING: Final = 2
STAMP: Final = 3
"""Places in ``Pinned.progress``."""


class Pinned:
    """Slots that are pinned for somebody, each once; none at first. ``RowCache.release`` lets them go.

    Attributes:
        unique_slots: int32 [n]; ``[0, num_unique)`` are the slots.
        progress: int64 [4]: ``consumed``, ``num_unique`` and ``num_missing`` of an ``Admission``, and the cache's stamp
            of rows seen in it. Changed by the kernel that changes the pins.
    """

    __slots__ = ("progress", "unique_slots")

    def __init__(self, most: int) -> None:
        self.unique_slots: Int32s = np.empty(most, np.int32)
        self.progress: Int64s = np.array([0, 0, 0, -1], np.int64)

    @property
    def num_unique(self) -> int:
        """How many."""
        return self.progress.item(NUM_UNIQUE)

    @property
    def slots(self) -> Int32s:
        """int32 [num_unique]: the pinned slots."""
        return self.unique_slots[: self.num_unique]


class Admission(Pinned):
    """The state of admitting one batch of keys; ``admit`` fills it in, over several calls if needed.

    Attributes:
        keys: int64 [n], row keys, duplicates allowed.
        order: int32 [n], the order of use: every position of ``keys`` once. Empty: that of ``keys``.
        consumed: the first ``consumed`` positions in order of use are resolved.
        inverse: int32 [n]; of a resolved position, the number of its unique row, in order of first use.
        unique_slots: int32 [n]; ``[0, num_unique)`` are the slots of the unique rows, each pinned once.
        missing: int32 [n]; ``[0, num_missing)`` are the positions of first use of the rows whose slot is loading, to
            be filled.
    """

    __slots__ = ("inverse", "keys", "missing", "order")

    def __init__(self, keys: Int64s, order: Int32s = NO_ORDER) -> None:
        assert len(order) in {0, len(keys)}, f"an order of {len(order)} positions, of {len(keys)} keys"
        self.unique_slots = np.empty(len(keys), np.int32)
        self.progress = np.array([0, 0, 0, -1], np.int64)
        self.keys: Int64s = checked(keys, "int64")
        self.order = order
        self.inverse: Int32s = np.zeros(len(keys), np.int32)
        self.missing: Int32s = np.empty(len(keys), np.int32)

    @property
    def consumed(self) -> int:
        return self.progress.item(CONSUMED)

    @property
    def num_missing(self) -> int:
        return self.progress.item(NUM_MISSING)


class Listing:
    """The state of listing a cache's resident rows; ``list_more`` fills it in, over several calls.

    Attributes:
        next_slot: the first that was not looked at. A row that stays keeps its slot, so none is passed over.
    """

    def __init__(self) -> None:
        self.next_slot = 0
        self._rows: list[tuple[Int64s, Int32s, Int64s]] = []

    def add(self, keys: Int64s, ranks: Int32s, stamps: Int64s) -> None:
        """Add rows: int64, int32 and int64 [n]. Rows of lower rank leave first, of equal ones those admitted before."""
        self._rows.append((keys, ranks, stamps))

    def keys(self) -> Int64s:
        """int64 [n]: the rows, likely next victims first; one that left its slot and came back may be in twice."""
        keys, ranks, stamps = (np.concatenate(each) for each in zip(*self._rows, strict=True))
        listed: Int64s = keys[np.lexsort((stamps, ranks))]
        return listed


def checked(array: Any, dtype: str = "int32") -> Any:
    """Slots, or keys, contiguous: another layout would compile the kernels again. TypeError for another type."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"slots or keys must be a numpy array, {dtype} [n], not {found}")
    return np.ascontiguousarray(array)


def indexes(slots: Int32s) -> Any:
    """Slots as uint32: indexes for which numpy raises IndexError where they are negative, too."""
    return checked(slots).view(np.uint32)


class RowCache(ABC):
    """The base class. Slots are int32, keys int64 (``layout.KEY_ROW_BITS``).

    Attributes:
        weights, state: uint64 [capacity, words], 64-byte aligned: the arenas.
        flags, pins: integers [capacity]; flags are the bits above.
        tallies: int64, see ``cache_state.Tally``.
    """

    def __init__(self, flags: Any, pins: Any, tallies: Int64s, *, weight_words: int, state_words: int) -> None:
        self.flags = flags
        self.pins = pins
        self.tallies = tallies
        self.weights = new_arena(len(flags), weight_words)
        self.state = new_arena(len(flags), state_words)
        # The flags of each eight slots as one word, if flags are adjacent bytes.
        whole = len(flags) // _EIGHT * _EIGHT if flags.itemsize == 1 else 0
        self._flag_words: Words = flags[:whole].view(np.uint64) if whole else np.empty(0, np.uint64)

    @staticmethod
    def require_capacity(capacity: int) -> None:
        """ValueError for what slots cannot number."""
        if not 1 <= capacity <= CAPACITY_MAX:
            raise ValueError(f"capacity={capacity} is not from 1 to {CAPACITY_MAX}")

    @property
    def capacity(self) -> int:
        return len(self.flags)

    @property
    def num_resident(self) -> int:
        return self.tallies.item(Tally.RESIDENT)

    @property
    def num_dirty(self) -> int:
        return self.tallies.item(Tally.DIRTY)

    @property
    def num_frozen(self) -> int:
        return self.tallies.item(Tally.FROZEN)

    @property
    def num_pinned(self) -> int:
        """Slots pinned at least once."""
        return self.tallies.item(Tally.PINNED)

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of arenas, index and policy together, as allocated."""

    def counters(self) -> CacheCounters:
        return CacheCounters(*self.tallies[Tally.LOOKUPS : Tally.EVICTIONS + 1].tolist())

    # Which rows are resident

    @abstractmethod
    def find(self, keys: Int64s) -> Int32s:
        """int32 [n]: each key's slot, or -1. Changes nothing, not even the policy's order."""

    @abstractmethod
    def use(self, keys: Int64s) -> Int32s | None:
        """``find``, and count hits without an admission: one access of each distinct slot, in order of first use. None,
        and nothing changes, if a row is not in, or awaited."""

    @abstractmethod
    def admit(self, admission: Admission) -> AdmitStatus:
        """Give each key a slot and pin it, in order of use, from ``admission.consumed`` on.

        The first occurrence of a key in the admission counts as one access for the policy and pins its slot once;
        later ones only resolve. A key that is not resident takes a free slot, else the policy's first unpinned
        victim, which must be clean; the slot is then loading. A slot found loading is missing again. On DIRTY_VICTIM
        and ALL_PINNED nothing was changed for the key at ``consumed``. No other admission may run between the calls of
        one. After ALL_PINNED, release the first part and admit the rest: ``Admission(keys[consumed:])``, or
        ``Admission(keys[order[consumed:]])``.
        """

    def keys_of(self, slots: Int32s) -> Int64s:
        """int64 [n]: the keys of the rows in these slots. AssertionError if one is free."""
        slots = checked(slots)
        self._require(_first_free(self.flags, slots), slots, "give the key of", "resident")
        return self._keys_in(slots)

    @abstractmethod
    def _keys_in(self, slots: Int32s) -> Int64s: ...

    @abstractmethod
    def resident_slots(self) -> Int32s:
        """int32 [num_resident]: every resident slot in eviction order, pinned, dirty and loading ones included."""

    def list_more(self, listing: Listing, limit: int) -> bool:
        """List the rows, loading ones included, in the next ``limit`` slots, or in all. Returns False after the last
        slot: every row resident throughout has then been listed."""
        first = listing.next_slot
        stop = min(first + limit, self.capacity)
        slots = (first + np.flatnonzero(self.flags[first:stop])).astype(np.int32)
        listing.add(self._keys_in(slots), self._ranks(slots), self._admitted(slots))
        listing.next_slot = stop
        return stop < self.capacity

    def _ranks(self, slots: Any) -> Int32s:
        """int32 [n]: those of lower rank leave first."""
        return np.zeros(len(slots), np.int32)

    def _admitted(self, slots: Any) -> Int64s:
        """int64 [n]: numbers that ascend by last admission, then by first use within it, where a cache knows that."""
        return np.zeros(len(slots), np.int64)

    @abstractmethod
    def dirty_victims(self, count: int, gap: int) -> Int32s:
        """The dirty or frozen ones among the next ``count`` unpinned victims, next victim first. The search ends at
        ``gap`` clean slots in a row, once an eighth of ``gap`` is found. Changes nothing."""

    def by_admission(self, slots: Int32s) -> Int32s:
        """The slots sorted by their rows' last admission, then by first use within it. A cache that does not know this
        order returns them as given. Changes nothing."""
        sorted_slots: Int32s = slots[np.argsort(self._admitted(indexes(slots)), kind="stable")]  # the fastest kind here
        return sorted_slots

    def evict(self, slots: Int32s) -> None:
        """Drop these rows, which must be resident, clean and unpinned (AssertionError)."""
        slots = checked(slots)
        self._require(self._drop_rows(slots, 1), slots, "evict", "resident, clean and unpinned")

    @abstractmethod
    def _drop_rows(self, slots: Int32s, evictions: int) -> int:
        """Drop these rows, each counted as so many evictions; stops at one that is not resident, clean and unpinned."""

    # Loading and pinned slots

    def is_loading(self, slots: Int32s) -> bool:
        """Whether any of the slots awaits its row."""
        are_some = self.tallies.item(Tally.FILLED) != self.tallies.item(Tally.RESIDENT)
        return are_some and bool((self.flags[indexes(slots)] & LOADING).any())

    def filled(self, slots: Int32s) -> None:
        """The rows of these loading slots are in place."""
        slots = checked(slots)
        self._require(_fill_slots(self.flags, self.tallies, slots), slots, "fill", "loading")

    def pin(self, slots: Int32s) -> None:
        slots = checked(slots)
        self._require(_pin_slots(self.flags, self.pins, self.tallies, slots), slots, "pin", "resident")

    def unpin(self, slots: Int32s) -> None:
        """Undo one pin of each slot; rows that are loading and not pinned any more are dropped: a caller cut short
        before leaves them loading, which is a miss for the next admission. AssertionError if one is not pinned."""
        self._unpin(checked(slots), np.array([0, len(slots), 0, -1]))

    def release(self, pinned: Pinned) -> None:
        """``unpin`` these slots; then ``pinned``, or an admission, is as it was before its first use. Again is fine."""
        self._unpin(pinned.slots, pinned.progress)

    def _unpin(self, slots: Int32s, progress: Int64s) -> None:
        bad, loading = _unpin_slots(self.flags, self.pins, self.tallies, slots, progress)
        self._require(bad, slots, "unpin", "pinned")
        if loading:
            self._drop_rows(slots[(self.flags[slots] & LOADING != 0) & (self.pins[slots] == 0)], 0)

    # Slots newer than the tier below

    def mark_dirty(self, slots: Int32s) -> None:
        """The rows are newer than the tier below; the caller has copied those that are frozen, which are so no more.
        AssertionError if one is loading (``filled`` comes first)."""
        slots = checked(slots)
        self._require(_mark_slots(self.flags, self.tallies, slots), slots, "mark dirty", "resident, not loading")

    def take(self, slots: Int32s, pinned: Pinned, *, frozen: bool) -> None:
        """Begin to write the dirty ones of ``slots``, or the frozen ones: they are pinned, and stay as they are.
        ``pinned`` gets them, in order; it has none before, and room for all."""
        flag, slots = FROZEN if frozen else DIRTY, checked(slots)
        _take_slots(self.flags, self.pins, self.tallies, slots, flag, pinned.unique_slots, pinned.progress)

    def settle(self, slots: Int32s) -> None:
        """Make those of these slots clean that are dirty and were not marked so again since ``take``."""
        _clear_slots(self.flags, self.tallies, checked(slots), DIRTY, DIRTY | CHANGED, int(Tally.DIRTY))

    def clean(self, slots: Int32s) -> None:
        """Make those of these slots clean that are dirty: their rows were written."""
        _clear_slots(self.flags, self.tallies, checked(slots), DIRTY, DIRTY, int(Tally.DIRTY))

    def thaw(self, slots: Int32s) -> None:
        """Make those of these slots clean that are frozen: their rows were written."""
        _clear_slots(self.flags, self.tallies, checked(slots), FROZEN, FROZEN, int(Tally.FROZEN))

    def frozen_of(self, slots: Int32s) -> Int32s:
        """Those of ``slots`` that are frozen, in order. Changes nothing."""
        frozen: Int32s = slots[(self.flags[indexes(slots)] & FROZEN) != 0]
        return frozen

    def freeze(self) -> None:
        """Make every dirty slot frozen. AssertionError if some are frozen already."""
        assert not self.num_frozen, f"{self.num_frozen} slots are frozen already"
        self._move(DIRTY, Tally.DIRTY, FROZEN, Tally.FROZEN)

    def unfreeze(self) -> None:
        """Make every frozen slot dirty: the commit was given up."""
        if self.num_frozen:  # a pass over all slots takes as long as a small commit
            self._move(FROZEN, Tally.FROZEN, DIRTY, Tally.DIRTY)

    def _move(self, old: int, old_tally: Tally, new: int, new_tally: Tally) -> None:
        used = self.flags[: self.tallies[Tally.USED_SLOTS]]
        _move_flags(used, self._flag_words, self.tallies, old, int(old_tally), new, int(new_tally))

    def dirty_slots(self) -> Int32s:
        """Every dirty slot, in order of their numbers."""
        return self._flagged(DIRTY, self.num_dirty)

    def frozen_slots(self) -> Int32s:
        """Every frozen slot, in order of their numbers."""
        return self._flagged(FROZEN, self.num_frozen)

    def _flagged(self, flag: int, expected: int) -> Int32s:
        found: Int32s = np.empty(expected, np.int32)
        count = _flagged_slots(self.flags[: self.tallies[Tally.USED_SLOTS]], flag, found)
        assert count == expected, f"{count} slots with flag {flag}, {expected} expected"
        return found

    @abstractmethod
    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold:
        free + resident == capacity; index entries == resident and each leads to its slot; the policy's order holds
        each resident slot once; free slots are neither pinned, dirty, frozen nor loading; counts agree with flags."""

    def _require(self, position: int, slots: Int32s, action: str, condition: str) -> None:
        """AssertionError that names the slot at a position, unless that is ``NOTHING_WRONG``."""
        if position == NOTHING_WRONG:
            return
        slot = int(slots[position])
        if not 0 <= slot < self.capacity:
            raise AssertionError(f"cannot {action} slot {slot}: the cache has {self.capacity} slots")
        names = [name for name, flag in FLAGS.items() if self.flags[slot] & flag]
        raise AssertionError(
            f"cannot {action} slot {slot}: it must be {condition}; it is {', '.join(names) or 'free'}, "
            f"pinned {int(self.pins[slot])} times"
        )


@inline
def is_resident(flags: Any, slot: Any) -> Any:
    return 0 <= slot < flags.size and flags[slot] != 0


@inline
def restart(progress: Int64s) -> None:
    """As it is before anything is pinned."""
    progress[:] = 0
    progress[STAMP] = -1


@kernel
def _first_free(flags: Any, chosen: Int32s) -> int:
    for i in range(chosen.size):
        if not is_resident(flags, np.int64(chosen[i])):
            return i
    return NOTHING_WRONG


@inline
def pin_slot(pins: Any, tallies: Int64s, slot: Any) -> None:
    tallies[Tally.PINNED] += pins[slot] == 0
    pins[slot] += 1


@inline
def unpin_slot(pins: Any, tallies: Int64s, slot: Any) -> None:
    pins[slot] -= 1
    tallies[Tally.PINNED] -= pins[slot] == 0


@kernel
def _pin_slots(flags: Any, pins: Any, tallies: Int64s, chosen: Int32s) -> int:
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not is_resident(flags, slot):
            return i
        pin_slot(pins, tallies, slot)
    return NOTHING_WRONG


@kernel
def _unpin_slots(flags: Any, pins: Any, tallies: Int64s, chosen: Int32s, progress: Int64s) -> tuple[int, int]:
    """Undo one pin of each slot, which are those of ``progress``; and how many are loading and not pinned any more."""
    loading = 0
    restart(progress)
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not is_resident(flags, slot) or pins[slot] == 0:
            return i, loading
        unpin_slot(pins, tallies, slot)
        loading += pins[slot] == 0 and flags[slot] & LOADING != 0
    return NOTHING_WRONG, loading


@kernel
def _fill_slots(flags: Any, tallies: Int64s, chosen: Int32s) -> int:
    """``RowCache.filled``. Others ask how many rows are in, without a lock: a row is counted when it is."""
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not is_resident(flags, slot) or not flags[slot] & LOADING:
            return i
        flags[slot] ^= LOADING
        tallies[Tally.FILLED] += 1
    return NOTHING_WRONG


@kernel
def _mark_slots(flags: Any, tallies: Int64s, chosen: Int32s) -> int:
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not is_resident(flags, slot) or flags[slot] & LOADING:
            return i
        tallies[Tally.DIRTY] += flags[slot] & DIRTY == 0
        tallies[Tally.FROZEN] -= flags[slot] & FROZEN != 0
        flags[slot] = (flags[slot] | (DIRTY | CHANGED | FROZEN)) ^ FROZEN
    return NOTHING_WRONG


@kernel
def _take_slots(
    flags: Any, pins: Any, tallies: Int64s, chosen: Int32s, flag: int, unique_slots: Int32s, progress: Int64s
) -> None:
    count = 0
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if is_resident(flags, slot) and flags[slot] & flag:
            flags[slot] = (flags[slot] | CHANGED) ^ CHANGED
            pin_slot(pins, tallies, slot)
            unique_slots[count] = slot
            count += 1
    progress[NUM_UNIQUE] = count


@kernel
def _clear_slots(flags: Any, tallies: Int64s, chosen: Int32s, flag: int, among: int, tally: int) -> None:
    """Clear a flag of slots that have it, and no other ``among`` these."""
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if is_resident(flags, slot) and flags[slot] & among == flag:
            flags[slot] = (flags[slot] | (flag | CHANGED)) ^ (flag | CHANGED)
            tallies[tally] -= 1


@kernel
def _move_flags(flags: Any, words: Words, tallies: Int64s, old: int, old_tally: int, new: int, new_tally: int) -> None:
    """Replace one flag by another in every slot that has it. Most eights of slots have none, and are one word to look
    at: slot by slot this takes seven times as long."""
    moved = 0
    for first in range(0, flags.size, _EIGHT):
        if first >= words.size * _EIGHT or item(words, first // _EIGHT) & (_ONES * np.uint64(old)) != 0:
            for slot in range(first, min(first + _EIGHT, flags.size)):
                if flags[slot] & old:  # no other slot's memory is written
                    flags[slot] ^= old | new
                    moved += 1
    tallies[old_tally] -= moved
    tallies[new_tally] += moved


@kernel
def _flagged_slots(flags: Any, flag: int, found: Int32s) -> int:
    """List the slots that have a flag, in order of their numbers; returns how many."""
    count = 0
    for slot in range(flags.size):
        if flags[slot] & flag and count < found.size:
            found[count] = slot
            count += 1
    return count
