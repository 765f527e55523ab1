"""What tiers would save, in words and tables that the terminal and the page share."""

from collections.abc import Callable
from operator import attrgetter
from typing import Final, NamedTuple

from ..assumptions import FACTORS, Fleet
from ..gain import FleetName, Gain, Metric, Outcome, Scale, Span, figure_of, saved, saved_share
from ..prediction import in_words
from .figure import Table
from .words import asked, count, money, named_words, share, targets, watts

__all__ = ["Line", "asked_lines", "cases_table", "headline", "lines_of", "notes"]

_MONTH: Final[Metric] = attrgetter("usd_a_month")
_POWER: Final[Metric] = attrgetter("watts")
_NO_FLEET: Final = "no such fleet"
_FLEETS: Final[tuple[tuple[FleetName, str], ...]] = (("memory", "all in memory"), ("tiers", "tiered"))


class Line(NamedTuple):
    """A fleet at a number of rows, or what the second saves beside the first.

    Attributes:
        rows: "" but for the first of its rows.
        month, power: figures with their ranges.
        machines: of a fleet; why there is none.
        span: of dollars a month; None for what is saved, and where there is no fleet.
    """

    rows: str
    name: str
    month: str
    power: str
    machines: str = ""
    span: Span | None = None


def lines_of(found: Gain) -> list[Line]:
    """Three for each number of rows."""
    lines = []
    for scale in found.scales:
        rows = f"{scale.times} x: {count(scale.num_rows)} rows"
        for which, name in _FLEETS:
            month, power = (scale.span(figure_of(which, metric)) for metric in (_MONTH, _POWER))
            lines.append(
                Line(rows, name, ranged(month, money), ranged(power, watts), _machines(scale.own, which), month)
            )
            rows = ""
        lines.append(Line("", "saved", _saved(scale, _MONTH, money), _saved(scale, _POWER, watts)))
    return lines


def _machines(outcome: Outcome, which: FleetName) -> str:
    fleet: Fleet | None = getattr(outcome, which)
    if fleet is None:
        return f"{_NO_FLEET}: {named_words(getattr(outcome, f'no_{which}'))}"
    return f"{named_words(fleet.machines)}; bound by {in_words(fleet.bottleneck)}"


def ranged(span: Span | None, shown: Callable[[float], str]) -> str:
    """A figure with its range, if it has one."""
    if span is None:
        return "-"
    low, own, high = map(shown, span)
    return own if low == high else f"{own} ({low} to {high})"


def _saved(scale: Scale, metric: Metric, shown: Callable[[float], str]) -> str:
    span = scale.span(saved(metric))
    return "-" if span is None else f"{shown(span.own)} = {ranged(scale.span(saved_share(metric)), _percent)}"


def _percent(part: float) -> str:
    return share(part, 0)


def headline(found: Gain) -> str:
    """Of the rows as they are, and of the most."""
    first, *_, last = found.scales
    return f"{_sentence(first)} {_sentence(last)}"


def _sentence(scale: Scale) -> str:
    rows = "With today's rows" if scale.times == 1 else f"With {scale.times} times the rows"
    usd, part = scale.span(saved(_MONTH)), scale.span(saved_share(_MONTH))
    if usd is None or part is None or scale.own.memory is None:
        fleet = "no fleet meets the target" if scale.own.tiers is None else "only a tiered fleet meets the target"
        return f"{rows}, {fleet}."
    if not usd.own:
        return f"{rows}, tiers save nothing: the cheapest fleet has every row in memory."
    off = "" if part.low == part.high else f"; {_percent(part.low)} to {_percent(part.high)} if an input is off"
    memory = money(scale.own.memory.usd_a_month)
    return f"{rows}, tiers save {money(usd.own)} of {memory} a month ({_percent(part.own)}{off})."


def asked_lines(found: Gain) -> list[str]:
    """The workload with the hosts that are compared, and the target."""
    hosts = ", ".join(found.hosts)
    return [asked(found.workload, hosts), f"target of each fleet: {targets(found.asked)}"]


def cases_table(found: Gain) -> Table:
    """What is saved a month by number of rows: as the plan has it, and with one input off. No rows where none is."""
    columns = ("input", *(f"{scale.times} x rows" for scale in found.scales))
    own = ("as planned", *(_saved_text(scale.own) for scale in found.scales))
    rows = [
        (f"{case.what} x {case.factor:g}", *(_saved_text(scale.cases[number].outcome) for scale in found.scales))
        for number, case in enumerate(found.scales[0].cases)
    ]
    return Table(columns, [own, *rows] if rows else [])


def _saved_text(outcome: Outcome) -> str:
    usd, part = saved(_MONTH)(outcome), saved_share(_MONTH)(outcome)
    if usd is None or part is None:
        return _NO_FLEET if outcome.tiers is None else "only a tiered fleet"
    return f"{money(usd)} = {_percent(part)}"


def notes(found: Gain) -> list[str]:
    """How fleets are compared, and where ranges come from."""
    pricing, (low, high) = found.asked.pricing, FACTORS
    growing = (
        "the trace's curve stretched, each row's uses divided among as many rows"
        if found.has_trace
        else "as many ids a sample, by the same law"
    )
    off = [f"each figure that nobody gave at {low:g} and {high:g} times"] if found.workload.assumed else []
    off += [f"each price {_percent(pricing.spread)} lower and higher"] if pricing.spread else []
    ranges = (
        f"{' and '.join(off)}, one at a time, both fleets searched anew" if off else "none, as all inputs are given"
    )
    exact = "" if pricing.spread else "; prices as they are, as pricing.spread does not say how far they may be off"
    return [
        "all in memory: the cheapest fleet that has every row in DDR or HBM; its drives hold files only",
        "tiered: the cheapest fleet of all, so it never costs more",
        f"more rows: {growing}; the dense model and the target stay",
        f"ranges: {ranges}{exact}",
        f"a month: parts over {pricing.years:g} years, and power at ${pricing.usd_per_kwh:g} a kWh times "
        f"{pricing.pue:g} for the building; no people, racks, switches or spares",
    ]
