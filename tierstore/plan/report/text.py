"""A plan for the terminal, plain text of 100 columns; and as one page of HTML without a script, which loads nothing."""

import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from ...settings.sections import to_toml
from ...system.terminal import columns_of
from ...train.page import Line, Step, draw
from ..planning import PlanResult, ShownCurve
from .sections import named, sections_of

__all__ = ["describe", "page_of"]

_WIDTH: Final = 100
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_POINTS: Final = 120
_SCALES: Final = ((1_000_000, "million row"), (1000, "thousand row"), (1, "row"))
_LEAST: Final = 1000
"""Of rows in what they are counted in."""
_MARKED: Final = {"Answer": "answer", "Warnings": "warnings"}
"""Classes of sections that stand out."""


def describe(result: PlanResult, *, colours: bool = False) -> str:
    """What was asked, the answer, and what supports it."""
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


def page_of(result: PlanResult) -> str:
    """The page, in UTF-8 some 40 KB."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return page.get_template("page.html").render(
        title=f"{named(result.prediction.setup.workload.name)}: a plan",
        sections=sections_of(result),
        marked=_MARKED,
        pictures=[(named(each.name), _picture(each)) for each in result.curves],
        plan_file=to_toml(result.asked),
    )


def _picture(shown: ShownCurve) -> str:
    """The curve, and a line up to it where the plan is."""
    curve = shown.curve
    top = max(int(curve.sizes[-1]), _POINTS)
    scale, over = next((each for each in _SCALES if top >= _LEAST * each[0]), _SCALES[-1])

    def percent(rows: float) -> float:
        return 100 * curve.miss_ratio(max(1.0, scale * rows))

    ends = np.linspace(0, top // scale, _POINTS + 1).astype(int).tolist()
    steps = [Step(before + 1, end, percent((before + end) / 2)) for before, end in pairwise(ends)]
    rows = round(min(max(shown.chosen_rows / scale, 1), ends[-1]))
    plan = [Step(rows, rows, value) for value in (0.0, percent(rows))]
    lines = [Line("missed", "c1", steps), Line("this plan", "mark", plan)]
    return draw(lines, title="missed, %", unit="%", low=0, over=over)
