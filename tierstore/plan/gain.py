"""What tiers save: the answer beside the cheapest fleet that has every row in memory, and both if an input is off."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .assumptions import Assumption, Fleet
from .workload import Workload, times


class Span(NamedTuple):
    """Of the plan's own inputs, and the least and most with one of them off."""

    low: float
    own: float
    high: float


class Gain(NamedTuple):
    """Attributes:
    memory: the cheapest that has every row in DDR or HBM and meets the target; None if none does.
    reason: why there is none; else "".
    usd_a_month, watts: what the answer has less than that; None if there is none.
    """

    memory: Fleet | None
    reason: str
    usd_a_month: Span | None
    watts: Span | None


def gain_of(
    workload: Workload, tiers: Fleet, assumptions: tuple[Assumption, ...], in_memory: Callable[[Workload], Fleet]
) -> Gain:
    """Of the answer, ``tiers``, and of what it becomes with each figure that nobody gave at half and twice of it.

    Args:
        in_memory: finds the cheapest fleet with every row in memory; a ValueError says why there is none.
    """
    try:
        memory = in_memory(workload)
    except ValueError as error:
        return Gain(None, str(error), None, None)
    pairs = [(memory, tiers)]
    for assumed, assumption in zip(workload.assumed, assumptions, strict=True):
        for what_if in assumption.what_if:
            if what_if.fleet is not None:
                try:
                    other = in_memory(replace(times(workload, assumed, what_if.factor), assumed=()))
                except ValueError:
                    continue
                pairs.append((other, what_if.fleet))
    dollars = [whole.usd_a_month - own.usd_a_month for whole, own in pairs]
    watts = [whole.watts - own.watts for whole, own in pairs]
    return Gain(memory, "", *(Span(min(saved), saved[0], max(saved)) for saved in (dollars, watts)))
