"""The contract of a row cache: which rows of a set of tables are resident, in which slot, and the next victim.

A cache owns two arenas, ``weights`` and ``state``, of ``capacity`` slots each, and the bookkeeping over them. The
caller that admits a row fills its slot, and serialises calls. Pinned slots may be read and written without its lock.

A slot is free, or resident. A resident slot may be *pinned* (in use; no policy may evict it), and is one of: *loading*
(reserved, its row not yet copied in), *dirty* (newer than the tier below), *frozen* (newer, and part of a version being
committed: copy it before it changes), or clean.

Any exception may cut a caller short between two calls. So each call does all of its work or none, and notes what it did
in memory of the caller's (``Pinned``). A slot that was left loading is a miss for the next admission. A row is clean
only once it was written.
"""

from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import numpy as np

from ..kernels.arrays import Int32s, Int64s, Words

RESIDENT: Final = 1
LOADING: Final = 2
DIRTY: Final = 4
FROZEN: Final = 8
CHANGED: Final = 16
"""Bits of a slot's flags; a free slot has none. CHANGED: marked dirty since its row was last taken to be written."""
FLAGS: Final = {"resident": RESIDENT, "loading": LOADING, "dirty": DIRTY, "frozen": FROZEN, "changed": CHANGED}
UNCLEAN: Final = DIRTY | FROZEN


class AdmitStatus(IntEnum):
    """Why ``admit`` returned."""

    COMPLETE = 0
    """Every key has a pinned slot."""
    DIRTY_VICTIM = 1
    """The next victim is dirty or frozen: write some ``dirty_victims`` back, then call ``admit`` again."""
    ALL_PINNED = 2
    """Every slot is pinned: use what was admitted so far, unpin it, and admit the rest afterwards."""


class CacheCounters(NamedTuple):
    """Running totals since the cache was made; ``hits + misses`` counts unique rows of each ``admit`` or ``touch``."""

    lookups: int
    """Keys given to ``admit`` or ``touch`` or ``access``, duplicates counted."""
    hits: int
    misses: int
    evictions: int


CONSUMED: Final = 0
NUM_UNIQUE: Final = 1
NUM_MISSING: Final = 2
STAMP: Final = 3
"""Places in ``Pinned.progress``."""


NO_ORDER: Final = np.empty(0, np.int32)


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
        missing: int32 [n]; ``[0, num_missing)`` are the unique numbers whose slot is loading, to be filled.
    """

    __slots__ = ("inverse", "keys", "missing", "order")

    def __init__(self, keys: Int64s, order: Int32s = NO_ORDER) -> None:
        assert len(order) in {0, len(keys)}, f"an order of {len(order)} positions, of {len(keys)} keys"
        super().__init__(len(keys))
        self.keys = keys
        self.order = order
        self.inverse: Int32s = np.empty(len(keys), np.int32)
        self.missing: Int32s = np.empty(len(keys), np.int32)

    @property
    def consumed(self) -> int:
        return self.progress.item(CONSUMED)

    @property
    def num_missing(self) -> int:
        return self.progress.item(NUM_MISSING)

    @property
    def missing_slots(self) -> Int32s:
        """int32 [num_missing]: the slots that await their rows."""
        slots: Int32s = self.unique_slots[self.missing[: self.num_missing]]
        return slots


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


class SlotStates(Protocol):
    """Which slots are in use, loading, or newer than the tier below, whatever rows they have.

    Slots are int32.
    """

    weights: Words
    """uint64 [capacity, weight_words], 64-byte aligned."""
    state: Words
    """uint64 [capacity, state_words], 64-byte aligned."""

    @property
    def capacity(self) -> int: ...

    def is_loading(self, slots: Int32s) -> bool:
        """Whether any of the slots awaits its row."""

    def filled(self, slots: Int32s) -> None:
        """The rows of these loading slots are in place."""

    @property
    def num_pinned(self) -> int:
        """Slots pinned at least once."""

    def pin(self, slots: Int32s) -> None: ...
    def unpin(self, slots: Int32s) -> None:
        """Undo one pin of each slot; rows that are loading and not pinned any more are dropped.
        AssertionError if one is not pinned."""

    @property
    def num_dirty(self) -> int: ...
    @property
    def num_frozen(self) -> int: ...

    def mark_dirty(self, slots: Int32s) -> None:
        """The rows are newer than the tier below; the caller has copied those that are frozen, which are so no more.
        AssertionError if one is loading (``filled`` comes first)."""

    def clean(self, slots: Int32s) -> Int32s:
        """Make dirty slots clean; returns those of ``slots`` that were dirty, in order. Their rows were written."""

    def take(self, slots: Int32s, pinned: Pinned, *, frozen: bool) -> None:
        """Begin to write the dirty ones of ``slots``, or the frozen ones: they are pinned, and stay as they are.

        Args:
            pinned: gets them, in order; it has none before, and room for all.
        """

    def settle(self, slots: Int32s) -> None:
        """Make those of these slots clean that are dirty and were not marked so again since ``take``."""

    def freeze(self) -> None:
        """Make every dirty slot frozen. AssertionError if some are frozen already."""

    def dirty_slots(self) -> Int32s:
        """Every dirty slot, in any order."""

    def frozen_slots(self) -> Int32s:
        """Every frozen slot, in any order."""

    def frozen_of(self, slots: Int32s) -> Int32s:
        """Those of ``slots`` that are frozen, in order. Changes nothing."""

    def thaw(self, slots: Int32s) -> Int32s:
        """Make frozen slots clean; returns those of ``slots`` that were frozen, in order. Their rows were written."""

    def unfreeze(self) -> None:
        """Make every frozen slot dirty: the commit was given up."""


class Placement(Protocol):
    """Which rows are resident, in which slot, and which are evicted.

    Slots are int32, keys int64 (``layout.KEY_ROW_BITS``).
    """

    @property
    def num_resident(self) -> int: ...

    def counters(self) -> CacheCounters: ...

    def find(self, keys: Int64s) -> Int32s:
        """int32 [n]: each key's slot, or -1. Changes nothing, not even the policy's order."""

    def touch(self, slots: Int32s) -> None:
        """Count hits without an admission: one access of each distinct slot, in order of first use."""

    def admit(self, admission: Admission) -> AdmitStatus:
        """Give each key a slot and pin it, in order of use, from ``admission.consumed`` on.

        The first occurrence of a key in the admission counts as one access for the policy and pins its slot once;
        later ones only resolve. A key that is not resident takes a free slot, else the policy's first unpinned
        victim, which must be clean; the slot is then loading. A slot found loading is missing again. On DIRTY_VICTIM
        and ALL_PINNED nothing was changed for the key at ``consumed``. No other admission may run between the calls of
        one. After ALL_PINNED, release the first part and admit the rest: ``Admission(keys[consumed:])``, or
        ``Admission(keys[order[consumed:]])``.
        """

    def release(self, pinned: Pinned) -> None:
        """``unpin`` these slots; then ``pinned``, or an admission, is as it was before its first use. Again is fine."""

    def keys_of(self, slots: Int32s) -> Int64s: ...
    def resident_slots(self) -> Int32s:
        """int32 [num_resident]: every resident slot in eviction order, pinned, dirty and loading ones included."""

    def list_more(self, listing: Listing, limit: int) -> bool:
        """List the rows, loading ones included, in the next ``limit`` slots, or in all. Returns False after the last
        slot: every row resident throughout has then been listed."""

    def dirty_victims(self, count: int, gap: int) -> Int32s:
        """The dirty or frozen ones among the next ``count`` unpinned victims, next victim first. The search ends at
        ``gap`` clean slots in a row, once an eighth of ``gap`` is found. Changes nothing."""

    def by_admission(self, slots: Int32s) -> Int32s:
        """The slots sorted by their rows' last admission, then by first use within it. A cache that does not know this
        order returns them as given. Changes nothing."""

    def evict(self, slots: Int32s) -> None:
        """Drop these rows, which must be resident, clean and unpinned (AssertionError)."""


class RowCache(SlotStates, Placement, Protocol):
    """Slots, and the rows in them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of arenas, index and policy together, as allocated."""

    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold:
        free + resident == capacity; index entries == resident and each leads to its slot; the policy's order holds
        each resident slot once; free slots are neither pinned, dirty, frozen nor loading; counts agree with flags."""
