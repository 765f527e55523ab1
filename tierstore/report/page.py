"""Sections as text of 100 columns for a terminal, and as one page of HTML that has no script and loads nothing."""

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Final, NamedTuple

from ..system.terminal import columns_of

_BASE_STYLE: Final = Path(__file__).with_name("base.css").read_text(encoding="utf-8")
"""Of every page: colours of the light and the dark theme, and fonts."""
_COLUMNS: Final = 100
_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 408, 10, 198  # of the plot in its picture
_TICKS: Final = 5


class Section(NamedTuple):
    """A table of texts, its columns first, and sentences below it; not escaped. ``is_text_last``: its last column.
    ``picture``: SVG, of the page."""

    title: str
    lines: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    is_text_last: bool = False
    picture: str = ""


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


def text_of(sections: Sequence[Section]) -> str:
    """Lines for a terminal: of each section the title, the table, the sentences."""
    lines: list[str] = []
    for each in sections:
        table = columns_of(each.table, is_last_text=each.is_text_last) if each.table else []
        lines.append(each.title)
        for line in (*table, *each.lines):
            words = line.lstrip()
            begin = 2 + len(line) - len(words)
            hanging = " " * (begin + 2 if words.startswith(("- ", "! ")) else begin)
            wrapped = textwrap.wrap(words, _COLUMNS, initial_indent=" " * begin, subsequent_indent=hanging)
            lines += wrapped if len(line) > _COLUMNS - 2 else [f"  {line}".rstrip()]
        lines.append("")
    return "\n".join(lines).rstrip()


def page_of(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        style=_BASE_STYLE,
        sections="\n".join("\n".join(_parts(each)) for each in sections),
    )


def _parts(section: Section) -> Iterator[str]:
    kind = "plot" if section.picture else section.title.partition(" ")[0].lower()
    yield f'<section class="panel {html.escape(kind)}">'
    if section.title:
        yield f"<h2>{html.escape(section.title)}</h2>"
    yield section.picture
    for number, row in enumerate(section.table):
        first, *others = map(html.escape, row)
        if not number:
            yield f'<div class="scroll"><table{" class=text" if section.is_text_last else ""}><thead>'
        kinds = ("col", 'th scope="col"', "th") if not number else ("row", "td", "td")
        cells = "".join(f"<{kinds[1]}>{cell}</{kinds[2]}>" for cell in others)
        yield f'<tr><th scope="{kinds[0]}">{first}</th>{cells}</tr>'
        if not number:
            yield "</thead><tbody>"
    if section.table:
        yield "</tbody></table></div>"
    yield from (f"<p>{html.escape(line)}</p>" for line in section.lines)
    yield "</section>"


def ticks(low: float, high: float) -> list[float]:
    """Two to seven multiples of 1, 2 or 5 times a power of ten, evenly apart, around ``low`` and ``high``."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > max(1e-6 * size, 1e-9) else max(size, 1.0)
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power * _TICKS >= span)
    first = math.floor(low / unit)
    return [unit * index for index in range(first, max(math.ceil(high / unit), first + 1) + 1)]


def figure(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str,
    low: float | None = None,
    over: str = "step",
    labels: Sequence[str] = (),
) -> list[Section]:
    """A section with a plot of lines and its key; none if no line has a step.

    Args:
        low: where the axis of values begins, by default near the least.
        over: what steps are.
        labels: of steps from 1 on, in place of their numbers.
    """
    every = [step for line in lines for step in line.steps]
    if not every:
        return []
    values = [value for step in every for value in (step.value, *(step.band or ()))]
    y_ticks = ticks(min(values) if low is None else low, max(values))
    first, last = min(step.first for step in every) - 1, max(step.last for step in every)
    x_ticks = [(tick, f"{tick:,.0f}") for tick in ticks(first + 1, last) if tick == int(tick) and first <= tick <= last]
    if labels:
        x_ticks = [(number + 0.5, label) for number, label in enumerate(labels)]

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT), 1)

    def y(value: float) -> float:
        return round(_BOTTOM + (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_TOP - _BOTTOM), 1)

    def points(line: Line, values: Sequence[float]) -> list[str]:
        """A value stands in the middle of its steps."""
        return [f"{x((a.first - 1 + a.last) / 2)},{y(value)}" for a, value in zip(line.steps, values, strict=True)]

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{_RIGHT}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y(tick) + 4}">{tick:,.6g}</text>')
    parts += [f'<text class="x" x="{x(at)}" y="{_BOTTOM + 18}">{html.escape(label)}</text>' for at, label in x_ticks]
    parts.append(f'<text class="x" x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 4}">{html.escape(over)}</text>')
    turned = f"translate(14 {(_BOTTOM + _TOP) / 2}) rotate(-90)"
    parts.append(f'<text class="x" transform="{turned}">{html.escape(unit)}</text>')
    for line in lines:
        if bands := [each.band for each in line.steps if each.band]:
            lows, highs = zip(*bands, strict=True)
            outline = " ".join(points(line, lows) + points(line, highs)[::-1])
            parts.append(f'<polygon class="{line.tone} band" points="{outline}"/>')
    for line in lines:
        middle = " ".join(points(line, [each.value for each in line.steps]))
        parts.append(f'<polyline class="{line.tone}" points="{middle}"/>')
    for (begin, end), text in _pointed_at(lines, unit, over, labels):
        place = f'x="{x(begin - 1)}" y="{_TOP}" width="{x(end) - x(begin - 1):.1f}" height="{_BOTTOM - _TOP}"'
        parts.append(f'<rect class="hover" {place}><title>{html.escape(text)}</title></rect>')
    key = "".join(
        '<span class="key"><svg viewBox="0 0 24 8" aria-hidden="true">'
        f'<path class="{line.tone}" stroke-width="3" d="M0 4H24"/></svg>{html.escape(line.name)}</span>'
        for line in lines
        if line.name
    )
    picture = "\n".join(["<figure>", *parts, f"</svg><figcaption>{key}</figcaption></figure>"])
    return [Section(title, picture=picture)]


def _pointed_at(
    lines: Sequence[Line], unit: str, over: str, labels: Sequence[str]
) -> Iterator[tuple[tuple[int, int], str]]:
    """Steps, and the values that lines have there, which a strip over them shows when pointed at."""
    values: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        for each in line.steps:
            values.setdefault(each[:2], []).append(f"{line.name}: {each.value:,.4g} {unit}")
    for (first, last), texts in values.items():
        steps = f"{over} {last:,}" if first == last else f"{over}s {first:,} - {last:,}"
        yield (first, last), "\n".join([f"{over} {labels[last - 1]}" if labels else steps, *texts])
