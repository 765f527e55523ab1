"""A plan as one page of HTML without a script: text, tables and two pictures. It asks nothing of a network."""

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...settings.sections import to_toml
from ...system.sizes import format_size
from ..result import PlanResult
from . import tables, words

_POINTS: Final = 120
_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 10, 40
_MAX_TICKS: Final = 6
_DOT: Final = 5


class Point(NamedTuple):
    x: float
    y: float


class Line(NamedTuple):
    """Attributes:
    points: by x, ascending, more than 0.
    mark: where the plan is.
    """

    name: str
    points: Sequence[Point]
    mark: Point


class Axes(NamedTuple):
    """Attributes:
    base: of the logarithmic x axis, whose ticks are its powers.
    x_text, y_text: of a tick.
    most: where the y axis ends; it begins at 0.
    """

    x_title: str
    y_title: str
    base: float
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    most: float


def page_of(result: PlanResult) -> str:
    """The page, in UTF-8 some 40 KB."""
    import jinja2

    tiers = [tier for tier in result.prediction.tiers if tier.tier in ("hbm", "ddr")]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page.filters |= {each: getattr(words, each) for each in words.__all__}
    return page.get_template("page.html").render(
        result=result,
        prediction=result.prediction,
        say=words,
        in_memory=1 - math.prod(1 - tier.hit_rate for tier in tiers),
        loads=tables.load_lines(result),
        rule=tables.RULE,
        tables=tables.tables_of(result),
        pictures=_pictures(result),
        plan_file=to_toml(result.asked),
    )


def _pictures(result: PlanResult) -> dict[str, str]:
    """SVG by title."""
    found = {"How often memory misses a row, by how many it has; each row counts once a batch": _curves(result)}
    if len(result.memory) > 1:
        found["Samples a second, by DDR for rows of a host; all else stays"] = _memory(result)
    return found


def _curves(result: PlanResult) -> str:
    lines = []
    for each in result.curves:
        curve = each.curve
        sizes = np.unique(np.geomspace(curve.sizes[0], max(curve.sizes[-1], 2), _POINTS).astype(np.int64))
        points = [Point(float(size), 100 * curve.miss_ratio(float(size))) for size in sizes]
        mark = min(max(each.chosen_rows, points[0].x), points[-1].x)
        lines.append(Line(each.name, points, Point(mark, 100 * curve.miss_ratio(mark))))
    axes = Axes("rows in memory", "missed, %", 10.0, words.count, lambda value: f"{value:g}", 100.0)
    return svg(lines, axes)


def _memory(result: PlanResult) -> str:
    points = [Point(each.ddr_bytes, each.samples_per_s) for each in result.memory]
    mark = Point(result.prediction.setup.ddr_bytes, result.prediction.samples_per_s)
    most = max(point.y for point in points)
    axes = Axes("DDR for rows, of a host", "samples/s", 2.0, lambda size: format_size(size), words.count, most)
    return svg([Line("samples/s", points, mark)], axes)


def svg(lines: Sequence[Line], axes: Axes) -> str:
    """One picture, x on a scale of logarithms; a line's name and value are told when its mark is pointed at."""
    every = [point.x for line in lines for point in line.points]
    low, high = math.log(min(every)), math.log(max(every))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + (math.log(value) - low) / (high - low or 1.0) * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - value / (axes.most or 1.0) * (bottom - _TOP), 1)

    first, last = (math.log(end) / math.log(axes.base) for end in (min(every), max(every)))
    step = max(1, math.ceil((last - first) / _MAX_TICKS))
    x_ticks = [axes.base**power for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1, step)]
    y_ticks = [axes.most * part / 4 for part in range(5)]
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(axes.y_title)}">']
    parts += [
        f'<path class="grid" d="M{_LEFT} {y(tick)}H{right}"/>'
        f'<text class="y" x="{_LEFT - 6}" y="{y(tick) + 4}">{html.escape(axes.y_text(tick))}</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<text class="x" x="{x(tick)}" y="{bottom + 16}">{html.escape(axes.x_text(tick))}</text>' for tick in x_ticks
    ]
    parts.append(f'<text class="x" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}">{html.escape(axes.x_title)}</text>')
    turned = f'transform="translate(12 {(_TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f'<text class="x" {turned}>{html.escape(axes.y_title)}</text>')
    for number, line in enumerate(lines):
        drawn = " ".join(f"{x(point.x)},{y(point.y)}" for point in line.points)
        name = html.escape(f"{words.named(line.name)}: {axes.x_text(line.mark.x)}, {axes.y_text(line.mark.y)}")
        parts.append(f'<polyline class="c{number % 4 + 1}" points="{drawn}"/>')
        parts.append(
            f'<circle cx="{x(line.mark.x)}" cy="{y(line.mark.y)}" r="{_DOT}"><title>this plan; {name}</title></circle>'
        )
    return "\n".join([*parts, "</svg>"])
