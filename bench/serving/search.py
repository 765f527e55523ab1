"""The highest load within bounds, found from latencies that scatter; several searches by turns."""

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

__all__ = ["NUM_FIRST", "Search", "by_turns", "highest_load", "search"]

_GAIN: Final = -0.5
_FACTOR: Final = 1.25
"""From one rate to the next at most: a stall of the machine must not send the search far off."""
NUM_FIRST: Final = 2
"""Rates on the way to the highest load, which do not count."""

Search = Generator[float, float, list[float]]
"""Gives the rate to measure next, is sent latency over its bound there (inf where requests failed), and returns the
rates around the highest load; none if latency was far above its bound at every rate."""


def search(first: float, ceiling: float, *, steps: int) -> Search:
    """Let each rate follow from the latency at the one before, by its root.

    This is Robbins and Monro's stochastic approximation. A bisection asks for yes or no, and keeps an error for good.

    Args:
        ceiling: no higher rate is tried.
        steps: measurements.
    """
    rates = [min(first, ceiling)]
    is_near = False
    for _ in range(steps):
        excess = yield rates[-1]
        factor = max(excess**_GAIN, 1 / _FACTOR)
        is_near |= factor > 1 / _FACTOR
        rates.append(min(rates[-1] * min(factor, _FACTOR), ceiling))
    return rates[min(NUM_FIRST, steps) :] if is_near else []


def highest_load(rates: Sequence[float]) -> float:
    """The highest load that a search found; 0 for none."""
    return statistics.median(rates) if rates else 0.0


def by_turns(
    searches: Mapping[str, Search], measure: Callable[[Mapping[str, float]], Mapping[str, float]]
) -> dict[str, list[float]]:
    """What each search finds, all measured together step by step: what differs is not what the machine did meanwhile.

    Args:
        measure: latencies over their bounds at these rates, by the searches' names.
    """
    found: dict[str, list[float]] = {}
    rates = {name: next(each) for name, each in searches.items()}
    while rates:
        excess = measure(rates)
        rates = {}
        for name, over in excess.items():
            try:
                rates[name] = searches[name].send(over)
            except StopIteration as end:
                found[name] = end.value
    return found
