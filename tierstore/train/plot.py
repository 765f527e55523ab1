"""Lines over steps, or rows, as SVG, which any browser draws without a script."""

import html
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_WIDTH: Final = 440
_HEIGHT: Final = 240
_LEFT: Final = 58
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 42
_TICKS: Final = 5


class Step(NamedTuple):
    """A value over a range of steps, the first and the last of them included."""

    first: int
    last: int
    value: float


class Line(NamedTuple):
    """``tone`` is a CSS class of the page, which gives its colour and dashes; ``steps`` are one after the other."""

    name: str
    tone: str
    steps: Sequence[Step]


class _Axis(NamedTuple):
    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        return round(self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1)


def ticks(low: float, high: float) -> list[float]:
    """Two to seven multiples of 1, 2 or 5 times a power of ten, evenly apart, around ``low`` and ``high``."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > max(1e-6 * size, 1e-9) else max(size, 1.0)
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power * _TICKS >= span)
    first = math.floor(low / unit)
    return [unit * index for index in range(first, max(math.ceil(high / unit), first + 1) + 1)]


def draw(lines: Sequence[Line], *, title: str, unit: str, low: float | None = None, over: str = "step") -> str:
    """One picture of lines, one of which has steps; ``low`` is where the axis begins, by default near the least
    value."""
    every = [step for line in lines for step in line.steps]
    values = [step.value for step in every]
    y_ticks = ticks(min(values) if low is None else low, max(values))
    first, last = min(step.first for step in every), max(step.last for step in every)
    x_ticks = [tick for tick in ticks(first, last) if tick == int(tick) and first - 1 <= tick <= last]
    x = _Axis(first - 1, last, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        *(
            f'<path class="grid" d="M{x.begin} {y.place(tick)}H{x.end}"/>'
            f'<text class="y" x="{_LEFT - 6}" y="{y.place(tick) + 4}">{tick:,.6g}</text>'
            for tick in y_ticks
        ),
        *(f'<text class="x" x="{x.place(tick)}" y="{_HEIGHT - _BOTTOM + 18}">{tick:,.0f}</text>' for tick in x_ticks),
        f'<text class="x" x="{(x.begin + x.end) / 2}" y="{_HEIGHT - 4}">{over}</text>',
        f'<text class="x" transform="translate(12 {(y.begin + y.end) / 2}) rotate(-90)">{html.escape(unit)}</text>',
        *(_polyline(line, x, y) for line in lines),
        *_hovers(lines, x, y, unit, over),
        "</svg>",
    ]
    return "\n".join(parts)


def _polyline(line: Line, x: _Axis, y: _Axis) -> str:
    """A value stands in the middle of its steps."""
    points = " ".join(f"{x.place((each.first - 1 + each.last) / 2)},{y.place(each.value)}" for each in line.steps)
    return f'<polyline class="{line.tone}" points="{points}"/>'


def _hovers(lines: Sequence[Line], x: _Axis, y: _Axis, unit: str, over: str) -> list[str]:
    """Strips that tell the values of their steps when pointed at."""
    told: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        for each in line.steps:
            told.setdefault(each[:2], []).append(f"{line.name}: {each.value:,.4g} {unit}")
    strips = []
    for (first, last), texts in told.items():
        place, text = x.place(first - 1), html.escape("\n".join([_steps(first, last, over), *texts]))
        strips.append(
            f'<rect class="hover" x="{place}" y="{y.end}" width="{x.place(last) - place:.1f}" '
            f'height="{y.begin - y.end}"><title>{text}</title></rect>'
        )
    return strips


def _steps(first: int, last: int, over: str) -> str:
    return f"{over} {last:,}" if first == last else f"{over}s {first:,} - {last:,}"
