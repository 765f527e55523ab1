"""A plan as one page of HTML without a script: the sections, and the miss-ratio curves. It loads nothing."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...settings.sections import to_toml
from ..result import PlanResult
from .sections import sections_of
from .words import count, named

_POINTS: Final = 120
_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 10, 40
_MAX_TICKS: Final = 6
_DOT: Final = 5
_MARKED: Final = {"Answer": "answer", "Warnings": "warnings"}
"""Classes of sections that stand out."""


class Point(NamedTuple):
    x: float
    y: float


class Line(NamedTuple):
    """``points``: by x, ascending, more than 0; ``mark``: where the plan is."""

    name: str
    points: Sequence[Point]
    mark: Point


def page_of(result: PlanResult) -> str:
    """The page, in UTF-8 some 20 KB."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return page.get_template("page.html").render(
        title=f"{named(result.prediction.setup.workload.name)}: a plan",
        sections=sections_of(result),
        marked=_MARKED,
        picture=_curves(result),
        plan_file=to_toml(result.asked),
    )


def _curves(result: PlanResult) -> str:
    lines = []
    for each in result.curves:
        curve = each.curve
        sizes = np.unique(np.geomspace(curve.sizes[0], max(curve.sizes[-1], 2), _POINTS).astype(np.int64))
        points = [Point(float(size), 100 * curve.miss_ratio(float(size))) for size in sizes]
        mark = min(max(each.chosen_rows, points[0].x), points[-1].x)
        lines.append(Line(each.name, points, Point(mark, 100 * curve.miss_ratio(mark))))
    return svg(lines)


def svg(lines: Sequence[Line]) -> str:
    """Percent over rows on a scale of logarithms; pointing at a line's mark shows its name and value."""
    every = [point.x for line in lines for point in line.points]
    low, high = math.log10(min(every)), math.log10(max(every))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + (math.log10(value) - low) / (high - low or 1.0) * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - value / 100 * (bottom - _TOP), 1)

    def text(kind: str, where: str, content: str) -> str:
        return f'<text class="{kind}" {where}>{html.escape(content)}</text>'

    step = max(1, math.ceil((high - low) / _MAX_TICKS))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="missed, %">']
    for tick in range(0, 101, 25):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{right}"/>')
        parts.append(text("y", f'x="{_LEFT - 6}" y="{y(tick) + 4}"', f"{tick}"))
    ticks = [10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, step)]
    parts += [text("x", f'x="{x(tick)}" y="{bottom + 16}"', count(tick)) for tick in ticks]
    parts.append(text("x", f'x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}"', "rows in memory"))
    parts.append(text("x", f'transform="translate(12 {(_TOP + bottom) / 2}) rotate(-90)"', "missed, %"))
    for number, line in enumerate(lines):
        drawn = " ".join(f"{x(point.x)},{y(point.y)}" for point in line.points)
        name = html.escape(f"{named(line.name)}: {count(line.mark.x)}, {line.mark.y:.3g} %")
        parts.append(f'<polyline class="c{number % 4 + 1}" points="{drawn}"/>')
        dot = f'cx="{x(line.mark.x)}" cy="{y(line.mark.y)}" r="{_DOT}"'
        parts.append(f"<circle {dot}><title>this plan; {name}</title></circle>")
    return "\n".join([*parts, "</svg>"])
