"""Kernels over a cache's bookkeeping: admission, replay, and the operations on lists of slots.

``admit`` is one pass over a batch's keys: one probe finds a row. The stamp in the slot's record tells whether this
admission has used it before; the number next to it is its unique number. At its first use a row is touched or reserved,
and pinned.
"""

from typing import Any, Final

import numpy as np

from ..kernels import hash_table
from ..kernels.arrays import Bools, Int32s, Int64s
from ..kernels.hash_table import Uint32s
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from .base import (
    CONSUMED,
    LOADING,
    NOTHING_WRONG,
    NUM_MISSING,
    NUM_UNIQUE,
    RESIDENT,
    UNCLEAN,
    AdmitStatus,
    is_resident,
    pin_slot,
    restart,
    unpin_slot,
)
from .cache_state import CacheState, SlotRecords, Tally, fetch_slot, place_in
from .policies import policy_insert, policy_remove, policy_touch
from .tinylfu import HIT, KEPT, NUM_SPEEDS, HalfLife, choose_rate, policy_begin, policy_settle, sample_key

_TOUCHED: Final = 32  # set only within ``use_keys``

_COMPLETE, _DIRTY_VICTIM, _ALL_PINNED = (int(status) for status in AdmitStatus)


@inline
def _drop(state: CacheState, slot: Any) -> None:
    """Take a clean, unpinned row out of index and policy; its slot is then in no list."""
    slots, secret, bits = state.slots, state.tallies[Tally.SECRET], state.tallies[Tally.SLOT_BITS]
    hash_table.erase(state.entries, slots, slots[slot]["key"], slot, secret, bits)
    policy_remove(state, state.bucket, slot)
    state.tallies[Tally.FILLED] -= slots[slot]["flags"] & LOADING == 0
    slots[slot]["flags"] = 0
    state.tallies[Tally.RESIDENT] -= 1


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
    slots, secret, bits = state.slots, state.tallies[Tally.SECRET], state.tallies[Tally.SLOT_BITS]
    slots[slot]["key"] = key
    slots[slot]["flags"] = flags
    hash_table.insert(state.entries, key, slot, secret, bits, 0, 2 * state.entries.size)
    policy_insert(state, state.bucket, slot)
    state.tallies[Tally.RESIDENT] += 1
    state.tallies[Tally.FILLED] += flags & LOADING == 0


@kernel
def admit_keys(
    state: CacheState, keys: Int64s, order: Int32s, stamp: int, inverse: Int32s, unique_slots: Int32s,
    missing: Int32s, progress: Int64s,
) -> int:  # fmt: skip
    """``RowCache.admit``; ``progress`` is of ``Pinned``, brought up to date.

    The victim is looked for behind ``cursor``: every slot before it in eviction order is pinned, and stays so during
    the call, so a call walks past each pinned slot once. A slot leaves the cursor before it moves.
    """
    slots, tallies = state.slots, state.tallies
    secret, bits = tallies[Tally.SECRET], tallies[Tally.SLOT_BITS]
    root = np.int64(slots.size - 1)
    consumed, num_unique, num_missing = progress[CONSUMED], progress[NUM_UNIQUE], progress[NUM_MISSING]
    policy_begin(state, keys.size - consumed)
    cursor = np.int64(slots[root]["next"])
    first_consumed, first_unique, first_missing = consumed, num_unique, num_missing
    status = _COMPLETE
    while consumed < keys.size:
        position = place_in(order, consumed)
        key = keys[position]
        fetch_slot(state.entries, slots, keys, order, consumed, secret, bits)
        slot = hash_table.find(state.entries, slots, key, secret, bits)
        if slot >= 0:
            if slots[slot]["stamp"] == stamp:
                inverse[position] = slots[slot]["number"]
                consumed += 1
                continue
            if slot == cursor:
                cursor = np.int64(slots[slot]["next"])
            policy_touch(state, state.bucket, slot)
            is_missing = slots[slot]["flags"] & LOADING != 0
        else:
            is_missing = True
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
        if is_missing:
            missing[num_missing] = position
            num_missing += 1
        pin_slot(slots["pins"], tallies, slot)
        slots[slot]["stamp"] = stamp
        slots[slot]["number"] = num_unique
        unique_slots[num_unique] = slot
        inverse[position] = num_unique
        num_unique += 1
        consumed += 1
    tallies[Tally.LOOKUPS] += consumed - first_consumed
    tallies[Tally.MISSES] += num_missing - first_missing
    tallies[Tally.HITS] += (num_unique - first_unique) - (num_missing - first_missing)
    progress[CONSUMED], progress[NUM_UNIQUE], progress[NUM_MISSING] = consumed, num_unique, num_missing
    policy_settle(state, num_unique - first_unique)
    return status


@inline
def _replay(state: CacheState, keys: Int64s) -> Any:
    """Single accesses; nothing is pinned or dirty. Returns how many hit."""
    slots, secret, bits = state.slots, state.tallies[Tally.SECRET], state.tallies[Tally.SLOT_BITS]
    hits = 0
    for key in keys:
        policy_begin(state, 1)
        slot = hash_table.find(state.entries, slots, key, secret, bits)
        if slot >= 0:
            hits += 1
            policy_touch(state, state.bucket, slot)
        else:
            slot = _free_slot(state)
            if slot < 0:
                slot = np.int64(slots[slots.size - 1]["next"])
                _drop(state, slot)
            _enter(state, key, slot, RESIDENT)
        policy_settle(state, 1)
    return hits


@inline
def _age(state: CacheState, half_life: HalfLife) -> None:
    """TinyLFU: replay a complete round in the small caches; change the rate."""
    half_life.waiting[0] = 0
    for speed in range(NUM_SPEEDS):
        hits = _replay(half_life.small[speed], half_life.waiting[1:])
        half_life.scores[speed] += HIT * hits - half_life.scores[speed] // KEPT
    state.tallies[Tally.RATE] = choose_rate(half_life.scores)


@kernel
def sample_slots(state: CacheState, half_life: HalfLife, chosen: Int32s) -> None:
    """TinyLFU: the rows of these resident slots were accessed."""
    for slot in chosen:
        if sample_key(half_life.waiting, state.slots.size - 1, state.slots[slot]["key"]):
            _age(state, half_life)


@inline
def _release(state: CacheState, pinned: Int32s) -> None:
    """Unpin these slots, if they are not -1 (released before)."""
    for i in range(pinned.size):
        if pinned[i] >= 0:
            unpin_slot(state.slots["pins"], state.tallies, np.int64(pinned[i]))
            pinned[i] = -1


@kernel
def replay_batches(
    state: CacheState, half_life: HalfLife, keys: Int64s, starts: Int64s, limits: Int64s, pinned: Int32s, is_hit: Bools,
    scratch: Int32s,
) -> None:  # fmt: skip
    """``DdrCache.access``.

    Args:
        limits: int64 [6]: ``depth`` and ``held_rows``; scratch.
        pinned: int32 [n], all -1; in the end, too.
        is_hit: bool [n], written.
        scratch: int32 [2, keys of the largest batch].
    """
    depth, held_rows, progress = limits[0], limits[1], limits[2:]
    oldest = 0
    for batch in range(starts.size - 1):
        begin, stop = starts[batch], starts[batch + 1]
        while oldest < batch - depth or (oldest < batch and stop - starts[oldest] > held_rows):
            _release(state, pinned[starts[oldest] : starts[oldest + 1]])
            oldest += 1
        while begin < stop:
            restart(progress)
            state.tallies[Tally.STAMP] += 1
            stamp = state.tallies[Tally.STAMP]
            batch_keys = keys[begin:stop]
            admit_keys(state, batch_keys, scratch[0, :0], stamp, scratch[0], pinned[begin:stop], scratch[1], progress)
            consumed, misses = progress[CONSUMED], progress[NUM_MISSING]
            is_hit[begin : begin + consumed] = True
            for i in range(misses):
                place = begin + scratch[1, i]
                is_hit[place] = False
                state.slots[pinned[place]]["flags"] ^= LOADING
            state.tallies[Tally.FILLED] += misses
            begin += consumed
            if begin < stop:  # every slot is pinned
                _release(state, pinned[starts[oldest] : begin])
                oldest = batch
        if state.sketch.size:
            for i in range(starts[batch], stop):
                if sample_key(half_life.waiting, state.slots.size - 1, keys[i]):
                    _age(state, half_life)
    _release(state, pinned)


@kernel
def find_keys(entries: Uint32s, slots: SlotRecords, tallies: Int64s, keys: Int64s, found: Int32s) -> None:
    """The slot of each key, or -1."""
    secret, bits = tallies[Tally.SECRET], tallies[Tally.SLOT_BITS]
    for i in range(keys.size):
        fetch_slot(entries, slots, keys, found[:0], i, secret, bits)
        found[i] = hash_table.find(entries, slots, keys[i], secret, bits)


@kernel
def use_keys(state: CacheState, keys: Int64s, found: Int32s, distinct: Int32s) -> bool:
    """``RowCache.use``: whether all rows are in; ``found`` receives their slots, ``distinct`` each slot once, in order
    of first use; ``Tally.HITS`` counts them."""
    slots, tallies = state.slots, state.tallies
    secret, bits = tallies[Tally.SECRET], tallies[Tally.SLOT_BITS]
    for i in range(keys.size):
        fetch_slot(state.entries, slots, keys, found[:0], i, secret, bits)
        slot = hash_table.find(state.entries, slots, keys[i], secret, bits)
        if slot < 0 or slots[slot]["flags"] & LOADING:
            return False
        found[i] = slot
    count = 0
    policy_begin(state, keys.size)
    for i in range(keys.size):
        slot = np.int64(found[i])
        if not slots[slot]["flags"] & _TOUCHED:
            slots[slot]["flags"] |= _TOUCHED
            distinct[count] = slot
            count += 1
            policy_touch(state, state.bucket, slot)
    for i in range(count):
        slots[distinct[i]]["flags"] &= ~_TOUCHED
    tallies[Tally.LOOKUPS] += keys.size
    tallies[Tally.HITS] += count
    policy_settle(state, count)
    return True


@kernel
def dirty_victim_slots(state: CacheState, found: Int32s, gap: int) -> int:
    """``RowCache.dirty_victims`` of ``found.size`` slots; returns how many of them are dirty or frozen."""
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
def drop_slots(state: CacheState, chosen: Int32s, evictions: int) -> int:
    """Drop rows, each counted as so many evictions; stops at one that is not resident, clean and unpinned."""
    slots = state.slots
    for i in range(chosen.size):
        slot = np.int64(chosen[i])
        if not is_resident(slots["flags"][:-1], slot) or slots[slot]["pins"] > 0 or slots[slot]["flags"] & UNCLEAN:
            return i
        _drop(state, slot)
        state.slots[slot]["next"] = state.tallies[Tally.FREE_SLOT]
        state.tallies[Tally.FREE_SLOT] = slot + 1
        state.tallies[Tally.EVICTIONS] += evictions
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
