"""Kernels over a cache's bookkeeping: policies, admission, replay, and the operations on lists of slots.

Each policy keeps resident slots in one list in eviction order, and takes O(1) a step. LRU: a touched slot moves to the
end. LFU: slots of equal count lie side by side, oldest first, and form a *bucket*; buckets lie in order of their
counts. A bucket knows its count and its last slot; its neighbours are found through the list. Both evict exactly what
cachetools (>= 8) evicts: a new row has count 1, and a row that returns starts again. TinyLFU is in tinylfu.py.

``admit`` is one pass over a batch's keys: one probe finds a row. The stamp in the slot's record tells whether this
admission has used it before; the number next to it is its unique number. At its first use a row is touched or reserved,
and pinned.
"""

from typing import Any, Final

import numpy as np

from ..kernels import hash_table
from ..kernels.arrays import Bools, Int32s, Int64s
from ..kernels.hash_table import Uint32s
from ..kernels.hashing import keyed_hash
from ..kernels.jit import prefetch_item
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from . import tinylfu
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
from .cache_state import LEVELS, CacheState, SlotRecords, Tally, link_after, place_in, unlink
from .tinylfu import HalfLife, policy_begin, policy_settle, sample_key

_TOUCHED: Final = 32  # set only within ``use_keys``

_COMPLETE, _DIRTY_VICTIM, _ALL_PINNED = (int(status) for status in AdmitStatus)


# Policies


@inline
def _new_bucket(state: CacheState, count: Any) -> Any:
    tallies = state.tallies
    bucket = tallies[Tally.FREE_BUCKET] - 1
    if bucket >= 0:
        tallies[Tally.FREE_BUCKET] = state.bucket_tail[bucket]
    else:
        bucket = tallies[Tally.USED_BUCKETS]
        tallies[Tally.USED_BUCKETS] = bucket + 1
    state.bucket_count[bucket] = count
    return bucket


@inline
def _leave_bucket(state: CacheState, slot: Any) -> None:
    """Let the slot's bucket end before it, or free the bucket if it has no other slot."""
    bucket = state.bucket[slot]
    if state.bucket_tail[bucket] != slot:
        return
    root = state.slots.size - 1
    before = state.slots[slot]["previous"]
    if before != root and state.bucket[before] == bucket:
        state.bucket_tail[bucket] = before
    else:
        state.bucket_tail[bucket] = state.tallies[Tally.FREE_BUCKET]
        state.tallies[Tally.FREE_BUCKET] = bucket + 1


@inline
def _lfu_touch(state: CacheState, slot: Any) -> None:
    slots, buckets, tails = state.slots, state.bucket, state.bucket_tail
    root = slots.size - 1
    bucket = buckets[slot]
    tail = tails[bucket]
    count = state.bucket_count[bucket] + 1
    after = slots[tail]["next"]
    if after != root and state.bucket_count[buckets[after]] == count:
        target = buckets[after]
        _leave_bucket(state, slot)
        unlink(slots, slot)
        link_after(slots, slot, tails[target])
    else:
        before = slots[slot]["previous"]
        if tail == slot and (before == root or buckets[before] != bucket):
            state.bucket_count[bucket] = count
            return
        target = _new_bucket(state, count)
        _leave_bucket(state, slot)
        if tail != slot:
            unlink(slots, slot)
            link_after(slots, slot, tail)
    tails[target] = slot
    buckets[slot] = target


@inline
def _lfu_insert(state: CacheState, slot: Any) -> None:
    slots = state.slots
    root = slots.size - 1
    first = slots[root]["next"]
    if first != root and state.bucket_count[state.bucket[first]] == 1:
        bucket = np.int64(state.bucket[first])
        link_after(slots, slot, state.bucket_tail[bucket])
    else:
        bucket = _new_bucket(state, 1)
        link_after(slots, slot, root)
    state.bucket_tail[bucket] = slot
    state.bucket[slot] = bucket


def ranks_of(state: CacheState, slots: Int64s) -> Int32s:
    """int32 [n]: which of these resident slots leave first, those of lower rank; of equal ones, those used before."""
    rank = state.slots["rank"][slots].astype(np.int32)
    if state.bucket is not None:
        return state.bucket_count[state.bucket[slots]].clip(max=2**31 - 1).astype(np.int32)
    if state.sketch.size:
        return np.where(rank & tinylfu.IN_WINDOW, np.int32(LEVELS), rank & np.int32(LEVELS - 1))
    return np.zeros(len(slots), np.int32)


@inline
def policy_touch(state: CacheState, bucket: Any, slot: Any) -> None:
    """Count one access of a resident slot. ``bucket`` is that of the state: only of a helper's argument that is None
    does numba leave out what is for others."""
    if bucket is not None:
        _lfu_touch(state, slot)
    elif state.sketch.size:
        tinylfu.touch(state, slot)
    else:
        slots = state.slots
        unlink(slots, slot)
        link_after(slots, slot, slots[slots.size - 1]["previous"])


@inline
def policy_insert(state: CacheState, bucket: Any, slot: Any) -> None:
    """Enter a new row's slot, with its first access."""
    if bucket is not None:
        _lfu_insert(state, slot)
    elif state.sketch.size:
        tinylfu.insert(state, slot)
    else:
        slots = state.slots
        link_after(slots, slot, slots[slots.size - 1]["previous"])


@inline
def policy_remove(state: CacheState, bucket: Any, slot: Any) -> None:
    """Forget a resident slot, and its count as far as the policy does."""
    if state.sketch.size:
        tinylfu.remove(state, slot)
    else:
        if bucket is not None:
            _leave_bucket(state, slot)
        unlink(state.slots, slot)


# Admission


@inline
def _find_slot(
    entries: Uint32s, slots: SlotRecords, keys: Int64s, order: Int32s, number: Any, secret: int, bits: int,
    likely: Int32s,
) -> Any:  # fmt: skip
    """The slot of the key that comes ``number``-th in ``order``, or ABSENT. Before, the places of a key further on are
    fetched into the processor's caches, and the slot that a nearer one is likely to be in, which is noted: each find
    needs two dependent reads, which overlap so. ``likely``: int32 [keys], scratch, some slot for each key."""
    if number + hash_table.FAR < keys.size:
        far, near = place_in(order, number + hash_table.FAR), place_in(order, number + hash_table.NEAR)
        hash_table.fetch_places(entries, keyed_hash(keys[far], secret))
        likely[near], _ = hash_table.candidate(entries, slots, keyed_hash(keys[near], secret), bits, np.uint64(0))
    position = place_in(order, number)
    key, slot = keys[position], np.int64(likely[position])
    if slot < 0 or slots[slot]["key"] != key or slots[slot]["flags"] & RESIDENT == 0:
        slot = hash_table.find(entries, slots, key, keyed_hash(key, secret), bits)
    return slot


@inline
def _drop(state: CacheState, slot: Any) -> None:
    """Take a clean, unpinned row out of index and policy; its slot is then in no list."""
    slots, secret, bits = state.slots, state.tallies[Tally.SECRET], state.tallies[Tally.SLOT_BITS]
    hash_table.erase(state.entries, slots, keyed_hash(slots[slot]["key"], secret), slot, bits, secret)
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
    hash_table.insert(state.entries, keyed_hash(key, secret), slot, bits, 0, 2 * state.entries.size)
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
        slot = _find_slot(state.entries, slots, keys, order, consumed, secret, bits, inverse)
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
        slot = hash_table.find(state.entries, slots, key, keyed_hash(key, secret), bits)
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
def _turn_round(state: CacheState, half_life: HalfLife) -> None:
    """TinyLFU: replay a complete round in the small caches; change the rate."""
    half_life.waiting[0] = 0
    for speed in range(tinylfu.NUM_SPEEDS):
        hits = _replay(half_life.small[speed], half_life.waiting[1:])
        half_life.scores[speed] += tinylfu.HIT * hits - half_life.scores[speed] // tinylfu.KEPT
    state.tallies[Tally.RATE] = tinylfu.choose_rate(half_life.scores)


@kernel
def age(state: CacheState, half_life: HalfLife) -> None:
    """TinyLFU: see ``_turn_round``."""
    _turn_round(state, half_life)


@kernel
def sample_slots(slots: SlotRecords, waiting: Int64s, chosen: Int32s, first: int) -> int:
    """TinyLFU: the rows of these resident slots were accessed, from the ``first`` on. Up to which a round is complete,
    -1 if none is. Apart from ``age``, as numba takes 10 us to be given the small caches."""
    for place in range(first, chosen.size):
        if place + hash_table.NEAR < chosen.size:
            prefetch_item(slots, np.int64(chosen[place + hash_table.NEAR]))
        if sample_key(waiting, slots.size - 1, slots[chosen[place]]["key"]):
            return place + 1
    return -1


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
                    _turn_round(state, half_life)
    _release(state, pinned)


@kernel
def find_keys(entries: Uint32s, slots: SlotRecords, tallies: Int64s, keys: Int64s, found: Int32s) -> None:
    """The slot of each key, or -1."""
    secret, bits = tallies[Tally.SECRET], tallies[Tally.SLOT_BITS]
    for i in range(keys.size):
        found[i] = _find_slot(entries, slots, keys, found[:0], i, secret, bits, found)


@kernel
def use_keys(state: CacheState, keys: Int64s, found: Int32s, distinct: Int32s) -> bool:
    """``RowCache.use``: whether all rows are in; ``found`` receives their slots, ``distinct`` each slot once, in order
    of first use; ``Tally.HITS`` counts them."""
    slots, tallies = state.slots, state.tallies
    secret, bits = tallies[Tally.SECRET], tallies[Tally.SLOT_BITS]
    for i in range(keys.size):
        slot = _find_slot(state.entries, slots, keys, found[:0], i, secret, bits, found)
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
