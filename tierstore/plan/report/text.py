"""A plan for the terminal: plain text, 100 columns."""

import textwrap
from typing import Final

from ...system.terminal import columns_of
from ..result import PlanResult
from .tables import RULE, load_lines, loads_table, marginals_table, price_table, tiers_table
from .words import (
    answer,
    asked,
    gain_lines,
    if_off,
    money,
    named_words,
    resource,
    significant,
    speed,
    summary_of,
    targets,
)

_WIDTH: Final = 100
_BAR: Final = 20
_SHOWN: Final = 20
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def describe(result: PlanResult, *, colours: bool = False) -> str:
    """What was asked, the answer, and what supports it.

    Args:
        colours: mark headings and the answer for a terminal.
    """
    setup, target = result.prediction.setup, targets(result.asked)
    step = "step" if setup.workload.is_training else "query"
    tiers = tiers_table(result)
    sections: list[tuple[str, list[str]]] = [
        ("Asked", [asked(setup.workload, ", ".join(result.hosts)), *([f"target: {target}"] if target else [])]),
        ("Assumed, as nobody said it", _assumed(result)),
        ("Answer", [answer(result)]),
        ("Warnings", [f"! {named_words(text)}" for text in result.warnings]),
        (f"Tiers of a host, in one {step}", columns_of([tiers.columns, *tiers.rows], is_last_text=False)),
        (f"Time of a {step}", _loads(result)),
        ("Beside all rows in memory", gain_lines(result)),
        ("What more of one resource would bring", _marginals(result)),
        ("Next best, and what fails", _alternatives(result)),
        ("Price", _price(result)),
        ("Drives", _wear(result)),
        ("Figures come from", [f"- {named_words(text)}" for text in result.sources]),
        ("Not modelled", [f"- {text}" for text in result.prediction.not_modelled]),
    ]
    lines: list[str] = []
    for title, body in sections:
        if body:
            lines += [f"{_BOLD}{title}{_PLAIN}" if colours else title]
            lines += [shown for line in body for shown in _wrapped(line)]
            lines.append("")
    return "\n".join(lines).rstrip()


def _wrapped(line: str) -> list[str]:
    if len(line) <= _WIDTH - 2:
        return [f"  {line}".rstrip()]
    begins = len(line) - len(line.lstrip())
    indent = " " * (begins + (4 if line.lstrip().startswith(("- ", "! ")) else 2))
    return textwrap.wrap(line.lstrip(), _WIDTH, initial_indent=" " * (begins + 2), subsequent_indent=indent)


def _loads(result: PlanResult) -> list[str]:
    """With bars; the bottleneck is marked, and how it is told."""
    lines, rows = load_lines(result), []
    for line, row in zip(lines, loads_table(result).rows, strict=True):
        bar = ("-" if line.is_part else "#") * round(_BAR * line.seconds / lines[0].seconds)
        rows.append((*row, bar.ljust(_BAR) + (" <- bottleneck" if line.is_bottleneck else "")))
    return [*columns_of(rows), RULE] if rows else []


def _assumed(result: PlanResult) -> list[str]:
    """Each with what the answer becomes if it is off, and how to say it."""
    lines = []
    for each in result.assumptions:
        lines.append(f"- {named_words(each.text)}; or give {each.instead}")
        lines += [f"  - if it is {found.factor:g} times that, {if_off(result, found)}" for found in each.what_if]
    return lines


def _marginals(result: PlanResult) -> list[str]:
    """Those that bring something, the most first; of the others the names."""
    table = marginals_table(result)
    rest = [resource(gain.resource) for gain in result.marginals[len(table.rows) :]]
    lines = columns_of([table.columns, *table.rows], is_last_text=False) if table.rows else []
    return [*lines, f"nothing: {', '.join(rest)}"] if rest else lines


def _alternatives(result: PlanResult) -> list[str]:
    lines = []
    for each in result.alternatives[:_SHOWN]:
        found = each.prediction
        known = "" if found is None else f": {speed(found)}; {money(found.price.usd_a_month)} a month"
        reason = f"; fails: {named_words(each.reason)}" if each.reason else ""
        lines.append(f"- {summary_of(each.setup)}{known}{reason}")
    more = len(result.alternatives) - _SHOWN
    return [*lines, f"- and {more:,} more"] if more > 0 else lines


def _price(result: PlanResult) -> list[str]:
    table, pricing = price_table(result), result.asked.pricing
    terms = f"bought over {pricing.years:g} years, with power at ${pricing.usd_per_kwh:g} a kWh"
    month = f"{money(result.prediction.price.usd_a_month)} a month, {terms}"
    return [*columns_of([table.columns, *table.rows], is_last_text=False), month]


def _wear(result: PlanResult) -> list[str]:
    drives, written = result.prediction.setup.host.storage, result.prediction.drive_writes_a_day
    if not drives or not written:
        return []
    rated = min(drive.drive_writes_a_day for drive in drives)
    return [f"each is written {significant(written)} times a day; it is rated for {significant(rated)}"]
