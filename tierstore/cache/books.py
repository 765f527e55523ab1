"""The state of a host-memory cache, as its kernels see it: what each slot holds, and the eviction order.

All policies keep the resident slots in one doubly linked list, next victim first. The list's ends are tied to a root:
the record at ``len(slots) - 1``, which belongs to no row.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bytes, Int32s, Int64s, Words
from ..kernels.hashing import SECRET
from ..kernels.jit import uncounted_inline as inline
from .index import SLOT_DTYPE, SlotRecords, index_places
from .sketch import BLOCK_BYTES, sketch_width

BUCKET_BYTES: Final = 4 + 8 + 4  # of LFU, per slot: the slot's bucket, and one bucket (there are never more than slots)
_ALIGNMENT_BYTES: Final = BLOCK_BYTES
LEVELS: Final = 256  # of TinyLFU: the list's main part has so many, and a counter of the sketch holds one


MAX_BATCHES: Final = 1024  # of lookahead: announced at a time, less one
USES_PER_ROW: Final = 6
"""Of lookahead: announced uses for each slot. On Criteo's lookups a third as many cost 2 points of hits, twice 1."""
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
    STAMP: Final = 7  # the newest admission's number
    USED_SLOTS: Final = 8  # slots from here on were never used
    FREE_SLOT: Final = 9  # first of the freed slots, linked by ``next``, plus 1; 0 for none
    USED_BUCKETS: Final = 10
    FREE_BUCKET: Final = 11  # first of the freed buckets, linked by ``bucket_tail``, plus 1; 0 for none
    FROZEN: Final = 12
    MAIN_LAST: Final = 13  # TinyLFU: the last slot before the window's, the root if there is none
    WINDOW_ROWS: Final = 14
    BASE: Final = 15  # TinyLFU: the level of a row with one access, now
    RATE: Final = 16  # by which each access advances the clock
    UNKNOWN_LAST: Final = 17  # Lookahead: the last slot of no known use, the root if there is none
    OLDEST_BATCH: Final = 18
    NEWEST_BATCH: Final = 19  # numbers of the announced batches, the newest below the oldest if there is none
    USES_START: Final = 20
    USES_END: Final = 21
    """Announced uses, counted since the cache was made; one lies at its number modulo their capacity."""
    FILLED: Final = 22  # of ``FullCache``: resident rows that are not loading
    CLOCK: Final = 23  # TinyLFU: since ``BASE`` rose


NUM_TALLIES: Final = len(Tally)


class CacheState(NamedTuple):
    """Arrays of LFU and of lookahead are None under another policy, whose kernels are compiled without their code;
    TinyLFU's are empty."""

    entries: Words  # uint64 [index_places(capacity)]: the index, see index.py
    slots: SlotRecords  # SLOT_DTYPE [capacity + 1]; the last is the root of the list
    bucket: Int32s | Any  # LFU, int32 [capacity]: a resident slot's bucket
    bucket_count: Int64s | Any  # LFU, int64 [capacity]: accesses of each row in the bucket
    bucket_tail: Int32s | Any  # LFU, int32 [capacity]: the bucket's last slot
    level_tail: Int32s
    """TinyLFU, int32 [LEVELS]: the last slot of the main part's rows of this level, the root if there is none.
    Lookahead, int32 [MAX_BATCHES]: the last slot of the rows that this batch uses next."""
    sketch: Bytes  # TinyLFU, uint8 [sketch_width(capacity)]: see sketch.py
    uses: SlotRecords | Any  # Lookahead, USE_DTYPE [USES_PER_ROW * capacity]: announced uses
    last_uses: Words | Any  # Lookahead, uint64: the index of announced keys; each leads to the key's newest use
    batches: SlotRecords | Any
    """Lookahead, BATCH_DTYPE [MAX_BATCHES]: announced batches, one at its number modulo MAX_BATCHES."""
    tallies: Int64s  # int64 [NUM_TALLIES]: see Tally


_DTYPES: Final[dict[str, Any]] = {
    "entries": np.uint64, "slots": SLOT_DTYPE, "bucket": np.int32, "bucket_count": np.int64, "bucket_tail": np.int32,
    "level_tail": np.int32, "sketch": np.uint8, "uses": USE_DTYPE, "last_uses": np.uint64, "batches": BATCH_DTYPE,
    "tallies": np.int64,
}  # fmt: skip
_ALIGNED: Final = ("slots", "sketch")  # they begin at the start of a cache line


def _lengths(capacity: int, policy: str) -> dict[str, int]:
    """Of each array that the policy has a use for."""
    lengths = {"entries": index_places(capacity), "slots": capacity + 1, "tallies": NUM_TALLIES}
    if policy == "lfu":
        lengths |= dict.fromkeys(("bucket", "bucket_count", "bucket_tail"), capacity)
    if policy == "tinylfu":
        lengths |= {"level_tail": LEVELS, "sketch": sketch_width(capacity)}
    if policy == "lookahead":
        num_uses = min(USES_PER_ROW * capacity, _USES_MAX)
        lengths |= {"level_tail": MAX_BATCHES, "batches": MAX_BATCHES}
        lengths |= {"uses": num_uses, "last_uses": index_places(num_uses)}
    return lengths


def _size_bytes(name: str, length: int) -> int:
    return length * int(np.dtype(_DTYPES[name]).itemsize) + (_ALIGNMENT_BYTES if name in _ALIGNED else 0)


def state_bytes_of(capacity: int, policy: str) -> int:
    """Bytes that ``new_state`` allocates."""
    return sum(_size_bytes(name, length) for name, length in _lengths(capacity, policy).items())


def _zeros(name: str, length: int) -> Any:
    """Untouched."""
    raw = np.zeros(_size_bytes(name, length) if length else 0, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES if name in _ALIGNED and length else 0
    return raw[start : start + length * np.dtype(_DTYPES[name]).itemsize].view(_DTYPES[name])


def new_state(capacity: int, policy: str) -> CacheState:
    """The state of an empty cache. Zeros mean empty nearly everywhere, so fresh pages from the system need no
    writing."""
    lengths = {"level_tail": 0, "sketch": 0} | _lengths(capacity, policy)
    arrays: dict[str, Any] = {name: _zeros(name, lengths[name]) if name in lengths else None for name in _DTYPES}
    state = CacheState(**arrays)
    state.slots[capacity]["previous"] = state.slots[capacity]["next"] = capacity
    state.level_tail[:] = capacity
    state.tallies[[Tally.MAIN_LAST, Tally.UNKNOWN_LAST]] = capacity
    state.tallies[Tally.OLDEST_BATCH] = 1
    for index in (state.entries, state.last_uses):
        if index is not None:
            index[-1] = SECRET
    return state


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
