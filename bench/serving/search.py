"""The highest load that is carried within bounds: raised until it is too much, then bisected."""

from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["Found", "highest_load"]

_FACTOR: Final = 1.5
_RANGE: Final = 100
"""So far below the first rate the search gives up."""


class Found(NamedTuple):
    """The highest rate that was carried and the lowest that was not; 0 if there was none."""

    carried: float
    too_much: float


def highest_load(carries: Callable[[float], bool], first: float, precision: float, ceiling: float) -> Found:
    """Search upwards or downwards from ``first`` by factors of 1.5, then between the two until they are close.

    Args:
        carries: measures a rate.
        precision: the two are at most so far apart, of the lower.
        ceiling: no higher rate is tried.
    """
    low = high = 0.0
    rate = min(first, ceiling)
    while not (low and high) and first / _RANGE < rate <= ceiling:
        if carries(rate):
            low, rate = rate, rate * _FACTOR
        else:
            high, rate = rate, rate / _FACTOR
    while low and high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if carries(middle):
            low = middle
        else:
            high = middle
    return Found(low, high)
