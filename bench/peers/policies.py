"""Hits of W-TinyLFU, S3-FIFO and SIEVE, with exact counts and ghosts, one access at a time.

Sources: G. Einziger et al., TinyLFU (ACM TOS 2017), with the constants of Caffeine; J. Yang et al., FIFO queues are all
you need for cache eviction (SOSP 2023); Y. Zhang et al., SIEVE is simpler than LRU (NSDI 2024).
"""

from typing import Any

import numpy as np

from tierstore.kernels.arrays import Int64s
from tierstore.kernels.jit import inline, kernel

__all__ = ["s3fifo_hits", "sieve_hits", "wtinylfu_hits"]


@inline
def _leave(after: Int64s, before: Int64s, where: Int64s, sizes: Int64s, row: Any) -> None:
    """Queues are rings; a queue's own number, behind all rows', stands before its first row."""
    after[before[row]], before[after[row]] = after[row], before[row]
    sizes[where[row]] -= 1


@inline
def _enter(after: Int64s, before: Int64s, where: Int64s, sizes: Int64s, queue: Any, row: Any) -> None:
    head = where.size + queue
    last = before[head]
    after[last], before[row], after[row], before[head] = row, last, head, row
    where[row] = queue
    sizes[queue] += 1


@kernel
def wtinylfu_hits(rows: Int64s, num_rows: int, capacity: int) -> int:
    """A window of a hundredth, the rest a segmented LRU of a fifth and four fifths; counts up to 15, halved every ten
    accesses a slot."""
    after, before = np.arange(num_rows + 3), np.arange(num_rows + 3)
    where, counts, sizes = np.full(num_rows, -1), np.zeros(num_rows, np.int64), np.zeros(3, np.int64)
    window_max = max(1, capacity // 100)
    hits, counted = 0, 0
    for row in rows:
        if counts[row] < 15:
            counts[row] += 1
            counted += 1
        if counted >= 10 * capacity:
            counts >>= 1
            counted >>= 1
        if where[row] >= 0:
            hits += 1
            _leave(after, before, where, sizes, row)
            _enter(after, before, where, sizes, min(2 * where[row], 2), row)
            if sizes[2] > (capacity - window_max) * 8 // 10:
                oldest = after[num_rows + 2]
                _leave(after, before, where, sizes, oldest)
                _enter(after, before, where, sizes, 1, oldest)
            continue
        _enter(after, before, where, sizes, 0, row)
        if sizes[0] <= window_max:
            continue
        candidate = after[num_rows]
        _leave(after, before, where, sizes, candidate)
        where[candidate] = -1
        if sizes[1] + sizes[2] >= capacity - window_max:
            victim = after[num_rows + 1 if sizes[1] else num_rows + 2]
            if victim >= num_rows or counts[candidate] <= counts[victim]:
                continue
            _leave(after, before, where, sizes, victim)
            where[victim] = -1
        _enter(after, before, where, sizes, 1, candidate)
    return hits


@kernel
def s3fifo_hits(rows: Int64s, num_rows: int, capacity: int) -> int:
    """A small queue of a tenth, a main queue, and ghosts of as many rows as the main queue holds."""
    after, before = np.arange(num_rows + 3), np.arange(num_rows + 3)
    where, uses, sizes = np.full(num_rows, -1), np.zeros(num_rows, np.int64), np.zeros(3, np.int64)
    hits, small_max = 0, max(1, capacity // 10)
    for row in rows:
        if where[row] == 0 or where[row] == 1:
            hits += 1
            uses[row] = min(uses[row] + 1, 3)
            continue
        while sizes[0] + sizes[1] >= capacity:
            queue = 0 if sizes[0] >= small_max or not sizes[1] else 1
            oldest = after[num_rows + queue]
            _leave(after, before, where, sizes, oldest)
            if queue == 0:
                _enter(after, before, where, sizes, 1 if uses[oldest] > 1 else 2, oldest)
                uses[oldest] = 0
            elif uses[oldest]:
                _enter(after, before, where, sizes, 1, oldest)
                uses[oldest] -= 1
            else:
                where[oldest] = -1
            if sizes[2] > max(1, capacity - small_max):
                oldest = after[num_rows + 2]
                _leave(after, before, where, sizes, oldest)
                where[oldest] = -1
        is_ghost = where[row] == 2
        if is_ghost:
            _leave(after, before, where, sizes, row)
        _enter(after, before, where, sizes, 1 if is_ghost else 0, row)
        uses[row] = 0
    return hits


@kernel
def sieve_hits(rows: Int64s, num_rows: int, capacity: int) -> int:
    """One queue; a hand goes from the oldest row to the newest and evicts the first that was not used since it came."""
    after, before = np.arange(num_rows + 1), np.arange(num_rows + 1)
    where, is_used, sizes = np.full(num_rows, -1), np.zeros(num_rows, np.bool_), np.zeros(1, np.int64)
    hits, hand = 0, num_rows
    for row in rows:
        is_used[row] = where[row] == 0
        if is_used[row]:
            hits += 1
            continue
        if sizes[0] == capacity:
            while hand == num_rows or is_used[hand]:
                if hand < num_rows:
                    is_used[hand] = False
                hand = after[hand]
            victim, hand = hand, after[hand]
            _leave(after, before, where, sizes, victim)
            where[victim] = -1
        _enter(after, before, where, sizes, 0, row)
    return hits
