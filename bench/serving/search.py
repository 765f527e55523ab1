"""The highest load within bounds, found from latencies that scatter; several searches by turns."""

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple

__all__ = ["NUM_FIRST", "Ratio", "Search", "by_turns", "highest_load", "search"]

_GAIN: Final = -0.5
_FACTOR: Final = 1.25
"""From one rate to the next at most: a stall of the machine must not send the search far off."""
NUM_FIRST: Final = 2
"""Rates on the way to the highest load, which do not count."""

_MOST_LIKENESS: Final = 0.8

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


class Ratio(NamedTuple):
    """One highest load over another: in some nine of ten runs the true ratio is not farther off than ``margin``."""

    value: float
    margin: float

    @classmethod
    def of(cls, rates: Sequence[float], others: Sequence[float]) -> "Ratio":
        """From the rates of two searches that were measured together, two steps or more.

        The median of the steps' ratios, in which what both met at a step cancels. The margin is two standard errors of
        the mean, for steps that resemble the one before by Kendall's estimate: https://doi.org/10.2307/2332719.
        """
        logs = [math.log(rate / other) for rate, other in zip(rates, others, strict=True)]
        count, center = len(logs), statistics.fmean(logs)
        off = [each - center for each in logs]
        variance = statistics.variance(logs)
        margin = 0.0
        if variance:
            found = sum(each * after for each, after in itertools.pairwise(off)) / (variance * (count - 1))
            likeness = min(max(found + (1 + 3 * found) / count, 0.0), _MOST_LIKENESS)
            margin = 2 * math.sqrt(variance / count * (1 + likeness) / (1 - likeness))
        value = math.exp(statistics.median(logs))
        return cls(value, value * margin)
