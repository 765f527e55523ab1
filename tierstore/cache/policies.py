"""Exact LRU and LFU over arrays, O(1) a step: both keep the resident slots in one doubly linked list in eviction order.

LRU: a touched slot moves to the end. LFU: slots of equal count lie side by side, oldest first, and form a *bucket*;
buckets lie in order of their counts. A bucket knows its count and its last slot; its neighbours are found through
the list. Both evict exactly what cachetools (>= 8) evicts: a new row has count 1, and a row that returns starts anew.

The list's ends are tied to a root: the record at ``len(slots) - 1``, which belongs to no row.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from .._jit import uncounted_kernel as inline
from .base import Int32s, Int64s, Words
from .index import SlotRecords

__all__ = [
    "BUCKET_BYTES",
    "NUM_TALLIES",
    "CacheState",
    "Tally",
    "policy_insert",
    "policy_remove",
    "policy_touch",
]

BUCKET_BYTES: Final = 4 + 8 + 4
"""Of LFU, per slot: the slot's bucket, and one bucket (there are never more than slots)."""


class Tally(IntEnum):
    """Places in ``CacheState.tallies``."""

    RESIDENT = 0
    DIRTY: Final = 1
    PINNED: Final = 2
    LOOKUPS: Final = 3
    HITS: Final = 4
    MISSES: Final = 5
    EVICTIONS: Final = 6
    STAMP: Final = 7
    """The newest admission's number."""
    USED_SLOTS: Final = 8
    """Slots from here on were never used."""
    FREE_SLOT: Final = 9
    """First of the freed slots, linked by ``next``, plus 1; 0 for none."""
    USED_BUCKETS: Final = 10
    FREE_BUCKET: Final = 11
    """First of the freed buckets, linked by ``bucket_tail``, plus 1; 0 for none."""
    FROZEN: Final = 12


NUM_TALLIES: Final = len(Tally)


class CacheState(NamedTuple):
    """The bookkeeping of a cache, as its kernels see it. With LRU the bucket arrays are empty."""

    entries: Words
    """uint64 [index_places(capacity)]: the index, see index.py."""
    slots: SlotRecords
    """SLOT_DTYPE [capacity + 1]; the last is the root of the list."""
    bucket: Int32s
    """int32 [capacity]: a resident slot's bucket."""
    bucket_count: Int64s
    """int64 [capacity]: accesses of each row in the bucket."""
    bucket_tail: Int32s
    """int32 [capacity]: the bucket's last slot."""
    tallies: Int64s
    """int64 [NUM_TALLIES]: see Tally."""


@inline
def _unlink(slots: SlotRecords, slot: Any) -> None:
    before = slots[slot]["previous"]
    after = slots[slot]["next"]
    slots[before]["next"] = after
    slots[after]["previous"] = before


@inline
def _link_after(slots: SlotRecords, slot: Any, before: Any) -> None:
    after = slots[before]["next"]
    slots[slot]["previous"] = before
    slots[slot]["next"] = after
    slots[before]["next"] = slot
    slots[after]["previous"] = slot


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
        _unlink(slots, slot)
        _link_after(slots, slot, tails[target])
    else:
        before = slots[slot]["previous"]
        if tail == slot and (before == root or buckets[before] != bucket):
            state.bucket_count[bucket] = count
            return
        target = _new_bucket(state, count)
        _leave_bucket(state, slot)
        if tail != slot:
            _unlink(slots, slot)
            _link_after(slots, slot, tail)
    tails[target] = slot
    buckets[slot] = target


@inline
def policy_touch(state: CacheState, slot: Any) -> None:
    """Count one access of a resident slot."""
    if state.bucket.size:
        _lfu_touch(state, slot)
    else:
        slots = state.slots
        root = slots.size - 1
        _unlink(slots, slot)
        _link_after(slots, slot, slots[root]["previous"])


@inline
def policy_insert(state: CacheState, slot: Any) -> None:
    """Enter a new row's slot, with its first access."""
    slots = state.slots
    root = slots.size - 1
    if state.bucket.size == 0:
        _link_after(slots, slot, slots[root]["previous"])
        return
    first = slots[root]["next"]
    if first != root and state.bucket_count[state.bucket[first]] == 1:
        bucket = np.int64(state.bucket[first])
        _link_after(slots, slot, state.bucket_tail[bucket])
    else:
        bucket = _new_bucket(state, 1)
        _link_after(slots, slot, root)
    state.bucket_tail[bucket] = slot
    state.bucket[slot] = bucket


@inline
def policy_remove(state: CacheState, slot: Any) -> None:
    """Forget a resident slot, and its count."""
    if state.bucket.size:
        _leave_bucket(state, slot)
    _unlink(state.slots, slot)
