"""The state of a host-memory cache, as its kernels see it: what each slot holds, and the eviction order.

All policies keep the resident slots in one doubly linked list, next victim first. The list's ends are tied to a root:
the record at ``len(slots) - 1``, which belongs to no row.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels import hash_table
from ..kernels.arrays import Bytes, Int32s, Int64s, Words
from ..kernels.hashing import SECRET
from ..kernels.jit import uncounted_inline as inline

SlotRecords = NDArray[Any]

SLOT_DTYPE: Final = np.dtype(
    [
        ("key", np.int64), ("previous", np.int32), ("next", np.int32), ("stamp", np.int32), ("number", np.int32),
        ("pins", np.int32), ("flags", np.int16), ("rank", np.int16),
    ]
)  # fmt: skip
"""All a hit needs to know of a slot, in half a cache line. ``previous``, ``next`` and ``rank`` are the policy's;
``stamp`` and ``number`` are the admission that last resolved the slot and the row's unique number in it."""

BUCKET_BYTES: Final = 4 + 8 + 4  # of LFU, per slot: the slot's bucket, and one bucket (there are never more than slots)
ALIGNMENT_BYTES: Final = 64  # a cache line, and a block of the sketch
_COUNTERS_PER_ROW: Final = 16  # of the sketch: half as many cost 0.2 to 0.35 points of hit rate on Criteo's lookups
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
    FILLED: Final = 17  # resident rows that are not loading
    CLOCK: Final = 18  # TinyLFU: since ``BASE`` rose
    SECRET: Final = 19  # of ``kernels.hashing``, by which the index places keys
    SLOT_BITS: Final = 20  # of an entry of the index, that have the slot


NUM_TALLIES: Final = len(Tally)


class CacheState(NamedTuple):
    """Arrays of LFU are None under another policy, whose kernels are compiled without their code; TinyLFU's are
    empty."""

    entries: hash_table.Uint32s  # uint32 [num_places(capacity)]: the index, see kernels/hash_table.py
    slots: SlotRecords  # SLOT_DTYPE [capacity + 1]; the last is the root of the list
    bucket: Int32s | Any  # LFU, int32 [capacity]: a resident slot's bucket
    bucket_count: Int64s | Any  # LFU, int64 [capacity]: accesses of each row in the bucket
    bucket_tail: Int32s | Any  # LFU, int32 [capacity]: the bucket's last slot
    level_tail: Int32s
    """TinyLFU, int32 [LEVELS]: the last slot of the main part's rows of this level, the root if there is none."""
    sketch: Bytes  # TinyLFU, uint8 [sketch_width(capacity)]: see tinylfu.py
    tallies: Int64s  # int64 [NUM_TALLIES]: see Tally


_ALIGNED: Final = {"slots", "sketch"}


def sketch_width(capacity: int) -> int:
    """Bytes, of a byte each, of the sketch of a cache of ``capacity`` slots: whole blocks."""
    return -(-_COUNTERS_PER_ROW * capacity // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _layout(capacity: int, policy: str) -> dict[str, Any]:
    """Of each array that the policy has a use for: its type and length."""
    layout: dict[str, Any] = {
        "entries": (np.uint32, hash_table.num_places(capacity)), "slots": (SLOT_DTYPE, capacity + 1),
        "tallies": (np.int64, NUM_TALLIES),
    }  # fmt: skip
    if policy == "lfu":
        layout |= {"bucket": (np.int32, capacity), "bucket_count": (np.int64, capacity)}
        layout["bucket_tail"] = np.int32, capacity
    if policy == "tinylfu":
        layout |= {"level_tail": (np.int32, LEVELS), "sketch": (np.uint8, sketch_width(capacity))}
    return layout


def _aligned(make: Any, dtype: Any, length: int) -> Any:
    """An array that starts at the start of a cache line; ``make`` is ``np.zeros`` or ``np.empty``."""
    size = length * np.dtype(dtype).itemsize
    raw = make(size + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype)


def arena_bytes(capacity: int, words: int) -> int:
    """Bytes allocated for rows of so many words."""
    return capacity * words * 8 + ALIGNMENT_BYTES if words else 0


def new_arena(capacity: int, words: int) -> Words:
    """uint64 [capacity, words], untouched."""
    arena = _aligned(np.empty, np.uint64, capacity * words) if words else np.empty(0, np.uint64)
    rows: Words = arena.reshape(capacity, words)
    return rows


def state_bytes_of(capacity: int, policy: str) -> int:
    """Bytes that ``new_state`` allocates."""
    arrays = _layout(capacity, policy)
    sizes: list[int] = [length * np.dtype(dtype).itemsize for dtype, length in arrays.values()]
    return sum(sizes) + ALIGNMENT_BYTES * len(arrays.keys() & _ALIGNED)


def new_state(capacity: int, policy: str) -> CacheState:
    """The state of an empty cache. Zeros mean empty nearly everywhere, so fresh pages from the system need no
    writing."""
    arrays: dict[str, Any] = dict.fromkeys(CacheState._fields) | {
        "level_tail": np.empty(0, np.int32), "sketch": np.empty(0, np.uint8)
    }  # fmt: skip
    for name, (dtype, length) in _layout(capacity, policy).items():
        arrays[name] = _aligned(np.zeros, dtype, length) if name in _ALIGNED else np.zeros(length, dtype)
    state = CacheState(**arrays)
    state.slots[capacity]["previous"] = state.slots[capacity]["next"] = capacity
    state.level_tail[:] = capacity
    state.tallies[Tally.MAIN_LAST] = capacity
    state.tallies[Tally.SECRET], state.tallies[Tally.SLOT_BITS] = SECRET, capacity.bit_length()
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


@inline
def place_in(order: Int32s, number: Any) -> Any:
    """uint64: the position that comes ``number``-th in an order, of which an empty one is that of positions."""
    return np.uint64(order[number]) if order.size else np.uint64(number)
