"""Pages of HTML that load nothing from a network: a table, and plots, as of runs of the trainer over their steps."""

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

from .summary import figures_of

_WIDTH: Final = 440
_HEIGHT: Final = 240
_LEFT: Final = 58
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 42
_TICKS: Final = 5


class Step(NamedTuple):
    """A value over steps from ``first`` to ``last``; ``band``: the least and the most that it was there."""

    first: int
    last: int
    value: float
    band: tuple[float, float] | None = None


class Line(NamedTuple):
    """``tone``: a CSS class of the page, which gives its colour; ``steps``: in order, all with a band or none."""

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


def draw(
    lines: Sequence[Line],
    *,
    title: str,
    unit: str,
    low: float | None = None,
    over: str = "step",
    labels: Sequence[str] = (),
) -> str:
    """A picture of lines, at least one of which has steps. ``low``: where the axis begins, by default near the least
    value; ``labels``: of steps from 1 on, in place of their numbers."""
    every = [step for line in lines for step in line.steps]
    values = [value for step in every for value in (step.value, *(step.band or ()))]
    y_ticks = ticks(min(values) if low is None else low, max(values))
    first, last = min(step.first for step in every), max(step.last for step in every)
    x_ticks = [(tick, f"{tick:,.0f}") for tick in ticks(first, last) if tick == int(tick) and first - 1 <= tick <= last]
    if labels:
        x_ticks = [(number + 0.5, label) for number, label in enumerate(labels)]
    x = _Axis(first - 1, last, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        *(
            f'<path class="grid" d="M{x.begin} {y.place(tick)}H{x.end}"/>'
            f'<text class="y" x="{_LEFT - 6}" y="{y.place(tick) + 4}">{tick:,.6g}</text>'
            for tick in y_ticks
        ),
        *(
            f'<text class="x" x="{x.place(tick)}" y="{_HEIGHT - _BOTTOM + 18}">{html.escape(label)}</text>'
            for tick, label in x_ticks
        ),
        f'<text class="x" x="{(x.begin + x.end) / 2}" y="{_HEIGHT - 4}">{html.escape(over)}</text>',
        f'<text class="x" transform="translate(12 {(y.begin + y.end) / 2}) rotate(-90)">{html.escape(unit)}</text>',
        *(_band(line, x, y) for line in lines if line.steps and line.steps[0].band),
        *(_polyline(line, x, y) for line in lines),
        *_hovers(lines, x, y, unit, over, labels),
        "</svg>",
    ]
    return "\n".join(parts)


def _band(line: Line, x: _Axis, y: _Axis) -> str:
    middles = [x.place((each.first - 1 + each.last) / 2) for each in line.steps]
    lows, highs = zip(*(each.band or () for each in line.steps), strict=True)
    there = [f"{middle},{y.place(value)}" for middle, value in zip(middles, lows, strict=True)]
    back = [f"{middle},{y.place(value)}" for middle, value in zip(middles, highs, strict=True)]
    return f'<polygon class="{line.tone} band" points="{" ".join(there + back[::-1])}"/>'


def _polyline(line: Line, x: _Axis, y: _Axis) -> str:
    """A value stands in the middle of its steps."""
    points = " ".join(f"{x.place((each.first - 1 + each.last) / 2)},{y.place(each.value)}" for each in line.steps)
    return f'<polyline class="{line.tone}" points="{points}"/>'


def _hovers(lines: Sequence[Line], x: _Axis, y: _Axis, unit: str, over: str, labels: Sequence[str]) -> list[str]:
    """Strips that show the values of their steps when pointed at."""
    values: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        for each in line.steps:
            values.setdefault(each[:2], []).append(f"{line.name}: {each.value:,.4g} {unit}")
    strips = []
    for (first, last), texts in values.items():
        steps = f"{over} {last:,}" if first == last else f"{over}s {first:,} - {last:,}"
        head = f"{over} {labels[last - 1]}" if labels else steps
        place, text = x.place(first - 1), html.escape("\n".join([head, *texts]))
        strips.append(
            f'<rect class="hover" x="{place}" y="{y.end}" width="{x.place(last) - place:.1f}" '
            f'height="{y.begin - y.end}"><title>{text}</title></rect>'
        )
    return strips


def figure(title: str, lines: Sequence[Line], **look: Any) -> list[str]:
    """A picture, of that look for ``draw``, with its title and key; none if no line has a step."""
    if not any(line.steps for line in lines):
        return []
    keys = "".join(
        '<span class="key"><svg viewBox="0 0 24 8" aria-hidden="true">'
        f'<path class="{line.tone}" stroke-width="3" d="M0 4H24"/></svg>{html.escape(line.name)}</span>'
        for line in lines
    )
    picture = draw(lines, title=title, **look)
    return [f'<figure class="panel"><h2>{html.escape(title)}</h2>{picture}<figcaption>{keys}</figcaption></figure>']


def filled(title: str, notes: Sequence[str], table: Sequence[Sequence[str]], plots: Sequence[str]) -> str:
    """The page of a table, whose first row and column are its heads, and of figures."""
    (_, *names), *rows = [[html.escape(text.strip()) for text in row] for row in table]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
        names="".join(f'<th scope="col">{name}</th>' for name in names),
        rows="\n".join(
            f'<tr><th scope="row">{label}</th>{"".join(f"<td>{text}</td>" for text in texts)}</tr>'
            for label, *texts in rows
        ),
        plots="\n".join(plots),
    )


Run = dict[str, Any]
"""``Summary.to_dict()``, or what was read from its JSON."""


class _Rate(NamedTuple):
    """A plot of one running total of a history by another."""

    title: str
    unit: str
    total: str
    by: str
    times: float
    low: float | None = 0


_RATES: Final = (
    _Rate("Loss, mean of the steps", "log loss", "loss_sum", "step", 1, None),
    _Rate("Hit rate of the HBM tier", "%", "hbm_hits", "hbm_unique", 100),
    _Rate("Hit rate of the DDR tier", "%", "ddr_hits", "ddr_unique", 100),
    _Rate("Read from SSD: rows not in memory, fetched ahead", "KiB a step", "bytes_read", "step", 2**-10),
    _Rate("Written to SSD: rows evicted, and commits", "KiB a step", "bytes_written", "step", 2**-10),
)


def page_of(title: str, runs: Mapping[str, Run], *, notes: Sequence[str] = ()) -> str:
    """The page, some 100 KB, of one or two runs by their names; ``notes`` stand below the title."""
    described = [
        f"{name}: {run['step'] - run['history'][0]['step']:,} steps, to step {run['step']:,}, model on {run['device']}"
        f"{', interrupted' if run['interrupted'] else ''}."
        for name, run in runs.items()
    ]
    plots = [part for each in _RATES for part in figure(each.title, _lines(runs, each), unit=each.unit, low=each.low)]
    return filled(title, [*notes, *described], table_of(runs), plots)


def table_of(runs: Mapping[str, Run]) -> list[list[str]]:
    """The runs' figures side by side, below their names."""
    figures = [figures_of(run) for run in runs.values()]
    labels = dict.fromkeys(label for each in figures for label in each)
    return [["", *runs], *([label, *(each.get(label, "") for each in figures)] for label in labels)]


def _lines(runs: Mapping[str, Run], rate: _Rate) -> list[Line]:
    """One for each run, of each two neighbours of its history between which there is such a rate."""
    lines = []
    for tone, (name, run) in zip(("c1", "c2"), runs.items(), strict=False):
        steps = []
        for a, b in pairwise(run["history"]):
            by = b[rate.by] - a[rate.by]
            if by and None not in (a[rate.total], b[rate.total]):
                steps.append(Step(a["step"] + 1, b["step"], rate.times * (b[rate.total] - a[rate.total]) / by))
        lines.append(Line(name, tone, steps))
    return lines
