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
    FILLED: Final = 17  # of ``FullCache``: resident rows that are not loading
    CLOCK: Final = 18  # TinyLFU: since ``BASE`` rose


NUM_TALLIES: Final = len(Tally)


class CacheState(NamedTuple):
    """Arrays of LFU are None under another policy, whose kernels are compiled without their code; TinyLFU's are
    empty."""

    entries: Words  # uint64 [index_places(capacity)]: the index, see index.py
    slots: SlotRecords  # SLOT_DTYPE [capacity + 1]; the last is the root of the list
    bucket: Int32s | Any  # LFU, int32 [capacity]: a resident slot's bucket
    bucket_count: Int64s | Any  # LFU, int64 [capacity]: accesses of each row in the bucket
    bucket_tail: Int32s | Any  # LFU, int32 [capacity]: the bucket's last slot
    level_tail: Int32s
    """TinyLFU, int32 [LEVELS]: the last slot of the main part's rows of this level, the root if there is none."""
    sketch: Bytes  # TinyLFU, uint8 [sketch_width(capacity)]: see sketch.py
    tallies: Int64s  # int64 [NUM_TALLIES]: see Tally


_DTYPES: Final[dict[str, Any]] = {
    "entries": np.uint64, "slots": SLOT_DTYPE, "bucket": np.int32, "bucket_count": np.int64, "bucket_tail": np.int32,
    "level_tail": np.int32, "sketch": np.uint8, "tallies": np.int64,
}  # fmt: skip
_ALIGNED: Final = ("slots", "sketch")  # they begin at the start of a cache line


def _lengths(capacity: int, policy: str) -> dict[str, int]:
    """Of each array that the policy has a use for."""
    lengths = {"entries": index_places(capacity), "slots": capacity + 1, "tallies": NUM_TALLIES}
    if policy == "lfu":
        lengths |= dict.fromkeys(("bucket", "bucket_count", "bucket_tail"), capacity)
    if policy == "tinylfu":
        lengths |= {"level_tail": LEVELS, "sketch": sketch_width(capacity)}
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
    state.tallies[Tally.MAIN_LAST] = capacity
    state.entries[-1] = SECRET
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
