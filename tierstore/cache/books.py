"""The bookkeeping of a cache in host memory, as its kernels see it: which slot holds what, in the order of eviction.

All policies keep the resident slots in one doubly linked list, next victim first. The list's ends are tied to a root:
the record at ``len(slots) - 1``, which belongs to no row.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import uncounted_inline as inline
from .base import Int32s, Int64s, Words
from .index import SLOT_DTYPE, SlotRecords, index_places
from .sketch import BLOCK_BYTES, sketch_width

__all__ = [
    "BUCKET_BYTES",
    "MAX_FREQUENCY",
    "NUM_TALLIES",
    "CacheState",
    "Tally",
    "link_after",
    "new_state",
    "state_bytes_of",
    "unlink",
]

BUCKET_BYTES: Final = 4 + 8 + 4
"""Of LFU, per slot: the slot's bucket, and one bucket (there are never more than slots)."""
_ALIGNMENT_BYTES: Final = BLOCK_BYTES
MAX_FREQUENCY: Final = 63
"""Of TinyLFU: accesses of a row are counted up to this, and each count is a level of the list."""


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
    """TinyLFU, int32 [MAX_FREQUENCY + 1]: the last slot of the rows accessed so often, the root if there is none."""
    sketch: NDArray[np.uint8]
    """TinyLFU, uint8 [sketch_width(capacity)]: see sketch.py."""
    tallies: Int64s
    """int64 [NUM_TALLIES]: see Tally."""


def _aligned_zeros(size_bytes: int) -> NDArray[np.uint8]:
    """uint8 [size_bytes] from the start of a cache line, untouched."""
    raw = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def state_bytes_of(capacity: int, policy: str) -> int:
    """Bytes that ``new_state`` allocates."""
    size = index_places(capacity) * 8 + (capacity + 1) * SLOT_DTYPE.itemsize + _ALIGNMENT_BYTES + NUM_TALLIES * 8
    if policy == "lfu":
        size += capacity * BUCKET_BYTES
    if policy == "tinylfu":
        size += (MAX_FREQUENCY + 1) * 4 + sketch_width(capacity) + _ALIGNMENT_BYTES
    return size


def new_state(capacity: int, policy: str) -> CacheState:
    """An empty cache's books. Zeros mean empty nearly everywhere, so fresh pages from the system need no writing."""
    slots = _aligned_zeros((capacity + 1) * SLOT_DTYPE.itemsize).view(SLOT_DTYPE)
    slots[capacity]["previous"] = slots[capacity]["next"] = capacity
    num_buckets = capacity if policy == "lfu" else 0
    is_tiny = policy == "tinylfu"
    tallies = np.zeros(NUM_TALLIES, np.int64)
    tallies[Tally.MAIN_LAST] = capacity
    return CacheState(
        entries=np.zeros(index_places(capacity), np.uint64),
        slots=slots,
        bucket=np.zeros(num_buckets, np.int32),
        bucket_count=np.zeros(num_buckets, np.int64),
        bucket_tail=np.zeros(num_buckets, np.int32),
        level_tail=np.full(MAX_FREQUENCY + 1 if is_tiny else 0, capacity, np.int32),
        sketch=_aligned_zeros(sketch_width(capacity)) if is_tiny else np.zeros(0, np.uint8),
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
