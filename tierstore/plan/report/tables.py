"""The result's tables, which the terminal and the page show: a tuple of texts for each row."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ...system.sizes import format_size
from ..prediction import in_words
from ..result import Alternative, PlanResult
from .words import (
    count,
    duration,
    money,
    named,
    named_words,
    quantity,
    resource,
    share,
    significant,
    summary_of,
    watts,
)

RULE: Final = (
    "Bars run side by side, the parts of one bar one after another; so the longest bar is the time taken, and its "
    "longest part is the bottleneck."
)
_INDENT: Final = "  "
NEGLIGIBLE: Final = 1e-4
"""Of the samples a second: a gain of less is nothing."""


class Table(NamedTuple):
    """Text, as people read it; not escaped yet. ``is_wide``: it takes the page's width."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    is_wide: bool = False


def tables_of(result: PlanResult) -> dict[str, Table]:
    """Those of the page, by title, beside the bars of a step."""
    step = "step" if result.prediction.setup.workload.is_training else "query"
    return {
        f"Tiers of a host, in one {step}": tiers_table(result),
        "What more of one resource would bring": marginals_table(result),
        "Price": price_table(result),
        "Next best, and what fails": alternatives_table(result),
    }


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
        text: its name.
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


def marginals_table(result: PlanResult) -> Table:
    """Of those that bring something."""
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
        for gain in result.marginals
        if gain.samples_per_s > NEGLIGIBLE * now
    ]
    return Table(("resource", "change", "samples/s", "of now", "USD", "samples/s a USD"), rows)


def alternatives_table(result: PlanResult) -> Table:
    """The plan first."""
    own = Alternative(result.prediction.setup, result.prediction, "this plan")
    shown = (own, *result.alternatives) if result.alternatives else ()
    columns = ("setup", "samples", "USD a month", "bound by", "verdict")
    return Table(columns, [_alternative_row(each) for each in shown], is_wide=True)


def _alternative_row(each: Alternative) -> tuple[str, ...]:
    found = each.prediction
    known = ("-", "-", "-")
    if found is not None:
        known = (f"{count(found.samples_per_s)}/s", money(found.price.usd_a_month), in_words(found.bottleneck))
    return summary_of(each.setup), *known, named_words(each.reason) or "reaches it"


def price_table(result: PlanResult) -> Table:
    price = result.prediction.price
    rows = [(named(part.name), f"{part.number:,}", money(part.usd), watts(part.watts)) for part in result.price_parts]
    return Table(("part", "count", "USD", "power"), [*rows, ("all", "", money(price.usd), watts(price.watts))])
