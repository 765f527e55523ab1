"""The highest load that is carried within bounds: raised until it is too much, then bisected; several by turns."""

from collections.abc import Callable, Generator, Mapping
from typing import Final, NamedTuple

__all__ = ["Found", "Search", "by_turns", "search"]

_FACTOR: Final = 1.5
_RANGE: Final = 100
"""So far below the first rate the search gives up."""


class Found(NamedTuple):
    """The highest rate that was carried and the lowest that was not; 0 if there was none."""

    carried: float
    too_much: float


Search = Generator[float, bool, Found]
"""Gives the rate to measure next, and is sent whether it was carried."""


def search(first: float, precision: float, ceiling: float, *, needed: int = 1) -> Search:
    """Search upwards or downwards from ``first`` by factors of 1.5, then between the two until they are close.

    Args:
        precision: the two are at most so far apart, of the lower.
        ceiling: no higher rate is tried.
        needed: measurements of a rate that say the same, to believe them.
    """
    low = high = 0.0
    rate = min(first, ceiling)
    while not (low and high) and first / _RANGE < rate <= ceiling:
        if (yield from _majority(rate, needed)):
            low, rate = rate, rate * _FACTOR
        else:
            high, rate = rate, rate / _FACTOR
    while low and high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if (yield from _majority(middle, needed)):
            low = middle
        else:
            high = middle
    return Found(low, high)


def _majority(rate: float, needed: int) -> Generator[float, bool, bool]:
    votes = [0, 0]
    while max(votes) < needed:
        votes[(yield rate)] += 1
    return votes[1] > votes[0]


def by_turns(searches: Mapping[str, Search], carries: Callable[[str, float], bool]) -> dict[str, Found]:
    """What each search finds; they take turns, measurement by measurement: what differs is not what the machine did
    meanwhile.

    Args:
        carries: measures a rate, given the search's name.
    """
    found: dict[str, Found] = {}
    rates: dict[str, float] = {}
    while len(found) < len(searches):
        for name, each in searches.items():
            if name not in found:
                try:
                    rates[name] = each.send(carries(name, rates[name])) if name in rates else next(each)
                except StopIteration as end:
                    found[name] = end.value
    return found
