"""TinyLFU as an eviction order: rows by a count that fades, behind them a window of the newest; O(1) a step.

A row's *level* is the logarithm of its accesses, each worth half as much as one a half-life later: ``HALVING`` levels
are a factor of two. All counts fade alike, so a level stays as it is until the row's next access; what moves is
``Tally.BASE``, the level of a row that is accessed once now. Each access advances a clock by ``Tally.RATE``. At the
slowest rate the order is LFU with a long memory, at the fastest nearly LRU.

A missed row is always admitted. It enters the *window*, the end of the list, in order of use. A row that leaves the
window enters the *main* part ``_NEWCOMER`` below its level, and before the rows there, until it is accessed again. So a
new row replaces a row only if it was accessed more often, and a loop over more rows than slots keeps hitting some of
them. A row accessed in main goes behind the rows of its new level.

The oldest rows leave the window together, once it is over its limit by a ``MOVED_SHARE`` of the slots; if dirty, they
are then also written together. A pinned row, and those behind it, stay in the window: in main the rows of in-flight
batches would head the list, and each search for a victim would walk past them.

Levels outlive residence in a *sketch*, a count-min sketch of bytes. An evicted row leaves its level there, and goes on
from it when it returns. A counter is raised to a given level, never added to (conservative update). So a row finds at
least the level that it left, and more only if other rows raised both its counters.

The *rate* follows small caches, which replay a sample of the accesses, each at its own speed. The sample is by key, in
proportion to the small caches' size over the real one's. So each has about the hit rate that the real cache would have
at its speed. The real cache takes the mean speed, weighted by recent hits: a lead of 4 hits doubles a weight. Leads
have bounds, wider for slower speeds: where phases alternate, being slow at the wrong time costs most.

Sources: G. Einziger, R. Friedman and B. Manes, TinyLFU: a highly efficient cache admission policy (ACM TOS 2017),
W-TinyLFU; the place in one list replaces its comparison of candidate and victim. D. Lee et al., LRFU: a spectrum of
policies that subsumes the least recently used and least frequently used policies (IEEE TC 2001): counts that fade.
G. Cormode and S. Muthukrishnan, An improved data stream summary: the count-min sketch and its applications (2005).
C. Estan and G. Varghese, New directions in traffic measurement and accounting (2002). C. Waldspurger, T. Saemundson,
I. Ahmad and N. Park, Cache modeling and optimization using miniature simulations (USENIX ATC 2017). N. Littlestone and
M. Warmuth, The weighted majority algorithm (1994), for the mean.
"""

from math import log2
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bytes, Int64s
from ..kernels.hashing import GOLDEN, mixed
from ..kernels.jit import uncounted_inline as inline
from .cache_state import ALIGNMENT_BYTES, LEVELS, CacheState, Tally, link_after, new_state, state_bytes_of, unlink

IN_WINDOW: Final = LEVELS  # bit of a slot record's ``rank``; the bits below are the row's level, or its place in main
IS_NEW: Final = 2 * LEVELS  # bit of a row that came to main from the window, and was not accessed since
HALVING: Final = 4  # levels that are a factor of two
_TICKS_PER_LEVEL: Final = 768  # of the clock, for each slot
_NEWCOMER: Final = 2
_HIGHEST: Final = 8 * HALVING  # above the base
_LOWEST: Final = -10 * HALVING  # what lies deeper counts as nothing
_LOWERED_BASE: Final = 96
_RAISED: Final = np.array(
    [
        min(max(round(HALVING * log2(1 + 2 ** (level / HALVING))), level + 1), _HIGHEST)
        for level in range(_LOWEST, _HIGHEST + 1)
    ]
)
"""The level after one more access, by the level before, from the base on. It rises each time: too much from 8 on."""
_WINDOW_SHARE: Final = 100
MOVED_SHARE: Final = 32
MOVED_MAX: Final = 4096
_FILED_PER_ACCESS: Final = 4
"""Rows that leave the window for each access at most, besides those; it is further over where rows were pinned."""

_BLOCK: Final = np.uint64(ALIGNMENT_BYTES)
_HALF_BLOCK: Final = np.uint64(ALIGNMENT_BYTES // 2)
_IN_HALF: Final = np.uint64(ALIGNMENT_BYTES // 2 - 1)
_HALF: Final = np.uint64(32)
_FIVE: Final = np.uint64(5)

_SAMPLED_ROWS: Final = 128
"""Slots of each small cache; those of the real one if it has fewer. Half as many cost 0.1 points on changing accesses;
twice as many gain less, for twice the time."""
_RATES: Final = np.array([64, 91, 128, 181, 256, 362, 512, 724, 1024, 2266, 5016, 11101, 24576])
"""``Tally.RATE``, from a half-life of 48 accesses a slot to one of an eighth."""
_STEPS: Final = 4  # each fourth is a small cache's: half-lives of 48, 12, 3 and 1/8 accesses a slot
_SLOTS_PER_ACCESS: Final = 4  # in a round
NUM_SPEEDS: Final = len(_RATES[::_STEPS])
HIT: Final = 256  # what a hit counts; scores lose a 64th in each round
KEPT: Final = 64
_DOUBLING: Final = 4  # hits by which a lead doubles the weight
_LEAD: Final = 24  # hits by which the fastest is behind at most; each slower one by as many more
_WEIGHT: Final = 2**40


@inline
def _counters(sketch: Bytes, key: Any) -> Any:
    """Where the key's two counters are in the sketch: in the halves of one block, a cache line, which costs under 0.03
    points of hit rate. The block follows from the mixed key's upper half."""
    bits = mixed(key)
    block = ((bits >> _HALF) * (np.uint64(sketch.size) // _BLOCK) >> _HALF) * _BLOCK
    return block + (bits & _IN_HALF), block + _HALF_BLOCK + ((bits >> _FIVE) & _IN_HALF)


@inline
def _raised(state: CacheState, level: Any) -> Any:
    base = state.tallies[Tally.BASE]
    return base + _RAISED[max(level - base, _LOWEST) - _LOWEST]


@inline
def _level(rank: Any) -> Any:
    """A row's level, whose rank says where it lies."""
    return (rank & (LEVELS - 1)) + (_NEWCOMER if rank & IS_NEW else 0)


@inline
def _file(state: CacheState, slot: Any, place: Any, is_new: Any) -> None:
    """Enter a slot into main: first of its place if it is new there, else last."""
    slots, tails, tallies = state.slots, state.level_tail, state.tallies
    root = np.int64(slots.size - 1)
    below = place - 1 if is_new else place
    while below >= 0 and tails[below] == root:
        below -= 1
    before = np.int64(tails[below]) if below >= 0 else root
    link_after(slots, slot, before)
    if not is_new or tails[place] == root:
        tails[place] = slot
    slots[slot]["rank"] = IS_NEW | place if is_new else place
    if tallies[Tally.MAIN_LAST] == before:
        tallies[Tally.MAIN_LAST] = slot


@inline
def _leave_main(state: CacheState, slot: Any) -> None:
    slots, tails = state.slots, state.level_tail
    root = slots.size - 1
    place = slots[slot]["rank"] & (LEVELS - 1)
    before = slots[slot]["previous"]
    if tails[place] == slot:
        tails[place] = before if before != root and slots[before]["rank"] & (LEVELS - 1) == place else root
    if state.tallies[Tally.MAIN_LAST] == slot:
        state.tallies[Tally.MAIN_LAST] = before
    unlink(slots, slot)


@inline
def _enter_window(state: CacheState, slot: Any, level: Any) -> None:
    slots = state.slots
    link_after(slots, slot, slots[slots.size - 1]["previous"])
    slots[slot]["rank"] = IN_WINDOW | level


@inline
def touch(state: CacheState, slot: Any) -> None:
    """Count one access of a resident slot."""
    slots = state.slots
    rank = np.int64(slots[slot]["rank"])
    level = _raised(state, _level(rank))
    if rank & IN_WINDOW:
        unlink(slots, slot)
        _enter_window(state, slot, level)
    else:
        _leave_main(state, slot)
        _file(state, slot, level, False)


@inline
def insert(state: CacheState, slot: Any) -> None:
    """Enter a new row's slot, with its first access and those before it left."""
    sketch = state.sketch
    one, other = _counters(sketch, state.slots[slot]["key"])
    state.tallies[Tally.WINDOW_ROWS] += 1
    _enter_window(state, slot, _raised(state, min(np.int64(sketch[one]), np.int64(sketch[other]))))


@inline
def remove(state: CacheState, slot: Any) -> None:
    """Forget a resident slot, and let its level go on in the sketch."""
    slots, sketch = state.slots, state.sketch
    rank = np.int64(slots[slot]["rank"])
    level = _level(rank)
    for counter in _counters(sketch, slots[slot]["key"]):
        if sketch[counter] < level:
            sketch[counter] = level
    if rank & IN_WINDOW:
        state.tallies[Tally.WINDOW_ROWS] -= 1
        unlink(slots, slot)
    else:
        _leave_main(state, slot)


@inline
def _lower(state: CacheState, amount: Any) -> None:
    """Lower the base and all levels, down to 0 at most. They keep their order, so no slot moves."""
    slots, tails, sketch = state.slots, state.level_tail, state.sketch
    root, lowered = slots.size - 1, np.uint8(min(amount, LEVELS - 1))
    state.tallies[Tally.BASE] -= amount
    for place in range(sketch.size):
        sketch[place] -= min(sketch[place], lowered)
    for slot in range(state.tallies[Tally.USED_SLOTS]):
        rank = np.int64(slots[slot]["rank"])
        slots[slot]["rank"] = rank - min(rank & (LEVELS - 1), amount)
    for level in range(LEVELS):
        tail = tails[level]
        tails[level] = root
        if tail != root:
            tails[max(level - amount, 0)] = tail


@inline
def policy_begin(state: CacheState, num_accesses: Any) -> None:
    """Before a call that counts so many accesses, of any policy: if enough rows are beyond the window's limit, move
    them into main, oldest first, up to a pinned one."""
    if not state.sketch.size:
        return
    slots, tallies = state.slots, state.tallies
    capacity = slots.size - 1
    limit, moved = max(capacity // _WINDOW_SHARE, 1), min(capacity // MOVED_SHARE, MOVED_MAX)
    left = moved + _FILED_PER_ACCESS * num_accesses if tallies[Tally.WINDOW_ROWS] > limit + moved else 0
    while left > 0 and tallies[Tally.WINDOW_ROWS] > limit:
        oldest = np.int64(slots[tallies[Tally.MAIN_LAST]]["next"])
        if slots[oldest]["pins"] > 0:
            break
        unlink(slots, oldest)
        tallies[Tally.WINDOW_ROWS] -= 1
        _file(state, oldest, max((np.int64(slots[oldest]["rank"]) & (LEVELS - 1)) - _NEWCOMER, 0), True)
        left -= 1


@inline
def policy_settle(state: CacheState, num_accesses: Any) -> None:
    """End a call that counted so many accesses, of any policy: advance the clock."""
    if not state.sketch.size:
        return
    tallies = state.tallies
    clock = tallies[Tally.CLOCK] + num_accesses * tallies[Tally.RATE]
    period = _TICKS_PER_LEVEL * (state.slots.size - 1)
    if clock >= period:
        tallies[Tally.BASE] += clock // period
        clock %= period
        if tallies[Tally.BASE] + _HIGHEST >= LEVELS:
            _lower(state, tallies[Tally.BASE] - _LOWERED_BASE)
    tallies[Tally.CLOCK] = clock


class HalfLife(NamedTuple):
    small: tuple[CacheState, ...]  # [NUM_SPEEDS]
    waiting: Int64s  # int64 [1 + accesses of a round]: how many sampled keys the small caches have not seen, and these
    scores: Int64s  # int64 [NUM_SPEEDS]: recent hits


def half_life_bytes_of(capacity: int) -> int:
    """Bytes of a TinyLFU cache's small ones."""
    return NUM_SPEEDS * state_bytes_of(min(capacity, _SAMPLED_ROWS), "tinylfu")


def new_half_life(state: CacheState) -> HalfLife:
    """Sets the rate of ``state``, the slowest at first; of another policy than TinyLFU it is never used."""
    if not state.sketch.size:
        return HalfLife((state,) * NUM_SPEEDS, state.tallies, state.tallies)
    rows = min(len(state.slots) - 1, _SAMPLED_ROWS)
    small = tuple(new_state(rows, "tinylfu") for _ in range(NUM_SPEEDS))
    for each, rate in zip((state, *small), (_RATES[0], *_RATES[::_STEPS]), strict=True):
        each.tallies[Tally.RATE] = rate
    return HalfLife(small, np.zeros(1 + max(1, rows // _SLOTS_PER_ACCESS), np.int64), np.zeros(NUM_SPEEDS, np.int64))


@inline
def sample_key(waiting: Int64s, capacity: Any, key: Any) -> Any:
    """Let the key wait if it is in the sample; returns whether it completes a round.

    The sample's hash differs from the one that the small caches place keys by."""
    salted = (mixed(key) * GOLDEN) >> _HALF
    if (salted * np.uint64(capacity)) >> _HALF >= np.uint64(_SAMPLED_ROWS):
        return False
    waiting[0] += 1
    waiting[waiting[0]] = key
    return waiting[0] == waiting.size - 1


@inline
def choose_rate(scores: Int64s) -> Any:
    """The real cache's ``Tally.RATE``."""
    best, total, moment = np.int64(0), 0, 0
    for score in scores:
        best = max(best, score)
    for speed in range(NUM_SPEEDS):
        scores[speed] = max(scores[speed], best - HIT * _LEAD * (NUM_SPEEDS - speed))
        weight = _WEIGHT >> ((best - scores[speed]) // (HIT * _DOUBLING))
        total += weight
        moment += weight * speed
    # Nothing was hit by any: a loop, of which the slowest keeps a part.
    return _RATES[(2 * _STEPS * moment + total) // (2 * total) if best > 0 else 0]
