"""LRU, LFU and TinyLFU over arrays, O(1) a step: each keeps resident slots in one list in eviction order.

LRU: a touched slot moves to the end. LFU: slots of equal count lie side by side, oldest first, and form a *bucket*;
buckets lie in order of their counts. A bucket knows its count and its last slot; its neighbours are found through
the list. Both evict exactly what cachetools (>= 8) evicts: a new row has count 1, and a row that returns starts again.
TinyLFU is in tinylfu.py.
"""

from typing import Any

import numpy as np

from ..kernels.arrays import Int32s, Int64s
from ..kernels.jit import uncounted_inline as inline
from .cache_state import LEVELS, CacheState, Tally, link_after, unlink
from .tinylfu import IN_WINDOW, tinylfu_insert, tinylfu_remove, tinylfu_touch


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
        return np.where(rank & IN_WINDOW, np.int32(LEVELS), rank & np.int32(LEVELS - 1))
    return np.zeros(len(slots), np.int32)


@inline
def policy_touch(state: CacheState, bucket: Any, slot: Any) -> None:
    """Count one access of a resident slot. ``bucket`` is that of the state: only of a helper's argument that is None
    does numba leave out what is for others."""
    if bucket is not None:
        _lfu_touch(state, slot)
    elif state.sketch.size:
        tinylfu_touch(state, slot)
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
        tinylfu_insert(state, slot)
    else:
        slots = state.slots
        link_after(slots, slot, slots[slots.size - 1]["previous"])


@inline
def policy_remove(state: CacheState, bucket: Any, slot: Any) -> None:
    """Forget a resident slot, and its count as far as the policy does."""
    if state.sketch.size:
        tinylfu_remove(state, slot)
    else:
        if bucket is not None:
            _leave_bucket(state, slot)
        unlink(state.slots, slot)
