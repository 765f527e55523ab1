"""Kernels over a cache's bookkeeping: admission, replay, and the operations on lists of slots.

``admit`` is one pass over a batch's keys: one probe finds a row. The stamp in the slot's record tells whether this
admission has used it before; the number beside it is its unique number. At its first use a row is touched or reserved,
and pinned.
"""

from typing import Any, Final

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from .base import AdmitStatus
from .books import CacheState, Tally
from .flags import DIRTY, FROZEN, LOADING, RESIDENT, UNCLEAN
from .index import SlotRecords, index_erase, index_find, index_insert, index_prefetch
from .policies import policy_begin, policy_insert, policy_remove, policy_settle, policy_touch

_TOUCHED: Final = 16
"""Set only within ``touch_slots``."""

NOTHING_WRONG: Final = -1
"""What kernels over slots return; otherwise the position of the first slot that forbids the operation. Those before
it are done, so that a caller's bug leaves the books balanced."""

_COMPLETE: Final = int(AdmitStatus.COMPLETE)
_DIRTY_VICTIM: Final = int(AdmitStatus.DIRTY_VICTIM)
_ALL_PINNED: Final = int(AdmitStatus.ALL_PINNED)


@inline
def _drop(state: CacheState, slot: Any) -> None:
    """Take a clean, unpinned row out of index and policy; its slot is then in no list."""
    slots = state.slots
    index_erase(state.entries, slots[slot]["key"], slot)
    policy_remove(state, slot)
    slots[slot]["flags"] = 0
    state.tallies[Tally.RESIDENT] -= 1


@inline
def _free(state: CacheState, slot: Any) -> None:
    state.slots[slot]["next"] = state.tallies[Tally.FREE_SLOT]
    state.tallies[Tally.FREE_SLOT] = slot + 1


@inline
def _free_slot(state: CacheState) -> Any:
    """A slot that holds no row, or -1."""
    tallies = state.tallies
    slot = tallies[Tally.FREE_SLOT] - 1
    if slot >= 0:
        tallies[Tally.FREE_SLOT] = state.slots[slot]["next"]
    elif tallies[Tally.USED_SLOTS] < state.slots.size - 1:
        slot = tallies[Tally.USED_SLOTS]
        tallies[Tally.USED_SLOTS] = slot + 1
    return slot


@inline
def _enter(state: CacheState, key: Any, slot: Any, flags: Any) -> None:
    """Make the key resident in a slot that is in no list."""
    slots = state.slots
    slots[slot]["key"] = key
    slots[slot]["flags"] = flags
    index_insert(state.entries, key, slot)
    policy_insert(state, slot)
    state.tallies[Tally.RESIDENT] += 1


@inline
def _pin(state: CacheState, slot: Any) -> None:
    slots = state.slots
    pins = slots[slot]["pins"]
    if pins == 0:
        state.tallies[Tally.PINNED] += 1
    slots[slot]["pins"] = pins + 1


@inline
def _unpin(state: CacheState, slot: Any) -> None:
    slots = state.slots
    pins = slots[slot]["pins"] - 1
    slots[slot]["pins"] = pins
    if pins == 0:
        state.tallies[Tally.PINNED] -= 1


@inline
def _is_resident(state: CacheState, slot: Any) -> Any:
    return 0 <= slot < state.slots.size - 1 and state.slots[slot]["flags"] != 0


@kernel
def admit_keys(
    state: CacheState,
    keys: Int64s,
    stamp: int,
    inverse: Int32s,
    unique_slots: Int32s,
    missing: Int32s,
    progress: Int64s,
) -> int:
    """``RowCache.admit``; ``progress`` is int64 [3]: consumed, num_unique, num_missing, brought up to date.

    The victim is looked for behind ``cursor``: every slot before it in eviction order is pinned, and stays so during
    the call, so a call walks past each pinned slot once. A slot leaves the cursor before it moves.
    """
    slots, tallies = state.slots, state.tallies
    root = np.int64(slots.size - 1)
    consumed, num_unique, num_missing = progress[0], progress[1], progress[2]
    policy_begin(state, keys.size - consumed)
    cursor = np.int64(slots[root]["next"])
    first_consumed, first_unique, first_missing = consumed, num_unique, num_missing
    status = _COMPLETE
    while consumed < keys.size:
        key = keys[consumed]
        index_prefetch(state.entries, slots, keys, consumed)
        slot = index_find(state.entries, slots, key)
        if slot >= 0:
            if slots[slot]["stamp"] == stamp:
                inverse[consumed] = slots[slot]["number"]
                consumed += 1
                continue
            if slot == cursor:
                cursor = np.int64(slots[slot]["next"])
            policy_touch(state, slot)
        else:
            slot = _free_slot(state)
            if slot < 0:
                while cursor != root and slots[cursor]["pins"] > 0:
                    cursor = np.int64(slots[cursor]["next"])
                if cursor == root:
                    status = _ALL_PINNED
                    break
                if slots[cursor]["flags"] & UNCLEAN:
                    status = _DIRTY_VICTIM
                    break
                slot = cursor
                cursor = np.int64(slots[slot]["next"])
                _drop(state, slot)
                tallies[Tally.EVICTIONS] += 1
            _enter(state, key, slot, RESIDENT | LOADING)
            missing[num_missing] = num_unique
            num_missing += 1
        _pin(state, slot)
        slots[slot]["stamp"] = stamp
        slots[slot]["number"] = num_unique
        unique_slots[num_unique] = slot
        inverse[consumed] = num_unique
        num_unique += 1
        consumed += 1
    tallies[Tally.LOOKUPS] += consumed - first_consumed
    tallies[Tally.MISSES] += num_missing - first_missing
    tallies[Tally.HITS] += (num_unique - first_unique) - (num_missing - first_missing)
    progress[0], progress[1], progress[2] = consumed, num_unique, num_missing
    policy_settle(state, num_unique - first_unique)
    return status


@kernel
def replay_keys(state: CacheState, keys: Int64s, is_hit: Bools) -> None:
    """``RowCache.access``; nothing is pinned or dirty."""
    slots, tallies = state.slots, state.tallies
    root = slots.size - 1
    misses, evictions = 0, 0
    for i in range(keys.size):
        key = keys[i]
        policy_begin(state, 1)
        slot = index_find(state.entries, slots, key)
        is_hit[i] = slot >= 0
        if slot >= 0:
            policy_touch(state, slot)
        else:
            misses += 1
            slot = _free_slot(state)
            if slot < 0:
                slot = np.int64(slots[root]["next"])
                _drop(state, slot)
                evictions += 1
            _enter(state, key, slot, RESIDENT)
        policy_settle(state, 1)
    tallies[Tally.LOOKUPS] += keys.size
    tallies[Tally.HITS] += keys.size - misses
    tallies[Tally.MISSES] += misses
    tallies[Tally.EVICTIONS] += evictions


@kernel
def find_keys(entries: Words, records: SlotRecords, keys: Int64s, found: Int32s) -> None:
    """The place of each key's record that an index leads to, or -1."""
    for i in range(keys.size):
        index_prefetch(entries, records, keys, i)
        found[i] = index_find(entries, records, keys[i])


@kernel
def touch_slots(state: CacheState, chosen: Int32s, distinct: Int32s) -> int:
    """``RowCache.touch``; ``distinct`` receives each slot once, in order of first use; ``Tally.HITS`` counts them."""
    slots, tallies = state.slots, state.tallies
    bad, count = NOTHING_WRONG, 0
    policy_begin(state, chosen.size)
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot):
            bad = i
            break
        tallies[Tally.LOOKUPS] += 1
        if not slots[slot]["flags"] & _TOUCHED:
            slots[slot]["flags"] |= _TOUCHED
            distinct[count] = slot
            count += 1
            policy_touch(state, slot)
    for i in range(count):
        slots[distinct[i]]["flags"] &= ~_TOUCHED
    tallies[Tally.HITS] += count
    policy_settle(state, count)
    return bad


@kernel
def pin_slots(state: CacheState, chosen: Int32s) -> int:
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot):
            return i
        _pin(state, slot)
    return NOTHING_WRONG


@kernel
def unpin_slots(state: CacheState, chosen: Int32s) -> int:
    """A loading slot keeps its last pin: the admission that reserved it fills or abandons it."""
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot):
            return i
        pins = slots[slot]["pins"]
        if pins == 0 or (pins == 1 and slots[slot]["flags"] & LOADING):
            return i
        _unpin(state, slot)
    return NOTHING_WRONG


@kernel
def fill_slots(state: CacheState, chosen: Int32s) -> int:
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot) or not slots[slot]["flags"] & LOADING:
            return i
        slots[slot]["flags"] &= ~LOADING
    return NOTHING_WRONG


@kernel
def mark_slots(state: CacheState, chosen: Int32s) -> int:
    """Make slots dirty; a loading slot holds no row yet, and a frozen one holds a row that nobody may change."""
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot) or slots[slot]["flags"] & (LOADING | FROZEN):
            return i
        if not slots[slot]["flags"] & DIRTY:
            slots[slot]["flags"] |= DIRTY
            state.tallies[Tally.DIRTY] += 1
    return NOTHING_WRONG


@kernel
def victim_slots(state: CacheState, found: Int32s, gap: int) -> int:
    """``RowCache.victims`` of ``found.size`` slots; returns how many of them are dirty or frozen."""
    slots = state.slots
    root = np.int64(slots.size - 1)
    slot = np.int64(slots[root]["next"])
    count, left, clean = 0, found.size, 0
    while slot != root and left > 0 and (clean < gap or 8 * count < gap):
        if slots[slot]["pins"] == 0:
            left -= 1
            clean += 1
            if slots[slot]["flags"] & UNCLEAN:
                found[count] = slot
                count += 1
                clean = 0
        slot = np.int64(slots[slot]["next"])
    return count


@kernel
def clear_slots(state: CacheState, chosen: Int32s, flag: int, tally: int, cleared: Int32s) -> int:
    """Clear a flag. The slots that had it are listed in ``cleared``; returns how many."""
    count = 0
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if _is_resident(state, slot) and state.slots[slot]["flags"] & flag:
            state.slots[slot]["flags"] &= ~flag
            cleared[count] = slot
            count += 1
    state.tallies[tally] -= count
    return count


@kernel
def move_flags(state: CacheState, old: int, old_tally: int, new: int, new_tally: int) -> None:
    """Replace one flag by another in every slot that has it."""
    slots, tallies = state.slots, state.tallies
    for slot in range(tallies[Tally.USED_SLOTS]):
        if slots[slot]["flags"] & old:
            slots[slot]["flags"] ^= old | new
    tallies[new_tally] += tallies[old_tally]
    tallies[old_tally] = 0


@kernel
def flagged_slots(state: CacheState, flag: int, found: Int32s) -> int:
    """List the slots that have a flag, in order of their numbers; returns how many."""
    count = 0
    for slot in range(state.tallies[Tally.USED_SLOTS]):
        if state.slots[slot]["flags"] & flag and count < found.size:
            found[count] = slot
            count += 1
    return count


@kernel
def evict_slots(state: CacheState, chosen: Int32s) -> int:
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot) or slots[slot]["pins"] > 0 or slots[slot]["flags"] & UNCLEAN:
            return i
        _drop(state, slot)
        _free(state, slot)
        state.tallies[Tally.EVICTIONS] += 1
    return NOTHING_WRONG


@kernel
def abandon_slots(state: CacheState, chosen: Int32s) -> int:
    """Unpin slots; loading slots that no other admission has pinned leave the cache."""
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot) or slots[slot]["pins"] == 0:
            return i
        _unpin(state, slot)
        if slots[slot]["pins"] == 0 and slots[slot]["flags"] & LOADING:
            _drop(state, slot)
            _free(state, slot)
    return NOTHING_WRONG


@kernel
def keys_of_slots(state: CacheState, chosen: Int32s, keys: Int64s) -> int:
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not _is_resident(state, slot):
            return i
        keys[i] = state.slots[slot]["key"]
    return NOTHING_WRONG


@kernel
def list_slots(state: CacheState, listed: Int32s) -> int:
    """Fill ``listed`` with the resident slots in eviction order; returns how many it holds,
    at most one too many."""
    slots = state.slots
    root = np.int64(slots.size - 1)
    slot = np.int64(slots[root]["next"])
    count = 0
    while slot != root:
        if count == listed.size:
            return count + 1
        listed[count] = slot
        count += 1
        slot = np.int64(slots[slot]["next"])
    return count


@kernel
def unmoved_slot(state: CacheState, visited: Int32s, keys: Int64s, stamps: Int32s) -> int:
    """The last visited slot whose row no admission has used since, or -1. Most likely it still has its place in
    eviction order, as do those before it."""
    slots = state.slots
    for i in range(visited.size - 1, -1, -1):
        slot = np.int64(visited[i])
        if slots[slot]["flags"] != 0 and slots[slot]["key"] == keys[i] and slots[slot]["stamp"] == stamps[i]:
            return int(slot)
    return -1


@kernel
def walk_slots(
    state: CacheState,
    start: int,
    is_listed: Bools,
    visited: Int32s,
    keys: Int64s,
    stamps: Int32s,
    is_new: Bools,
) -> int:
    """Visit slots in eviction order, after ``start`` (-1: from the beginning), and list those not yet listed. Returns
    how many were visited; fewer than there is room for mean the end."""
    slots = state.slots
    root = np.int64(slots.size - 1)
    slot = np.int64(slots[root if start < 0 else start]["next"])
    count = 0
    while slot != root and count < visited.size:
        visited[count] = slot
        keys[count] = slots[slot]["key"]
        stamps[count] = slots[slot]["stamp"]
        is_new[count] = not is_listed[slot]
        is_listed[slot] = True
        count += 1
        slot = np.int64(slots[slot]["next"])
    return count


@kernel
def list_unlisted(state: CacheState, first: int, stop: int, is_listed: Bools, keys: Int64s) -> int:
    """Keys of the resident slots from ``first`` to ``stop`` that were not listed; returns how many."""
    slots = state.slots
    count = 0
    for slot in range(first, min(stop, state.tallies[Tally.USED_SLOTS])):
        if slots[slot]["flags"] != 0 and not is_listed[slot]:
            is_listed[slot] = True
            keys[count] = slots[slot]["key"]
            count += 1
    return count
