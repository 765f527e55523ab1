"""Runs of the trainer as a page of HTML that asks nothing of a network: a table, and plots over their steps."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

from ..system.sizes import format_size

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
    """``tone`` is a CSS class of the page, which gives its colour and dashes; ``steps`` are one after the other;
    ``band`` is the least and the most at each of them, if it is not empty."""

    name: str
    tone: str
    steps: Sequence[Step]
    band: Sequence[tuple[float, float]] = ()

    @property
    def key(self) -> str:
        """Its stroke and name, for a caption."""
        return (
            '<span class="key"><svg viewBox="0 0 24 8" aria-hidden="true">'
            f'<path class="{self.tone}" stroke-width="3" d="M0 4H24"/></svg>{html.escape(self.name)}</span>'
        )


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
    """One picture of lines, one of which has steps; ``low`` is where the axis begins, by default near the least
    value; ``labels`` name the steps from 1 on, in place of their numbers."""
    every = [step for line in lines for step in line.steps]
    values = [*(step.value for step in every), *(value for line in lines for band in line.band for value in band)]
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
        *(_band(line, x, y) for line in lines if line.band),
        *(_polyline(line, x, y) for line in lines),
        *_hovers(lines, x, y, unit, over, labels),
        "</svg>",
    ]
    return "\n".join(parts)


def _band(line: Line, x: _Axis, y: _Axis) -> str:
    middles = [x.place((each.first - 1 + each.last) / 2) for each in line.steps]
    lows, highs = zip(*line.band, strict=True)
    there = [f"{middle},{y.place(value)}" for middle, value in zip(middles, lows, strict=True)]
    back = [f"{middle},{y.place(value)}" for middle, value in zip(middles, highs, strict=True)]
    return f'<polygon class="{line.tone} band" points="{" ".join(there + back[::-1])}"/>'


def _polyline(line: Line, x: _Axis, y: _Axis) -> str:
    """A value stands in the middle of its steps."""
    points = " ".join(f"{x.place((each.first - 1 + each.last) / 2)},{y.place(each.value)}" for each in line.steps)
    return f'<polyline class="{line.tone}" points="{points}"/>'


def _hovers(lines: Sequence[Line], x: _Axis, y: _Axis, unit: str, over: str, labels: Sequence[str]) -> list[str]:
    """Strips that tell the values of their steps when pointed at."""
    told: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        for each in line.steps:
            told.setdefault(each[:2], []).append(f"{line.name}: {each.value:,.4g} {unit}")
    strips = []
    for (first, last), texts in told.items():
        head = f"{over} {labels[last - 1]}" if labels else _steps(first, last, over)
        place, text = x.place(first - 1), html.escape("\n".join([head, *texts]))
        strips.append(
            f'<rect class="hover" x="{place}" y="{y.end}" width="{x.place(last) - place:.1f}" '
            f'height="{y.begin - y.end}"><title>{text}</title></rect>'
        )
    return strips


def _steps(first: int, last: int, over: str) -> str:
    return f"{over} {last:,}" if first == last else f"{over}s {first:,} - {last:,}"


Run = dict[str, Any]
"""``Summary.to_dict()``, or what was read from its JSON."""
_TONES: Final = ("c1", "c2")
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class Row(NamedTuple):
    """What a figure is called, and its text for each run."""

    label: str
    texts: tuple[str, ...]


def table_of(runs: Sequence[Run]) -> list[Row]:
    """The runs' results; lines that say nothing of any run are left out."""
    texts: list[tuple[str, Callable[[Run], str]]] = [
        ("HBM tier: rows, index", lambda run: _if_hbm(run, format_size(run["tiers"]["hbm"]["bytes"]))),
        ("hit rate of the HBM tier", lambda run: _if_hbm(run, _percent(run["tiers"]["hbm"]["hit_rate"]))),
        ("tier memory: rows, index, staging", lambda run: format_size(run["tiers"]["ddr"]["bytes"])),
        ("whole process, tier included", lambda run: format_size(run["end_bytes"])),
        ("  grown since its first step", lambda run: format_size(max(0, run["end_bytes"] - run["start_bytes"]))),
        ("samples/s", lambda run: f"{run['samples_per_second']:,.0f}"),
        ("seconds", lambda run: f"{run['seconds']:.1f}"),
        ("hit rate of the DDR tier", lambda run: _percent(run["tiers"]["ddr"]["hit_rate"])),
        ("read from SSD", lambda run: format_size(run["tiers"]["ssd"]["bytes_read"])),
        ("written to SSD", lambda run: format_size(run["tiers"]["ssd"]["bytes_written"])),
        ("test AUC", lambda run: _test(run, "auc")),
        ("test log loss", lambda run: _test(run, "log_loss")),
        ("bits (SHA-256)", lambda run: (run["bits"] or "")[:16]),
    ]
    rows = [Row(label, tuple(map(text, runs))) for label, text in texts]
    return [row for row in rows if any(row.texts)]


def _if_hbm(run: Run, text: str) -> str:
    return text if run["tiers"]["hbm"]["capacity_rows"] else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _test(run: Run, name: str) -> str:
    value = (run["test"] or {}).get(name)
    return "" if value is None else f"{value:.6f}"


def page_of(title: str, runs: Mapping[str, Run], *, notes: Sequence[str] = ()) -> str:
    """The page, some 100 KB, of one or two runs by their names; ``notes`` stand below the title."""
    notes = [*notes, *(_describe(name, run) for name, run in runs.items())]
    return filled(title, notes, list(runs), table_of(list(runs.values())), _plots(runs))


def filled(title: str, notes: Sequence[str], names: Sequence[str], table: Sequence[Row], plots: Sequence[str]) -> str:
    """The page of a table, with ``names`` above its columns, and of figures."""
    rows = [
        (html.escape(row.label.strip()), "".join(f"<td>{html.escape(text)}</td>" for text in row.texts))
        for row in table
    ]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
        names="".join(f'<th scope="col">{html.escape(name)}</th>' for name in names),
        rows="\n".join(f'<tr><th scope="row">{label}</th>{cells}</tr>' for label, cells in rows),
        plots="\n".join(plots),
    )


def _describe(name: str, run: Run) -> str:
    history, ranks = run["history"], len(run["ranks"])
    begin = history[0]["step"]
    parts = [
        f"{name}: {run['step'] - begin:,} steps, {run['rows']:,} samples, model on {run['device']}",
        f"continued at step {begin:,}" if begin else "",
        "interrupted" if run["interrupted"] else "",
        f"figures of {ranks} ranks together" if ranks else "",
    ]
    return "; ".join(filter(None, parts)) + "."


def _plots(runs: Mapping[str, Run]) -> list[str]:
    hits = _lines(runs, _hit_rate("ddr"))
    if any(run["tiers"]["hbm"]["capacity_rows"] for run in runs.values()):
        hits = [
            *(line._replace(name=f"{line.name} (DDR)") for line in hits),
            *(
                line._replace(name=f"{line.name} (HBM)", tone=f"{line.tone} dashed")
                for line in _lines(runs, _hit_rate("hbm"))
            ),
        ]
    return [
        *figure("Loss, mean of the steps", _lines(runs, _mean_loss), unit="log loss"),
        *figure("Hit rate", hits, unit="%", low=0),
        *_bytes_figure("Read from SSD: rows not in memory, fetched ahead", runs, "bytes_read"),
        *_bytes_figure("Written to SSD: rows evicted, and commits", runs, "bytes_written"),
    ]


def _mean_loss(before: Run, after: Run) -> float | None:
    if None in (before["loss_sum"], after["loss_sum"]):
        return None
    return float((after["loss_sum"] - before["loss_sum"]) / (after["step"] - before["step"]))


def _hit_rate(tier: str) -> Callable[[Run, Run], float]:
    """Percent, of points; 0 where no rows were asked for."""

    def rate(before: Run, after: Run) -> float:
        hits, rows = (after[f"{tier}_{name}"] - before[f"{tier}_{name}"] for name in ("hits", "unique"))
        return float(100 * hits / max(rows, 1))

    return rate


def _bytes_figure(title: str, runs: Mapping[str, Run], name: str) -> list[str]:
    lines = _lines(runs, lambda before, after: (after[name] - before[name]) / (after["step"] - before["step"]))
    most = max((step.value for line in lines for step in line.steps), default=0)
    unit, size = next((each for each in _UNITS if most >= each[1]), _UNITS[-1])
    lines = [line._replace(steps=[step._replace(value=step.value / size) for step in line.steps]) for line in lines]
    return figure(title, lines, unit=f"{unit} a step", low=0)


def _lines(runs: Mapping[str, Run], value: Callable[[Run, Run], float | None]) -> list[Line]:
    """One for each run, of a value between each two neighbours of its history, where there is one."""
    lines = []
    for tone, (name, run) in zip(_TONES, runs.items(), strict=False):
        steps = [(a["step"] + 1, b["step"], value(a, b)) for a, b in pairwise(run["history"])]
        lines.append(Line(name, tone, [Step(first, last, each) for first, last, each in steps if each is not None]))
    return lines


def figure(title: str, lines: Sequence[Line], **look: Any) -> list[str]:
    """A picture, of that look for ``draw``, with its title and key; none if no line has a step."""
    if not any(line.steps for line in lines):
        return []
    keys = "".join(line.key for line in lines)
    picture = draw(lines, title=title, **look)
    return [f'<figure class="panel"><h2>{html.escape(title)}</h2>{picture}<figcaption>{keys}</figcaption></figure>']
