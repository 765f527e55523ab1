"""A plan for the terminal: plain text, 100 columns."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from ...system.sizes import format_size
from ..result import PlanResult
from .sentences import answer, asked, speed, summary_of, targets
from .words import count, duration, money, named, named_words, quantity, resource, share, significant, watts

__all__ = ["describe"]

_WIDTH: Final = 100
_BAR: Final = 28
_SHOWN: Final = 20
_NEGLIGIBLE: Final = 1e-4
"""Of the samples a second: a gain of less is nothing."""
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def describe(result: PlanResult, *, colours: bool = False) -> str:
    """What was asked, the answer, and what supports it.

    Args:
        colours: mark headings and the answer for a terminal.
    """
    sections: list[tuple[str, list[str]]] = [
        ("Asked", [asked(result), *([f"target: {targets(result)}"] if targets(result) else [])]),
        ("Answer", [answer(result)]),
        ("Warnings", [f"! {named_words(text)}" for text in result.warnings]),
        ("Tiers of a host, in one step" if _trains(result) else "Tiers of a host, in one query", _tiers(result)),
        ("Time, were all else infinitely fast", _loads(result)),
        ("What more would bring", _gains(result)),
        ("Next best, and what fails", _alternatives(result)),
        ("Where tables could lie", _placements(result)),
        ("Price", _price(result)),
        ("Drives", _wear(result)),
        ("Figures come from", [f"- {named_words(text)}" for text in result.assumptions]),
        ("Not modelled", [f"- {text}" for text in result.prediction.not_modelled]),
    ]
    lines: list[str] = []
    for title, body in sections:
        if body:
            lines += [f"{_BOLD}{title}{_PLAIN}" if colours else title, *_wrapped(body), ""]
    return "\n".join(lines).rstrip()


def _trains(result: PlanResult) -> bool:
    return result.prediction.setup.workload.is_training


def _wrapped(lines: Iterable[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        indent = "    " if line.startswith(("- ", "! ")) else "  "
        found += (
            [f"  {line}".rstrip()]
            if len(line) <= _WIDTH - 2
            else textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent=indent)
        )
    return found


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _tiers(result: PlanResult) -> list[str]:
    rows = [("tier", "capacity", "rows", "lookups", "hit rate")]
    for tier in result.prediction.tiers:
        capacity = format_size(tier.capacity_bytes)
        rows.append((tier.tier, capacity, count(tier.rows), count(tier.lookups), share(tier.hit_rate, 2)))
    return _columns(rows)


def _loads(result: PlanResult) -> list[str]:
    prediction = result.prediction
    own = prediction.bottleneck
    busy = [load for load in prediction.loads if load.seconds]
    ranked = sorted(busy, key=lambda load: (-load.seconds, load.resource != own))
    rows = []
    for load in ranked:
        bar = "#" * round(_BAR * load.seconds / ranked[0].seconds)
        amount = quantity(load.amount, load.unit)
        rows.append((resource(load.resource), duration(load.seconds), amount, bar.ljust(_BAR)))
    lines = _columns(rows)
    return [
        (line + (" <- bottleneck" if load.resource == own else "")).rstrip()
        for line, load in zip(lines, ranked, strict=True)
    ]


def _gains(result: PlanResult) -> list[str]:
    """Those that bring something, the most first; of the others the names."""
    now = result.prediction.samples_per_s
    ranked = sorted(result.gains, key=lambda gain: -gain.samples_per_s)
    useful = [gain for gain in ranked if gain.samples_per_s > _NEGLIGIBLE * now]
    rows = [("resource", "change", "samples/s", "of now", "USD", "samples/s a USD")]
    for gain in useful:
        usd = "-" if gain.usd is None else money(gain.usd)
        per_usd = significant(gain.samples_per_s / gain.usd) if gain.usd else "-"
        more = share(gain.samples_per_s / now, 2)
        name = resource(gain.resource)
        rows.append((name, gain.change, f"+{count(gain.samples_per_s)}", f"+{more}", usd, per_usd))
    useless = dict.fromkeys(gain.resource for gain in ranked if gain not in useful)
    rest = [resource(name) for name in useless if name not in {gain.resource for gain in useful}]
    lines = _columns(rows) if useful else []
    return [*lines, f"nothing: {', '.join(rest)}"] if rest else lines


def _alternatives(result: PlanResult) -> list[str]:
    lines = []
    for each in result.alternatives[:_SHOWN]:
        found = each.prediction
        known = "" if found is None else f": {speed(found)}; {money(found.price.usd)}"
        lines.append(
            f"- {summary_of(each.setup)}{known}{f'; fails: {named_words(each.reason)}' if each.reason else ''}"
        )
    more = len(result.alternatives) - _SHOWN
    return [*lines, f"- and {more:,} more"] if more > 0 else lines


def _placements(result: PlanResult) -> list[str]:
    rows = [
        (
            each.strategy,
            duration(each.step_s) if not each.note else "-",
            each.note or f"bound by {resource(each.bottleneck)}",
        )
        for each in result.placements
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)] if rows else [0, 0]
    return [f"{name.ljust(widths[0])}  {step.rjust(widths[1])}  {named_words(note)}" for name, step, note in rows]


def _price(result: PlanResult) -> list[str]:
    price = result.prediction.price
    rows = [("part", "count", "USD", "power")]
    rows += [(named(part.name), f"{part.number:,}", money(part.usd), watts(part.watts)) for part in result.price_parts]
    rows.append(("all", "", money(price.usd), watts(price.watts)))
    pricing = result.asked.pricing
    terms = f"bought over {pricing.years:g} years, with power at ${pricing.usd_per_kwh:g} a kWh"
    return [*_columns(rows), f"{money(price.usd_a_month)} a month, {terms}"]


def _wear(result: PlanResult) -> list[str]:
    drives = result.prediction.setup.host.storage
    if not drives or not result.prediction.drive_writes_a_day:
        return []
    rated = min(drive.drive_writes_a_day for drive in drives)
    written = result.prediction.drive_writes_a_day
    return [f"each is written {significant(written)} times a day; it is rated for {significant(rated)}"]
