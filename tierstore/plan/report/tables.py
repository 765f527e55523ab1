"""The result's tables, which the terminal shows and the page has beneath its plots: a tuple of texts for each row."""

from typing import Final, NamedTuple

from ...system.sizes import format_size
from ..prediction import in_words
from ..result import Marginal, PlanResult
from .figure import Table
from .words import count, duration, money, named, quantity, resource, share, significant, watts

RULE: Final = (
    "Bars run side by side, the parts of one bar one after another; so the longest bar is the time taken, and its "
    "longest part is the bottleneck."
)
_INDENT: Final = "  "
NEGLIGIBLE: Final = 1e-4
"""Of the samples a second: a gain of less is nothing."""


def tiers_table(result: PlanResult) -> Table:
    """The last tier has every row, so no hit rate is told; the page cache is a line of its own where it has some."""
    rows = []
    for tier in result.prediction.tiers:
        size, lookups = format_size(tier.capacity_bytes), tier.lookups
        if tier.tier != "ssd":
            rows.append((tier.tier.upper(), size, count(tier.rows), count(lookups), share(tier.hit_rate, 2)))
            continue
        if lookups and tier.hit_rate:
            cache = format_size(result.prediction.setup.page_cache_bytes)
            rows.append(("page cache", cache, "-", count(lookups), share(tier.hit_rate, 2)))
            lookups *= 1 - tier.hit_rate
        rows.append(("SSD", size, count(tier.rows), count(lookups), "-"))
    return Table(("tier", "capacity", "rows", "lookups", "hit rate"), rows)


class LoadLine(NamedTuple):
    """A lane, or a resource of it.

    Attributes:
        text: its name; of a resource beside others of its lane indented.
        work: "" of a lane of several.
        is_part: it is one of several of its lane, whose line is above.
        is_bottleneck: it is the longest part of the longest lane.
    """

    text: str
    seconds: float
    work: str
    is_part: bool
    is_bottleneck: bool


def load_lines(result: PlanResult) -> list[LoadLine]:
    """Lanes that take time, the longest first, each with its resources, the longest first."""
    loads = {load.resource: load for load in result.prediction.loads}
    lines = []
    for index, lane in enumerate(result.prediction.lanes):
        busy = [loads[name] for name in lane.resources if name in loads and loads[name].seconds]
        busy.sort(key=lambda load: -load.seconds)
        if len(busy) > 1:
            lines.append(LoadLine(in_words(lane.name), lane.seconds, "", False, False))
        for rank, load in enumerate(busy):
            work = "" if load.unit == "seconds" else quantity(load.amount, load.unit)  # of waits there is none
            name = in_words(load.resource)
            is_part = len(busy) > 1
            lines.append(LoadLine(name, load.seconds, work, is_part, is_bottleneck=index == rank == 0))
    return lines


def loads_table(result: PlanResult) -> Table:
    rows = [
        ((_INDENT if line.is_part else "") + line.text, duration(line.seconds), line.work)
        for line in load_lines(result)
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
