"""Caches that know the future, in plain Python. Nothing of tierstore is in them."""

import heapq

import numpy as np
from numpy.typing import NDArray

__all__ = ["belady_hits", "belady_rows_read"]

Keys = NDArray[np.int64]


def _next_uses(keys: Keys, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: when each key is used next, after all times if never. ``times`` (int64 [n]) ascend."""
    order = np.argsort(keys, kind="stable")
    next_uses = np.full(len(keys), times[-1] + 1 if len(keys) else 0, np.int64)
    again = keys[order[1:]] == keys[order[:-1]]
    next_uses[order[:-1][again]] = times[order[1:][again]]
    return next_uses


def belady_hits(keys: Keys, capacity: int) -> int:
    """The most hits any cache could have that lets every row in: the row used last leaves.

    Source: L. Belady, A study of replacement algorithms for a virtual-storage computer (IBM Systems Journal, 1966).
    """
    resident: dict[int, int] = {}
    queue: list[tuple[int, int]] = []
    hits = 0
    for key, next_use in zip(keys.tolist(), _next_uses(keys, np.arange(len(keys))).tolist(), strict=True):
        if key in resident:
            hits += 1
        elif len(resident) == capacity:
            while True:
                use, victim = heapq.heappop(queue)
                if resident.get(victim) == -use:
                    del resident[victim]
                    break
        resident[key] = next_use
        heapq.heappush(queue, (-next_use, key))
    return hits


def belady_rows_read(batches: list[Keys], capacity: int) -> int:
    """The fewest rows read when all rows of a batch are needed at once; no batch has more than ``capacity``."""
    distinct = [np.unique(batch) for batch in batches]
    times = np.repeat(np.arange(len(batches)), [len(batch) for batch in distinct])
    next_uses = _next_uses(np.concatenate(distinct), times).tolist()
    resident: dict[int, int] = {}
    queue: list[tuple[int, int]] = []
    read = place = 0
    for batch in distinct:
        keys = batch.tolist()
        missing = sum(key not in resident for key in keys)
        read += missing
        used = dict(zip(keys, next_uses[place : place + len(keys)], strict=True))
        place += len(keys)
        excess = len(resident) + missing - capacity
        while excess > 0:
            use, victim = heapq.heappop(queue)
            if victim not in used and resident.get(victim) == -use:
                del resident[victim]
                excess -= 1
        resident |= used
        for key, next_use in used.items():
            heapq.heappush(queue, (-next_use, key))
    return read
