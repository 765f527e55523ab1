"""How long a unit of some work takes: enough of it to be told from the clock, a few times, the median."""

import math
import statistics
import time
from collections.abc import Callable

__all__ = ["rate_of"]

_REPETITIONS = 5
_MOST_GROWTH = 16
_ENOUGH = 1 / 16
"""Of the time wanted: what tells how much work fills it."""


def rate_of(
    work: Callable[[int], object],
    *,
    seconds: float,
    first: int = 1,
    most: int = 1 << 40,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How many units a second ``work(units)`` does: the median of five calls, after smaller ones that find their size.

    Args:
        seconds: for all five together, about; a call with ``most`` units may make it less.
        first: units of the first call; it also warms up.
        most: units of a call, at most.
    """
    wanted, units = seconds / _REPETITIONS, min(first, most)
    work(units)
    while True:
        taken = _seconds(work, units, clock)
        is_told = taken >= wanted * _ENOUGH
        if units >= most and taken <= wanted:
            break
        units = max(1, min(math.ceil(units * min(wanted / taken, _MOST_GROWTH)), most))
        if is_told:
            break
    return units / statistics.median(_seconds(work, units, clock) for _ in range(_REPETITIONS))


def _seconds(work: Callable[[int], object], units: int, clock: Callable[[], float]) -> float:
    began = clock()
    work(units)
    # A coarse clock may not move in a call of the largest size allowed.
    return max(clock() - began, 1e-9)
