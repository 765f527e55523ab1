"""Caches that know too much: perfect counts, and the future.

Both evict the row of least priority, and the priority that each access gives its row is known before any cache is
simulated; so one kernel replays both.

The optimum is that of caches which let every row in: L. Belady, A study of replacement algorithms for a virtual-storage
computer, IBM Systems Journal 5, 1966.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.arrays import Int64s
from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel
from ..accesses import Numbered

__all__ = ["perfect_counts", "replay", "times_of_next_use"]


def perfect_counts(accesses: Numbered) -> Int64s:
    """int64 [n]: by how often the row was accessed so far, cached or not; of equal counts the least recent leaves."""
    priorities = np.empty(len(accesses.numbers), np.int64)
    _count(accesses.numbers, np.zeros(accesses.num_rows, np.int64), priorities)
    return priorities


def times_of_next_use(accesses: Numbered) -> Int64s:
    """int64 [n]: the sooner the row is used again, the more."""
    priorities = np.empty(len(accesses.numbers), np.int64)
    _look_ahead(accesses.numbers, np.full(accesses.num_rows, len(priorities), np.int64), priorities)
    return priorities


def replay(accesses: Numbered, priorities: Int64s, capacity: int) -> NDArray[np.bool_]:
    """Which accesses hit: bool [n].

    Args:
        priorities: int64 [n], each row's after the access.
        capacity: rows, at least 1.
    """
    is_hit = np.empty(len(accesses.numbers), np.bool_)
    heap, levels = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
    _replay(accesses.numbers, priorities, heap, levels, np.full(accesses.num_rows, -1, np.int32), is_hit)
    return is_hit


@kernel
def _count(numbers: Any, counts: Any, priorities: Any) -> None:
    for time in range(numbers.shape[0]):
        counts[numbers[time]] += 1
        priorities[time] = counts[numbers[time]] * numbers.shape[0] + time


@kernel
def _look_ahead(numbers: Any, next_uses: Any, priorities: Any) -> None:
    for time in range(numbers.shape[0] - 1, -1, -1):
        priorities[time] = -next_uses[numbers[time]]
        next_uses[numbers[time]] = time


@inline
def _rise(heap: Any, levels: Any, places: Any, place: Any, row: Any, level: Any) -> Any:
    """Where an element belongs between ``place``, which is free, and the root; those above move down."""
    while place > 0:
        parent = (place - 1) >> 1
        if levels[parent] <= level:
            break
        heap[place], levels[place] = heap[parent], levels[parent]
        places[heap[place]] = place
        place = parent
    heap[place], levels[place], places[row] = row, level, place
    return place


@inline
def _sink(heap: Any, levels: Any, places: Any, size: Any, place: Any, row: Any, level: Any) -> None:
    """The same, between ``place`` and the leaves of a heap of ``size``."""
    child = 2 * place + 1
    while child < size:
        if child + 1 < size and levels[child + 1] < levels[child]:
            child += 1
        if levels[child] >= level:
            break
        heap[place], levels[place] = heap[child], levels[child]
        places[heap[place]] = place
        place = child
        child = 2 * place + 1
    heap[place], levels[place], places[row] = row, level, place


@kernel
def _replay(numbers: Any, priorities: Any, heap: Any, levels: Any, places: Any, is_hit: Any) -> None:
    """``heap``, ``levels``: rows and priorities of a binary heap, the least first; ``places``: of each row, or -1."""
    size = np.int64(0)
    for time in range(numbers.shape[0]):
        row, level = numbers[time], priorities[time]
        place = np.int64(places[row])
        is_hit[time] = place >= 0
        if place < 0:
            if size == heap.shape[0]:
                places[heap[0]] = -1
                place = np.int64(0)
            else:
                place = size
                size += 1
        place = _rise(heap, levels, places, place, row, level)
        _sink(heap, levels, places, size, place, row, level)
