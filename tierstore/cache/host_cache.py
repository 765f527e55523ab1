"""What the caches in host memory share: the arenas, the flags and pins of slots, and how many there are of each.

Kernels over slots return ``NOTHING_WRONG``, or the position of the first slot that forbids the operation. Those before
it are done, so that a caller's bug leaves the counts balanced.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..kernels.simd import item
from .base import CHANGED, DIRTY, FLAGS, FROZEN, LOADING, NUM_UNIQUE, STAMP, CacheCounters, Pinned
from .cache_state import Tally

NOTHING_WRONG: Final = -1
NUMBER_MAX: Final = 2**62  # of counts and sizes that arguments give
CAPACITY_MAX: Final = 2**31 - 2  # slots are int32, and a list's root takes one number
_ALIGNMENT_BYTES: Final = 64
EIGHT: Final = 8  # flags of a byte each in a word
_ONES: Final = np.uint64(0x0101010101010101)
_NO_WORDS: Final = np.empty(0, np.uint64)


def arena_bytes(capacity: int, words: int) -> int:
    """Bytes allocated for rows of so many words."""
    return capacity * words * 8 + _ALIGNMENT_BYTES if words else 0


def _aligned_arena(capacity: int, words: int) -> Words:
    """An arena that starts on a cache line, untouched."""
    raw = np.empty(capacity * words * 8 + _ALIGNMENT_BYTES if words else 0, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    arena: Words = raw[start : start + capacity * words * 8].view(np.uint64).reshape(capacity, words)
    return arena


def _check(array: object, dtype: str, name: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a numpy array, {dtype} [n], not {found}")


def checked_slots(array: Int32s) -> Int32s:
    """Checked, and contiguous: another layout would compile the kernels again."""
    _check(array, "int32", "slots")
    return np.ascontiguousarray(array)


def indexes(slots: Int32s) -> NDArray[np.uint32]:
    """Checked, as indexes for which numpy raises IndexError where they are negative, too."""
    return checked_slots(slots).view(np.uint32)


def checked_keys(array: Int64s) -> Int64s:
    _check(array, "int64", "keys")
    return np.ascontiguousarray(array)


def checked_starts(array: Int64s, count: int) -> Int64s:
    """A copy, checked: ascending from 0 to ``count``, which begins and ends of batches are."""
    _check(array, "int64", "starts")
    starts = array.copy()
    if not len(starts) or starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
        raise ValueError(
            f"starts must ascend from 0 to the number of keys, {count}; they are {starts[:8].tolist()} ..."
        )
    return starts


def require_capacity(capacity: int) -> None:
    """ValueError for what slots cannot number."""
    if not 1 <= capacity <= CAPACITY_MAX:
        raise ValueError(f"capacity={capacity} is not from 1 to {CAPACITY_MAX}")


class HostCache:
    """``SlotStates``, and counters.

    Attributes:
        weights, state: uint64 [capacity, words], 64-byte aligned.
        flags, pins: integers [capacity]; flags are bits as in ``flags``.
        tallies: int64, see ``cache_state.Tally``.
    """

    def __init__(self, flags: Any, pins: Any, tallies: Int64s, *, weight_words: int, state_words: int) -> None:
        if weight_words < 0 or state_words < 0:
            raise ValueError(f"weight_words={weight_words}, state_words={state_words}: neither may be negative")
        self.flags = flags
        self.pins = pins
        self.tallies = tallies
        self.weights = _aligned_arena(len(flags), weight_words)
        self.state = _aligned_arena(len(flags), state_words)

    @property
    def capacity(self) -> int:
        return len(self.flags)

    @property
    def num_resident(self) -> int:
        return int(self.tallies[Tally.RESIDENT])

    @property
    def num_dirty(self) -> int:
        return int(self.tallies[Tally.DIRTY])

    @property
    def num_frozen(self) -> int:
        return int(self.tallies[Tally.FROZEN])

    @property
    def num_pinned(self) -> int:
        return int(self.tallies[Tally.PINNED])

    @property
    def size_bytes(self) -> int:
        words = self.weights.shape[1], self.state.shape[1]
        return sum(arena_bytes(self.capacity, each) for each in words) + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Of ``size_bytes``, all but rows."""
        raise NotImplementedError

    def counters(self) -> CacheCounters:
        return CacheCounters(*self.tallies[Tally.LOOKUPS : Tally.EVICTIONS + 1].tolist())

    def is_loading(self, slots: Int32s) -> bool:
        are_some = self.tallies.item(Tally.FILLED) != self.tallies.item(Tally.RESIDENT)
        return are_some and bool((self.flags[indexes(slots)] & LOADING).any())

    def filled(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self.require(_fill_slots(self.flags, self.tallies, slots), slots, "fill", "loading")

    def pin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self.require(_pin_slots(self.flags, self.pins, self.tallies, slots), slots, "pin", "resident")

    def unpin(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self._unpin(slots, np.array([0, len(slots), 0, -1]))

    def release(self, pinned: Pinned) -> None:
        self._unpin(pinned.unique_slots, pinned.progress)

    def _unpin(self, slots: Int32s, progress: Int64s) -> None:
        """Whoever is cut short before the rows are dropped leaves them loading, which the next admission misses."""
        slots = slots[: progress.item(NUM_UNIQUE)]
        bad, loading = _unpin_slots(self.flags, self.pins, self.tallies, slots, progress)
        self.require(bad, slots, "unpin", "pinned")
        if loading:
            self._drop(slots[(self.flags[slots] & LOADING != 0) & (self.pins[slots] == 0)], 0)

    def evict(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        self.require(self._drop(slots, 1), slots, "evict", "resident, clean and unpinned")

    def _drop(self, slots: Int32s, evictions: int) -> int:
        """Drop these rows, each counted as so many evictions; stops at one that is not resident, clean and unpinned."""
        raise NotImplementedError

    def mark_dirty(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        bad = _mark_slots(self.flags, self.tallies, slots)
        self.require(bad, slots, "mark dirty", "resident, not loading")

    def take(self, slots: Int32s, pinned: Pinned, *, frozen: bool) -> None:
        flag = FROZEN if frozen else DIRTY
        _take_slots(
            self.flags, self.pins, self.tallies, checked_slots(slots), flag, pinned.unique_slots, pinned.progress
        )

    def settle(self, slots: Int32s) -> None:
        _settle_slots(self.flags, self.tallies, checked_slots(slots))

    def clean(self, slots: Int32s) -> Int32s:
        return self._clear(slots, DIRTY, Tally.DIRTY)

    def thaw(self, slots: Int32s) -> Int32s:
        return self._clear(slots, FROZEN, Tally.FROZEN)

    def _clear(self, slots: Int32s, flag: int, tally: Tally) -> Int32s:
        slots = checked_slots(slots)
        cleared: Int32s = np.empty(len(slots), np.int32)
        return cleared[: _clear_slots(self.flags, self.tallies, slots, flag, int(tally), cleared)]

    def frozen_of(self, slots: Int32s) -> Int32s:
        frozen: Int32s = slots[(self.flags[indexes(slots)] & FROZEN) != 0]
        return frozen

    def freeze(self) -> None:
        assert not self.num_frozen, f"{self.num_frozen} slots are frozen already"
        self._move(DIRTY, Tally.DIRTY, FROZEN, Tally.FROZEN)

    def unfreeze(self) -> None:
        if self.num_frozen:  # a pass over all slots takes as long as a small commit
            self._move(FROZEN, Tally.FROZEN, DIRTY, Tally.DIRTY)

    def _move(self, old: int, old_tally: Tally, new: int, new_tally: Tally) -> None:
        _move_flags(self._used_flags, self._flag_words, self.tallies, old, int(old_tally), new, int(new_tally))

    @property
    def _used_flags(self) -> Any:
        return self.flags[: self.tallies[Tally.USED_SLOTS]]

    @property
    def _flag_words(self) -> Words:
        """The flags of each eight slots as one word, if flags are adjacent bytes; else empty."""
        return _NO_WORDS

    def dirty_slots(self) -> Int32s:
        return self.flagged(DIRTY, self.num_dirty)

    def frozen_slots(self) -> Int32s:
        return self.flagged(FROZEN, self.num_frozen)

    def flagged(self, flag: int, expected: int) -> Int32s:
        """int32 [expected]: the slots that have a flag, in order of their numbers."""
        found: Int32s = np.empty(expected, np.int32)
        count = _flagged_slots(self._used_flags, flag, found)
        assert count == expected, f"{count} slots with flag {flag}, {expected} expected"
        return found

    def require(self, position: int, slots: Int32s, action: str, condition: str) -> None:
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
    """Make slots dirty; a loading slot holds no row yet."""
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
    """``RowCache.take`` of the slots that have a flag."""
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
def _settle_slots(flags: Any, tallies: Int64s, chosen: Int32s) -> None:
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if is_resident(flags, slot) and flags[slot] & (DIRTY | CHANGED) == DIRTY:
            flags[slot] ^= DIRTY
            tallies[Tally.DIRTY] -= 1


@kernel
def _clear_slots(flags: Any, tallies: Int64s, chosen: Int32s, flag: int, tally: int, cleared: Int32s) -> int:
    """Clear a flag. The slots that had it are listed in ``cleared``; returns how many."""
    count = 0
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if is_resident(flags, slot) and flags[slot] & flag:
            flags[slot] = (flags[slot] | (flag | CHANGED)) ^ (flag | CHANGED)
            cleared[count] = slot
            count += 1
    tallies[tally] -= count
    return count


@kernel
def _move_flags(
    flags: Any, words: Words, tallies: Int64s, old: int, old_tally: int, new: int, new_tally: int
) -> None:  # fmt: skip
    """Replace one flag by another in every slot that has it. Most eights of slots have none, and are one word to look
    at: slot by slot this takes seven times as long."""
    moved = 0
    for first in range(0, flags.size, EIGHT):
        if first >= words.size * EIGHT or item(words, first // EIGHT) & (_ONES * np.uint64(old)) != 0:
            for slot in range(first, min(first + EIGHT, flags.size)):
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
