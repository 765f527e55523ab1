"""The warm tier: rows in host memory, evicted by exact LRU, exact LFU, TinyLFU or lookahead.

Beside its rows a cache needs, per row, 12 bytes of index, 32 bytes of slot record and, with LFU, 16 bytes of buckets or
with TinyLFU 16 bytes of sketch: 44 bytes with LRU, 60 with these; with lookahead 28 bytes for each of 6 announced uses,
212 bytes in all (``OVERHEAD_BYTES``). And a cache, whatever its
size, up to ``FIXED_BYTES``. Nothing else grows with the capacity; memory is taken from the system as slots are first
used.
"""

from typing import Final, Literal, get_args

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from . import admission as kernels
from .base import Admission, AdmitStatus, CacheCounters, Listing
from .books import (
    BATCH_DTYPE,
    BUCKET_BYTES,
    MAX_BATCHES,
    USE_DTYPE,
    USES_PER_ROW,
    CacheState,
    Tally,
    new_state,
    state_bytes_of,
)
from .dueling import SAMPLED_ROWS, Duel, duel_bytes_of
from .flags import DIRTY, FLAGS, FROZEN, LOADING
from .index import SLOT_DTYPE
from .integrity import check_state
from .lookahead import announce_keys, has_room, retire_batch
from .sketch import sketch_width

PolicyName = Literal["lru", "lfu", "tinylfu", "lookahead"]

INDEX_BYTES: Final = 12
OVERHEAD_BYTES: Final[dict[str, int]] = {
    "lru": INDEX_BYTES + SLOT_DTYPE.itemsize,
    "lfu": INDEX_BYTES + SLOT_DTYPE.itemsize + BUCKET_BYTES,
    "tinylfu": INDEX_BYTES + SLOT_DTYPE.itemsize + sketch_width(4) // 4,
    "lookahead": INDEX_BYTES + SLOT_DTYPE.itemsize + USES_PER_ROW * (USE_DTYPE.itemsize + INDEX_BYTES),
}
"""Index and policy, in bytes per cached row."""
FIXED_BYTES: Final[dict[str, int]] = {
    "lru": 500,
    "lfu": 500,
    "tinylfu": 800 + duel_bytes_of(SAMPLED_ROWS),
    "lookahead": 500 + MAX_BATCHES * (BATCH_DTYPE.itemsize + 4),
}
"""The most that a cache takes beside its rows and their overhead."""

CAPACITY_MAX: Final = 2**31 - 2
"""Slots are int32, and the list's root takes one number."""

ALIGNMENT_BYTES: Final = 64
_STAMP_MAX: Final = 2**31 - 1


def _arena_bytes(capacity: int, words: int) -> int:
    return capacity * words * 8 + ALIGNMENT_BYTES if words else 0


def size_bytes_of(capacity: int, *, weight_words: int, state_words: int, policy: PolicyName) -> int:
    """Bytes a ``DdrCache`` of this capacity allocates."""
    rows = _arena_bytes(capacity, weight_words) + _arena_bytes(capacity, state_words)
    return rows + _overhead_bytes_of(capacity, policy)


def _overhead_bytes_of(capacity: int, policy: PolicyName) -> int:
    return state_bytes_of(capacity, policy) + (duel_bytes_of(capacity) if policy == "tinylfu" else 0)


def capacity_for(budget_bytes: int, *, weight_words: int, state_words: int, policy: PolicyName) -> int:
    """The largest capacity whose ``size_bytes`` is at most the budget; 0 if not even one row fits."""
    low, high = 0, min(max(budget_bytes, 0) // OVERHEAD_BYTES[policy], CAPACITY_MAX)
    while low < high:
        middle = (low + high + 1) // 2
        size = size_bytes_of(middle, weight_words=weight_words, state_words=state_words, policy=policy)
        if size <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def aligned_arena(capacity: int, words: int) -> tuple[Words, int]:
    """An arena that starts on a cache line, untouched; and the bytes allocated for it."""
    size_bytes = _arena_bytes(capacity, words)
    if not size_bytes:
        return np.empty((capacity, 0), np.uint64), 0
    raw = np.empty(size_bytes, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    arena: Words = raw[start : start + capacity * words * 8].view(np.uint64).reshape(capacity, words)
    return arena, raw.nbytes


def _check(array: object, dtype: str, name: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a numpy array, {dtype} [n], not {found}")


def checked_slots(array: Int32s) -> Int32s:
    """Checked, and contiguous: another layout would compile the kernels again."""
    _check(array, "int32", "slots")
    return np.ascontiguousarray(array)


def checked_keys(array: Int64s) -> Int64s:
    _check(array, "int64", "keys")
    return np.ascontiguousarray(array)


class DdrCache:
    """A ``RowCache`` in host memory.

    Args:
        capacity: slots, at least 1.
        weight_words: 64-bit words of weights a row; 0 for a cache without rows, to simulate.
        state_words: 64-bit words of optimizer state a row.
        policy: "lru", "lfu", "tinylfu" or "lookahead".

    Raises:
        ValueError: for any of them out of range.
    """

    def __init__(self, capacity: int, *, weight_words: int, state_words: int, policy: PolicyName) -> None:
        if not 1 <= capacity <= CAPACITY_MAX:
            raise ValueError(f"capacity={capacity} is not from 1 to {CAPACITY_MAX}")
        if weight_words < 0 or state_words < 0:
            raise ValueError(f"weight_words={weight_words}, state_words={state_words}: neither may be negative")
        if policy not in get_args(PolicyName):
            raise ValueError(f"policy={policy!r} is none of {', '.join(get_args(PolicyName))}")
        self.policy: Final = policy
        self.weights, weights_bytes = aligned_arena(capacity, weight_words)
        self.state, state_bytes = aligned_arena(capacity, state_words)
        self._books: CacheState = new_state(capacity, policy)
        self._duel = Duel(self._books) if policy == "tinylfu" else None
        self._arena_bytes = weights_bytes + state_bytes

    @property
    def capacity(self) -> int:
        return len(self._books.slots) - 1

    @property
    def num_resident(self) -> int:
        return int(self._books.tallies[Tally.RESIDENT])

    @property
    def num_dirty(self) -> int:
        return int(self._books.tallies[Tally.DIRTY])

    @property
    def num_frozen(self) -> int:
        return int(self._books.tallies[Tally.FROZEN])

    @property
    def num_pinned(self) -> int:
        return int(self._books.tallies[Tally.PINNED])

    @property
    def size_bytes(self) -> int:
        return self._arena_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Of ``size_bytes``, index and policy."""
        return _overhead_bytes_of(self.capacity, self.policy)

    def counters(self) -> CacheCounters:
        lookups, hits, misses, evictions = self._books.tallies[Tally.LOOKUPS : Tally.EVICTIONS + 1].tolist()
        return CacheCounters(lookups=lookups, hits=hits, misses=misses, evictions=evictions)

    def find(self, keys: Int64s) -> Int32s:
        keys = checked_keys(keys)
        found: Int32s = np.empty(len(keys), np.int32)
        kernels.find_keys(self._books.entries, self._books.slots, keys, found)
        return found

    def is_loading(self, slots: Int32s) -> bool:
        return bool((self._books.slots["flags"][checked_slots(slots)] & LOADING).any())

    def touch(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        distinct, before = np.empty_like(slots), self._books.tallies[Tally.HITS]
        self._require(kernels.touch_slots(self._books, slots, distinct), slots, "touch", "resident")
        self._observe(distinct[: self._books.tallies[Tally.HITS] - before])

    def _observe(self, slots: Int32s) -> None:
        if self._duel and len(self._duel.observe(self.keys_of(slots))) % 2:
            self._duel.turn()

    def admit(self, admission: Admission) -> AdmitStatus:
        if admission.stamp < 0:
            admission.stamp = self._next_stamp()
        assert admission.stamp == self._books.tallies[Tally.STAMP], "another admission ran between the calls of one"
        num_before = admission.num_unique
        progress = np.array([admission.consumed, admission.num_unique, admission.num_missing], np.int64)
        status = kernels.admit_keys(
            self._books,
            checked_keys(admission.keys),
            admission.stamp,
            admission.inverse,
            admission.unique_slots,
            admission.missing,
            progress,
        )
        admission.consumed, admission.num_unique, admission.num_missing = progress.tolist()
        self._observe(admission.slots[num_before:])
        return AdmitStatus(status)

    def _next_stamp(self) -> int:
        tallies = self._books.tallies
        if tallies[Tally.STAMP] == _STAMP_MAX:
            self._books.slots["stamp"] = 0
            tallies[Tally.STAMP] = 0
        tallies[Tally.STAMP] += 1
        return int(tallies[Tally.STAMP])

    def filled(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(kernels.fill_slots(self._books, slots), slots, "fill", "loading")

    def abandon(self, admission: Admission) -> None:
        slots = admission.slots
        self._require(kernels.abandon_slots(self._books, slots), slots, "abandon", "pinned")
        admission.consumed = admission.num_unique = admission.num_missing = 0
        admission.stamp = -1

    def pin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(kernels.pin_slots(self._books, slots), slots, "pin", "resident")

    def unpin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(kernels.unpin_slots(self._books, slots), slots, "unpin", "pinned, and filled by its last unpin")

    def mark_dirty(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(kernels.mark_slots(self._books, slots), slots, "mark dirty", "resident, not loading, not frozen")

    def victims(self, count: int, gap: int) -> Int32s:
        """See RowCache. A call walks past every pinned slot before these."""
        found: Int32s = np.empty(min(count, self.num_resident), np.int32)
        return found[: kernels.victim_slots(self._books, found, gap)]

    def by_admission(self, slots: Int32s) -> Int32s:
        records = self._books.slots[slots]
        sorted_slots: Int32s = slots[np.lexsort((records["number"], records["stamp"]))]
        return sorted_slots

    def clean(self, slots: Int32s) -> Int32s:
        return self._clear(slots, DIRTY, Tally.DIRTY)

    def frozen_of(self, slots: Int32s) -> Int32s:
        slots = checked_slots(slots)
        frozen: Int32s = slots[(self._books.slots["flags"][slots] & FROZEN) != 0]
        return frozen

    def thaw(self, slots: Int32s) -> Int32s:
        return self._clear(slots, FROZEN, Tally.FROZEN)

    def _clear(self, slots: Int32s, flag: int, tally: Tally) -> Int32s:
        slots = checked_slots(slots)
        cleared: Int32s = np.empty(len(slots), np.int32)
        return cleared[: kernels.clear_slots(self._books, slots, flag, int(tally), cleared)]

    def freeze(self) -> None:
        assert not self.num_frozen, f"{self.num_frozen} slots are frozen already"
        kernels.move_flags(self._books, DIRTY, int(Tally.DIRTY), FROZEN, int(Tally.FROZEN))

    def unfreeze(self) -> None:
        kernels.move_flags(self._books, FROZEN, int(Tally.FROZEN), DIRTY, int(Tally.DIRTY))

    def dirty_slots(self) -> Int32s:
        return self._flagged(DIRTY, self.num_dirty)

    def frozen_slots(self) -> Int32s:
        return self._flagged(FROZEN, self.num_frozen)

    def _flagged(self, flag: int, expected: int) -> Int32s:
        found: Int32s = np.empty(expected, np.int32)
        count = kernels.flagged_slots(self._books, flag, found)
        assert count == expected, f"{count} slots with flag {flag}, {expected} expected"
        return found

    def keys_of(self, slots: Int32s) -> Int64s:
        slots = checked_slots(slots)
        keys: Int64s = np.empty(len(slots), np.int64)
        self._require(kernels.keys_of_slots(self._books, slots, keys), slots, "give the key of", "resident")
        return keys

    def resident_slots(self) -> Int32s:
        listed: Int32s = np.empty(self.num_resident, np.int32)
        count = kernels.list_slots(self._books, listed)
        assert count == len(listed), f"at least {count} slots in the policy's list, {len(listed)} resident"
        return listed

    def list_more(self, listing: Listing, limit: int) -> bool:
        """See Listable.

        The walk continues after the last row not used since. Rows move while it pauses, so it may lose its place. The
        slots that it passed over are then found by number, which never changes.
        """
        if not listing.is_walked:
            listing.is_walked = not self._walk_on(listing, limit)
            return True
        stop = min(listing.next_slot + limit, self.capacity)
        keys: Int64s = np.empty(stop - listing.next_slot, np.int64)
        count = kernels.list_unlisted(self._books, listing.next_slot, stop, listing.is_listed, keys)
        listing.keys.append(keys[:count])
        listing.next_slot = stop
        return stop < self.capacity

    def _walk_on(self, listing: Listing, limit: int) -> bool:
        """Whether there is more of the walk."""
        start = -1
        if listing.visited is not None:
            start = kernels.unmoved_slot(self._books, *listing.visited)
            if start < 0:
                return False
        visited, stamps = np.empty(limit, np.int32), np.empty(limit, np.int32)
        keys, is_new = np.empty(limit, np.int64), np.empty(limit, np.bool_)
        count = kernels.walk_slots(self._books, start, listing.is_listed, visited, keys, stamps, is_new)
        listing.keys.append(keys[:count][is_new[:count]])
        listing.visited = visited[:count], keys[:count], stamps[:count]
        listing.num_steps += count
        # Rows that were listed may move behind the walk faster than it goes.
        return count == limit and listing.num_steps < 2 * self.capacity

    def evict(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._require(kernels.evict_slots(self._books, slots), slots, "evict", "resident, clean and unpinned")

    def access(self, keys: Int64s) -> Bools:
        unclean = self.num_dirty + self.num_frozen
        assert self.num_pinned == unclean == 0, f"replay with {self.num_pinned} pinned, {unclean} dirty"
        keys = checked_keys(keys)
        is_hit = np.empty(len(keys), np.bool_)
        start = 0
        if self._duel:
            for turn in self._duel.observe(keys).tolist():
                kernels.replay_keys(self._books, keys[start : turn + 1], is_hit[start : turn + 1])
                self._duel.turn()
                start = turn + 1
        kernels.replay_keys(self._books, keys[start:], is_hit[start:])
        return is_hit

    def can_announce(self, num_keys: int) -> bool:
        """See Announceable."""
        return self.policy != "lookahead" or bool(has_room(self._books, num_keys))

    def announce(self, keys: Int64s) -> int:
        """See Announceable."""
        return int(announce_keys(self._books, checked_keys(keys))) if self.policy == "lookahead" else 0

    def retire(self, batch: int) -> None:
        """See Announceable."""
        if batch:
            retire_batch(self._books, batch)

    def check_integrity(self) -> None:
        check_state(self._books)

    def _require(self, position: int, slots: Int32s, action: str, condition: str) -> None:
        if position == kernels.NOTHING_WRONG:
            return
        slot = int(slots[position])
        if not 0 <= slot < self.capacity:
            raise AssertionError(f"cannot {action} slot {slot}: the cache has {self.capacity} slots")
        record = self._books.slots[slot]
        flags = int(record["flags"])
        names = [name for name, flag in FLAGS.items() if flags & flag]
        raise AssertionError(
            f"cannot {action} slot {slot}: it must be {condition}; it is {', '.join(names) or 'free'}, "
            f"pinned {int(record['pins'])} times"
        )
