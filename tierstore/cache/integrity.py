"""The conservation laws of a cache's bookkeeping, each term of them counted again."""

from typing import Any

import numpy as np

from ..kernels.arrays import Int32s, Int64s
from .admission import find_keys
from .base import DIRTY, FROZEN, LOADING, RESIDENT
from .cache_state import LEVELS, CacheState, Tally
from .tinylfu import IN_WINDOW

Faults = dict[str, Any]  # by name, what should be False or empty
Counts = dict[str, tuple[int, int]]  # by name, how many there should be and how many there are


def _chain(following: Any, first: int, end: int) -> Int64s:
    """The links from ``first`` to before ``end``, as many as there may be."""
    links: list[int] = []
    while first != end and len(links) < len(following):
        links.append(first)
        first = int(following[first])
    return np.array(links, np.int64)


def _freed(following: Any, first: int, num_used: int) -> Int64s:
    """What was freed, numbers being one more in its chain, and what was never used."""
    freed = _chain([0, *following], first, 0) - 1
    return np.concatenate([freed, np.arange(num_used, len(following))])


def _last_of_each(groups: Any, slots: Int64s, num_groups: int, root: int) -> Int32s:
    """The last slot of each group, or the root."""
    tails = np.full(num_groups, root, np.int32)
    tails[groups] = slots  # of equal groups the last one wins
    return tails


def _check_buckets(state: CacheState, listed: Int64s, faults: Faults, counts: Counts) -> None:
    buckets = state.bucket[listed]
    lasts = np.flatnonzero(np.diff(buckets, append=-1))
    faults["buckets' last slots wrong"] = state.bucket_tail[buckets[lasts]] != listed[lasts]
    faults["buckets out of order"] = np.diff(state.bucket_count[buckets[lasts]]) <= 0
    tallies = state.tallies
    free = _freed(state.bucket_tail.tolist(), int(tallies[Tally.FREE_BUCKET]), int(tallies[Tally.USED_BUCKETS]))
    counts["free buckets"] = len(state.bucket) - len(lasts), len(free)


def _check_levels(state: CacheState, listed: Int64s, faults: Faults, counts: Counts) -> None:
    root, rank = len(state.slots) - 1, state.slots["rank"][listed]
    in_window = rank & IN_WINDOW != 0
    main, levels = listed[~in_window], rank[~in_window] & (LEVELS - 1)
    faults["window before main"] = np.diff(in_window.astype(int)) < 0
    faults["levels out of order"] = np.diff(levels) < 0
    faults["levels' last slots wrong"] = state.level_tail != _last_of_each(levels, main, len(state.level_tail), root)
    faults["last of main wrong"] = state.tallies[Tally.MAIN_LAST] != [root, *main][-1]
    counts["window"] = int(state.tallies[Tally.WINDOW_ROWS]), int(in_window.sum())


def check_state(state: CacheState) -> None:
    """AssertionError, with every term, unless the laws of ``RowCache.check_integrity`` hold. O(capacity)."""
    slots, tallies = state.slots, state.tallies
    root = len(slots) - 1
    flags, pins = slots["flags"][:-1], slots["pins"][:-1]
    listed = _chain(slots["next"].tolist(), int(slots["next"][root]), root)
    free = _freed(slots["next"][:-1].tolist(), int(tallies[Tally.FREE_SLOT]), int(tallies[Tally.USED_SLOTS]))
    found: Int32s = np.empty(len(listed), np.int32)
    find_keys(state.entries, slots, slots["key"][listed], found)
    num_resident = int(tallies[Tally.RESIDENT])
    counts: Counts = {
        "free slots": (root - num_resident, len(free)),
        "resident": (num_resident, int(np.count_nonzero(flags & RESIDENT))),
        "filled": (int(tallies[Tally.FILLED]), int(np.count_nonzero(flags & (RESIDENT | LOADING) == RESIDENT))),
        "index entries": (num_resident, int(np.count_nonzero(state.entries[:-1]))),
        "listed": (num_resident, len(listed)),
        "dirty": (int(tallies[Tally.DIRTY]), int(np.count_nonzero(flags & DIRTY))),
        "frozen": (int(tallies[Tally.FROZEN]), int(np.count_nonzero(flags & FROZEN))),
        "pinned": (int(tallies[Tally.PINNED]), int(np.count_nonzero(pins))),
    }
    faults: Faults = {
        "free but in use": (flags[free] != 0) | (pins[free] != 0),
        "listed but not resident": flags[listed] & RESIDENT == 0,
        "wrong back links": slots["previous"][[*listed, root]] != [root, *listed],
        "not found by key": found != listed,
        "negative pins": pins < 0,
        "loading and dirty": (flags & LOADING != 0) & (flags & (DIRTY | FROZEN) != 0),
        "dirty and frozen": (flags & DIRTY != 0) & (flags & FROZEN != 0),
        "flags or pins without a row": ((flags != 0) | (pins != 0)) & (flags & RESIDENT == 0),
    }
    if state.bucket is not None:
        _check_buckets(state, listed, faults, counts)
    if state.sketch.size:
        _check_levels(state, listed, faults, counts)
    terms = {name: f"{kept} kept, {counted} counted" for name, (kept, counted) in counts.items()}
    terms |= {name: str(np.count_nonzero(wrong)) for name, wrong in faults.items()}
    broken = [name for name, (kept, counted) in counts.items() if kept != counted]
    broken += [name for name, wrong in faults.items() if np.any(wrong)]
    if broken:
        all_terms = ", ".join(f"{name}: {term}" for name, term in terms.items())
        raise AssertionError(f"cache of {root} slots: broken: {'; '.join(broken)}. Terms: {all_terms}")
