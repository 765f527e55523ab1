"""The result's tables, which the terminal shows and the page has beneath its plots: a tuple of texts for each row."""

from typing import Final

from ...system.sizes import format_size
from ..prediction import ResourceLoad
from ..result import Marginal, PlanResult
from .figure import Table
from .words import count, duration, money, named, quantity, resource, share, significant, watts

NEGLIGIBLE: Final = 1e-4
"""Of the samples a second: a gain of less is nothing."""


def tiers_table(result: PlanResult) -> Table:
    rows = [
        (tier.tier, format_size(tier.capacity_bytes), count(tier.rows), count(tier.lookups), share(tier.hit_rate, 2))
        for tier in result.prediction.tiers
    ]
    return Table(("tier", "capacity", "rows", "lookups", "hit rate"), rows)


def ranked_loads(result: PlanResult) -> list[ResourceLoad]:
    """Those that take time, the longest first; of equal ones the bottleneck."""
    own = result.prediction.bottleneck
    busy = [load for load in result.prediction.loads if load.seconds]
    return sorted(busy, key=lambda load: (-load.seconds, load.resource != own))


def loads_table(result: PlanResult) -> Table:
    rows = [
        (resource(load.resource), duration(load.seconds), quantity(load.amount, load.unit))
        for load in ranked_loads(result)
    ]
    return Table(("resource", "time", "work"), rows)


def gains_table(result: PlanResult, gains: list[Marginal]) -> Table:
    now = result.prediction.samples_per_s
    rows = [
        (
            resource(gain.resource),
            gain.change,
            f"+{count(gain.samples_per_s)}",
            f"+{share(gain.samples_per_s / now, 2)}",
            "-" if gain.usd is None else money(gain.usd),
            significant(gain.samples_per_s / gain.usd) if gain.usd else "-",
        )
        for gain in gains
    ]
    return Table(("resource", "change", "samples/s", "of now", "USD", "samples/s a USD"), rows)


def price_table(result: PlanResult) -> Table:
    price = result.prediction.price
    rows = [(named(part.name), f"{part.number:,}", money(part.usd), watts(part.watts)) for part in result.price_parts]
    return Table(("part", "count", "USD", "power"), [*rows, ("all", "", money(price.usd), watts(price.watts))])
