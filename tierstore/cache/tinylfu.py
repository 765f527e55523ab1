"""TinyLFU as an eviction order: rows by a count that fades, behind them a window of the newest; O(1) a step.

A row's *level* is the logarithm of its accesses, each worth half as much as one a half-life later: ``HALVING`` levels
are a factor of two. All counts fade alike, so a level stays as it is until the row's next access; what moves is
``Tally.BASE``, the level of a row that is accessed once now. Each access advances a clock by ``Tally.RATE``. At the
slowest rate the order is LFU with a long memory, at the fastest nearly LRU; half_life.py chooses between.

A missed row is always admitted. It enters the *window*, the end of the list, in order of use. A row that leaves the
window enters the *main* part ``_NEWCOMER`` below its level, and before the rows there, until it is accessed again. So a
new row replaces a row only if it was accessed more often, and a loop over more rows than slots keeps hitting some of
them. A row accessed in main goes behind the rows of its new level. Levels outlive residence in a sketch (sketch.py).

The oldest rows leave the window together, once it is over its limit by a ``MOVED_SHARE`` of the slots; if dirty, they
are then also written together. A pinned row, and those behind it, stay in the window: in main the rows of in-flight
batches would head the list, and each search for a victim would walk past them.

Sources: G. Einziger, R. Friedman and B. Manes, TinyLFU: a highly efficient cache admission policy (ACM TOS 2017),
W-TinyLFU; the place in one list replaces its comparison of candidate and victim. D. Lee et al., LRFU: a spectrum of
policies that subsumes the least recently used and least frequently used policies (IEEE TC 2001): counts that fade.
"""

from math import log2
from typing import Any, Final

import numpy as np

from ..kernels.jit import uncounted_inline as inline
from .cache_state import LEVELS, CacheState, Tally, link_after, unlink
from .sketch import sketch_level, sketch_lower, sketch_raise

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
def tinylfu_touch(state: CacheState, slot: Any) -> None:
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
def tinylfu_insert(state: CacheState, slot: Any) -> None:
    """Enter a new row's slot, with its first access and those before it left."""
    state.tallies[Tally.WINDOW_ROWS] += 1
    _enter_window(state, slot, _raised(state, sketch_level(state.sketch, state.slots[slot]["key"])))


@inline
def tinylfu_remove(state: CacheState, slot: Any) -> None:
    """Forget a resident slot, and let its level go on in the sketch."""
    slots = state.slots
    rank = np.int64(slots[slot]["rank"])
    sketch_raise(state.sketch, slots[slot]["key"], _level(rank))
    if rank & IN_WINDOW:
        state.tallies[Tally.WINDOW_ROWS] -= 1
        unlink(slots, slot)
    else:
        _leave_main(state, slot)


@inline
def _lower(state: CacheState, amount: Any) -> None:
    """Lower the base and all levels, down to 0 at most. They keep their order, so no slot moves."""
    slots, tails = state.slots, state.level_tail
    root = slots.size - 1
    state.tallies[Tally.BASE] -= amount
    sketch_lower(state.sketch, min(amount, LEVELS - 1))
    for slot in range(state.tallies[Tally.USED_SLOTS]):
        rank = np.int64(slots[slot]["rank"])
        slots[slot]["rank"] = rank - min(rank & (LEVELS - 1), amount)
    for level in range(LEVELS):
        tail = tails[level]
        tails[level] = root
        if tail != root:
            tails[max(level - amount, 0)] = tail


@inline
def tinylfu_file(state: CacheState, num_accesses: Any) -> None:
    """Before so many accesses: if enough rows are beyond the window's limit, move them into main, oldest first, up to a
    pinned one."""
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
def tinylfu_settle(state: CacheState, num_accesses: Any) -> None:
    """After so many accesses: advance the clock."""
    tallies = state.tallies
    clock = tallies[Tally.CLOCK] + num_accesses * tallies[Tally.RATE]
    period = _TICKS_PER_LEVEL * (state.slots.size - 1)
    if clock >= period:
        tallies[Tally.BASE] += clock // period
        clock %= period
        if tallies[Tally.BASE] + _HIGHEST >= LEVELS:
            _lower(state, tallies[Tally.BASE] - _LOWERED_BASE)
    tallies[Tally.CLOCK] = clock
