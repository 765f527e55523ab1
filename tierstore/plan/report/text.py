"""A plan for the terminal: plain text, 100 columns."""

import textwrap
from typing import Final

from ...system.terminal import columns_of
from ..result import PlanResult
from .sections import sections_of

_WIDTH: Final = 100
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def describe(result: PlanResult, *, colours: bool = False) -> str:
    """What was asked, the answer, and what supports it.

    Args:
        colours: mark headings for a terminal.
    """
    lines: list[str] = []
    for each in sections_of(result):
        table = columns_of(each.table, is_last_text=each.is_text_last) if each.table else []
        lines.append(f"{_BOLD}{each.title}{_PLAIN}" if colours else each.title)
        lines += [shown for line in (*table, *each.lines) for shown in _wrapped(line)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _wrapped(line: str) -> list[str]:
    if len(line) <= _WIDTH - 2:
        return [f"  {line}".rstrip()]
    begins = len(line) - len(line.lstrip())
    indent = " " * (begins + (4 if line.lstrip().startswith(("- ", "! ")) else 2))
    return textwrap.wrap(line.lstrip(), _WIDTH, initial_indent=" " * (begins + 2), subsequent_indent=indent)
