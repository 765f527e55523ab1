"""The state of a host-memory cache, as its kernels see it: what each slot holds, and the eviction order.

All policies keep the resident slots in one doubly linked list, next victim first. The list's ends are tied to a root:
the record at ``len(slots) - 1``, which belongs to no row.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bytes, Int32s, Int64s, Words
from ..kernels.jit import uncounted_inline as inline
from .index import SLOT_DTYPE, SlotRecords, index_places
from .sketch import BLOCK_BYTES, sketch_width

BUCKET_BYTES: Final = 4 + 8 + 4
"""Of LFU, per slot: the slot's bucket, and one bucket (there are never more than slots)."""
_ALIGNMENT_BYTES: Final = BLOCK_BYTES
MAX_FREQUENCY: Final = 63
"""Of TinyLFU: accesses of a row are counted up to this, and each count is a level of the list."""


MAX_BATCHES: Final = 1024
"""Of lookahead: announced at a time, less one."""
USES_PER_ROW: Final = 6
"""Of lookahead: announced uses there is room for, for each slot. Of memory for rows of 64 float32, this share hits most
on Criteo's lookups; a third as many costs 2 points, twice as many 1."""
_USES_MAX: Final = 2**31 - 2
USE_DTYPE: Final = np.dtype([("key", np.int64), ("next", np.int32), ("batch", np.int32)])
"""``next`` is the key's next announced use, of the newest the oldest; ``batch`` its batch's place."""
BATCH_DTYPE: Final = np.dtype([("start", np.int64), ("count", np.int32), ("is_open", np.int32)])
"""Number of the batch's first use, how many it has, and whether it is still to come."""


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
    MAIN_LAST: Final = 13
    """TinyLFU: the last slot before the window's, the root if there is none."""
    WINDOW_ROWS: Final = 14
    WINDOW_LIMIT: Final = 15
    """Rows the window keeps."""
    UNHALVED: Final = 16
    """Accesses since counts were halved."""
    UNKNOWN_LAST: Final = 17
    """Lookahead: the last slot of no known use, the root if there is none."""
    OLDEST_BATCH: Final = 18
    NEWEST_BATCH: Final = 19
    """Numbers of the announced batches, the newest below the oldest if there is none."""
    USES_START: Final = 20
    USES_END: Final = 21
    """Announced uses, counted since the cache was made; one lies at its number modulo their capacity."""


NUM_TALLIES: Final = len(Tally)


class CacheState(NamedTuple):
    """A policy that has no use for an array has it empty; its kernels tell policies by that."""

    entries: Words
    """uint64 [index_places(capacity)]: the index, see index.py."""
    slots: SlotRecords
    """SLOT_DTYPE [capacity + 1]; the last is the root of the list."""
    bucket: Int32s
    """LFU, int32 [capacity]: a resident slot's bucket."""
    bucket_count: Int64s
    """LFU, int64 [capacity]: accesses of each row in the bucket."""
    bucket_tail: Int32s
    """LFU, int32 [capacity]: the bucket's last slot."""
    level_tail: Int32s
    """TinyLFU, int32 [MAX_FREQUENCY + 1]: the last slot of the rows accessed so often, the root if there is none.
    Lookahead, int32 [MAX_BATCHES]: the last slot of the rows that this batch uses next."""
    sketch: Bytes
    """TinyLFU, uint8 [sketch_width(capacity)]: see sketch.py."""
    uses: SlotRecords
    """Lookahead, USE_DTYPE [USES_PER_ROW * capacity]: announced uses."""
    last_uses: Words
    """Lookahead, uint64: the index of announced keys; each leads to the key's newest use."""
    batches: SlotRecords
    """Lookahead, BATCH_DTYPE [MAX_BATCHES]: announced batches, one at its number modulo MAX_BATCHES."""
    tallies: Int64s
    """int64 [NUM_TALLIES]: see Tally."""


def _aligned_zeros(size_bytes: int) -> Bytes:
    """uint8 [size_bytes] from the start of a cache line, untouched."""
    raw = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def _num_uses(capacity: int) -> int:
    return min(USES_PER_ROW * capacity, _USES_MAX)


def state_bytes_of(capacity: int, policy: str) -> int:
    """Bytes that ``new_state`` allocates."""
    size = index_places(capacity) * 8 + (capacity + 1) * SLOT_DTYPE.itemsize + _ALIGNMENT_BYTES + NUM_TALLIES * 8
    if policy == "lfu":
        size += capacity * BUCKET_BYTES
    if policy == "tinylfu":
        size += (MAX_FREQUENCY + 1) * 4 + sketch_width(capacity) + _ALIGNMENT_BYTES
    if policy == "lookahead":
        num_uses = _num_uses(capacity)
        size += num_uses * USE_DTYPE.itemsize + index_places(num_uses) * 8
        size += MAX_BATCHES * (BATCH_DTYPE.itemsize + 4)
    return size


def new_state(capacity: int, policy: str) -> CacheState:
    """The state of an empty cache. Zeros mean empty nearly everywhere, so fresh pages from the system need no
    writing."""
    slots = _aligned_zeros((capacity + 1) * SLOT_DTYPE.itemsize).view(SLOT_DTYPE)
    slots[capacity]["previous"] = slots[capacity]["next"] = capacity
    num_buckets = capacity if policy == "lfu" else 0
    is_tiny = policy == "tinylfu"
    num_levels = {"tinylfu": MAX_FREQUENCY + 1, "lookahead": MAX_BATCHES}.get(policy, 0)
    num_uses = _num_uses(capacity) if policy == "lookahead" else 0
    tallies = np.zeros(NUM_TALLIES, np.int64)
    tallies[Tally.MAIN_LAST] = tallies[Tally.UNKNOWN_LAST] = capacity
    tallies[Tally.OLDEST_BATCH] = 1
    return CacheState(
        entries=np.zeros(index_places(capacity), np.uint64),
        slots=slots,
        bucket=np.zeros(num_buckets, np.int32),
        bucket_count=np.zeros(num_buckets, np.int64),
        bucket_tail=np.zeros(num_buckets, np.int32),
        level_tail=np.full(num_levels, capacity, np.int32),
        sketch=_aligned_zeros(sketch_width(capacity)) if is_tiny else np.zeros(0, np.uint8),
        uses=np.zeros(num_uses, USE_DTYPE),
        last_uses=np.zeros(index_places(num_uses) if num_uses else 0, np.uint64),
        batches=np.zeros(MAX_BATCHES if num_uses else 0, BATCH_DTYPE),
        tallies=tallies,
    )


@inline
def unlink(slots: SlotRecords, slot: Any) -> None:
    before = slots[slot]["previous"]
    after = slots[slot]["next"]
    slots[before]["next"] = after
    slots[after]["previous"] = before


@inline
def link_after(slots: SlotRecords, slot: Any, before: Any) -> None:
    after = slots[before]["next"]
    slots[slot]["previous"] = before
    slots[slot]["next"] = after
    slots[before]["next"] = slot
    slots[after]["previous"] = slot
