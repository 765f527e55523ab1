"""What tiers would save: text for the terminal, and one page of HTML without a script."""

from ...system.terminal import columns_of
from ..gain import Gain
from . import gain_words
from .figure import Table
from .page import template
from .text import laid_out

__all__ = ["describe_gain", "gain_page_of"]


def describe_gain(found: Gain, *, colours: bool = False) -> str:
    """What was asked, what is saved, and what that supports; 100 columns.

    Args:
        colours: mark headings for a terminal.
    """
    lines, cases = gain_words.lines_of(found), gain_words.cases_table(found)
    table, machines = [("fleet", "a month", "power")], list[str]()
    for line in lines:
        if line.rows:
            table.append((line.rows, "", ""))
            machines.append(line.rows)
        table.append((f"  {line.name}", line.month, line.power))
        machines += [f"- {line.name}: {line.machines}"] if line.machines else []
    return laid_out(
        [
            ("Asked", gain_words.asked_lines(found)),
            ("What tiers would save", [gain_words.headline(found)]),
            ("Cheapest fleets, and their range", columns_of(table)),
            ("Their machines", machines),
            ("Saved a month, if an input is off", _columns(cases) if cases.rows else []),
            ("How they are compared", [f"- {text}" for text in gain_words.notes(found)]),
        ],
        colours=colours,
    )


def _columns(table: Table) -> list[str]:
    return columns_of([table.columns, *table.rows], is_last_text=False)


def gain_page_of(found: Gain) -> str:
    """The page, in UTF-8 some 15 KB; it asks nothing of a network."""
    lines = gain_words.lines_of(found)
    return template("gain.html").render(
        found=found,
        say=gain_words,
        lines=lines,
        most=max(line.span.high for line in lines if line.span is not None),
        cases=gain_words.cases_table(found),
    )
