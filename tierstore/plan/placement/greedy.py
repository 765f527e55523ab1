"""Assigning things of a cost and a size to equal devices: longest processing time first, then moves and swaps.

R. L. Graham, Bounds on Multiprocessing Timing Anomalies (SIAM Journal on Applied Mathematics 17, 1969): taking the
costliest first, each to the device with the least cost so far, ends within 4/3 - 1/(3 devices) of the least possible
largest cost, where every device has room for everything.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUNDS_MAX", "improve", "longest_first", "lower_bound"]

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

ROUNDS_MAX: Final = 1000
"""Of moves and swaps. Each makes two devices more equal; hundreds of tables take some tens."""
_LEAST_GAIN: Final = 1e-9
"""Of the largest cost: less is rounding."""


class _Exchange(NamedTuple):
    """Thing ``ours`` goes to ``device``, from where ``theirs`` comes back, if it is one (-1: nothing)."""

    ours: int
    theirs: int
    device: int


def longest_first(costs: Floats, sizes: Int64s, num_devices: int, budget: int) -> Int64s | None:
    """int64 [things]: the device of each; None if this order leaves no room for one.

    Args:
        costs, sizes: float64 and int64 [things].
        budget: room of each device.
    """
    loads, free = np.zeros(num_devices), np.full(num_devices, budget, np.int64)
    devices = np.empty(len(costs), np.int64)
    for thing in np.argsort(-costs, kind="stable"):
        device = int(np.argmin(np.where(free >= sizes[thing], loads, np.inf)))
        if free[device] < sizes[thing]:
            return None
        devices[thing] = device
        loads[device] += costs[thing]
        free[device] -= sizes[thing]
    return devices


def improve(devices: Int64s, costs: Floats, sizes: Int64s, num_devices: int, budget: int) -> Int64s:
    """Move things off the device with the largest cost, or swap them for cheaper ones, while that makes it smaller.

    Returns:
        a new array; no device's cost is above the largest before.
    """
    devices = devices.copy()
    for _ in range(ROUNDS_MAX):
        exchange = _best_exchange(devices, costs, sizes, num_devices, budget)
        if exchange is None:
            break
        if exchange.theirs >= 0:
            devices[exchange.theirs] = devices[exchange.ours]
        devices[exchange.ours] = exchange.device
    return devices


def _best_exchange(devices: Int64s, costs: Floats, sizes: Int64s, num_devices: int, budget: int) -> _Exchange | None:
    """Off the device with the largest cost, that after which the larger cost of the two is least."""
    loads = np.bincount(devices, costs, num_devices)
    used = np.zeros(num_devices, np.int64)
    np.add.at(used, devices, sizes)
    busiest = int(np.argmax(loads))
    ours = np.flatnonzero(devices == busiest)
    others = np.flatnonzero(devices != busiest)
    # A move is a swap for nothing; there is one nothing a device.
    partners = np.concatenate([others, np.full(num_devices, -1)])
    homes = np.concatenate([devices[others], np.arange(num_devices)])
    cost = costs[ours][:, None] - np.concatenate([costs[others], np.zeros(num_devices)])
    size = sizes[ours][:, None] - np.concatenate([sizes[others], np.zeros(num_devices, np.int64)])
    after = np.maximum(loads[busiest] - cost, loads[homes] + cost)
    is_possible = (used[homes] + size <= budget) & (used[busiest] - size <= budget) & (homes != busiest)
    after = np.where(is_possible, after, np.inf)
    if not after.size or after.min() >= loads[busiest] * (1 - _LEAST_GAIN):
        return None
    row, column = np.unravel_index(int(after.argmin()), after.shape)
    return _Exchange(int(ours[row]), int(partners[column]), int(homes[column]))


def lower_bound(costs: Floats, num_devices: int) -> float:
    """No assignment of these things has a smaller largest cost: the mean, the largest, and the two that must share a
    device where there is one thing more than devices."""
    descending = -np.sort(-costs)
    pair = descending[num_devices - 1] + descending[num_devices] if len(costs) > num_devices else 0.0
    return float(max(costs.sum() / num_devices, descending[0], pair))
