"""TinyLFU as an eviction order: rows by access count, behind them a window of the newest.

A step is O(1).

A missed row is about to be used, so it is always admitted. It enters the *window*, the end of the list, in order of
use. A row that leaves a full window enters the *main* part by its access count: before rows of equal count, behind
those of lower count. So a new row replaces a row only if it was accessed more often, and a loop over more rows than
slots keeps hitting some of them. A row accessed in main moves up one level, behind the rows there; into the window only
if that has room. Counts outlive residence in a sketch (sketch.py), and
all counts are halved every ``HALVING_PERIOD`` accesses a slot, which leaves the list as it is.

A pinned row, and those behind it, stay in a full window until an admission begins after they are unpinned. Moved to
main before, the rows of in-flight batches would head the list, and each search for a victim would walk past them.

With a window of one hundredth of the slots this is LFU with nearly perfect counts; with a window of all slots it is
exact LRU. dueling.py chooses.

Sources: G. Einziger, R. Friedman and B. Manes, TinyLFU: a highly efficient cache admission policy (ACM TOS 2017),
W-TinyLFU; the place in one list replaces its comparison of candidate and victim.
"""

from typing import Any, Final

import numpy as np

from ..kernels.jit import uncounted_inline as inline
from .books import MAX_FREQUENCY, CacheState, Tally, link_after, unlink
from .sketch import sketch_count, sketch_halve, sketch_raise

IN_WINDOW: Final = MAX_FREQUENCY + 1  # bit of a slot record's ``rank``; the bits below are the count
HALVING_PERIOD: Final = 50
"""Accesses, for each slot, between two halvings. A fifth costs 2 points of hit rate on Criteo's lookups, twice as many
gain 0.1 to 0.2 and follow slow drift less well."""
_FILED_PER_ACCESS: Final = 4
"""Rows that leave the window for each access at most: a window that shrinks does so without a pause."""


@inline
def _file(state: CacheState, slot: Any, level: Any, is_new: Any) -> None:
    """Enter a slot into main: first of its level if it is new there, else last."""
    slots, tails, tallies = state.slots, state.level_tail, state.tallies
    root = np.int64(slots.size - 1)
    below = level - 1 if is_new else level
    while below >= 0 and tails[below] == root:
        below -= 1
    before = np.int64(tails[below]) if below >= 0 else root
    link_after(slots, slot, before)
    if not is_new or tails[level] == root:
        tails[level] = slot
    slots[slot]["rank"] = level
    if tallies[Tally.MAIN_LAST] == before:
        tallies[Tally.MAIN_LAST] = slot


@inline
def _leave_main(state: CacheState, slot: Any) -> None:
    slots, tails = state.slots, state.level_tail
    root = slots.size - 1
    level = slots[slot]["rank"]
    before = slots[slot]["previous"]
    if tails[level] == slot:
        tails[level] = before if before != root and slots[before]["rank"] == level else root
    if state.tallies[Tally.MAIN_LAST] == slot:
        state.tallies[Tally.MAIN_LAST] = before
    unlink(slots, slot)


@inline
def _enter_window(state: CacheState, slot: Any, count: Any) -> None:
    slots = state.slots
    link_after(slots, slot, slots[slots.size - 1]["previous"])
    slots[slot]["rank"] = IN_WINDOW | count


@inline
def tinylfu_touch(state: CacheState, slot: Any) -> None:
    """Count one access of a resident slot."""
    slots, tallies = state.slots, state.tallies
    frequency = np.int64(slots[slot]["rank"])
    count = min((frequency & MAX_FREQUENCY) + 1, MAX_FREQUENCY)
    if frequency & IN_WINDOW:
        unlink(slots, slot)
        _enter_window(state, slot, count)
        return
    _leave_main(state, slot)
    if tallies[Tally.WINDOW_ROWS] < tallies[Tally.WINDOW_LIMIT]:
        tallies[Tally.WINDOW_ROWS] += 1
        _enter_window(state, slot, count)
    else:
        _file(state, slot, count, False)


@inline
def tinylfu_insert(state: CacheState, slot: Any) -> None:
    """Enter a new row's slot, with its first access and those before it left."""
    count = min(sketch_count(state.sketch, state.slots[slot]["key"]) + 1, MAX_FREQUENCY)
    state.tallies[Tally.WINDOW_ROWS] += 1
    _enter_window(state, slot, count)


@inline
def tinylfu_remove(state: CacheState, slot: Any) -> None:
    """Forget a resident slot, and let its count go on in the sketch."""
    slots = state.slots
    frequency = np.int64(slots[slot]["rank"])
    sketch_raise(state.sketch, slots[slot]["key"], frequency & MAX_FREQUENCY)
    if frequency & IN_WINDOW:
        state.tallies[Tally.WINDOW_ROWS] -= 1
        unlink(slots, slot)
    else:
        _leave_main(state, slot)


@inline
def _halve(state: CacheState) -> None:
    """Halve all counts. Two levels that become one are neighbours, so no slot moves."""
    slots, tails = state.slots, state.level_tail
    root = slots.size - 1
    sketch_halve(state.sketch)
    for slot in range(state.tallies[Tally.USED_SLOTS]):
        frequency = slots[slot]["rank"]
        slots[slot]["rank"] = (frequency & IN_WINDOW) | ((frequency & MAX_FREQUENCY) >> 1)
    for level in range(tails.size // 2):
        lower, upper = tails[2 * level], tails[2 * level + 1]
        tails[level] = lower if upper == root else upper
    for level in range(tails.size // 2, tails.size):
        tails[level] = root


@inline
def tinylfu_file(state: CacheState, num_accesses: Any) -> None:
    """Before so many accesses: move rows beyond the window's limit into main, oldest first, up to a pinned one."""
    slots, tallies = state.slots, state.tallies
    left = _FILED_PER_ACCESS * num_accesses
    while left > 0 and tallies[Tally.WINDOW_ROWS] > tallies[Tally.WINDOW_LIMIT]:
        oldest = np.int64(slots[tallies[Tally.MAIN_LAST]]["next"])
        if slots[oldest]["pins"] > 0:
            break
        unlink(slots, oldest)
        tallies[Tally.WINDOW_ROWS] -= 1
        _file(state, oldest, np.int64(slots[oldest]["rank"]) & MAX_FREQUENCY, True)
        left -= 1


@inline
def tinylfu_settle(state: CacheState, num_accesses: Any) -> None:
    """After so many accesses: halve if it is time."""
    slots, tallies = state.slots, state.tallies
    tallies[Tally.UNHALVED] += num_accesses
    if tallies[Tally.UNHALVED] >= HALVING_PERIOD * (slots.size - 1):
        tallies[Tally.UNHALVED] = 0
        _halve(state)
